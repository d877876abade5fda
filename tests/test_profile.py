"""What `echo-kv profile` makes of a trace of kernels: verbs, layers, and sums that add up."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from support.kineto import GENERIC, HOPPER, LAYER, MODEL, OWN, event, step_events, step_names

import echo
from echo.profile.kernels import GAPS, OTHER, UPLOAD, layers_of, part_of
from echo.profile.kineto import steps_of
from echo.profile.tables import layer_lines, sparkline, verb_lines
from echo.profile.timeline import Profile, Span, Step

ROOT = Path(__file__).parents[1]


def profile_of(steps: list[Step], layers: int, step_us: float) -> Profile:
    counts = [np.full(layers, number) for number in (30.0, 10.0, 8.0, 5.0, 4.0, 3.0)]
    return Profile("by hand", "cuda:0", layers, steps, step_us, 20.0, *counts)


# --- kernels --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", [GENERIC, HOPPER])
def test_kernels_belong_to_the_verb_that_launches_them(kernels):
    for verb, names in kernels.items():
        assert all(part_of(name) == verb for name in names), verb


@pytest.mark.parametrize(
    ("name", "part"),
    [
        (MODEL, OTHER),
        ("score_kernel(float*)", OTHER),
        ("void other::echo::recall<1>(int)", OTHER),
        (f"{OWN}any_kernel()", OTHER),
        (f"{OWN}recalled(int)", OTHER),
        (f"void {OWN}select_recall<4>(echo::RecallParams)", "select+recall"),
        ("void echo::sm90::append_score<true>(echo::ScoreParams)", "append+score"),
        (f"{OWN}prefetch_rows(echo::RecallParams)", "prefetch"),
        (f"{OWN}find_forecast(echo::ForecastParams, echo::ForecastLists, echo::KernelErrorView)", "forecast"),
        ("echo::commit", "commit"),
    ],
)
def test_names_say_what_kernels_do(name, part):
    assert part_of(name) == part


def test_every_kernel_of_a_step_is_known():
    """Whoever adds one names it after its verb, or in `_NAMED`."""
    apart = {"any_kernel"}  # never launched
    found = set()
    for source in (ROOT / "cpp").rglob("*.cu*"):
        text = re.sub(r"__launch_bounds__\([^)]*\)", "", source.read_text(encoding="utf-8"))
        found |= set(re.findall(r"__global__\s+void\s+(\w+)\(", text))
    assert {"append", "score_sm90", "recall", "attend_sm90"} <= found
    assert {name for name in found - apart if part_of(f"echo::{name}") == OTHER} == set()


@pytest.mark.parametrize("kernels", [GENERIC, HOPPER])
@pytest.mark.parametrize("layers", [1, 2, 61])
def test_layers_follow_from_the_order_of_verbs(kernels, layers):
    parts = [part_of(name) for name in step_names(kernels, layers)]
    found = layers_of(parts, layers)
    each = sum(len(kernels[verb]) for verb in LAYER)
    assert [layer for layer in found if layer is not None] == [i // each for i in range(each * layers)]
    assert all(
        (layer is None) == (part in ("begin", "commit", OTHER)) for layer, part in zip(found, parts, strict=True)
    )


def test_layers_that_share_a_selection_and_fused_kernels_have_their_places():
    shared = ["append", "score", "select", "recall", "attend", "recall", "attend", "recall", "attend", "append"]
    assert layers_of(shared, 4) == [0, 0, 0, 0, 0, 1, 1, 2, 2, 3]
    assert layers_of(["append+score", "select+recall", "attend"] * 3, 3) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert layers_of(["begin", "append", OTHER, "attend", "prefetch", "append"], 2) == [None, 0, None, 0, None, 1]


def test_where_order_tells_nothing_layers_share_equally_or_not_at_all():
    assert layers_of(["begin", *["recall"] * 6, "commit"], 3) == [None, 0, 0, 1, 1, 2, 2, None]
    assert layers_of(["recall"] * 7, 3) == [None] * 7
    assert layers_of([OTHER, "commit"], 3) == [None] * 2


def test_forecasts_run_beside_the_others():
    """They belong to no layer, count where nothing else runs, and may end behind the commit."""
    spans = [Span("recall", 0, 2, "a", 0), Span("forecast", 2, 9, "b"), Span("attend", 3, 6, "a", 0),
             Span("forecast", 5, 10, "c"), Span("commit", 8, 9, "a")]  # fmt: skip
    assert Step(0.0, 10.0, spans).own_times().tolist() == [2, 3, 3, 1, 1]
    forecast = f"{OWN}fetch_forecast(echo::ForecastParams, echo::ForecastLists, int)"
    names = step_names(GENERIC, 2)
    events = step_events(names, 1000.0) + step_events(names, 2000.0)
    events += [event("kernel", forecast, 1000.0 + 4 * (len(names) + 2), 5.0, stream=9)]
    first, second = steps_of(events, 2)
    assert first.spans[-1].part == "forecast" and first.spans[-1].layer is None
    assert [span.part for span in second.spans] == [UPLOAD, *map(part_of, names)]


# --- traces of torch ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", [GENERIC, HOPPER])
def test_steps_are_found_in_a_trace(kernels):
    names = step_names(kernels, 5)
    events = [event("cpu_op", "aten::add", 900.0, 5.0), {"ph": "M", "name": "process_name"}]
    events += step_events(names, 1000.0) + step_events(names, 2000.0)
    steps = steps_of(reversed(events), 5)
    assert len(steps) == 2
    first, second = steps
    assert first.host[0].start == 0 and first.start == 50 and second.start == 1050
    assert [span.part for span in first.spans] == [UPLOAD, *map(part_of, names)]
    assert {span.track for span in first.spans} == {"stream 7"}
    assert [span.part for span in second.host] == ["step", "cudaMemcpyAsync", "cudaGraphLaunch"]
    assert first.own_times().tolist() == [3.0] * (len(names) + 1)
    assert first.end - first.start == 4 * len(names) + 3


def test_a_step_that_is_cut_off_is_left_out():
    names = step_names(HOPPER, 2)
    events = step_events(names, 1000.0) + step_events(names[:-2], 2000.0)
    (step,) = steps_of(events, 2)
    assert step.host == []  # whose calls they are is not known
    (begun,) = steps_of(step_events(names[-1:], 0.0)[-1:] + step_events(names, 1000.0), 2)
    assert len(begun.spans) == len(names) + 1 and len(begun.host) == 3
    for useless in ([], events[:3], step_events([MODEL], 0.0)):
        with pytest.raises(echo.NotSupported, match=r"^profile: .* no whole step"):
            steps_of(useless, 2)


def test_no_step_runs_before_it_was_called():
    """Clocks of the host and the device may differ by milliseconds."""
    names = step_names(HOPPER, 2)
    events = step_events(names, 1000.0, host=-400.0) + step_events(names, 2000.0, host=-300.0)
    for step in steps_of(events, 2):
        assert 0 <= step.host[0].start <= step.start


def test_of_kernels_that_overlap_the_first_takes_the_time():
    spans = [("recall", 0.0, 10.0), ("attend", 4.0, 12.0), ("prefetch", 5.0, 6.0), ("commit", 20.0, 21.0)]
    step = Step(0.0, 21.0, [Span(part, start, end, "stream 7") for part, start, end in spans])
    assert step.own_times().tolist() == [10.0, 2.0, 0.0, 1.0]


# --- sums -----------------------------------------------------------------------------------------------------------


def test_the_parts_add_up_to_the_step():
    names = step_names(GENERIC, 4)
    steps = steps_of(step_events(names, 0.0) + step_events(names, 1000.0, length=5.0), 4)
    busy = 4.0 * (len(names) + 1)
    profile = profile_of(steps, 4, busy + 44)
    parts = {part.name: part for part in profile.parts()}
    assert list(parts) == [UPLOAD, "begin", *LAYER, "commit", OTHER, GAPS]
    assert sum(part.us for part in parts.values()) == pytest.approx(profile.step_us)
    assert sum(part.share for part in parts.values()) == pytest.approx(1)
    assert parts["attend"].us == pytest.approx(4 * 4 * 4.0) and parts["attend"].us_per_layer == pytest.approx(16.0)
    assert parts["attend"].launches == pytest.approx(16) and parts["begin"].us_per_layer is None
    assert parts[GAPS].us == pytest.approx(44) and parts[GAPS].launches == 0
    assert profile.by_layer("recall").tolist() == pytest.approx([4.0] * 4)
    assert profile.hit_rate().tolist() == [0.75] * 4
    text = "\n".join(verb_lines(profile))
    assert "a step takes" in text and "mind the shares" not in text
    assert json.loads(json.dumps(profile.report()))["by_layer"]["missed_rows"] == [10.0] * 4


def test_a_profiler_that_makes_kernels_slower_is_noticed():
    steps = steps_of(step_events(step_names(HOPPER, 2), 0.0), 2)
    profile = profile_of(steps, 2, 10.0)
    assert GAPS not in {part.name for part in profile.parts()}
    assert "mind the shares" in verb_lines(profile)[-1]


def test_of_many_layers_those_that_recall_longest_are_shown():
    spans = [Span("recall", 10.0 * layer, 10.0 * layer + 1 + layer % 7, "stream 7", layer) for layer in range(61)]
    lines = layer_lines(profile_of([Step(0.0, 620.0, spans)], 61, 620.0))
    assert [line.split()[0] for line in lines[6:11]] == ["6", "13", "20", "27", "34"] and len(lines) == 12
    assert lines[5].split()[-7:] == ["missed", "prefetched", "used", "forecast", "used", "hit", "rate"]
    assert lines[6].split()[-6:] == ["10.0", "8.0", "5.0", "4.0", "3.0", "75.0%"]
    assert len(sparkline(range(61))) == 61 and sparkline([0, 1, 8]) == "▁▂█" and sparkline([0, 0]) == "▁▁"
    assert layer_lines(profile_of([Step(0.0, 1.0, [])], 61, 1.0)) == ["no kernel could be put down to a layer"]
