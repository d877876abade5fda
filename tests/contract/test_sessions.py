"""Sessions that fork, forget, pause and go on: bit for bit what sessions without such a past would give."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from support.rig import (
    Pair,
    Rig,
    assert_same_bits,
    check_cache,
    check_mirror,
    full_width_shape,
    host_row_of,
    host_rows,
    small_shape,
)

import echo

LENGTHS = [0, 1, 63, 64, 65, 200]
INTEGERS = {"integers": True}  # scores are exact, so selections have to be the oracle's own


def tokens_of(seed: int, count: int) -> list[int]:
    """Random token ids."""
    return np.random.default_rng(seed).integers(61, size=count).tolist()


def opened(rig: Rig, max_tokens: int, tokens: Sequence[int]) -> Pair:
    """A session that was fed these tokens."""
    pair = rig.open(max_tokens)
    if tokens:
        rig.prefill(pair, tokens)
    return pair


@pytest.fixture
def make_both(make_rig) -> Callable[..., tuple[Rig, Rig]]:
    """A rig with the least pool, and one of the same model where all is resident and nothing ever forks."""

    def make(shape: echo.ModelShape | None = None, **settings) -> tuple[Rig, Rig]:
        rig = make_rig(shape or small_shape(), model=INTEGERS, **settings)
        plain = make_rig(shape or small_shape(), model=rig.model, gpu_slots=2048)
        return rig, plain

    return make


def assert_steps_agree(rig: Rig, plain: Rig, entries: Sequence[tuple[Pair, Pair, int]], how: str) -> None:
    """Steps of `rig`, in one batch or one by one, give what `plain` gives one by one."""
    expected = [plain.step([(twin, token)], verify=False) for _, twin, token in entries]
    if how == "apart":
        given = [rig.step([(pair, token)]) for pair, _, token in entries]
    else:
        whole = rig.step([(pair, token) for pair, _, token in entries], captured=how == "captured")
        given = [(whole[0][i : i + 1], whole[1][i : i + 1]) for i in range(len(entries))]
    for one, other in zip(given, expected, strict=True):
        assert_same_bits(one, other)


def resident_rows(runtime: echo.Runtime) -> list[set[int]]:
    """Host rows that have a slot, by layer."""
    states = (runtime.cache_state(layer) for layer in range(runtime.shape.layers))
    return [set(np.flatnonzero(state["slot_of"] != -1).tolist()) for state in states]


def own_rows(rig: Rig, pair: Pair) -> set[int]:
    """Host rows of a session's tokens that no other session has."""
    others = {block for other in rig.pairs if other is not pair for block in other.session.blocks}
    rows = (host_row_of(pair.session, position) for position in range(pair.session.length))
    return {row for row in rows if row // 64 not in others}


def everything(rig: Rig) -> list:
    """All that a refused call must leave alone."""
    stats = rig.runtime.stats()
    known: list = [stats.sessions, stats.free_host_tokens, [(x.hits, x.misses, x.used_slots) for x in stats.layers]]
    for layer in range(rig.runtime.shape.layers):
        known += [array.tobytes() for array in rig.runtime.cache_state(layer).values()]
    for pair in rig.pairs:
        session, kv = pair.session, rig.runtime.export_kv(pair.session)
        known += [session.length, session.capacity, session.blocks, session.paused, session.closed]
        known.append(rig.runtime.thresholds(session).tobytes())
        for layer in range(kv.layers):
            known += [host_rows(kv, layer).tobytes(), kv.index_keys(layer).tobytes()]
    return known


def assert_all_is_free(rig: Rig) -> None:
    """Host rows and slots are back at the start, in one piece."""
    stats = rig.runtime.stats()
    assert (stats.sessions, stats.free_host_tokens) == (0, stats.host_tokens)
    assert all(layer.used_slots == 0 for layer in stats.layers)
    whole = rig.runtime.open_session(rig.runtime.plan.config.max_context)
    assert whole.blocks == list(range(whole.blocks[0], whole.blocks[0] + len(whole.blocks)))
    whole.close()


# --- forks ----------------------------------------------------------------------------------------------------------


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

    before = rig.runtime.stats().layers
    rig.runtime.step(echo.Batch([fork.session for fork in forks], [1, 2, 3, 4]), forward)
    for layer, (old, new) in enumerate(zip(before, rig.runtime.stats().layers, strict=True)):
        assert (new.misses - old.misses, new.hits - old.hits) == (16, 48)
        assert all(torch.equal(slots[layer][0], row) for row in slots[layer])
    check_cache(rig.runtime, [fork.session for fork in forks] + [source.session])


def test_a_fork_begins_with_the_thresholds_of_its_parent(make_rig):
    """Moving averages are copied with every bit, and belong to each alone from then on."""
    rig = make_rig(small_shape())
    for length in (0, 10, 16, 100):
        parent = opened(rig, 128, tokens_of(length, length))
        start = rig.runtime.thresholds(parent.session)
        assert np.isnan(start).all() == (length < 16)
        child = rig.fork(parent)
        np.testing.assert_array_equal(rig.runtime.thresholds(child.session), start)
        rig.prefill(parent, tokens_of(1, 20))
        assert (rig.runtime.thresholds(parent.session) != start).all()
        np.testing.assert_array_equal(rig.runtime.thresholds(child.session), start)
        rig.check()
        rig.close(parent)
        fresh = rig.open(64)  # takes the place of the parent
        assert np.isnan(rig.runtime.thresholds(fresh.session)).all()
        np.testing.assert_array_equal(rig.runtime.thresholds(child.session), start)
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


# --- truncation -----------------------------------------------------------------------------------------------------


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
        for layer in range(3):
            first = 0
            for view in filled.rows(layer):
                view[:] = host_rows(kv, layer)[first : first + len(view)]
                first += len(view)
            filled.index_keys(layer)[:] = kv.index_keys(layer)
        filled.thresholds = kv.thresholds
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


# --- capacity -------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("length", [0, 30, 63, 64, 100, 127])
def test_a_cut_that_needs_a_block_where_none_is_free_changes_nothing(make_rig, length):
    """Pitfall 20: 130 tokens in three blocks, of which two are shared."""
    rig = make_rig(small_shape(), host_tokens=512, max_context=256, max_sessions=4)
    parent = opened(rig, 192, tokens_of(16, 130))
    child = rig.fork(parent)
    rig.step([(parent, 3), (child, 4)])
    filler = rig.open(256)
    assert rig.runtime.stats().free_host_tokens == 0
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


# --- pauses ---------------------------------------------------------------------------------------------------------


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
            before, own, counted = resident_rows(rig.runtime), own_rows(rig, pair), rig.runtime.stats()
            rig.pause(pair)
            assert all(rows & own for rows in before)
            assert resident_rows(rig.runtime) == [rows - own for rows in before]
            rig.pause(pair)  # as good as once
            assert pair.session.paused and pair.session.length == twin.session.length and not pair.session.closed
            assert "paused" in repr(pair.session)
            assert rig.runtime.stats().free_host_tokens == counted.free_host_tokens
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
    resident, counted = resident_rows(rig.runtime), rig.runtime.stats().layers
    results = rig.step([(parent, 9)])
    assert_same_bits(results, plain.step([(twins[0], 9)], verify=False))
    new_row = host_row_of(parent.session, 146)
    for layer, (old, new) in enumerate(zip(counted, rig.runtime.stats().layers, strict=True)):
        wanted = {host_row_of(parent.session, position) for position in results[1][0, layer].tolist()}
        assert new.misses - old.misses == len(wanted - resident[layer] - {new_row})  # what it had was still there
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
