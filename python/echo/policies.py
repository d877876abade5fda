"""`echo-kv policies`: what pools of several sizes miss under the runtime's rule of replacement and under others."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

import echo
from echo import files, trace_options
from echo.traces import Trace, synthetic
from echo.traces.comparison import Comparison, check_policies, compare, slots_of
from echo.traces.forecast import REACH, Forecast, check_forecasts, compare_forecasts
from echo.traces.policies import POLICIES

Result = tuple[Trace, Comparison, list[list[Forecast]]]  # forecasts by pool, then by reach and cap

LINES = {
    "lru": ("#1f6f8b", "-"),
    "fifo": ("#b8c4d0", "-"),
    "random": ("#8a8a8a", "-"),
    "echo": ("#c0392b", "-"),
    "score": ("#d68910", ":"),  # hardly different from echo
    "belady": ("#222222", "--"),
}


def add_command(commands: Any) -> None:
    """Adds `policies` to the commands."""
    parser = commands.add_parser(
        "policies",
        help="compare policies of replacement on recorded or generated selections",
        description="What pools of several sizes miss under the runtime's rule of replacement (echo), under its scores "
        "alone (score), LRU, FIFO, random, and Belady's optimum, which knows the future.",
    )
    parser.add_argument("traces", nargs="*", metavar="TRACE", help=f"{trace_options.SOURCES}; default: these)")
    parser.add_argument(
        "--policies",
        default=",".join(POLICIES),
        metavar="LIST",
        help=f"which are compared (default {','.join(POLICIES)})",
    )
    parser.add_argument(
        "--forecast",
        nargs="?",
        const="0.05,0.1,0.2",
        metavar="CAPS",
        help="echo once more, with forecasts of so many rows of a step and layer at most, in multiples of top-k "
        "(default 0.05,0.1,0.2)",
    )
    parser.add_argument(
        "--reach",
        metavar="LIST",
        help=f"how far forecasts look, in multiples of top-k (default 1.1,{REACH},2; the runtime's is {REACH})",
    )
    trace_options.add_flags(parser, pools="1,2,4,8", plot="draw hit rates over pool sizes")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints a table per trace, policies down, pools across."""
    sources = options.traces or list(synthetic.REGIMES)
    pools, layers = trace_options.check(options, sources)
    names = options.policies.split(",")
    check_policies(names)
    caps, reaches = _forecast_options(options)
    results: list[Result] = []
    for source in sources:
        trace = trace_options.load(source, options)
        slots = [slots_of(trace, pool) for pool in pools]
        result = compare(trace, slots, names, layers)
        forecasts = compare_forecasts(trace, slots, reaches, caps, layers) if caps and trace.ranks else []
        _print(trace, result, pools, forecasts)
        results.append((trace, result, forecasts))
    full = all(result.full.all() for _, result, _ in results)
    print(
        "misses, % of selected rows in the second half of the steps"
        + ("" if full else "; * first uses among them: the pool was not full yet")
    )
    if options.json is not None:
        report = {"build": echo.build_info(), "traces": [_figures(*one, pools) for one in results]}
        files.write_text(options.json, json.dumps(report, indent=1) + "\n")
    if options.plot is not None:
        _plot(options.plot, results, pools)
    return 0


def _forecast_options(options: argparse.Namespace) -> tuple[list[float], list[float]]:
    if options.forecast is None:
        if options.reach is not None:
            raise echo.InvalidArgument(f"reach: {options.reach!r} given without forecast")
        return [], []
    caps = trace_options.numbers("forecast", options.forecast, float)
    reaches = trace_options.numbers("reach", options.reach or f"1.1,{REACH},2", float)
    check_forecasts(reaches, caps)
    return caps, reaches


def _print(trace: Trace, result: Comparison, pools: Sequence[float], forecasts: Sequence[Sequence[Forecast]]) -> None:
    print(f"{trace.model}: {trace.summary()}")
    if note := trace_options.ranks_note(trace, max(result.slots)):
        print(note)
    print(f"{'pool / top-k':<14}" + " ".join(f"{pool:>9g}" for pool in pools))
    marks = [" " if full.all() else "*" for full in result.full]
    for name in result.rates:
        cells = zip(result.mean(name), marks, strict=True)
        print((f"{name:<14}" + "".join(f"{100 * rate:>9.2f}{mark}" for rate, mark in cells)).rstrip())
    if {"echo", "lru"} <= result.rates.keys():
        lru = np.maximum(result.mean("lru"), 1e-12)
        print(f"{'echo to lru, %':<14}" + " ".join(f"{100 * r:>+9.1f}" for r in result.mean("echo") / lru - 1))
    if forecasts:
        print("echo with forecasts: misses left / fetched / in vain, % of selected rows")
        print(f"{'reach, cap':<14}" + "".join(f"{pool:>22g}" for pool in pools))
        for of_pools in zip(*forecasts, strict=True):
            line = f"{of_pools[0].reach:<5g}{of_pools[0].cap:<9g}"
            for one in of_pools:
                shares = (one.misses, one.fetched, one.fetched - one.used)
                line += f"{' / '.join(f'{100 * share:.2f}' for share in shares):>22}"
            print(line)
    print()


def _figures(
    trace: Trace, result: Comparison, forecasts: Sequence[Sequence[Forecast]], pools: Sequence[float]
) -> dict[str, Any]:
    return {
        **trace_options.figures(trace),
        "pools": list(pools),
        "slots": list(result.slots),
        "layers": list(result.layers),
        "full": result.full.tolist(),
        "misses": {name: rates.tolist() for name, rates in result.rates.items()},
        "forecasts": [[asdict(one) for one in of_pool] for of_pool in forecasts],
    }


def _plot(path: Path, results: Sequence[Result], pools: Sequence[float]) -> None:
    pyplot = trace_options.pyplot()
    columns = min(3, len(results))
    rows = -(-len(results) // columns)
    figure, panels = pyplot.subplots(
        rows, columns, figsize=(4.2 * columns, 3.4 * rows), layout="constrained", squeeze=False
    )
    for panel, (trace, result, forecasts) in zip(panels.flat, results, strict=False):
        for name in (name for name in LINES if name in result.rates):
            color, style = LINES[name]
            panel.plot(pools, 100 - 100 * result.mean(name), style, marker="o", ms=3, color=color, label=name)
        for i, of_pools in enumerate(zip(*forecasts, strict=True)):
            reach, cap = of_pools[0].reach, of_pools[0].cap
            color = pyplot.get_cmap("autumn")(i / len(forecasts[0]))
            label = f"echo, forecasts to {reach:g} k, {cap:g} k rows"
            panel.plot(pools, [100 - 100 * one.misses for one in of_pools], "-.", lw=1, color=color, label=label)
        panel.set_xscale("log", base=2)
        panel.set_xticks(pools, [f"{pool:g}" for pool in pools])
        panel.set_title(trace.model.split(":")[-1], fontsize="medium")
        panel.grid(alpha=0.3)
    for panel in panels.flat[len(results) :]:
        panel.set_visible(False)
    for panel in panels[:, 0]:
        panel.set(xlabel="pool, multiples of top-k", ylabel="hit rate, %")
    lines = {line.get_label(): line for panel in panels.flat for line in panel.get_lines()}
    figure.legend(
        list(lines.values()),
        list(lines),
        loc="outside lower center",
        ncols=2 * columns,
        frameon=False,
        fontsize="small",
    )
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
