"""`echo-kv plan`: what a runtime needs, what fits a machine, how many sessions of which length."""

from __future__ import annotations

import argparse
from typing import Any

import echo
from echo import settings

_PRESETS = {
    "deepseek-v3.2": echo.ModelShape.deepseek_v32,
    "glm-5": echo.ModelShape.glm_5,
    "tiny": echo.ModelShape.tiny,
}
_LENGTHS = (2048, 4096, 8192, 16384, 32768, 65536, 102400, 131072, 262144, 524288, 1048576)


def add_command(commands: Any) -> None:
    """Adds `plan` to the commands."""
    parser = commands.add_parser("plan", help="compute all sizes for a model and a machine, without taking memory")
    parser.add_argument("--model", choices=sorted(_PRESETS), default="deepseek-v3.2", help="sizes of the model")
    parser.add_argument("--row-format", choices=("fp8_656", "bf16_1152", "fp32"), default="fp8_656")
    parser.add_argument("--gpu-memory", type=settings.size, metavar="SIZE", help="plan for a GPU with this much free")
    parser.add_argument("--host-memory", type=settings.size, metavar="SIZE", help="plan for this much host memory")
    settings.add_flags(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints the plan; status 1 if it does not fit."""
    shape = _PRESETS[options.model](options.row_format)
    given = settings.given(options)
    device = "cuda" if options.gpu_memory else given.get("device", "auto")
    here = echo.machine_limits("cpu" if options.gpu_memory else device)
    limits = echo.MachineLimits(
        device_bytes=options.gpu_memory or here.device_bytes,
        host_bytes=options.host_memory or here.host_bytes,
    )
    if device == "auto":
        device = "cuda" if limits.device_bytes else "cpu"
    config = echo.RuntimeConfig(**(given | {"device": device}))
    plan = echo.make_plan(shape, config, limits)

    layers, block = shape.layers, shape.index_block_bytes
    print(f"{options.model}, {layers} layers, {shape.row_format} rows of {shape.row_bytes} B, top-{shape.top_k}")
    print(
        f"per token: {layers * plan.host_row_stride:,} B of host rows, {layers * block // 64:,} B of index keys; "
        f"at least {plan.minimum_slots:,} slots per layer\n"
    )
    print(plan.table())
    most = largest_host_tokens(shape, given | {"device": device}, limits)
    print(f"largest host pool that fits with these settings: {most:,} tokens\n")
    print(f"{'tokens per session':>20}  {'sessions of this plan':>22}  {'of the largest pool':>20}")
    for length in (n for n in _LENGTHS if n <= max(plan.config.max_context, 65536)):
        largest = most // (-(-length // 64) * 64)
        print(f"{length:>20,}  {plan.sessions_of(length):>22,}  {largest:>20,}")
    print(f"\n(max_context = {plan.config.max_context:,}, max_sessions = {plan.config.max_sessions:,})")
    return 0 if plan.fits else 1


def largest_host_tokens(shape: echo.ModelShape, given: dict[str, Any], limits: echo.MachineLimits) -> int:
    """Largest `host_tokens` (a multiple of 64) with which the plan fits the limits; 0 if none does."""

    def fits(blocks: int) -> bool:
        config = echo.RuntimeConfig(**(given | {"host_tokens": blocks * 64}))
        return echo.make_plan(shape, config, limits).fits

    low, high = 0, 2**31 // 64 - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low * 64
