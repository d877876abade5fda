"""`echo-kv policies`: what pools of several sizes miss under the runtime's rule of replacement and under others."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import echo
from echo import trace_options
from echo.traces import Trace, synthetic
from echo.traces.comparison import Comparison, check_policies, compare, slots_of
from echo.traces.policies import POLICIES

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
    parser = commands.add_parser("policies", help="compare policies of replacement on recorded or generated selections")
    parser.add_argument("traces", nargs="*", metavar="TRACE", help=f"{trace_options.SOURCES}; default: these)")
    parser.add_argument(
        "--policies", default=",".join(POLICIES), metavar="LIST", help=f"(default {','.join(POLICIES)})"
    )
    trace_options.add_flags(parser, pools="1,2,4,8", plot="draw hit rates over pool sizes")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints a table per trace, policies down, pools across."""
    sources = options.traces or list(synthetic.REGIMES)
    pools, layers = trace_options.check(options, sources)
    names = options.policies.split(",")
    check_policies(names)
    results: list[tuple[Trace, Comparison]] = []
    for source in sources:
        trace = trace_options.load(source, options)
        result = compare(trace, [slots_of(trace, pool) for pool in pools], names, layers)
        _print(trace, result, pools)
        results.append((trace, result))
    print(
        "misses, % of selected rows in the second half of the steps; * first uses among them: the pool was not full yet"
    )
    if options.json is not None:
        report = {"build": echo.build_info(), "traces": [_figures(*pair, pools) for pair in results]}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if options.plot is not None:
        _plot(options.plot, results, pools)
    return 0


def _print(trace: Trace, result: Comparison, pools: Sequence[float]) -> None:
    print(f"{trace.model}: {trace.summary()}")
    if note := trace_options.ranks_note(trace, max(result.slots)):
        print(note)
    print(f"{'pool / top-k':<14}" + "".join(f"{pool:>9g} " for pool in pools))
    marks = [" " if full.all() else "*" for full in result.full]
    for name in result.rates:
        cells = zip(result.mean(name), marks, strict=True)
        print(f"{name:<14}" + "".join(f"{100 * rate:>9.2f}{mark}" for rate, mark in cells))
    if {"echo", "lru"} <= result.rates.keys():
        lru = np.maximum(result.mean("lru"), 1e-12)
        print(f"{'echo to lru, %':<14}" + "".join(f"{100 * r:>+9.1f} " for r in result.mean("echo") / lru - 1))
    print()


def _figures(trace: Trace, result: Comparison, pools: Sequence[float]) -> dict[str, Any]:
    return {
        **trace_options.figures(trace),
        "pools": list(pools),
        "slots": list(result.slots),
        "layers": list(result.layers),
        "full": result.full.tolist(),
        "misses": {name: rates.tolist() for name, rates in result.rates.items()},
    }


def _plot(path: Path, results: Sequence[tuple[Trace, Comparison]], pools: Sequence[float]) -> None:
    pyplot = trace_options.pyplot()
    columns = min(3, len(results))
    rows = -(-len(results) // columns)
    figure, panels = pyplot.subplots(
        rows, columns, figsize=(4.2 * columns, 3.4 * rows), layout="constrained", squeeze=False
    )
    for panel, (trace, result) in zip(panels.flat, results, strict=False):
        for name in (name for name in LINES if name in result.rates):
            color, style = LINES[name]
            panel.plot(pools, 100 - 100 * result.mean(name), style, marker="o", ms=3, color=color, label=name)
        panel.set_xscale("log", base=2)
        panel.set_xticks(pools, [f"{pool:g}" for pool in pools])
        panel.set_title(trace.model.split(":")[-1], fontsize="medium")
        panel.grid(alpha=0.3)
    for panel in panels.flat[len(results) :]:
        panel.set_visible(False)
    for panel in panels[:, 0]:
        panel.set(xlabel="pool, multiples of top-k", ylabel="hit rate, %")
    lines = panels[0, 0].get_lines()
    figure.legend(lines, [line.get_label() for line in lines], loc="outside lower center", ncols=6, frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
