"""Decodes a workload and finds out where the time goes."""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echo import Batch, Forward, Runtime
from echo.profile.kineto import MARK, steps_of
from echo.profile.timed_pass import now, timed_step
from echo.profile.timeline import Profile, Step
from echo.profile.workload import WARM_UP, Workload

_AHEAD = 3  # steps that the host may be ahead of the device, so that no call waits for room in its queue
_COUNTED = ("hits", "misses", "prefetched", "prefetched_used", "forecast", "forecast_used")
_UNUSED = 2  # first steps under the profiler: the first launch takes long there


def steps_needed(steps: int, device: str) -> int:
    """How many steps are decoded to measure so many."""
    return WARM_UP + (steps if device == "cpu" else 2 * steps + _UNUSED)


def measure(work: Workload, steps: int) -> Profile:
    """Decodes; on a GPU `steps` steps twice, first without the profiler.

    Raises:
        NotSupported: the profiler saw no step.
        CapacityError: the workload does not fit this machine.
    """
    total = steps_needed(steps, work.device)
    with work.runtime(total) as runtime:
        sessions = work.open(runtime, total)
        batches = [work.batch_of(sessions, step) for step in range(total)]
        warm, last = batches[:WARM_UP], batches[WARM_UP:]
        step_us, call_us = None, None
        if runtime.device == "cpu":
            for batch in warm:
                runtime.step(batch, work.forward)
        else:
            runtime.capture(work.forward, [work.batch])
            for batch in warm:
                runtime.step(batch)
            step_us, call_us = _by_events(runtime, last[:steps])
            last = last[steps:]
        before = _counts(runtime)
        if step_us is None:
            found = _by_clock(runtime, last, work.forward)
            step_us = statistics.fmean(step.end - step.start for step in found)
        else:
            found = steps_of(_events(runtime, last), work.shape.layers)[-steps:]
        counts = (_counts(runtime) - before) / len(last)
        return Profile(
            workload=work.describe(),
            device=runtime.device,
            layers=work.shape.layers,
            steps=found,
            step_us=step_us,
            call_us=call_us,
            **dict(zip(_COUNTED, counts.T, strict=True)),
        )


def _counts(runtime: Runtime) -> NDArray[np.float64]:
    """[layers, counters]."""
    runtime.synchronize()
    return np.array([[getattr(layer, name) for name in _COUNTED] for layer in runtime.stats().layers], np.float64)


def _by_clock(runtime: Runtime, batches: Sequence[Batch], forward: Forward) -> list[Step]:
    found = [timed_step(runtime, batch, forward) for batch in batches]
    return [step.moved(-found[0].start) for step in found]


def _by_events(runtime: Runtime, batches: Sequence[Batch]) -> tuple[float, float]:
    """Medians: microseconds of a step between events, and of its call on the host.

    The host keeps ahead of the device if it can; if not, the device waits, and that is in the step's time, too.
    """
    import torch

    with torch.cuda.device(runtime.device):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(batches) + 1)]
        calls = []
        runtime.synchronize()
        events[0].record()
        for number, (batch, after) in enumerate(zip(batches, events[1:], strict=True)):
            events[max(0, number - _AHEAD)].synchronize()
            start = now()
            runtime.step(batch)
            calls.append(now() - start)
            after.record()
        events[-1].synchronize()
    times = [1e3 * a.elapsed_time(b) for a, b in itertools.pairwise(events)]
    return statistics.median(times), statistics.median(calls)


def _events(runtime: Runtime, batches: Sequence[Batch]) -> list[dict[str, Any]]:
    """What torch's profiler records of the steps."""
    import torch

    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with warnings.catch_warnings(), torch.profiler.profile(activities=activities) as profiler:
        warnings.simplefilter("ignore")  # that it forgets after a cycle: this is one
        for batch in batches:
            with torch.profiler.record_function(MARK):
                runtime.step(batch)
        runtime.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    return events
