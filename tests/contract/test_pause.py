"""Pauses: a session gives up its slots and comes back with the same bits."""

from __future__ import annotations

import pytest
from support.rig import (
    assert_same_bits,
    check_mirror,
    host_row_of,
    tokens_of,
)
from support.session_checks import (
    assert_all_is_free,
    assert_steps_agree,
    everything,
    opened,
    own_rows,
    resident_rows,
)

import echo


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_a_paused_session_gives_up_its_slots_and_comes_back_with_the_same_bits(make_both, captured):
    """Pitfall 21: pause and resume at any time; exactly its own rows go, and nothing is lost."""
    rig, plain = make_both(gpu_slots=512)
    if captured:
        rig.runtime.capture(rig.model, [2, 4])
    prompt = tokens_of(7, 90)
    pair, twin = opened(rig, 200, prompt), opened(plain, 200, prompt)
    other, other_twin = opened(rig, 200, tokens_of(8, 40)), opened(plain, 200, tokens_of(8, 40))
    how = "captured" if captured else "one batch"
    for turn in range(18):
        assert_steps_agree(rig, plain, [(pair, twin, turn), (other, other_twin, 60 - turn)], how)
        if turn % 3 == 0:
            before, own, counted = resident_rows(rig.runtime), own_rows(rig, pair), rig.stats()
            rig.pause(pair)
            assert all(rows & own for rows in before)
            assert resident_rows(rig.runtime) == [rows - own for rows in before]
            rig.pause(pair)  # as good as once
            assert pair.session.paused and pair.session.length == twin.session.length and not pair.session.closed
            assert "paused" in repr(pair.session)
            assert rig.stats().free_host_tokens == counted.free_host_tokens
            rig.check()
            assert_steps_agree(rig, plain, [(other, other_twin, turn)], how)
            rig.check()
            pair.session.resume()
            pair.session.resume()
            assert not pair.session.paused and "paused" not in repr(pair.session)
    rig.check()
    assert rig.inexact == 0


def test_a_paused_session_is_refused_and_can_be_exported(make_both):
    rig, plain = make_both()
    rig.runtime.capture(rig.model, [2])
    pair, other = opened(rig, 200, tokens_of(18, 100)), opened(rig, 200, tokens_of(19, 30))
    twin = opened(plain, 200, tokens_of(18, 100))
    rig.pause(pair)
    before = everything(rig)
    for call in (
        lambda: rig.runtime.step(echo.Batch([other.session, pair.session], [1, 1]), rig.model),
        lambda: rig.runtime.step(echo.Batch([pair.session, other.session], [1, 1])),
        lambda: rig.runtime.prefill(pair.session, [1], rig.model),
        lambda: rig.runtime.prefill(pair.session, [1]),
    ):
        with pytest.raises(echo.StateError, match="^session: session 0 is paused; resume it first"):
            call()
    assert everything(rig) == before
    kv = rig.runtime.export_kv(pair.session)
    check_mirror(pair, kv)
    copy = rig.open(200)
    rig.runtime.import_kv(copy.session, kv)
    copy.oracle = pair.oracle.copy()
    del kv  # which keeps the rows of a session that closes
    rig.step([(other, 1)], captured=True)
    rig.check()
    assert_steps_agree(rig, plain, [(copy, twin, 3)], "captured")
    rig.close(pair)  # without resuming it
    rig.check()
    with pytest.raises(echo.StateError, match="^session: session 0 is closed"):
        pair.session.resume()
    for each in (other, copy):
        rig.close(each)
    assert_all_is_free(rig)


def test_a_paused_fork_leaves_shared_rows_to_those_that_run(make_both):
    """Rows of shared blocks stay, and stay right, until their last holder gives them up."""
    rig, plain = make_both(gpu_slots=1024)
    prompt = tokens_of(20, 140)
    parent = opened(rig, 256, prompt)
    child = rig.fork(parent)
    twins = [opened(plain, 256, prompt) for _ in range(2)]
    for token in range(6):
        assert_steps_agree(rig, plain, [(parent, twins[0], token), (child, twins[1], token + 30)], "one batch")
    shared = {host_row_of(parent.session, position) for position in range(128)}
    before = resident_rows(rig.runtime)
    assert all(rows & shared for rows in before)
    rig.pause(child)
    assert all(new & shared == old & shared for old, new in zip(before, resident_rows(rig.runtime), strict=True))
    resident, counted = resident_rows(rig.runtime), rig.stats().layers
    results = rig.step([(parent, 9)])
    assert_same_bits(results, plain.step([(twins[0], 9)], verify=False))
    new_row = host_row_of(parent.session, 146)
    for layer, (old, new) in enumerate(zip(counted, rig.stats().layers, strict=True)):
        wanted = {host_row_of(parent.session, position) for position in results[1][0, layer].tolist()}
        fetched = new.misses - old.misses + new.prefetched_used - old.prefetched_used
        assert fetched == len(wanted - resident[layer] - {new_row})  # what it had was still there
    rig.pause(parent)
    rig.check()
    for pair in (child, parent):
        pair.session.resume()
    assert_steps_agree(rig, plain, [(child, twins[1], 9), (parent, twins[0], 10)], "one batch")
    rig.pause(child)
    rig.close(parent)
    rig.check()
    rig.close(child)
    assert_all_is_free(rig)


def test_paused_sessions_fork_truncate_import_and_close(make_both):
    rig, plain = make_both()
    prompt = tokens_of(9, 100)
    pair, twin = opened(rig, 200, prompt), opened(plain, 200, prompt)
    cut = opened(plain, 200, prompt[:70])
    rig.pause(pair)
    child = rig.fork(pair)
    assert pair.session.paused and not child.session.paused  # a pause is not inherited
    rig.truncate(pair, 70)
    assert pair.session.paused
    rig.check(thresholds=False)
    assert_steps_agree(rig, plain, [(child, twin, 5)], "apart")
    rig.pause(child)
    empty = rig.open(200)
    rig.pause(empty)
    rig.runtime.import_kv(empty.session, rig.runtime.export_kv(child.session))
    empty.oracle = child.oracle.copy()
    rig.check(thresholds=False)
    rig.close(child)
    rig.check(thresholds=False)
    for each in (pair, empty):
        each.session.resume()
    assert_steps_agree(rig, plain, [(pair, cut, 5), (empty, twin, 6)], "one batch")
    rig.check(thresholds=False)
