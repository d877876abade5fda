"""Decode steps in a trace of torch's profiler.

The trace is read as Chrome's format, which has been the same for years, while torch's own classes change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from echo import NotSupported
from echo.profile.kernels import COMMIT, FORECAST, OTHER, UPLOAD, layers_of, part_of
from echo.profile.timeline import Span, Step, sorted_spans

MARK = "echo step"
"""Name of the annotation that encloses each call of `step`."""

_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_HOST = {"cuda_runtime", "cuda_driver"}


def steps_of(events: Iterable[dict[str, Any]], layers: int) -> list[Step]:
    """The steps that were recorded from begin to end, their times counted from the first one's begin.

    A step ends with its commit, or a forecast that takes longer, and what follows belongs to the next one: so nothing
    else may run in between.

    Args:
        events: of `traceEvents`.
        layers: of the model.

    Raises:
        NotSupported: there is no step among them.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    device = sorted_spans(_device_span(event) for event in complete if event.get("cat") in _DEVICE)
    marks = sorted(
        (float(event["ts"]), float(event["dur"]))
        for event in complete
        if event["name"] == MARK and event.get("cat") == "user_annotation"
    )
    calls = [event for event in complete if event.get("cat") in _HOST]
    found: list[list[Span]] = []
    committed = True
    for span in device:
        commits = COMMIT in span.part.split("+")
        if committed and not commits and span.part != FORECAST:
            found.append([])
        if found:  # the end of a step that began unseen is none
            found[-1].append(span)
        committed = commits or (committed and span.part == FORECAST)
    if found and not committed:
        found.pop()
    if not found:
        raise NotSupported(
            f"profile: torch's profiler recorded {len(device)} kernels and copies and no whole step; "
            "is another profiler attached, or CUPTI missing?"
        )
    host = [_host_spans(calls, start, start + length) for start, length in marks]
    if len(host) != len(found):  # nobody knows whose they are
        host = [[] for _ in found]
    return _from_zero([_step(spans, layers, called) for spans, called in zip(found, host, strict=True)])


def _device_span(event: dict[str, Any]) -> Span:
    name = event["name"]
    part = part_of(name) if event["cat"] == "kernel" else UPLOAD if name.startswith("Memcpy HtoD") else OTHER
    start = float(event["ts"])
    stream = event.get("args", {}).get("stream", event.get("tid", 0))
    return Span(part, start, start + float(event["dur"]), f"stream {stream}", detail=name)


def _step(spans: Sequence[Span], layers: int, host: list[Span]) -> Step:
    found = layers_of([span.part for span in spans], layers)
    placed = [replace(span, layer=layer) for span, layer in zip(spans, found, strict=True)]
    return Step(placed[0].start, max(span.end for span in placed), placed, host)


def _host_spans(calls: Iterable[dict[str, Any]], begin: float, end: float) -> list[Span]:
    """The call of `step`, and what it asked of CUDA."""
    inner = (
        Span(call["name"], float(call["ts"]), float(call["ts"]) + float(call["dur"]), "host")
        for call in calls
        if begin <= float(call["ts"]) <= end
    )
    return [Span("step", begin, end, "host"), *sorted_spans(inner)]


def _from_zero(steps: Sequence[Step]) -> list[Step]:
    """Of clocks that disagree the host's is set back until no step runs before it was called."""
    called = [step.host[0].start for step in steps if step.host]
    late = max((step.host[0].start - step.start for step in steps if step.host), default=0.0)
    late = max(late, 0.0)
    zero = min([steps[0].start, *(start - late for start in called[:1])])
    return [step.moved(-zero, -zero - late) for step in steps]
