"""Flags that `echo-kv policies`, `predictor` and `replay` share, and what they mean."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import echo
from echo import settings
from echo.extras import lacking
from echo.traces import Trace, shipped, synthetic

SOURCES = (
    f"files of `record`, traces that ship ({', '.join(shipped.NAMES)}), or generated ones "
    f"({', '.join(synthetic.REGIMES)}"
)

_GENERATED = {  # flags of generated selections, their defaults and what they are
    "steps": (300, "decode steps (default 300)"),
    "top_k": (512, "tokens that a step selects (default 512)"),
    "seed": (0, "of all that is random (default 0)"),
    "sinks": (0, "first tokens that are always selected"),
    "recency": (0, "reach of a bonus for recent tokens"),
    "turn_every": (0, "steps until the topic changes"),
}


def add_flags(parser: argparse.ArgumentParser, pools: str, plot: str) -> None:
    """Adds pools, layers, what generated selections are like, and files to write; `plot` says what is drawn."""
    parser.add_argument(
        "--pools", default=pools, metavar="LIST", help=f"sizes of the pool in multiples of top-k (default {pools})"
    )
    parser.add_argument("--layers", metavar="LIST", help="layers of the traces, 0 is the first (default: all)")
    generated = parser.add_argument_group("generated selections")
    for name, (_, text) in _GENERATED.items():
        generated.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=text)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures, layer by layer")
    parser.add_argument("--plot", type=Path, metavar="FILE", help=plot)


def check(options: argparse.Namespace, sources: Sequence[str]) -> tuple[list[float], list[int] | None]:
    """Pools, and layers if some were given; what cannot be read or written is refused before anything is done.

    Raises:
        InvalidArgument: naming `pools`, `layers`, `json`, `plot` or `path`, or a flag of generated selections.
    """
    pools = numbers("pools", options.pools, float)
    if not all(1 <= pool <= 1 << 16 for pool in pools):
        raise echo.InvalidArgument(f"pools: {options.pools!r} given, expected multiples of top-k from 1 to {1 << 16}")
    _check_sources(options, sources)
    check_files(options, read=[source for source in sources if source not in (*shipped.NAMES, *synthetic.REGIMES)])
    return pools, None if options.layers is None else numbers("layers", options.layers, int)


def _check_sources(options: argparse.Namespace, sources: Sequence[str]) -> None:
    for source in sources:
        if source not in (*shipped.NAMES, *synthetic.REGIMES) and not Path(source).exists():
            known = ", ".join((*shipped.NAMES, *synthetic.REGIMES))
            raise echo.InvalidArgument(f"path: there is no file {source!r}; traces that need none are {known}")
    if not any(source in synthetic.REGIMES for source in sources):
        for name in _GENERATED:
            if (value := getattr(options, name)) is not None:
                raise echo.InvalidArgument(f"{name}: {value} given, but none of the traces is generated")
    if options.seed is not None:
        settings.check_seed(options.seed)


def check_files(
    options: argparse.Namespace, names: Sequence[str] = ("json", "plot"), read: Iterable[str | Path] = ()
) -> None:
    """Finds out before anything is done what could not be written in the end, or would take the place of something.

    Args:
        options: flags; a `plot` needs an ending that is known.
        names: of those that are files to write.
        read: files that are read.

    Raises:
        InvalidArgument: naming the flag.
        NotSupported: naming `plot`, if matplotlib is missing.
    """
    taken = {Path(path).resolve(): "is to be read" for path in read}
    for name in names:
        path = getattr(options, name)
        if path is None:
            continue
        if not path.parent.is_dir() or path.is_dir():
            raise echo.InvalidArgument(f"{name}: {str(path)!r} given, expected a file in a folder that exists")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise echo.InvalidArgument(f"{name}: {str(path)!r} given, which may not be written to")
        if (use := taken.get(path.resolve())) is not None and (path.is_file() or not path.exists()):
            raise echo.InvalidArgument(f"{name}: {str(path)!r} given, which {use}")
        taken[path.resolve()] = f"is to be the {name}, too"
        if name == "plot":
            endings = _endings()
            if path.suffix[1:].lower() not in endings:
                raise echo.InvalidArgument(f"plot: {str(path)!r} given, expected an ending of {', '.join(endings)}")


def load(source: str, options: argparse.Namespace) -> Trace:
    """A trace that ships, a generated one, or that of a file."""
    if source in shipped.NAMES:
        trace = Trace.load(shipped.path_of(source))
        return replace(trace, model=f"{trace.model}:{source}")
    if source not in synthetic.REGIMES:
        return Trace.load(source)
    given = {name: getattr(options, name) for name in _GENERATED}
    sizes = {name: default if given[name] is None else given[name] for name, (default, _) in _GENERATED.items()}
    return synthetic.generate(source, ranks=synthetic.ALL, **sizes)


def ranks_note(trace: Trace, slots: int) -> str | None:
    """What a replay in pools of up to so many slots does not know of a trace; None if it knows enough."""
    if trace.ranks == 0:
        return "without scores: score and echo go by age"
    if trace.ranks < min(trace.context[0], 4 * slots):
        return f"scores of {trace.ranks:,} tokens: score and echo take the others for lower ones and go by their age"
    return None


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


def finite(part: Any) -> Any:
    """Figures for JSON, which has neither inf nor NaN: None stands for them."""
    if isinstance(part, dict):
        return {name: finite(one) for name, one in part.items()}
    if isinstance(part, (list, tuple)):
        return [finite(one) for one in part]
    return None if isinstance(part, float) and not math.isfinite(part) else part


def pyplot() -> Any:
    """matplotlib's, drawing to files; NotSupported naming `plot` if it is missing."""
    try:
        import matplotlib
    except ImportError as error:
        raise lacking(error, "pip install matplotlib", "plot") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _endings() -> list[str]:
    pyplot()
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    return sorted(FigureCanvasAgg.get_supported_filetypes())
