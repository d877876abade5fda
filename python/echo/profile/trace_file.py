"""The steps as a file for chrome://tracing and ui.perfetto.dev."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import echo
from echo import files
from echo.profile.timeline import Profile, Span

_DEVICE, _HOST = 1, 2  # processes, in the order in which they are shown
_STEPS = "steps"


def write_trace(path: Path, profile: Profile) -> None:
    """Writes one track for each stream, one for the steps, and one for the host."""
    tracks = sorted({span.track for step in profile.steps for span in (*step.spans, *step.host)})
    places = {_STEPS: (_DEVICE, 0)}
    for number, track in enumerate(tracks, 1):
        places[track] = (_HOST if track == "host" else _DEVICE, number)
    events = [_named("process_name", (_DEVICE, 0), profile.device)]
    if "host" in places:
        events.append(_named("process_name", (_HOST, 0), "host"))
    events += [_named("thread_name", place, track) for track, place in places.items()]
    for number, step in enumerate(profile.steps):
        whole = Span(f"step {number}", step.start, step.end, _STEPS)
        events += [_event(span, places[span.track]) for span in (whole, *step.spans, *step.host)]
    document = {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {"build": echo.build_info(), "workload": profile.workload},
    }
    files.write_text(path, json.dumps(document) + "\n")


def _named(kind: str, place: tuple[int, int], name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": place[0], "tid": place[1], "args": {"name": name}}


def _event(span: Span, place: tuple[int, int]) -> dict[str, Any]:
    arguments: dict[str, Any] = {} if span.layer is None else {"layer": span.layer}
    if span.detail:
        arguments["kernel"] = span.detail
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.part,
        "ts": round(span.start, 3),
        "dur": round(span.end - span.start, 3),
        "pid": place[0],
        "tid": place[1],
        "args": arguments,
    }
