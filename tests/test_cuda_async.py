"""Host calls while the GPU is still busy with earlier steps: nothing is reused, freed or overwritten too early.

`torch.cuda._sleep` keeps the stream busy for some tenths of a second, so that whatever follows is certainly called
before the device gets there; the outputs must be those of a run without delays.
"""

from __future__ import annotations

import time

import pytest
import torch
from support.gpu import LONG, ON_A_GPU
from support.rig import Rig, assert_same_bits, small_shape, tokens_of

import echo

pytestmark = ON_A_GPU


@pytest.fixture
def rigs(make_rig) -> tuple[Rig, Rig]:
    """The same runtime and model twice: one that is delayed, one that is not."""
    settings = {"host_tokens": 1024, "max_context": 512}
    made = make_rig(small_shape(), **settings), make_rig(small_shape(), **settings)
    for rig in made:
        rig.runtime.capture(rig.model, [1, 2])  # an eager model may wait for the device by itself
    return made


def _kept(results):
    """A replay writes to the same memory again."""
    return tuple(part.clone() for part in results)


def delayed_step(rig: Rig, entries) -> tuple[torch.Tensor, torch.Tensor]:
    """A step that is still waiting when this returns."""
    torch.cuda._sleep(LONG)
    batch = echo.Batch([pair.session for pair, _ in entries], [token for _, token in entries])
    return rig.runtime.step(batch)


@pytest.mark.alone
def test_a_step_returns_before_its_work_is_done(rigs):
    rig, _ = rigs
    pair = rig.open(128)
    rig.prefill(pair, tokens_of(1, 100))
    torch.cuda.synchronize()
    delayed_step(rig, [(pair, 1)])
    assert not torch.cuda.current_stream().query()


@pytest.mark.alone
def test_counters_are_read_beside_the_steps(rigs):
    """`stats` does not wait for steps in flight; once they are done their part is in it."""
    rig, _ = rigs
    pair = rig.open(128)
    rig.prefill(pair, tokens_of(1, 100))
    before = rig.stats()
    delayed_step(rig, [(pair, 1)])
    with rig.runtime.open_session(128):  # its map is filled behind the step, and not waited for either
        early = rig.runtime.stats()
        assert not torch.cuda.current_stream().query(), "the step is done already"
    assert early.steps == before.steps + 1
    assert [layer.appended for layer in early.layers] == [layer.appended for layer in before.layers]
    late = rig.stats()
    assert [layer.appended for layer in late.layers] == [layer.appended + 1 for layer in before.layers]


def fed(rig: Rig, max_tokens: int, tokens: list[int]) -> echo.Session:
    """A session that has read them; nobody follows what it does."""
    session = rig.runtime.open_session(max_tokens)
    for first in range(0, len(tokens), 64):
        rig.runtime.prefill(session, tokens[first : first + 64], rig.model)
    return session


def stepped(rigs: tuple[Rig, Rig], rig: Rig, session: echo.Session) -> tuple[torch.Tensor, torch.Tensor]:
    """A step, which the first rig's stream comes to late."""
    if rig is rigs[0]:
        torch.cuda._sleep(LONG)
    return rig.runtime.step(echo.Batch([session], [7]))


@pytest.mark.parametrize("repeat", range(20))
def test_rows_of_a_closed_session_are_not_imported_into_too_early(rigs, repeat):
    results = []
    for rig in rigs:
        session = fed(rig, 512, tokens_of(repeat, 300))
        results.append(stepped(rigs, rig, session))
        session.close()
        other = rig.runtime.open_session(512)  # the same blocks, or others
        third = rig.runtime.open_session(512)
        for session in (other, third):
            filled = rig.runtime.begin_import(session, 300)
            for layer in range(3):
                for rows in filled.rows(layer):
                    rows[:] = 0xFF
    assert_same_bits(*results)


@pytest.mark.parametrize("repeat", range(20))
def test_a_fork_that_is_cut_and_filled_leaves_the_parents_step_alone(rigs, repeat):
    results = []
    for rig in rigs:
        parent = fed(rig, 256, tokens_of(repeat, 128))
        child = parent.fork()
        results.append(stepped(rigs, rig, parent))
        parent.close()
        child.truncate(0)
        filled = rig.runtime.begin_import(child, 128)
        for layer in range(3):
            for rows in filled.rows(layer):
                rows[:] = 0xFF
    assert_same_bits(*results)


@pytest.mark.parametrize("captured", [False, True])
def test_many_delayed_steps_queue_up(rigs, captured):
    """More passes than the ring of control blocks holds, all issued before the first one runs."""
    results = []
    for rig in rigs:
        pairs = [rig.open(128), rig.open(128)]
        for number, pair in enumerate(pairs):
            rig.prefill(pair, tokens_of(number, 70))
        steps = []
        if rig is rigs[0]:
            torch.cuda._sleep(LONG)
        for token in range(24):
            batch = echo.Batch([pair.session for pair in pairs], [token, token + 1])
            outputs, selections = rig.runtime.step(batch, None if captured else rig.model)
            steps.append((outputs.clone(), selections.clone()))
        results.append(steps)
    for delayed, plain in zip(*results, strict=True):
        assert_same_bits(delayed, plain)


def test_a_runtime_closes_with_work_in_flight(rigs):
    rig, plain = rigs
    results = []
    for one in (rig, plain):
        pair = one.open(256)
        one.prefill(pair, tokens_of(3, 200))
        step = delayed_step(one, [(pair, 7)]) if one is rig else one.step([(pair, 7)])
        started = time.perf_counter()
        one.runtime.close()
        one.runtime.close()
        assert time.perf_counter() - started < 30
        results.append(step)
    assert_same_bits(*results)
    torch.cuda.synchronize()


def test_work_on_two_streams_is_in_order(rigs):
    results = []
    for rig in rigs:
        pair = rig.open(256)
        rig.prefill(pair, tokens_of(4, 150))
        if rig is rigs[0]:
            torch.cuda._sleep(LONG)
        first = _kept(rig.runtime.step(echo.Batch([pair.session], [1])))
        other = torch.cuda.Stream()
        with torch.cuda.stream(other):
            second = _kept(rig.runtime.step(echo.Batch([pair.session], [2])))
        torch.cuda.current_stream().wait_stream(other)
        torch.cuda.synchronize()
        results.append((torch.cat([first[0], second[0]]), torch.cat([first[1], second[1]])))
    assert_same_bits(*results)
