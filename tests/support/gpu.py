"""What tests of a GPU share: time limits, events, sessions, and what a profile saw."""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import pathlib
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

import echo
from support.rig import Pair, Rig, host_rows, small_shape, tokens_of
from support.synthetic import SyntheticModel

ON_A_GPU = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("watchdog"),
    pytest.mark.parametrize("device", ["cuda"], indirect=True),
]
"""Marks of a file whose tests need a GPU."""

LONG = 400_000_000  # cycles of a GPU, some tenths of a second: longer than it takes to issue a few steps


@contextmanager
def watched(config: pytest.Config, seconds: float = 240.0) -> Iterator[None]:
    """Where a kernel never ends nothing can be saved: says where that was, and exits."""
    with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        terminal = os.fdopen(os.dup(2), "w")
    with terminal:
        faulthandler.dump_traceback_later(seconds, exit=True, file=terminal)
        yield
        faulthandler.cancel_dump_traceback_later()


def hopper_scores(shape: echo.ModelShape, kernels: str) -> bool:
    """Whether a GPU's scores come from the kernel made for Hopper: it sifts, prefetches and appends index keys."""
    return (
        kernels != "generic"
        and torch.cuda.get_device_capability() == (9, 0)
        and (shape.index_key_format, shape.index_dim) == ("fp8", 128)
    )


def hopper_attends(device: str) -> bool:
    """Whether attention over rows of 512 + 64 in FP8 or BF16 is the kernel made for Hopper."""
    return (
        device == "cuda"
        and os.environ.get("ECHO_KERNELS") != "generic"
        and torch.cuda.get_device_capability() == (9, 0)
    )


def opened(rig: Rig, max_tokens: int, tokens: list[int]) -> Pair:
    """A session that was fed these tokens."""
    pair = rig.open(max_tokens)
    rig.prefill(pair, tokens, verify=False)
    return pair


def batch_of(pairs: list[Pair], token: int = 1) -> echo.Batch:
    """One new token for each."""
    return echo.Batch([pair.session for pair in pairs], [token] * len(pairs))


def assert_same_mirrors(a: Rig, b: Rig) -> None:
    """Host rows and moving averages of all sessions have the same bits."""
    for one, other in zip(a.pairs, b.pairs, strict=True):
        given, expected = a.runtime.export_kv(one.session), b.runtime.export_kv(other.session)
        np.testing.assert_array_equal(given.thresholds, expected.thresholds)
        np.testing.assert_array_equal(given.deviations, expected.deviations)
        for layer in range(given.layers):
            np.testing.assert_array_equal(host_rows(given, layer), host_rows(expected, layer))


def marked() -> torch.cuda.Event:
    """An event behind all that was issued to the current stream."""
    event = torch.cuda.Event()
    event.record()
    return event


def finished(event: torch.cuda.Event, seconds: float = 60.0) -> bool:
    """Whether what the event marks ends in time; never waits for ever."""
    end = time.monotonic() + seconds
    while not event.query():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


def use_a_runtime() -> None:
    """A runtime comes, works and goes."""
    shape = small_shape()
    model = SyntheticModel(shape, device="cuda")
    with echo.Runtime(shape, device="cuda", host_tokens=1024, max_batch=2, max_context=256) as runtime:
        rig = Rig(runtime, model)
        pair = opened(rig, 128, tokens_of(0, 50))
        runtime.capture(model, [2])
        for token in range(5):
            rig.step([(pair, token)], captured=token % 2 == 0)
        rig.check()


def free_memory() -> int:
    """Bytes free on the device, with nothing kept for later by torch."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


@contextmanager
def nothing_lost() -> Iterator[None]:
    """Device memory is as free afterwards as it was before, and a new runtime works."""
    for _ in range(2):
        use_a_runtime()  # loads kernels, which takes memory once
    before = free_memory()
    yield
    use_a_runtime()
    end = time.monotonic() + 20.0  # another process's memory may take a moment
    while abs(free_memory() - before) >= 32 << 20:
        assert time.monotonic() < end, f"{before >> 20} MiB were free before, {free_memory() >> 20} MiB are now"
        time.sleep(0.2)


def recorded(trace: pathlib.Path, window: str) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Names in a torch trace: host calls within the window, copies up to its end, and all of both that came later.

    Chrome's trace format has been the same for years, while torch's own classes change.
    """
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("ph") == "X"]
    spans = [e for e in events if e["name"] == window and not e.get("cat", "").startswith("gpu")]
    assert len(spans) == 1, f"{len(spans)} spans named '{window}' were recorded"
    begin, end = float(spans[0]["ts"]), float(spans[0]["ts"]) + float(spans[0]["dur"])
    calls: Counter[str] = Counter()
    copies: Counter[str] = Counter()
    later: Counter[str] = Counter()
    for event in events:
        name, at = event["name"], float(event["ts"])
        is_call = re.match(r"(cuda|cu)[A-Z]", name) is not None
        if not is_call and not name.startswith("Memcpy"):
            continue
        if at > end + 20_000.0:  # 20 ms: the device's clock may be off by some of them
            later[name] += 1
        elif not is_call:
            copies[name] += 1
        elif begin <= at <= end:
            calls[name] += 1
    return calls, copies, later


def matching(counts: Counter[str], pattern: str) -> int:
    """How many of them; names may carry the suffix of a version."""
    return sum(count for name, count in counts.items() if re.fullmatch(f"({pattern})(_v\\d+|_ptsz)*", name))


def host_work(calls: Counter[str], copies: Counter[str]) -> dict[str, int]:
    """What steady steps ask of CUDA, given what `recorded` found: one launch and one copy each, and nothing else."""
    return {
        "graph launches": matching(calls, r"cudaGraphLaunch|cuGraphLaunch"),
        "copies asked for": matching(calls, r"cudaMemcpyAsync|cuMemcpyHtoDAsync"),
        "copies to the device": sum(n for name, n in copies.items() if "HtoD" in name),
        "copies to the host": sum(n for name, n in copies.items() if "DtoH" in name),
        "pageable copies": sum(n for name, n in copies.items() if "Pageable" in name),
        "copies that wait": matching(calls, r"cudaMemcpy|cuMemcpy|cuMemcpy(HtoD|DtoH)"),
        "synchronisations": matching(calls, r"(cuda|cu)(Stream|Device|Event|Ctx)Synchronize"),
        "allocations": matching(calls, r"cuda(Malloc|Free|Host)\w*|cuMem(Alloc|Free|Host|Create|Map)\w*"),
        "launches outside of graphs": matching(calls, r"cuda(LaunchKernel|Memset)\w*|cuLaunchKernel\w*"),
    }


def steady(steps: int) -> dict[str, int]:
    """What `host_work` has to say of so many steps."""
    once = ("graph launches", "copies asked for", "copies to the device")
    return {name: steps if name in once else 0 for name in host_work(Counter(), Counter())}
