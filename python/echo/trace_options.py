"""Flags that `echo-kv policies` and `echo-kv replay` share, and what they mean."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import echo
from echo.traces import Trace, shipped, synthetic

SOURCES = (
    f"files of `record`, traces that ship ({', '.join(shipped.NAMES)}), or generated ones "
    f"({', '.join(synthetic.REGIMES)}"
)


def add_flags(parser: argparse.ArgumentParser, pools: str, plot: str) -> None:
    """Adds pools, layers, what generated selections are like, and files to write; `plot` says what is drawn."""
    parser.add_argument(
        "--pools", default=pools, metavar="LIST", help=f"sizes of the pool in multiples of top-k (default {pools})"
    )
    parser.add_argument("--layers", metavar="LIST", help="layers of the traces, 0 is the first (default: all)")
    generated = parser.add_argument_group("generated selections")
    generated.add_argument("--steps", type=int, default=300, metavar="N", help="decode steps (default 300)")
    generated.add_argument("--top-k", type=int, default=512, metavar="N", help="(default 512)")
    generated.add_argument("--seed", type=int, default=0, metavar="N", help="(default 0)")
    generated.add_argument("--sinks", type=int, default=0, metavar="N", help="first tokens that are always selected")
    generated.add_argument("--recency", type=int, default=0, metavar="N", help="reach of a bonus for recent tokens")
    generated.add_argument("--turn-every", type=int, default=0, metavar="N", help="steps until the topic changes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures, layer by layer")
    parser.add_argument("--plot", type=Path, metavar="FILE", help=plot)


def check(options: argparse.Namespace) -> tuple[list[float], list[int] | None]:
    """Pools, and layers if some were given; files that cannot be written to are refused before anything is done.

    Raises:
        InvalidArgument: naming `pools`, `layers`, `json` or `plot`.
    """
    pools = numbers("pools", options.pools, float)
    if not all(1 <= pool <= 1 << 16 for pool in pools):
        raise echo.InvalidArgument(f"pools: {options.pools!r} given, expected multiples of top-k from 1 to {1 << 16}")
    check_files(options)
    return pools, None if options.layers is None else numbers("layers", options.layers, int)


def check_files(options: argparse.Namespace, names: Sequence[str] = ("json", "plot")) -> None:
    """InvalidArgument naming the flag of a file that cannot be written to."""
    for name in names:
        path = getattr(options, name)
        if path is not None and (not path.parent.is_dir() or path.is_dir()):
            raise echo.InvalidArgument(f"{name}: {str(path)!r} given, expected a file in a folder that exists")


def load(source: str, options: argparse.Namespace) -> Trace:
    """A trace that ships, a generated one, or that of a file."""
    if source in shipped.NAMES:
        trace = Trace.load(shipped.path_of(source))
        return replace(trace, model=f"{trace.model}:{source}")
    if source not in synthetic.REGIMES:
        return Trace.load(source)
    return synthetic.generate(
        source,
        steps=options.steps,
        top_k=options.top_k,
        seed=options.seed,
        ranks=synthetic.ALL,
        sinks=options.sinks,
        recency=options.recency,
        turn_every=options.turn_every,
    )


def numbers(name: str, text: str, kind: Any) -> list[Any]:
    """Those of a list such as '1,2,4'; InvalidArgument naming `name` if it is none."""
    try:
        return [kind(word) for word in text.split(",")]
    except ValueError as error:
        raise echo.InvalidArgument(f"{name}: {text!r} given, expected numbers such as 1,2,4") from error


def figures(trace: Trace) -> dict[str, Any]:
    """What a trace is, for a report."""
    return {
        "model": trace.model,
        "text": trace.text,
        "notes": trace.notes,
        "seed": trace.seed,
        "steps": trace.steps,
        "top_k": trace.top_k,
        "ranks": trace.ranks,
        "context": [int(trace.context[0]), int(trace.context[-1])],
    }


def pyplot() -> Any:
    """matplotlib's, drawing to files; NotSupported naming `plot` if it is missing."""
    try:
        import matplotlib
    except ImportError as error:
        raise echo.NotSupported("plot: matplotlib is missing; pip install 'echo-kv[demo]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
