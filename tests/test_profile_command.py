"""`echo-kv profile` from end to end: real steps on the CPU and on a GPU, its tables and files."""

from __future__ import annotations

import itertools
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.commands import run
from support.gpu import hopper_scores
from support.kineto import LAYER
from support.rig import full_width_shape

import echo
from echo.profile.kernels import OTHER, UPLOAD
from echo.profile.measure import measure
from echo.profile.synthetic import synthetic_workload
from echo.profile.tables import layer_lines, verb_lines
from echo.profile.timed_pass import TimedPass, timed_step


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_a_timed_pass_does_what_the_pass_does(make_rig):
    """The oracle checks each row; layer 1 shares the selection of layer 0."""
    rig = make_rig(full_width_shape("fp8_656"), model={"shared": {1}}, fused=True)
    pair = rig.open(200)
    rig.prefill(pair, [token % 61 for token in range(100)])
    model, seen = rig.model, []

    def timed(p):
        one = TimedPass(p)
        result = model(one)
        seen.extend(one.spans)
        return result

    for token in range(5):
        outputs, selections = rig.runtime.step(echo.Batch([pair.session], [token]), timed)
        rig._follow(pair, [token], (outputs, selections), verify=True)
    rig.check()
    names = [span.name for span in seen[: len(seen) // 5]]
    assert names == [f"{verb} layer 0" for verb in LAYER] + [
        f"{verb} layer 1" for verb in ("append", "recall", "attend")
    ]
    assert all(a.end <= b.start for a, b in itertools.pairwise(seen))


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_a_step_on_the_cpu_has_no_holes(make_rig):
    rig = make_rig(full_width_shape("fp8_656"), fused=True)
    pair = rig.open(200)
    rig.prefill(pair, [token % 61 for token in range(100)])
    step = timed_step(rig.runtime, echo.Batch([pair.session], [7]), rig.model)
    assert step.spans[0].start == step.start and step.spans[-1].end == step.end
    assert all(a.end == b.start for a, b in zip(step.spans, step.spans[1:], strict=False))
    assert step.own_times().sum() == pytest.approx(step.end - step.start)


@pytest.mark.parametrize(("workload", "forecast_cap"), [("tiny", 0), ("tiny", 40), ("synthetic", 0)])
def test_the_command_prints_tables_and_writes_files(capsys, tmp_path, device, workload, forecast_cap):
    pytest.importorskip("matplotlib")
    if workload == "tiny":
        pytest.importorskip("echo.hf")
        sizes, layers = ("--batch", "2", "--length", "400", "--pool", "1.2"), 5
    else:
        sizes, layers = ("--synthetic", "--layers", "2", "--batch", "2", "--length", "150", "--threads", "1"), 2
    # Both have keys that Hopper's score takes: it appends them, and recall rows.
    kernels = os.environ.get("ECHO_KERNELS", "auto")
    hopper = device == "cuda" and hopper_scores(echo.ModelShape(), kernels)
    verbs = LAYER[1:] if hopper else LAYER
    files = {name: tmp_path / f"profile.{name}" for name in ("trace", "json", "plot")}
    files["plot"] = files["plot"].with_suffix(".png")
    status, out, _ = run(
        capsys, "profile", "--device", device, "--steps", "3", "--forecast-cap", str(forecast_cap), *sizes,
        *(word for name, file in files.items() for word in (f"--{name}", str(file))),
    )  # fmt: skip
    assert status == 0 and f"{layers} layers" in out and "2 sessions of" in out and "3 steps" in out
    assert files["plot"].read_bytes().startswith(b"\x89PNG")
    report = json.loads(files["json"].read_text())
    parts = {part["name"]: part for part in report["parts"]}
    assert sum(part["us"] for part in parts.values()) >= 0.999 * report["step_us"]
    assert len(report["by_layer"]["hit_rate"]) == layers
    forecasts = forecast_cap > 0 and (device == "cpu" or kernels != "generic")
    assert (sum(report["by_layer"]["forecast_rows"]) > 0) == forecasts
    for part in parts.values():
        assert re.search(rf"^{part['name']} .*{part['share']:.1%}", out, re.MULTILINE)
    tracks, events = events_of(files["trace"])
    whole = [event for event in events if event["track"] == "steps"]
    assert [event["name"] for event in whole] == ["step 0", "step 1", "step 2"]
    for step in whole:
        inside = [
            event
            for event in events
            if event["track"] not in ("steps", "host") and -0.01 <= event["ts"] - step["ts"] < step["dur"] - 0.01
        ]
        # From the first one's begin to the last one's end; between them others run side by side, or nothing.
        assert inside[0]["ts"] == pytest.approx(step["ts"], abs=0.01)
        end = max(event["ts"] + event["dur"] for event in inside)
        assert end == pytest.approx(step["ts"] + step["dur"], abs=0.01)
        names = {event["name"] for event in inside}
        assert {f"{verb} layer {layers - 1}" for verb in verbs} <= names
        assert not any(verb in name for verb in {*LAYER} - {*verbs} for name in names)
        if device == "cpu":
            assert sum(event["dur"] for event in inside) == pytest.approx(step["dur"], rel=1e-2)
        else:
            assert ("forecast" in names) == forecasts
    if device == "cpu":
        assert list(parts) == ["begin", *LAYER, "commit", OTHER] and report["call_us"] is None
        assert all(parts[verb]["launches"] == layers for verb in LAYER) and tracks == {"cpu", "steps"}
        assert sum(event["dur"] for event in whole) / 3 == pytest.approx(report["step_us"], rel=1e-3)
    else:
        assert {UPLOAD, "begin", *verbs, "commit", OTHER} <= set(parts) and {"host", "steps"} < tracks


def events_of(file: Path) -> tuple[set[str], list[dict[str, Any]]]:
    """Tracks of a trace, and its events with the name of theirs."""
    events = json.loads(file.read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    return set(tracks.values()), [
        {**event, "track": tracks[event["pid"], event["tid"]]} for event in events if event["ph"] == "X"
    ]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--steps", "0"), "steps"),
        (("--batch", "0"), "batch"),
        (("--synthetic", "--batch", "65536"), "batch"),
        (("--length", "-1"), "length"),
        (("--length", "16384"), "length"),
        (("--layers", "3"), "layers"),
        (("--synthetic", "--layers", "0"), "layers"),
        (("--synthetic", "--layers", "2147483648"), "layers"),
        (("--pool", "0.5"), "pool"),
        (("--pool", "nan"), "pool"),
        (("--synthetic", "--drift", "-1"), "drift"),
        (("--drift", "0.5"), "drift"),
        (("--plot", "picture.foo"), "plot"),
        (("--threads", "-1"), "threads"),
        (("--trace", "missing/trace.json"), "trace"),
        (("--plot", "."), "plot"),
        (("--device", "tpu"), "device"),
        (("--synthetic", "--kernels", "best"), "kernels"),
        (("--threshold-alpha", "2"), "threshold_alpha"),
    ],
)
def test_nonsense_is_refused_by_name(capsys, tmp_path, monkeypatch, arguments, named):
    monkeypatch.chdir(tmp_path)
    if arguments[0] == "--device":
        status, _, err = run(capsys, "profile", *arguments)
    else:
        status, _, err = run(capsys, "profile", "--device", "cpu", *arguments)
    assert status == 1 and err.startswith(f"echo-kv profile: {named}: ")


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("kernels", ["generic", "auto"])
def test_the_table_adds_up_to_what_events_measure(device, kernels):
    """Of another runtime, so nothing of the profile is compared with itself."""
    steps, layers = 20, 8
    work = synthetic_workload("cuda:0", layers, 4, 8192, 2, 0.2, {"kernels": kernels})
    profile = measure(work, steps)
    assert len(profile.steps) == steps and profile.call_us is not None
    print("\n".join([*verb_lines(profile), *layer_lines(profile)]))
    parts = {part.name: part for part in profile.parts()}
    verbs = LAYER if kernels == "generic" else LAYER[1:]  # otherwise score appends
    assert {UPLOAD, "begin", *verbs, "commit"} <= set(parts)
    for verb in verbs:
        assert parts[verb].launches >= layers and (profile.by_layer(verb) > 0).all(), verb
    assert [span.part for span in profile.steps[-1].host].count("cudaGraphLaunch") == 1
    assert (profile.misses > 0).all()

    total = 20 + steps
    with work.runtime(total) as runtime:
        sessions = work.open(runtime, total)
        runtime.capture(work.forward, [work.batch])
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        for step in range(20):
            runtime.step(work.batch_of(sessions, step))
        for step, mark in enumerate(marks):
            mark.record()
            if step < steps:
                runtime.step(work.batch_of(sessions, 20 + step))
        torch.cuda.synchronize()
    measured = 1e3 * float(np.median([a.elapsed_time(b) for a, b in itertools.pairwise(marks)]))
    assert sum(part.us for part in parts.values()) == pytest.approx(measured, rel=0.05)
