"""Forks: the same past, their own futures, one copy of what they share."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.rig import (
    Pair,
    Rig,
    assert_same_bits,
    check_cache,
    full_width_shape,
    host_row_of,
    small_shape,
    tokens_of,
)
from support.session_checks import (
    LENGTHS,
    assert_all_is_free,
    assert_steps_agree,
    everything,
    opened,
    own_rows,
    resident_rows,
)

import echo


@pytest.mark.parametrize(
    ("how", "awake"),
    [
        ("one batch", [0, 1, 2, 3]),
        ("captured", [0, 1, 2, 3]),
        ("apart", [0, 1, 2, 3]),
        ("one batch", [1, 2, 3]),
        ("apart", [0]),
        ("captured", [1]),
    ],
    ids=["one batch", "captured", "apart", "only children", "only the parent", "only a child, captured"],
)
@pytest.mark.parametrize("length", LENGTHS)
def test_forks_have_the_same_past_and_their_own_futures(make_both, length, how, awake):
    """Pitfall 12: whole blocks are shared, the rest is copied; whoever goes on and whoever rests, all are right."""
    rig, plain = make_both()
    if how == "captured":
        rig.runtime.capture(rig.model, [4])
    prompt = tokens_of(length, length)
    parent = opened(rig, 256, prompt)
    child = rig.fork(parent)
    family = [parent, child, rig.fork(parent, max_tokens=length + 30), rig.fork(child, max_tokens=length + 25)]
    twins = [opened(plain, 256, prompt) for _ in family]
    assert [pair.session.capacity for pair in family] == [256, 256, length + 30, length + 25]
    whole = length // 64
    for number, pair in enumerate(family):
        assert pair.session.length == length and not pair.session.paused
        assert pair.session.blocks[:whole] == parent.session.blocks[:whole]
        for other in family[:number]:
            assert not set(pair.session.blocks[whole:]) & set(other.session.blocks)
    rig.check()
    for turn in range(12):
        tokens = tokens_of(1000 * length + turn, 4)
        assert_steps_agree(rig, plain, [(family[i], twins[i], tokens[i]) for i in awake], how)
    rig.check()
    for i in reversed(range(4)):  # those that rested have the past they had
        assert_same_bits(rig.prefill(family[i], [i, 7, i]), plain.prefill(twins[i], [i, 7, i], verify=False))
    assert_steps_agree(rig, plain, [(*both, 5) for both in zip(family, twins, strict=True)], how)
    rig.check()
    assert rig.inexact == 0


@pytest.mark.parametrize("row_format", ["fp8_656", "bf16_1152"])
@pytest.mark.parametrize("length", [65, 128])
def test_forks_of_encoded_rows(make_both, row_format, length):
    rig, plain = make_both(full_width_shape(row_format))
    prompt = tokens_of(length, length)
    parent = opened(rig, 256, prompt)
    family = [parent, rig.fork(parent)]
    twins = [opened(plain, 256, prompt) for _ in family]
    for turn in range(8):
        assert_steps_agree(rig, plain, [(family[i], twins[i], turn + i) for i in range(2)], "one batch")
    rig.check(thresholds=False)


@pytest.mark.parametrize("order", ["parent first", "children first", *range(4)])
@pytest.mark.parametrize("length", [64, 100, 130])
def test_whoever_closes_first_takes_nothing_from_the_others(make_both, length, order):
    """Pitfall 21: the parent, its forks and theirs close in any order; those that remain go on, then all is free."""
    rig, plain = make_both()
    prompt = tokens_of(length, length)
    family = [opened(rig, 200, prompt)]
    for number in range(5):
        family.append(rig.fork(family[number // 2]))  # two forks each
    twins = {id(pair): opened(plain, 200, prompt) for pair in family}
    leaving = list(family)
    if order == "children first":
        leaving.reverse()
    elif order != "parent first":
        leaving = [family[i] for i in np.random.default_rng(order).permutation(6)]
    for turn, gone in enumerate(leaving):
        awake = [pair for pair in family if pair in rig.pairs][: 4 - turn % 2]
        assert_steps_agree(rig, plain, [(pair, twins[id(pair)], turn + i) for i, pair in enumerate(awake)], "one batch")
        own = own_rows(rig, gone)
        before = resident_rows(rig.runtime)
        rig.close(gone)
        assert resident_rows(rig.runtime) == [rows - own for rows in before], (
            "a shared row lost its slot, or an own kept it"
        )
        rig.check()
    assert_all_is_free(rig)


def test_shared_rows_are_fetched_once_and_have_one_slot(make_rig, device):
    """Pitfall 12: forks that select the same rows of a shared prefix use one slot for each."""
    rig = make_rig(small_shape(), gpu_slots=512)
    source = rig.open(200)
    rig.prefill(source, tokens_of(1, 128))
    parent = rig.open(200)
    rig.runtime.import_kv(parent.session, rig.runtime.export_kv(source.session))  # on the host alone
    parent.oracle = source.oracle.copy()
    forks = [parent, *(rig.fork(parent) for _ in range(3))]
    want = torch.arange(3, 19, dtype=torch.int32, device=device).repeat(4, 1)
    slots: list[torch.Tensor] = []

    def forward(p: echo.ForwardPass) -> None:
        for layer in range(3):
            x = rig.model.inputs(layer, torch.from_dlpack(p.tokens), torch.from_dlpack(p.positions))
            p.append(layer, x.kv, x.index_key)
            slots.append(torch.from_dlpack(p.recall(layer, want)).clone())

    before = rig.stats().layers
    rig.runtime.step(echo.Batch([fork.session for fork in forks], [1, 2, 3, 4]), forward)
    for layer, (old, new) in enumerate(zip(before, rig.stats().layers, strict=True)):
        assert (new.misses - old.misses, new.hits - old.hits) == (16, 48)
        assert all(torch.equal(slots[layer][0], row) for row in slots[layer])
    check_cache(rig.runtime, [fork.session for fork in forks] + [source.session])


def predictions(rig: Rig, pair: Pair) -> np.ndarray:
    """float32 [2, layers]: moving averages of k-th scores, and of their distance from those."""
    return np.array([rig.runtime.thresholds(pair.session), rig.runtime.export_kv(pair.session).deviations], np.float32)


def test_a_fork_begins_with_the_predictions_of_its_parent(make_rig):
    """Moving averages are copied with every bit, and belong to each alone from then on."""
    rig = make_rig(small_shape())
    for length in (0, 10, 16, 100):
        parent = opened(rig, 128, tokens_of(length, length))
        start = predictions(rig, parent)
        assert np.isnan(start[0]).all() == (length < 16) and np.isnan(start[1]).all() == (length < 17)
        child = rig.fork(parent)
        np.testing.assert_array_equal(predictions(rig, child), start)
        rig.prefill(parent, tokens_of(1, 20))
        assert (predictions(rig, parent) != start).all()
        np.testing.assert_array_equal(predictions(rig, child), start)
        rig.check()
        rig.close(parent)
        fresh = rig.open(64)  # takes the place of the parent
        assert np.isnan(predictions(rig, fresh)).all()
        np.testing.assert_array_equal(predictions(rig, child), start)
        rig.prefill(child, tokens_of(2, 20))
        rig.check()
        rig.close(fresh)
        rig.close(child)


def test_a_fork_may_be_full_at_once(make_rig):
    rig = make_rig(small_shape())
    parent = opened(rig, 200, tokens_of(3, 128))
    full = rig.fork(parent, max_tokens=128)
    assert full.session.blocks == parent.session.blocks[:2]  # and takes no host row of its own
    with pytest.raises(echo.CapacityError, match="^tokens: .*no room for 1 more"):
        rig.step([(full, 1)])
    again = rig.fork(full, max_tokens=200)
    assert_same_bits(rig.step([(again, 9)]), rig.step([(parent, 9)]))
    rig.check()
    for pair in list(rig.pairs):
        rig.close(pair)
    assert_all_is_free(rig)


def test_rows_of_forks_survive_whoever_comes_and_goes(make_rig):
    rig = make_rig(small_shape(layers=2), max_sessions=16, host_tokens=4096, gpu_slots=200)
    rng = np.random.default_rng(11)
    rig.prefill(rig.open(256), tokens_of(12, 130))
    for _ in range(60):
        pair = rig.pairs[int(rng.integers(len(rig.pairs)))]
        choice = rng.random()
        if choice < 0.35 and len(rig.pairs) < 9:
            rig.fork(pair)
        elif choice < 0.5 and len(rig.pairs) > 2:
            rig.close(pair)
        elif choice < 0.65:
            rig.truncate(pair, int(rng.integers(max(1, pair.session.length - 70), pair.session.length + 1)))
        elif pair.session.length < 250:
            rig.step([(pair, int(rng.integers(61)))])
        check_cache(rig.runtime, [p.session for p in rig.pairs])
    rig.check()
    for pair in list(rig.pairs):
        rig.close(pair)
    assert_all_is_free(rig)


def test_a_fork_that_does_not_fit_changes_nothing(make_rig):
    """Pitfall 20: refused by name, and everything goes on."""
    rig = make_rig(small_shape(), host_tokens=512, max_context=256, max_sessions=3)
    parent = opened(rig, 256, tokens_of(10, 100))
    filler = rig.open(128)
    before = everything(rig)
    for tokens in (-1, 99, 257, 1 << 40):
        with pytest.raises(echo.InvalidArgument, match=f"^max_tokens: {tokens} given"):
            parent.session.fork(tokens)
    for tokens in (0, 193, 256):
        with pytest.raises(echo.CapacityError, match="^max_tokens: .* 2 of 8 are free"):
            parent.session.fork(tokens)
    assert everything(rig) == before
    child = rig.fork(parent, 128)
    before = everything(rig)
    with pytest.raises(echo.CapacityError, match="^max_sessions: all 3 sessions are open"):
        parent.session.fork(100)
    assert everything(rig) == before
    rig.step([(parent, 3), (child, 4)])
    rig.check()
    rig.close(filler)
    rig.fork(child)
    rig.check()


def test_sessions_are_compared_as_sessions(make_runtime):
    """Handles of one session are equal; ids are unique in a runtime, not beyond."""
    first, second = make_runtime(small_shape()), make_runtime(small_shape())
    a, b, foreign = first.open_session(64), first.open_session(64), second.open_session(64)
    assert a == a and hash(a) == hash(a) and a != b
    assert a.id == foreign.id and a != foreign
    assert a != 0 and a != "session"
    assert len({a, b, foreign}) == 3
    fork = a.fork()
    assert fork != a and fork.id == 2
    with a as same:
        assert same == a
    assert a.closed and not fork.closed and host_row_of(b, 3) == b.blocks[0] * 64 + 3
