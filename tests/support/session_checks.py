"""What tests of forked, cut and paused sessions compare."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import echo
from support.rig import (
    Pair,
    Rig,
    assert_same_bits,
    host_rows,
    host_rows_of,
)

LENGTHS = [0, 1, 63, 64, 65, 200]
INTEGERS = {"integers": True}  # scores are exact, so selections have to be the oracle's own


def opened(rig: Rig, max_tokens: int, tokens: Sequence[int]) -> Pair:
    """A session that was fed these tokens."""
    pair = rig.open(max_tokens)
    if tokens:
        rig.prefill(pair, tokens)
    return pair


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
    return {row for row in host_rows_of(pair.session).tolist() if row // 64 not in others}


def everything(rig: Rig) -> list:
    """All that a refused call must leave alone."""
    stats = rig.stats()
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
    stats = rig.stats()
    assert (stats.sessions, stats.free_host_tokens) == (0, stats.host_tokens)
    assert all(layer.used_slots == 0 for layer in stats.layers)
    whole = rig.runtime.open_session(rig.runtime.plan.config.max_context)
    assert whole.blocks == list(range(whole.blocks[0], whole.blocks[0] + len(whole.blocks)))
    whole.close()
