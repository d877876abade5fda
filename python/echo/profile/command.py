"""The command: its options, and what is done with them in which order."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import echo
from echo import files, settings, trace_options
from echo.decoding import device_of, one_torch_thread
from echo.extras import HF, TORCH, require_torch
from echo.profile.measure import measure, steps_needed
from echo.profile.picture import save_picture
from echo.profile.synthetic import synthetic_workload
from echo.profile.tables import print_tables
from echo.profile.tiny import tiny_workload
from echo.profile.trace_file import write_trace
from echo.profile.workload import Workload

_DRIFT = 0.25
_MOST_SESSIONS = 65535  # of a runtime's step
# Sizes of the workload follow from its own flags.
_WITHOUT = frozenset({
    "device", "host_tokens", "gpu_slots", "max_batch", "query_rows", "max_sessions", "max_context",
})  # fmt: skip


def add_command(commands: Any) -> None:
    """Adds `profile` to the commands."""
    parser = commands.add_parser(
        "profile",
        help="say where the time of a decode step goes",
        description="Puts the time of decode steps down to verbs and layers: of captured steps under torch's profiler "
        "on a GPU, of eager steps, verb by verb, on the CPU.",
    )
    parser.add_argument(
        "--synthetic",
        action="store_true",
        help="random rows in the attention of DeepSeek-V3.2 instead of the small model that ships",
    )
    parser.add_argument("--layers", type=int, metavar="N", help="of --synthetic (default 61, on the CPU 4)")
    parser.add_argument(
        "--batch", type=int, metavar="N", help="sessions in the batch (default 4; --synthetic 13, on the CPU 2)"
    )
    parser.add_argument(
        "--length", type=int, metavar="N", help="tokens of each session (default 4096; --synthetic 16384)"
    )
    parser.add_argument(
        "--pool",
        type=float,
        default=2,
        metavar="X",
        help="slots of each layer's pool for each session, in multiples of top-k (default 2)",
    )
    parser.add_argument(
        "--drift",
        type=float,
        metavar="X",
        help="of --synthetic: fresh part of index queries in each step, relative to the part that stays; "
        f"the larger, the more is recalled (default {_DRIFT})",
    )
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="steps that are measured (default 20)")
    settings.add_device(parser)
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write the steps for chrome://tracing or ui.perfetto.dev"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw one step as a timeline")
    settings.add_flags(parser, _WITHOUT)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measures, prints the tables and writes the files."""
    _check(options)
    require_torch(TORCH if options.synthetic else HF)
    device = device_of(settings.device(options))
    print(f"{echo.build_info()}, on {device}", flush=True)
    with one_torch_thread():
        profile = measure(_workload(options, device), options.steps)
    print(f"{profile.workload}; {settings.counted(len(profile.steps), 'step')}\n")
    print_tables(profile)
    if options.trace is not None:
        write_trace(options.trace, profile)
    if options.json is not None:
        report = {"build": echo.build_info(), **profile.report()}
        files.write_text(options.json, json.dumps(report, indent=1) + "\n")
    if options.plot is not None:
        save_picture(options.plot, profile)
    return 0


def _workload(options: argparse.Namespace, device: str) -> Workload:
    given = settings.given(options, _WITHOUT)
    if not options.synthetic:
        steps = steps_needed(options.steps, device)
        return tiny_workload(device, options.batch or 4, options.length or 4096, options.pool, steps, given)
    layers, batch = (4, 2) if device == "cpu" else (61, 13)
    return synthetic_workload(
        device,
        options.layers or layers,
        options.batch or batch,
        options.length or 16384,
        options.pool,
        _DRIFT if options.drift is None else options.drift,
        given,
    )


def _check(options: argparse.Namespace) -> None:
    for name in ("layers", "batch", "length", "steps"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise echo.InvalidArgument(f"{name}: {value} given, expected at least 1")
    if options.batch is not None and options.batch > _MOST_SESSIONS:
        raise echo.InvalidArgument(f"batch: {options.batch} given, expected at most {_MOST_SESSIONS}")
    for name in ("layers", "drift"):
        if (value := getattr(options, name)) is not None and not options.synthetic:
            raise echo.InvalidArgument(f"{name}: {value} given, the model that ships has its own; see --synthetic")
    if not 1 <= options.pool <= 1 << 16:
        raise echo.InvalidArgument(f"pool: {options.pool} given, expected a multiple of top-k from 1 to {1 << 16}")
    if options.drift is not None and not 0 <= options.drift <= 1000:
        raise echo.InvalidArgument(f"drift: {options.drift} given, expected 0 to 1000")
    trace_options.check_files(options, ("trace", "json", "plot"))
    settings.check(settings.given(options, _WITHOUT))
