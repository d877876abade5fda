"""`echo-kv predictor`: how well the k-th score is foretold, and what prefetches by that would fetch and miss."""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

import echo
from echo import files, trace_options
from echo.traces import Trace, shipped
from echo.traces.comparison import slots_of
from echo.traces.layer_steps import LayerSteps
from echo.traces.policies import make_pool
from echo.traces.predictor import Guess, guesses

_TRACES = (*shipped.NAMES, "glm", "low_overlap", "long_context")
_ALPHAS = "0,0.3,0.5,0.7,0.9"
_CAPS = "1.2,5,inf"
_AVERAGED = ("error", "candidates", "full", "prefetched", "wasted", "left", "misses")


def add_command(commands: Any) -> None:
    """Adds `predictor` to the commands."""
    parser = commands.add_parser(
        "predictor",
        help="how well the k-th score is foretold, and what that prefetches",
        description="Compares ways to foretell the k-th score of a step, and what prefetches of the rows above it "
        "would fetch in vain and still miss: moving averages of the scores before, which are the runtime's way, the "
        "last selection scored first (rescore), and a sample of the step's own scores.",
    )
    parser.add_argument(
        "traces", nargs="*", metavar="TRACE", help=f"{trace_options.SOURCES}; default: {', '.join(_TRACES)})"
    )
    trace_options.add_flags(parser, pools="2", plot="draw what is fetched in vain and what is still missed")
    parser.add_argument(
        "--alpha", default=_ALPHAS, metavar="LIST", help=f"weights of the past in moving averages (default {_ALPHAS})"
    )
    parser.add_argument(
        "--caps",
        default=_CAPS,
        metavar="LIST",
        help=f"rows that may be prefetched for each 1,000 scored tokens (default {_CAPS})",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints a table per trace and pool: ways to foretell down, caps across."""
    sources = options.traces or list(_TRACES)
    pools, layers = trace_options.check(options, sources)
    alphas = trace_options.numbers("alpha", options.alpha, float)
    if not all(0 <= alpha <= 1 for alpha in alphas):
        raise echo.InvalidArgument(f"alpha: {options.alpha!r} given, expected numbers from 0 to 1")
    caps = trace_options.numbers("caps", options.caps, float)
    if not all(cap >= 0 for cap in caps):
        raise echo.InvalidArgument(f"caps: {options.caps!r} given, expected numbers from 0 on, or inf")
    report, drawn = [], []
    for source in sources:
        trace = trace_options.load(source, options)
        print(f"{trace.model}: {trace.summary()}")
        if trace.ranks == 0:
            print("without scores: nothing to foretell\n")
            continue
        if note := trace_options.ranks_note(trace, max(slots_of(trace, pool) for pool in pools)):
            print(note)
        results = [averages(trace, slots_of(trace, pool), alphas, caps, layers) for pool in pools]
        for pool, guessed in zip(pools, results, strict=True):
            _print(pool, guessed, caps)
        drawn.append((trace, results[0]))
        of_pools = [
            {"pool": pool, "guesses": [trace_options.finite(asdict(guess)) for guess in guessed]}
            for pool, guessed in zip(pools, results, strict=True)
        ]
        report.append({**trace_options.figures(trace), "pools": of_pools})
    if options.json is not None:
        text = json.dumps({"build": echo.build_info(), "traces": report}, indent=1, allow_nan=False)
        files.write_text(options.json, text + "\n")
    if options.plot is not None and drawn:
        _plot(options.plot, drawn, caps)
    return 0


def averages(
    trace: Trace, slots: int, alphas: Sequence[float], caps: Sequence[float], layers: Sequence[int] | None = None
) -> list[Guess]:
    """Means over the layers that have steps with scores, in pools of so many slots under the product's rule.

    Raises:
        InvalidArgument: naming `layers`, or `trace` if it has no such layer.
    """
    found = []
    for layer in range(trace.layers) if layers is None else layers:
        steps = LayerSteps(trace, layer)
        try:
            found.append(guesses(make_pool(steps, slots, "echo"), trace.context, alphas, caps))
        except echo.InvalidArgument:  # nothing is scored after another step
            continue
    if not found:
        raise echo.InvalidArgument("trace: no layer has steps that are scored after others")
    return [
        replace(same[0], **{name: _mean([getattr(one, name) for one in same]) for name in _AVERAGED})
        for same in zip(*found, strict=True)
    ]


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return float(np.mean(known)) if known else math.nan


def _print(pool: float, guessed: Sequence[Guess], caps: Sequence[float]) -> None:
    missed = 100 * guessed[0].misses
    print(
        f"pool of {pool:g} x top-k, {missed:.1f} % of top-k missed without prefetch; in vain / still missed, % of top-k"
    )
    print(
        f"{'foretold by':<13}{'error':>8}{'candidates':>12}{'full, %':>9}"
        + "".join(f"{f'cap {cap:g}':>16}" for cap in caps)
    )
    for first in range(0, len(guessed), len(caps)):
        same = guessed[first : first + len(caps)]
        one = same[0]
        cells = [f"{100 * guess.wasted:.1f} / {100 * guess.left:.1f}" for guess in same]
        print(
            f"{one.name:<13}{one.error:>8.2f}{one.candidates:>12.2f}{100 * one.full:>9.1f}"
            + "".join(f"{cell:>16}" for cell in cells)
        )
    print()


def _plot(path: Path, drawn: Sequence[tuple[Trace, Sequence[Guess]]], caps: Sequence[float]) -> None:
    pyplot = trace_options.pyplot()
    columns = min(4, len(drawn))
    rows = -(-len(drawn) // columns)
    figure, panels = pyplot.subplots(
        rows, columns, figsize=(3.4 * columns, 3.2 * rows), layout="constrained", squeeze=False
    )
    colors = {"alpha": "#1f6f8b", "rescore": "#d68910", "sample": "#c0392b"}
    for panel, (trace, guessed) in zip(panels.flat, drawn, strict=False):
        for (kind, color), (j, cap) in itertools.product(colors.items(), enumerate(caps)):
            part = [guess for guess in guessed[j :: len(caps)] if guess.name.startswith(kind)]
            panel.plot(
                [100 * guess.wasted for guess in part], [100 * guess.left for guess in part], color=color, ms=4, lw=1,
                marker="o^sDvP"[j % 6], label=f"{kind}, cap {cap:g}",
            )  # fmt: skip
        panel.set_xscale("symlog", linthresh=1)
        panel.set_ylim(bottom=0)
        panel.axhline(100 * guessed[0].misses, color="#8a8a8a", ls=":", lw=1)
        panel.set_title(trace.model.split(":")[-1], fontsize="medium")
        panel.grid(alpha=0.3)
    for panel in panels.flat[len(drawn) :]:
        panel.set_visible(False)
    for panel in panels[-1]:
        panel.set_xlabel("fetched in vain, % of top-k")
    for panel in panels[:, 0]:
        panel.set_ylabel("still missed, % of top-k")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns + 1, frameon=False, fontsize="x-small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
