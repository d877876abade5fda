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
_MODEL = "deepseek-v3.2"
_SIZES = {
    "layers": "layers of the model",
    "index_heads": "heads of the indexer",
    "index_dim": "dimensions of its queries and keys",
    "query_heads": "heads of attention",
    "latent_dim": "dimensions of a row's latent",
    "rope_dim": "dimensions of a row's positional part",
    "top_k": "tokens that a query selects",
}
_LENGTHS = (2048, 4096, 8192, 16384, 32768, 65536, 102400, 131072, 262144, 524288, 1048576)


def add_command(commands: Any) -> None:
    """Adds `plan` to the commands."""
    parser = commands.add_parser(
        "plan",
        help="compute all sizes for a model and a machine, without taking memory",
        description="Prints every allocation of a runtime before any is made, the largest pools that fit, and how many "
        "sessions of which length. Exit status 1 if the plan does not fit.",
    )
    parser.add_argument(
        "--model", choices=sorted(_PRESETS), default=_MODEL, help=f"sizes of the model (default {_MODEL})"
    )
    sizes = parser.add_argument_group("sizes of the model", "A flag that is not given has the value of --model.")
    for size, text in _SIZES.items():
        sizes.add_argument(f"--{size.replace('_', '-')}", dest=size, type=int, metavar="N", help=text)
    settings.add_row_format(parser)
    parser.add_argument("--gpu-memory", type=settings.size, metavar="SIZE", help="plan for a GPU with this much free")
    parser.add_argument("--host-memory", type=settings.size, metavar="SIZE", help="plan for this much host memory")
    settings.add_flags(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints the plan; status 1 if it does not fit."""
    shape = _shape(options)
    given = settings.given(options)
    if options.gpu_memory and settings.device(options) == "cpu":
        raise echo.InvalidArgument("gpu_memory: given for device 'cpu', which has none; see --device and ECHO_DEVICE")
    device = "cuda" if options.gpu_memory else settings.device(options)
    here = echo.machine_limits("cpu" if options.gpu_memory else device)
    limits = echo.MachineLimits(
        device_bytes=options.gpu_memory or here.device_bytes, host_bytes=options.host_memory or here.host_bytes
    )
    if device == "auto":
        device = "cuda" if limits.device_bytes else "cpu"
    given["device"] = device
    asked = echo.RuntimeConfig(**given)
    plan = echo.make_plan(shape, asked, limits)
    config = plan.config

    print(
        f"{options.model}: {settings.counted(shape.layers, 'layer')}, {shape.row_format} rows of "
        f"{shape.row_bytes} B, top-{shape.top_k}"
    )
    print(
        f"per token: {shape.layers * plan.host_row_stride:,} B of host rows, "
        f"{shape.layers * shape.index_block_bytes // 64:,} B of index keys; "
        f"at least {plan.minimum_slots:,} slots per layer\n"
    )
    print(plan.table())
    if device != "cpu" and not any(item.name == "scratch" for item in plan.items):
        print("working memory of the GPU kernels (some 10 MiB) is not in it: this build has no CUDA\n")
    if config.max_context < asked.max_context:
        print(f"max_context is {config.max_context:,}, all of host_tokens, and not {asked.max_context:,}\n")
    tokens = _largest(shape, given, limits, "host_tokens", 64)
    slots = _largest(shape, given, limits, "gpu_slots", 1)
    print(f"with all other settings as they are, at most {tokens:,} host_tokens fit, or {slots:,} gpu_slots per layer")
    if device != "cpu" and plan.fits:
        print("(what the GPU has left is best spent on gpu_slots: they raise the hit rate)")
    print()
    print(f"{'tokens per session':>20}  {'sessions':>10}  {'with the largest host pool':>28}")
    for length in (n for n in _LENGTHS if n <= config.max_context):
        largest = min(config.max_sessions, tokens // (-(-length // 64) * 64))
        print(f"{length:>20,}  {plan.sessions_of(length):>10,}  {largest:>28,}")
    print(f"\n(up to max_context = {config.max_context:,} tokens and max_sessions = {config.max_sessions:,})")
    return 0 if plan.fits else 1


def _shape(options: argparse.Namespace) -> echo.ModelShape:
    preset = _PRESETS[options.model](options.row_format)
    chosen = {size: getattr(options, size) for size in _SIZES}
    return echo.ModelShape(
        row_format=preset.row_format,
        index_key_format=preset.index_key_format,
        **{size: getattr(preset, size) if value is None else value for size, value in chosen.items()},
    )


def _largest(shape: echo.ModelShape, given: dict[str, Any], limits: echo.MachineLimits, setting: str, unit: int) -> int:
    """Largest value of a setting, in steps of `unit`, with which the plan fits the limits; 0 if none does."""

    def fits(count: int) -> bool:
        try:
            config = echo.RuntimeConfig(**(given | {setting: count * unit}))
            return echo.make_plan(shape, config, limits).fits
        except echo.InvalidArgument:  # fewer slots than a step needs
            return False

    low, high = 0, 2**31 // unit - 2
    least = echo.make_plan(shape, echo.RuntimeConfig(**(given | {"gpu_slots": 0})), limits).minimum_slots
    if setting == "gpu_slots" and fits(least):
        low = least
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low * unit
