"""Sessions that fork, forget, pause and go on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.rig import assert_same_bits, check_cache, host_row_of, small_shape

import echo


def tokens_of(seed: int, count: int) -> list[int]:
    """Random token ids."""
    return np.random.default_rng(seed).integers(61, size=count).tolist()


@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 150])
def test_a_fork_has_the_same_past_and_its_own_future(make_rig, length):
    """Pitfall 12: whole blocks are shared, the rest is copied; either may go first."""
    rig = make_rig(small_shape(), model={"integers": True})
    parent = rig.open(200)
    rig.prefill(parent, tokens_of(length, length))
    children = [rig.fork(parent), rig.fork(parent, max_tokens=length + 30)]
    whole = length // 64
    for child in children:
        assert child.session.length == length
        assert child.session.blocks[:whole] == parent.session.blocks[:whole]
        assert not set(child.session.blocks[whole:]) & set(parent.session.blocks)
    assert [child.session.capacity for child in children] == [200, length + 30]
    rig.check()
    assert_same_bits(rig.step([(children[0], 7)]), rig.step([(parent, 7)]))
    rig.step([(parent, 1), (children[0], 2), (children[1], 3)])
    rig.prefill(children[1], tokens_of(0, 20))
    rig.check()
    rig.close(parent)
    rig.check()
    grandchild = rig.fork(children[0])
    rig.close(children[0])
    for token in range(5):
        rig.step([(grandchild, token), (children[1], token)])
    rig.check()
    rig.close(grandchild)
    rig.close(children[1])
    assert rig.runtime.stats().free_host_tokens == rig.runtime.stats().host_tokens
    assert all(layer.used_slots == 0 for layer in rig.runtime.stats().layers)


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


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 127, 128, 129, 150])
def test_truncating_a_fork_leaves_the_others_alone(make_rig, length):
    rig = make_rig(small_shape())
    parent = rig.open(256)
    rig.prefill(parent, tokens_of(4, 150))
    first, second = rig.fork(parent), rig.fork(parent)
    rig.truncate(first, length)
    rig.check()
    rig.truncate(parent, min(length + 20, 150))
    rig.check()
    rig.prefill(first, tokens_of(5, 40))
    rig.prefill(parent, tokens_of(6, 30))
    for token in range(4):
        rig.step([(second, token), (parent, token), (first, token)])
    rig.check()
    for pair in (parent, first, second):
        rig.close(pair)
        rig.check()


def test_a_paused_session_gives_up_its_slots_and_comes_back_with_the_same_bits(make_rig):
    """Pitfall 21: pause and resume at any time, export while paused; nothing is lost."""
    rig = make_rig(small_shape(), gpu_slots=512)
    clean = make_rig(small_shape(), model=rig.model)
    prompt = tokens_of(7, 90)
    pair, other, twin = rig.open(200), rig.open(200), clean.open(200)
    for each, own in ((rig, pair), (clean, twin)):
        each.prefill(own, prompt)
    rig.prefill(other, tokens_of(8, 40))
    for turn in range(20):
        assert_same_bits(rig.step([(pair, turn)]), clean.step([(twin, turn)]))
        if turn % 3 == 0:
            rig.pause(pair)
            rig.pause(pair)
            assert pair.session.paused and pair.session.length == twin.session.length
            rig.check()
            for call in (
                lambda: rig.runtime.step(echo.Batch([other.session, pair.session], [1, 1]), rig.model),
                lambda: rig.runtime.prefill(pair.session, [1], rig.model),
            ):
                with pytest.raises(echo.StateError, match="^session: session 0 is paused"):
                    call()
            rig.step([(other, turn)])
            rig.check()
            pair.session.resume()
            pair.session.resume()
            assert not pair.session.paused
    rig.check()


def test_paused_sessions_fork_truncate_and_close(make_rig):
    rig = make_rig(small_shape())
    pair = rig.open(200)
    rig.prefill(pair, tokens_of(9, 100))
    rig.pause(pair)
    child = rig.fork(pair)
    rig.truncate(pair, 70)
    rig.check()
    rig.step([(child, 5)])
    rig.pause(child)
    rig.check()
    rig.close(child)
    rig.check()
    pair.session.resume()
    rig.step([(pair, 5)])
    rig.check()


def test_a_fork_that_does_not_fit_changes_nothing(make_rig):
    """Pitfall 20: refused by name, and everything goes on."""
    rig = make_rig(small_shape(), host_tokens=512, max_context=256, max_sessions=3)
    parent = rig.open(256)
    rig.prefill(parent, tokens_of(10, 100))
    for tokens in (-1, 99, 257):
        with pytest.raises(echo.InvalidArgument, match=f"^max_tokens: {tokens} given"):
            parent.session.fork(tokens)
    filler = rig.open(128)
    with pytest.raises(echo.CapacityError, match="^max_tokens: .* 2 of 8 are free"):
        parent.session.fork()
    child = rig.fork(parent, 128)
    with pytest.raises(echo.CapacityError, match="^max_sessions: "):
        parent.session.fork(100)
    rig.check()
    with pytest.raises(echo.CapacityError, match="^max_tokens: "):  # a shared block would need a copy
        rig.close(filler)
        rig.open(192)
        child.session.truncate(30)
    assert child.session.length == 100
    rig.check()
    for length in (-1, 101, 1 << 40):
        with pytest.raises(echo.InvalidArgument, match=f"^length: {length} given, expected 0 to"):
            child.session.truncate(length)
    rig.step([(parent, 3), (child, 4)])
    rig.check()


def test_rows_of_forks_survive_whoever_closes_in_whatever_order(make_rig):
    rig = make_rig(small_shape(layers=2), max_sessions=16, host_tokens=4096, gpu_slots=200)
    rng = np.random.default_rng(11)
    rig.prefill(rig.open(256), tokens_of(12, 130))
    start = rig.runtime.stats().host_tokens
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
    rig.check()
    assert rig.runtime.stats().free_host_tokens == start


def test_sessions_are_compared_as_sessions(make_runtime):
    """Handles of one session are equal; ids are unique in a runtime, not beyond."""
    first, second = make_runtime(small_shape()), make_runtime(small_shape())
    a, b, foreign = first.open_session(64), first.open_session(64), second.open_session(64)
    assert a == a and hash(a) == hash(a) and a != b
    assert a.id == foreign.id and a != foreign
    assert a != 0 and a != "session"
    assert len({a, b, foreign}) == 3
    with a as same:
        assert same == a
    assert a.closed and host_row_of(b, 3) == b.blocks[0] * 64 + 3
