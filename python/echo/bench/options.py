"""Flags of `echo-kv bench decode`, and what they mean."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import echo
from echo import settings, trace_options
from echo.bench import offered, systems
from echo.bench.regimes import REGIMES
from echo.bench.schedule import Load, draw_load, room_for
from echo.bench.systems import SYSTEMS, System
from echo.decoding import device_of
from echo.extras import require_torch

_SET_HERE = frozenset({
    "device", "host_tokens", "gpu_slots", "max_batch", "query_rows", "max_sessions", "max_context", "prefill_chunk",
    *(switch.setting for switch in systems.SWITCHES.values()),
})  # fmt: skip
_SIZES: dict[bool, dict[str, Any]] = {  # by --quick: small enough for seconds on a CPU
    False: {
        "requests": 318, "output": "256", "layers": 61, "lengths": "80K-100K", "pools": "325K,200K,110K", "host": 112e9,
    },
    True: {
        "requests": 70, "output": "32", "layers": 2, "lengths": "2.5K-3.1K", "pools": "10K,6.2K,3.4K", "host": 118e6,
    },
}  # fmt: skip

_MOST_REQUESTS = 1_000_000  # the schedule has all of them


@dataclass(frozen=True)
class Options:
    """What was asked for, checked.

    Attributes:
        shape: of the model.
        load: what is served.
        systems: all of them, pool by pool.
        left_out: those that cannot be measured here, and why.
        added: milliseconds that are added to each step, one result for each.
        repeat: of `schedule.sample`.
        steps: that are run of a batch, 0 for all.
        regime: a key of `REGIMES`.
        quick: whether sizes are scaled down.
        device: 'cpu' or 'cuda:N'.
        seed: of all that is random.
        settings: of the runtime.
    """

    shape: echo.ModelShape
    load: Load
    systems: list[System]
    left_out: dict[str, str]
    added: list[float]
    repeat: int
    steps: int
    regime: str
    quick: bool
    device: str
    seed: int
    settings: dict[str, Any]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds all flags."""
    full = _SIZES[False]
    parser.add_argument("--requests", type=int, metavar="N", help=f"that are served (default {full['requests']})")
    parser.add_argument("--output", metavar="N", help=f"tokens of each, or from-to (default {full['output']})")
    parser.add_argument("--layers", type=int, metavar="N", help=f"of the model (default {full['layers']})")
    parser.add_argument("--lengths", metavar="FROM-TO", help=f"tokens of contexts (default {full['lengths']})")
    parser.add_argument("--pools", metavar="LIST", help=f"rows per layer on the GPU (default {full['pools']})")
    parser.add_argument(
        "--host-memory",
        type=settings.size,
        metavar="SIZE",
        help="for rows of contexts, decides how many there are (default 112 GB, or what the machine has)",
    )
    parser.add_argument("--systems", metavar="LIST", help=f"of {', '.join(SYSTEMS)} (default: all)")
    parser.add_argument(
        "--added",
        default="0,20,50,276",
        metavar="LIST",
        help="milliseconds for everything that is not attention, modelled (default 0,20,50,276)",
    )
    parser.add_argument("--overlap", choices=tuple(REGIMES), default="glm", help="how selections change (default glm)")
    parser.add_argument(
        "--repeat",
        type=int,
        default=3,
        metavar="N",
        help="batches of one size that are really run, others take as long (default 3; 0: run all)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=96,
        metavar="N",
        help="steps of a batch that are really run, from cold pools on; the others take as long as the second half of "
        "these (default 96; 0: run all)",
    )
    parser.add_argument(
        "--quick",
        action=argparse.BooleanOptionalAction,
        help="everything scaled down, for a first look (default on the CPU)",
    )
    settings.add_device(parser)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of all that is random (default 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures, as soon as there are some")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw throughput by pool")
    settings.add_flags(parser, without=_SET_HERE)


def check(options: argparse.Namespace) -> Options:
    """Sizes, load and systems.

    Raises:
        InvalidArgument: naming the flag.
        NotSupported: torch is missing, or nothing can be measured here.
    """
    given, device = settings.given(options, _SET_HERE), settings.device(options)
    settings.check(given)
    device = device_of(device)
    quick = device == "cpu" if options.quick is None else options.quick
    sizes = _SIZES[quick]

    def chosen(name: str) -> Any:
        value = getattr(options, name)
        return sizes[name] if value is None else value

    for name in ("requests", "layers"):
        if chosen(name) < 1:
            raise echo.InvalidArgument(f"{name}: {chosen(name)} given, expected at least 1")
    if chosen("requests") > _MOST_REQUESTS:
        raise echo.InvalidArgument(f"requests: {chosen('requests')} given, expected at most {_MOST_REQUESTS}")
    if options.repeat < 0:
        raise echo.InvalidArgument(f"repeat: {options.repeat} given, expected at least 0")
    if options.steps < 0 or options.steps == 1:
        raise echo.InvalidArgument(f"steps: {options.steps} given, expected at least 2, or 0 for all")
    trace_options.check_files(options)
    added = trace_options.numbers("added", options.added, float)
    if not all(0 <= extra < 1e6 for extra in added):
        raise echo.InvalidArgument(f"added: {options.added!r} given, expected milliseconds")
    names = SYSTEMS if options.systems is None else tuple(options.systems.split(","))
    for name in names:
        if name not in SYSTEMS:
            raise echo.InvalidArgument(f"systems: {name!r} given, expected some of {', '.join(SYSTEMS)}")
    shape = _shape(chosen("layers"), quick)
    lengths, output = _range("lengths", chosen("lengths")), _range("output", chosen("output"))
    pools = [_tokens("pools", word) for word in chosen("pools").split(",")]
    settings.check_seed(options.seed)
    require_torch()
    here = echo.machine_limits(device).host_bytes
    host = options.host_memory or int(min(sizes["host"], 0.95 * here if here else sizes["host"]))
    room = room_for(output[1], lengths[1], shape.top_k)
    stride = max(shape.row_bytes, echo.RuntimeConfig(**given).host_row_stride)  # 0: the bytes of a row
    load = draw_load(lengths, chosen("requests"), output, host // (shape.layers * stride), room, options.seed)
    made = [systems.make_system(name, pool, load, shape) for pool in pools for name in names]
    reasons = {name: offered.why_not(name, _shape(1, quick), device, given) for name in names}
    left_out = {name: reason for name, reason in reasons.items() if reason is not None}
    if len(left_out) == len(names):
        raise echo.NotSupported("systems: none of them can be measured here; " + "; ".join(left_out.values()))
    return Options(
        shape=shape,
        load=load,
        systems=[system for system in made if system.name not in left_out],
        left_out=left_out,
        added=added,
        repeat=options.repeat,
        steps=options.steps,
        regime=options.overlap,
        quick=quick,
        device=device,
        seed=options.seed,
        settings=given,
    )


def _shape(layers: int, quick: bool) -> echo.ModelShape:
    if quick:
        return echo.ModelShape(layers=layers, index_heads=8, query_heads=8, top_k=64)
    return echo.ModelShape(layers=layers)


def _tokens(name: str, text: str) -> int:
    """Of a number such as 80K, in thousands."""
    word = text.strip().upper()
    try:
        count = round(float(word.removesuffix("K")) * (1000 if word.endswith("K") else 1))
    except (ValueError, OverflowError):
        count = 0
    if not 1 <= count < 1 << 31:
        raise echo.InvalidArgument(f"{name}: {text!r} given, expected a number of tokens such as 80K")
    return count


def _range(name: str, text: str) -> tuple[int, int]:
    first, dash, last = text.partition("-")
    least, most = _tokens(name, first), _tokens(name, last if dash else first)
    if least > most:
        raise echo.InvalidArgument(f"{name}: {text!r} given, expected the smaller number first")
    return least, most
