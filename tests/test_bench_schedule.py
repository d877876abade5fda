"""Continuous batching of `echo-kv bench decode`, and what times of some stretches come to."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

import echo
from echo.bench.figures import account
from echo.bench.measured import Counts, Timed
from echo.bench.schedule import Load, draw_load, room_for, sample, schedule


@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=8),
    outputs=st.lists(st.integers(1, 9), min_size=1, max_size=40),
    most=st.integers(1, 10),
    tokens=st.none() | st.integers(109, 500),
)
def test_bounds_hold_and_every_request_gets_its_tokens(lengths, outputs, most, tokens):
    stretches = schedule(Load(tuple(lengths), tuple(outputs)), most, tokens)
    got = [0] * len(outputs)
    before: list = []
    for stretch in stretches:
        running = list(stretch.running)
        assert 1 <= len(running) <= most and stretch.steps >= 1
        assert len({one.context for one in running}) == len(running)
        if tokens is not None:
            assert sum(lengths[one.context] + outputs[one.request] for one in running) <= tokens
        assert running[: len(running) - stretch.opened] == before  # who ran before comes first
        for one in running:
            got[one.request] += stretch.steps
        assert stretch.closed == tuple(i for i, one in enumerate(running) if got[one.request] == outputs[one.request])
        before = [one for i, one in enumerate(running) if i not in stretch.closed]
    assert got == outputs and not before


def test_requests_start_in_order_and_as_soon_as_they_can():
    stretches = schedule(Load((10, 10, 10), (2, 3, 1, 4)), most=2)
    assert [[one.request for one in stretch.running] for stretch in stretches] == [[0, 1], [1, 2], [3]]
    assert [stretch.steps for stretch in stretches] == [2, 1, 4]
    assert [stretch.opened for stretch in stretches] == [2, 1, 1]


def test_a_request_that_never_fits_is_refused():
    for most, tokens in ((4, 109), (0, None)):
        with pytest.raises(echo.InvalidArgument, match="^pools: "):
            schedule(Load((100,), (10,)), most, tokens)


def test_equal_outputs_come_in_batches_of_which_some_are_run():
    stretches = schedule(Load((10,) * 4, (5,) * 30), most=4)
    assert [len(stretch.running) for stretch in stretches] == [4] * 7 + [2] and all(s.whole for s in stretches)
    assert sample(stretches, 3) == [0, 1, 2, 7] and sample(stretches, 0) == list(range(8))
    mixed = schedule(Load((10,) * 4, (5, 3) * 15), most=4)
    assert sample(mixed, 1) == list(range(len(mixed)))  # requests go on from one to the next


def ran(seconds: float, late: float, steps: int = 5) -> Timed:
    return Timed(steps, seconds, Counts(90, 10, 8, 1), 2, late, Counts(38, 2, 4, 0))


def test_what_was_not_run_takes_as_long_as_what_was():
    stretches = schedule(Load((10,) * 4, (5,) * 30), most=4)
    times = {0: ran(1.0, 0.1), 1: ran(2.0, 0.2), 2: ran(1.5, 0.1), 7: ran(0.5, 0.1)}
    served = account(stretches, times)
    assert [(batch.requests, batch.steps, batch.times) for batch in served.batches] == [(4, 5, 7), (2, 5, 1)]
    assert served.seconds == pytest.approx(7 * 1.5 + 0.5) and served.tokens == 150 and served.steps == 40
    assert served.batch == 150 / 40 and served.batch_most == 4 and len(served.runs) == 4
    assert served.batches[0].spread == pytest.approx(1 / 1.5) and served.batches[1].spread == 0
    assert served.counts == Counts(720, 80, 64, 8) and served.late == Counts(152, 8, 16)
    assert served.counts.share(served.counts.misses) == 0.1 and Counts().share(0) == 0
    assert served.step_ms == pytest.approx(275)
    assert served.tokens_per_second(0) == pytest.approx(150 / 11)
    assert served.tokens_per_second(25) == pytest.approx(150 / 12)


def test_steps_that_were_not_run_are_like_the_last_ones():
    stretches = schedule(Load((10,) * 4, (11,) * 8), most=4)
    served = account(stretches, {0: ran(1.0, 0.2), 1: ran(2.0, 0.4)})
    # Six steps are missing, three times the late ones.
    assert served.seconds == pytest.approx(1.0 + 3 * 0.2 + 2.0 + 3 * 0.4) and served.steps == 22
    assert served.counts == Counts(2 * (90 + 3 * 38), 2 * (10 + 3 * 2), 2 * (8 + 3 * 4), 2 * 1)
    figures = served.batches[0].figures()
    assert (figures["batch"], figures["steps"], figures["times_in_schedule"]) == (4, 11, 2)
    first = {"steps": 5, "ms_per_step": 200, "late_ms_per_step": 100, "miss_rate": 0.1, "late_miss_rate": 0.05}
    assert figures["runs"][0] == pytest.approx(first)
    whole = Timed(1, 1.0, Counts(1), 0, 0.0, Counts())
    assert whole.lasting(1) == 1.0 and whole.counting(1) == Counts(1)
    assert whole.figures()["late_ms_per_step"] is None


def test_contexts_fill_the_host():
    load = draw_load((800, 1000), 318, (256, 256), 28_000, 256, seed=0)
    taken = [length + 256 for length in load.lengths]
    assert len(load.outputs) == 318 and set(load.outputs) == {256}
    assert 28_000 - 1280 < sum(taken) <= 28_000 and all(768 <= length <= 1000 for length in load.lengths)
    assert all(length % 64 == 0 for length in load.lengths)
    assert load == draw_load((800, 1000), 318, (256, 256), 28_000, 256, seed=0)
    assert load != draw_load((800, 1000), 318, (256, 256), 28_000, 256, seed=1)
    assert len(draw_load((800, 1000), 5, (1, 9), 28_000, 256, seed=0).lengths) == 5
    with pytest.raises(echo.InvalidArgument, match="^host_memory: "):
        draw_load((800, 1000), 5, (1, 9), 700, 256, seed=0)
    assert room_for(256, 100_000, 2048) == 256 and room_for(8, 100_000, 2048) == 49
