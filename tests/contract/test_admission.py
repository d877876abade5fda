"""Capacity, life cycle and failure: what does not fit is refused, what is given back can be had again."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from support.rig import assert_same_bits, small_shape
from support.synthetic import ForwardFailed, fail_at

import echo


def free_state(runtime: echo.Runtime) -> tuple:
    """What must return to its start when sessions go."""
    runtime.synchronize()
    stats = runtime.stats()
    return stats.sessions, stats.free_host_tokens, [layer.used_slots for layer in stats.layers]


def test_what_does_not_fit_is_refused_and_running_sessions_go_on(make_rig):
    """Pitfall 20: host rows, sessions and context; prompt and output are counted at admission."""
    rig = make_rig(small_shape(), host_tokens=1024, max_context=512, max_sessions=3)
    running = rig.open(300)
    rig.prefill(running, list(range(60)))
    for tokens, error, message in (
        (513, echo.InvalidArgument, "^max_tokens: 513 given, expected 1 to max_context = 512"),
        (0, echo.InvalidArgument, "^max_tokens: 0 given"),
        (-5, echo.InvalidArgument, "^max_tokens: -5 given"),
    ):
        with pytest.raises(error, match=message):
            rig.runtime.open_session(tokens)
    second = rig.open(512)
    with pytest.raises(
        echo.CapacityError, match="^max_tokens: a session of 193 tokens needs 4 blocks.*3 of 16 are free"
    ):
        rig.runtime.open_session(193)
    rig.step([(running, 1), (second, 2)])
    third = rig.open(192)
    with pytest.raises(echo.CapacityError, match="^max_sessions: all 3 sessions are open"):
        rig.runtime.open_session(1)
    rig.step([(running, 1), (third, 2)])
    rig.check()
    rig.close(second)
    rig.open(512)
    rig.step([(running, 3)])
    rig.check()


def test_a_session_takes_its_capacity_and_not_one_token_more(make_rig):
    rig = make_rig(small_shape(), query_rows=2)
    full, other = rig.open(70), rig.open(128)
    rig.prefill(full, [1] * 60)
    with pytest.raises(echo.CapacityError, match="^tokens: session 0 holds 60 of 70 tokens, no room for 11 more"):
        rig.runtime.prefill(full.session, [1] * 11, rig.model)
    assert full.session.length == 60
    for _ in range(9):
        rig.step([(full, 2), (other, 2)])
    with pytest.raises(echo.CapacityError, match="^tokens: .*no room for 2 more"):
        rig.step([(other, [3, 4]), (full, [3, 4])])  # one that is full stops the whole step ...
    assert (full.session.length, other.session.length) == (69, 9)  # ... before anything has changed
    rig.check()
    rig.step([(full, 3)])
    rig.step([(other, 3)])
    rig.check()


def test_plan_says_how_many_sessions_can_be_opened(make_runtime):
    runtime = make_runtime(small_shape(), host_tokens=1000, max_sessions=64)
    for tokens in (1, 64, 65, 500, 1000, 1024):
        promised = runtime.plan.sessions_of(tokens)
        opened = [runtime.open_session(tokens) for _ in range(promised)]
        with pytest.raises((echo.CapacityError, echo.InvalidArgument)):
            runtime.open_session(tokens)
        for session in opened:
            session.close()
    assert runtime.plan.sessions_of(1025) == runtime.plan.sessions_of(0) == 0


def test_open_and_close_thousands_of_times(make_rig):
    """Pitfall 21: sessions are closed at every stage; free counts return to the start and nothing lingers."""
    rig = make_rig(small_shape(layers=2), host_tokens=1024, max_context=256, max_sessions=8)
    start = free_state(rig.runtime)
    keeper = rig.open(256)
    rig.prefill(keeper, [(3 * i) % 61 for i in range(30)])
    rng = np.random.default_rng(0)
    live = []
    for round_ in range(3000):
        if live and (len(live) == 6 or rng.random() < 0.5):
            live.pop(int(rng.integers(len(live)))).close()
            continue
        try:
            session = rig.runtime.open_session(int(rng.integers(1, 200)))
        except echo.CapacityError:
            continue
        live.append(session)
        stage = rng.random()
        if stage < 0.3:
            rig.runtime.prefill(session, [1], rig.model)
        if stage < 0.15 and session.capacity > 3:
            rig.runtime.step(echo.Batch([session], [2]), rig.model)
        if round_ % 500 == 0:
            rig.step([(keeper, 5)])
    for session in live:
        session.close()
        session.close()
    rig.check()
    rig.close(keeper)
    assert free_state(rig.runtime) == start
    whole = rig.open(256)  # nothing is left in fragments
    assert np.diff(whole.session.blocks).tolist() == [1, 1, 1]


STAGES = [(stage, layer) for layer in (0, 2) for stage in ("append", "score", "select", "recall", "attend", "end")]


@pytest.mark.parametrize("call", ["prefill", "step", "captured step"])
@pytest.mark.parametrize(("stage", "layer"), STAGES)
def test_a_forward_that_raises_changes_nothing(make_rig, stage, layer, call):
    """Pitfall 21: at every stage; the session is as before, and trying again gives what one try would have given."""
    clean = make_rig(small_shape(), model={"integers": True})
    rig = make_rig(small_shape(), model=clean.model.to(clean.model.device))
    if call == "captured step":
        if rig.kind == "cuda":
            pytest.skip("a replay on a GPU runs no Python that could raise")
        for each in (clean, rig):
            each.runtime.capture(each.model, [2])
    pairs = [each.open(128) for each in (clean, rig)]
    others = [each.open(128) for each in (clean, rig)]
    for each, pair, other in zip((clean, rig), pairs, others, strict=True):
        each.prefill(pair, [(3 * i) % 61 for i in range(40)])
        each.prefill(other, [(7 * i) % 61 for i in range(20)])

    def attempt(each, pair, other):
        if call == "prefill":
            return each.prefill(pair, [4, 5, 6])
        return each.step([(pair, 4), (other, 5)], captured=call == "captured step")

    thresholds = rig.runtime.thresholds(pairs[1].session)
    free = free_state(rig.runtime)[:2]
    for _ in range(3):
        rig.model.on_stage = fail_at(stage, layer)
        with pytest.raises(ForwardFailed, match=f"{stage} of layer {layer}"):
            attempt(rig, pairs[1], others[1])
        assert (pairs[1].session.length, others[1].session.length) == (40, 20)
        np.testing.assert_array_equal(rig.runtime.thresholds(pairs[1].session), thresholds)
        assert free_state(rig.runtime)[:2] == free
        rig.check()
    rig.model.on_stage = None
    assert_same_bits(attempt(rig, pairs[1], others[1]), attempt(clean, pairs[0], others[0]))
    rig.check()
    for token in range(4):
        assert_same_bits(rig.step([(pairs[1], token)]), clean.step([(pairs[0], token)]))
    rig.check()


def test_scores_of_a_failed_pass_reach_no_other_session(make_rig):
    """A k-th score was found before the forward raised; the next session in that row has none of its own yet."""
    rig = make_rig(small_shape())
    long_one = rig.open(64)
    rig.prefill(long_one, [(3 * i) % 61 for i in range(30)])
    rig.model.on_stage = fail_at("end", 2)
    with pytest.raises(ForwardFailed):
        rig.prefill(long_one, [1, 2, 3])
    rig.model.on_stage = None
    fresh = rig.open(64)
    rig.step([(fresh, 1)])
    assert np.isnan(rig.runtime.thresholds(fresh.session)).all()
    rig.check()


def test_a_forward_that_leaves_out_a_layer_is_refused(make_rig):
    rig = make_rig(small_shape())
    pair = rig.open(64)
    rig.prefill(pair, [1, 2, 3])

    def forward(p: echo.ForwardPass) -> None:
        x = rig.model.inputs(0, torch.from_dlpack(p.tokens), torch.from_dlpack(p.positions))
        p.append(0, x.kv, x.index_key)

    for call in (
        lambda: rig.runtime.step(echo.Batch([pair.session], [4]), forward),
        lambda: rig.runtime.prefill(pair.session, [4, 5], forward),
        lambda: rig.runtime.capture(forward, [1]),
    ):
        with pytest.raises(echo.StateError, match="^forward: layer 1 of 3 was not appended to"):
            call()
    rig.check()
    rig.step([(pair, 4)])
    rig.check()


def test_interrupts_and_exits_pass_through(make_rig):
    """What is no Exception leaves a forward like any other error."""
    rig = make_rig(small_shape())
    pair = rig.open(64)

    def interrupted(p: echo.ForwardPass) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rig.runtime.step(echo.Batch([pair.session], [4]), interrupted)
    rig.step([(pair, 4)])
    rig.check()


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "dropped"])
def test_forwards_and_runtimes_are_let_go(device, closed):
    """Nothing keeps a model alive that is not captured, nor a runtime, and all its memory, that nobody names."""

    class Model:
        def __call__(self, p: echo.ForwardPass) -> None:
            for layer in range(3):
                p.append(layer, torch.zeros(p.rows, 80, device=p.device))

    runtime = echo.Runtime(small_shape(), device=device, host_tokens=64, max_batch=1)
    session = runtime.open_session(64)
    used, captured = Model(), Model()
    runtime.step(echo.Batch([session], [1]), used)
    runtime.capture(captured, [1])
    watch_used, watch_captured, watch_runtime = weakref.ref(used), weakref.ref(captured), weakref.ref(runtime)
    del used, captured
    gc.collect()
    assert watch_used() is None and watch_captured() is not None
    if closed:
        runtime.close()
    del runtime
    gc.collect()
    assert watch_runtime() is None and watch_captured() is None
    session.close()
