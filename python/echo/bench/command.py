"""`echo-kv bench decode`: what is run in which order."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any

import echo
from echo import files
from echo.bench import systems, tables
from echo.bench.figures import Case, Served, account, base_of
from echo.bench.options import Options, add_flags, check
from echo.bench.regimes import REGIMES
from echo.bench.schedule import Load, sample
from echo.bench.systems import System
from echo.settings import counted


def add_decode(parts: Any) -> None:
    """Adds `decode` to the parts of `bench`."""
    parser = parts.add_parser(
        "decode",
        help="tokens per second at fixed GPU memory, with and without offloading",
        description="Serves long requests with continuous batching, by real steps of the attention of DeepSeek-V3.2. "
        "The rest of the model does not run: it is a time that is added to each step.",
    )
    add_flags(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measures all systems and prints a table."""
    asked = check(options)
    load = asked.load
    layers = counted(asked.shape.layers, "layer")
    print(
        f"{echo.build_info()}; {counted(len(load.outputs), 'request')}, {sum(load.outputs):,} tokens to write, "
        f"on {_contexts(load)}; {layers}, top-{asked.shape.top_k}, "
        f"selections like {asked.regime}",
        flush=True,
    )
    if options.quick is None and asked.quick:
        print("on the CPU everything is scaled down (--quick); --no-quick takes the sizes of a GPU")
    for name, reason in asked.left_out.items():
        print(f"{name} is left out: {reason}")
    cases: list[Case] = []
    echo.keep_host_memory(True)  # all runtimes need the same
    try:
        for group in _groups(asked):
            cases += measure(asked, group)
            cases.sort(key=lambda case: asked.systems.index(case.system))
            if options.json is not None:
                files.write_text(options.json, json.dumps(report(asked, cases), indent=1, allow_nan=False) + "\n")
    finally:
        echo.keep_host_memory(False)
    tables.print_table(cases, asked.added)
    print(f"\n{_how(asked)}")
    if options.plot is not None:
        from echo.bench.picture import save_picture

        save_picture(options.plot, cases, asked.added, _title(asked))
    return 0


def measure(asked: Options, group: Sequence[System]) -> list[Case]:
    """Systems that share a runtime."""
    from echo.bench.serve import Server

    load, shape = asked.load, asked.shape
    stretches = [system.stretches(load) for system in group]
    most = max(len(stretch.running) for each in stretches for stretch in each)
    slots = max(max(system.slots for system in group), most * (shape.top_k + 1))
    started = time.perf_counter()
    cases = []
    with Server(
        shape, load, most, REGIMES[asked.regime], device=asked.device, seed=asked.seed, gpu_slots=slots,
        **dict(group[0].settings), **asked.settings,
    ) as server:  # fmt: skip
        print(
            f"{server.runtime.device}, {slots:,} slots: ready after {time.perf_counter() - started:.1f} s, "
            f"{server.fill_seconds:.1f} of them to fill {sum(load.lengths):,} tokens",
            flush=True,
        )
        done: dict[tuple[int | None, int], Served] = {}  # pools that give a system the same are run once
        for system, parts in zip(group, stretches, strict=True):
            same = system.tokens, system.most
            if same not in done:
                chosen = sample(parts, asked.repeat)
                done[same] = account(parts, server.serve(parts, chosen, system.resident, asked.steps))
            served = done[same]
            cases.append(Case(system, systems.gpu_bytes(system, load, shape), served))
            print(
                f"  {system.name}, pool {system.pool:,}: batch {served.batch:.1f}, {served.step_ms:.2f} ms a step, "
                f"{sum(run.steps for run in served.runs):,} of {served.steps:,} steps run in "
                f"{sum(run.seconds for run in served.runs):.1f} s",
                flush=True,
            )
    return cases


def report(asked: Options, cases: Sequence[Case]) -> dict[str, Any]:
    """What `--json` writes."""
    load, shape = asked.load, asked.shape
    return {
        "build": echo.build_info(),
        "device": asked.device,
        "settings": asked.settings,
        "modelled": "added_ms: all of a step that is not attention, the same for all batches",
        "measured": "runs of each batch size that the schedule has, from cold pools on: cases[].measured[].runs",
        "put_together": "attention_ms_per_step, miss_rate and tokens_per_s: the whole schedule; steps that were not "
        "run are taken to be like the second half of those that were, batches like others of their size",
        "left_out": asked.left_out,
        "repeat": asked.repeat,
        "steps": asked.steps,
        "cases": [
            {
                "case": {"system": case.system.name, "pool": case.system.pool, "overlap": asked.regime},
                "layers": shape.layers,
                "top_k": shape.top_k,
                "row_bytes": shape.row_bytes,
                "requests": len(load.outputs),
                "contexts": len(load.lengths),
                "context_tokens": sum(load.lengths),
                **case.figures(base_of(cases, case), asked.added),
            }
            for case in cases
        ],
    }


def _how(asked: Options) -> str:
    """What was measured and what was put together, for people."""
    batches = f"{asked.repeat} batches" if asked.repeat else "all batches"
    steps = f"the first {asked.steps} steps" if asked.steps else "all steps"
    return (
        f"Measured: {steps} of {batches} of each size, of attention with indexer and cache, "
        f"{counted(asked.shape.layers, 'layer')}.\nPut together: the schedule; steps that were not run take as long as "
        "the second half of those that were, batches\nas long as others of their size. Filling contexts is not timed. "
        "Modelled: the time added, all that is not attention; a\nreal one grows with the batch. Ratios are to resident "
        "at the same pool.\nOf selected rows, missed: fetched when a layer asked for them, in all steps / in the second"
        " half of those that were run;\nahead: fetched before, all / those that were not selected then. spread: of the "
        "runs of one batch size, longest less\nshortest, over the mean."
    )


def _groups(asked: Options) -> list[list[System]]:
    """Systems that can share a runtime: all resident ones, in the largest pool; and those with equal slots."""
    groups: dict[Any, list[System]] = {}
    for system in asked.systems:
        key = (system.settings, "resident" if system.resident else (system.slots, system.most))
        groups.setdefault(key, []).append(system)
    return list(groups.values())


def _title(asked: Options) -> str:
    return (
        f"{counted(len(asked.load.outputs), 'request')} on {_contexts(asked.load)}, "
        f"{counted(asked.shape.layers, 'layer')}, top-{asked.shape.top_k}; added time is modelled"
    )


def _contexts(load: Load) -> str:
    return f"{counted(len(load.lengths), 'context')} of {min(load.lengths):,} to {max(load.lengths):,} tokens"
