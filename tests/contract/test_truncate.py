"""Truncation: what follows a cut is as if what was cut had never been."""

from __future__ import annotations

import numpy as np
import pytest
from support.rig import (
    assert_same_bits,
    check_cache,
    fill,
    host_row_of,
    host_rows,
    small_shape,
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
def test_truncation_forgets_and_what_follows_is_as_if_it_had_never_been(make_rig, captured):
    """Rejected speculation: after a cut, selections and outputs are those of a session without the detour."""
    rig = make_rig(small_shape(), query_rows=3)
    if captured:
        rig.runtime.capture(rig.model, [2], 3)
    straight, winding = rig.open(256), rig.open(256)
    prompt = tokens_of(2, 60)
    rig.prefill(straight, prompt)
    rig.prefill(winding, prompt)
    rng = np.random.default_rng(3)
    for _ in range(25):
        tokens = rng.integers(61, size=3).tolist()
        accepted = int(rng.integers(1, 4))
        rejected = rng.integers(61, size=3 - accepted).tolist()
        length = winding.session.length
        given = rig.step([(winding, tokens[:accepted] + rejected)], captured=captured)
        rig.truncate(winding, length + accepted)
        for row in range(accepted):
            expected = rig.step([(straight, tokens[row])])
            assert_same_bits((given[0][row : row + 1], given[1][row : row + 1]), expected)
        check_cache(rig.runtime, [straight.session, winding.session])
    assert straight.oracle.tokens == winding.oracle.tokens
    rig.check()


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("slots", [0, 2048], ids=["least pool", "all resident"])
@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 128, 149, 150])
def test_other_tokens_after_a_cut_meet_nothing_of_the_old_ones(make_both, length, slots, captured):
    """Pitfall 4: host rows, slots and index keys of forgotten tokens are never seen again, resident or not."""
    rig, plain = make_both(gpu_slots=slots)
    if captured:
        rig.runtime.capture(rig.model, [1, 2])
    prompt = tokens_of(4, 150)
    pair = opened(rig, 256, prompt)
    twin = opened(plain, 256, prompt[:length])
    for token in range(10):  # decoded tokens have slots, unlike those of a prefill
        rig.step([(pair, token)], captured=captured)
    forgotten = {host_row_of(pair.session, position) for position in range(length, 160)}
    before = resident_rows(rig.runtime)
    rig.truncate(pair, length)
    assert pair.session.length == length
    assert resident_rows(rig.runtime) == [rows - forgotten for rows in before]
    rig.check(thresholds=False)
    others = [60 - token for token in tokens_of(4, 190)][length:]
    for token in [*range(20, 28), *others[:2]]:
        how = "captured" if captured else "apart"
        assert_steps_agree(rig, plain, [(pair, twin, token)], how)
    rig.check(thresholds=False)
    rest = others[: 200 - pair.session.length]
    assert_same_bits(rig.prefill(pair, rest), plain.prefill(twin, rest, verify=False))
    assert_steps_agree(rig, plain, [(pair, twin, 3)], "apart")
    rig.check(thresholds=False)
    assert rig.inexact == 0


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 127, 128, 129, 150])
def test_truncating_a_fork_leaves_the_others_alone(make_both, length):
    """Copy on write: a shared block that would be appended to is replaced, and its other holders keep theirs."""
    rig, plain = make_both()
    prompt = tokens_of(4, 150)
    parent = opened(rig, 256, prompt)
    first, second = rig.fork(parent), rig.fork(parent)
    rig.step([(parent, 1), (first, 2), (second, 3)])
    lengths = {"first": length, "parent": min(length + 20, 150), "second": 151}
    twins = {name: opened(plain, 256, prompt[: lengths[name]]) for name in ("first", "parent")}
    twins["second"] = opened(plain, 256, [*prompt, 3])
    kept = [host_rows(rig.runtime.export_kv(second.session), layer).copy() for layer in range(3)]
    blocks = second.session.blocks
    for pair, name in ((first, "first"), (parent, "parent")):
        gone = own_rows(rig, pair) - {host_row_of(pair.session, position) for position in range(lengths[name])}
        before = resident_rows(rig.runtime)
        rig.truncate(pair, lengths[name])
        assert resident_rows(rig.runtime) == [rows - gone for rows in before]
        whole = lengths[name] // 64
        assert pair.session.blocks[:whole] == blocks[:whole]
        assert not set(pair.session.blocks[whole:]) & set(blocks)
        rig.check(thresholds=False)
    for pair, name in ((first, "first"), (parent, "parent")):
        more = tokens_of(5 + len(name), 30)
        assert_same_bits(rig.prefill(pair, more), plain.prefill(twins[name], more, verify=False))
    for token in range(4):
        entries = [
            (pair, twins[name], token) for pair, name in ((second, "second"), (parent, "parent"), (first, "first"))
        ]
        assert_steps_agree(rig, plain, entries, "one batch")
    assert second.session.blocks == blocks
    for layer in range(3):
        np.testing.assert_array_equal(host_rows(rig.runtime.export_kv(second.session), layer)[:151], kept[layer])
    rig.check(thresholds=False)
    for pair in (parent, first, second):
        rig.close(pair)
        rig.check(thresholds=False)
    assert_all_is_free(rig)


def test_a_fork_of_a_cut_session_and_a_cut_of_a_cut(make_both):
    rig, plain = make_both()
    prompt = tokens_of(13, 200)
    pair = opened(rig, 256, prompt)
    for length, other in ((190, 128), (129, 64), (100, 100), (64, 63), (63, 1), (1, 0), (0, 0)):
        rig.truncate(pair, length)
        child = rig.fork(pair)
        twin = opened(plain, 256, prompt[:length])
        for token in range(3):
            assert_steps_agree(rig, plain, [(child, twin, token)], "apart")
        rig.truncate(child, other)
        rig.check(thresholds=False)
        plain.close(twin)
        twin = opened(plain, 256, [*prompt[:length], 0, 1, 2][:other])
        assert_steps_agree(rig, plain, [(child, twin, 9)], "apart")
        rig.check(thresholds=False)
        rig.close(child)
    assert pair.session.length == 0
    rig.close(pair)
    assert_all_is_free(rig)


@pytest.mark.parametrize("forked", [False, True], ids=["alone", "forked"])
@pytest.mark.parametrize("copied", [True, False], ids=["import_kv", "begin_import"])
def test_an_import_into_a_session_that_was_cut_to_nothing(make_both, forked, copied):
    """Pitfall 4: what is imported replaces what was there; where that is shared, it goes elsewhere."""
    rig, plain = make_both(gpu_slots=1024)
    source = opened(rig, 200, tokens_of(14, 140))
    target = opened(rig, 256, tokens_of(15, 150))
    rig.step([(target, 1)])
    sibling = rig.fork(target) if forked else None
    kept = [host_rows(rig.runtime.export_kv(target.session), layer).copy() for layer in range(3)]
    rig.truncate(target, 0)
    with pytest.raises(echo.StateError, match="^session: .* holds 140 tokens already"):
        rig.runtime.import_kv(source.session, rig.runtime.export_kv(source.session))
    kv = rig.runtime.export_kv(source.session)
    if copied:
        rig.runtime.import_kv(target.session, kv)
    else:
        filled = rig.runtime.begin_import(target.session, 140)
        fill(filled, kv)
        rig.runtime.finish_import(target.session, filled)
    target.oracle = source.oracle.copy()
    rig.check()
    twin = opened(plain, 256, tokens_of(14, 140))
    assert_steps_agree(rig, plain, [(target, twin, 3)], "apart")
    if sibling:
        twin = opened(plain, 256, [*tokens_of(15, 150), 1])
        for layer in range(3):
            np.testing.assert_array_equal(host_rows(rig.runtime.export_kv(sibling.session), layer), kept[layer])
        assert_steps_agree(rig, plain, [(sibling, twin, 3)], "apart")
    rig.check()
    assert rig.inexact == 0


@pytest.mark.parametrize("length", [0, 30, 63, 64, 100, 127])
def test_a_cut_that_needs_a_block_where_none_is_free_changes_nothing(make_rig, length):
    """Pitfall 20: 130 tokens in three blocks, of which two are shared."""
    rig = make_rig(small_shape(), host_tokens=512, max_context=256, max_sessions=4)
    parent = opened(rig, 192, tokens_of(16, 130))
    child = rig.fork(parent)
    rig.step([(parent, 3), (child, 4)])
    filler = rig.open(256)
    assert rig.stats().free_host_tokens == 0
    before = everything(rig)
    needed = 2 - length // 64
    for pair in (child, parent):
        with pytest.raises(echo.CapacityError, match=f"^length: .* needs {needed} blocks .* 0 of 8 are free"):
            pair.session.truncate(length)
    for bad in (-1, 132, 1 << 40):
        with pytest.raises(echo.InvalidArgument, match=f"^length: {bad} given, expected 0 to the session's 131"):
            child.session.truncate(bad)
    assert everything(rig) == before
    rig.truncate(child, 128)  # needs none
    rig.check(thresholds=False)
    rig.step([(parent, 5), (child, 6)])
    rig.close(filler)
    rig.truncate(child, length)
    rig.check(thresholds=False)
    rig.step([(parent, 5), (child, 6)])
    rig.check(thresholds=False)


def test_the_last_holder_of_a_block_needs_no_copy(make_rig):
    """A cut is only refused for blocks that somebody else still holds."""
    rig = make_rig(small_shape(), host_tokens=384, max_context=192, max_sessions=3)
    parent = opened(rig, 192, tokens_of(17, 150))
    child = rig.fork(parent)
    filler = rig.open(128)
    with pytest.raises(echo.CapacityError, match="^length: "):
        child.session.truncate(10)
    rig.close(parent)
    blocks = child.session.blocks
    rig.truncate(child, 10)
    assert child.session.blocks == blocks
    rig.step([(child, 5), (filler, 6)])
    rig.check(thresholds=False)
