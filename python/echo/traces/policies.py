"""What a pool has to fetch, step by step, under a policy of replacement.

A pool is two maps, from slot to position and back, and a policy that names victims among slots that the current step
does not use. A step does what the product does: the new token gets a slot (no miss: its row is made on the spot), hits
are marked as used, then all misses get slots together. Cost of a step: a few passes of numpy over the pool.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from echo import InvalidArgument

_FREE = -1
_WINDOW = 256  # both as in cpp/cache_manager/replacement.hpp
_SPREAD = 16
_NEVER = 1 << 40

Slots = NDArray[np.int64]  # or rows: positions, numbered in their order


class _Pool:
    """Slots and the policy "lru": the slot goes whose last use is the longest ago.

    Attributes:
        held: int64 [slots], row in each slot, -1 for none.
        slot_of: int64 [tokens], -1 for none.
        stamp: int64 [slots], step of last use, -1 if free; the step that runs is `now`.
    """

    def __init__(self, slots: int, tokens: int) -> None:
        self.held = np.full(slots, _FREE, np.int64)
        self.slot_of = np.full(tokens, _FREE, np.int64)
        self.stamp = np.full(slots, _FREE, np.int64)
        self.now = 0

    def use(self, rows: Slots) -> int:
        """Brings rows (distinct, ascending) into the pool and returns how many were not there."""
        slots = self.slot_of[rows]
        self.stamp[slots[slots != _FREE]] = self.now
        missing = rows[slots == _FREE]
        if len(missing):
            victims = self.victims(len(missing))
            self.slot_of[self.held[victims][self.stamp[victims] != _FREE]] = _FREE
            self.held[victims] = missing
            self.slot_of[missing] = victims
            self.stamp[victims] = self.now
            self.placed(victims)
        return len(missing)

    def victims(self, count: int) -> Slots:
        """Slots to be given away: free ones, then by `order`, of equal ones those with the smaller position."""
        candidates = np.flatnonzero(self.stamp < self.now)
        order = np.where(self.stamp[candidates] == _FREE, -_NEVER, self.order(candidates))
        return candidates[np.lexsort((self.held[candidates], order))[:count]]

    def order(self, slots: Slots) -> Slots:
        """int64 [slots], least for what goes first."""
        return self.stamp[slots]

    def placed(self, slots: Slots) -> None:
        """Told which slots got new rows."""


class _Fifo(_Pool):
    """The row goes that came first."""

    def __init__(self, slots: int, tokens: int) -> None:
        super().__init__(slots, tokens)
        self._since = np.zeros(slots, np.int64)

    def order(self, slots: Slots) -> Slots:
        return self._since[slots]

    def placed(self, slots: Slots) -> None:
        self._since[slots] = self.now


class _Random(_Pool):
    """Any row goes."""

    def __init__(self, slots: int, tokens: int, seed: int) -> None:
        super().__init__(slots, tokens)
        self._draws = np.random.default_rng(seed)

    def order(self, slots: Slots) -> Slots:
        return self._draws.permutation(len(slots))


class _Belady(_Pool):
    """The row goes that is selected again the latest: no policy without prefetch misses less."""

    def __init__(self, slots: int, tokens: int, selected: Slots) -> None:
        super().__init__(slots, tokens)
        self._period = len(selected) + 1  # a use is the number row * period + step
        steps = np.repeat(np.arange(1, self._period), selected.shape[1])
        rows = selected.ravel()
        uses = (rows * self._period + steps)[rows >= 0]
        self._uses = np.append(np.sort(uses), _NEVER * self._period)

    def order(self, slots: Slots) -> Slots:
        rows = self.held[slots]
        # The uses of this very step count: what it selects must not make room for its new token.
        following = self._uses[np.searchsorted(self._uses, rows * self._period + self.now)]
        return np.where(following // self._period == rows, -(following % self._period), -_NEVER + 1)


class _Echo(_Pool):
    """The product's rule, as cpp/cache_manager/replacement.hpp documents it."""

    def __init__(self, slots: int, tokens: int) -> None:
        super().__init__(slots, tokens)
        self._hand = 0

    def victims(self, count: int) -> Slots:
        """The first slots behind the hand whose stamp is at most the limit."""
        turn = np.flatnonzero(self.stamp <= self._limit(count))
        victims = np.concatenate([turn[turn >= self._hand], turn[turn < self._hand]])[:count]
        self._hand = (int(victims[-1]) + 1) % len(self.held)
        return victims

    def _limit(self, needed: int) -> int:
        """The least stamp, or one older than the window, up to which enough slots qualify."""
        wanted = max(needed, len(self.held) // _SPREAD)
        oldest = max(self.now - _WINDOW, _FREE)
        young = self.stamp[self.stamp > oldest]
        counts = np.bincount(young - oldest - 1, minlength=self.now - oldest)[: self.now - oldest - 1]
        found = len(self.held) - len(young) + np.concatenate([[0], np.cumsum(counts)])
        return oldest + min(int(np.searchsorted(found, wanted)), len(counts))


POLICIES = ("lru", "fifo", "random", "echo", "belady")


def misses(
    positions: NDArray[np.int32],
    pool: int,
    policy: str,
    context: NDArray[np.int32] | None = None,
    seed: int = 0,
) -> NDArray[np.int64]:
    """Rows that are fetched in each step.

    Args:
        positions: int32 [steps, top_k], the selections of one layer of a `Trace`.
        pool: slots; empty at first.
        policy: one of `POLICIES`.
        context: int32 [steps], as in a `Trace`. The newest token of a step whose context grew, and of the first, gets
            a slot before the selection is known. Default: no token is new.
        seed: of "random".

    Returns:
        int64 [steps].

    Raises:
        InvalidArgument: naming `pool`, if it is smaller than top_k + 1, or another argument that is malformed.
    """
    if positions.ndim != 2 or (context is not None and context.shape != positions.shape[:1]):
        name = "positions" if positions.ndim != 2 else "context"
        raise InvalidArgument(f"{name}: expected positions [steps, top_k] of one layer, and context [steps]")
    steps, top_k = positions.shape
    if pool < top_k + 1:
        raise InvalidArgument(f"pool: {pool} slots given, expected at least {top_k + 1} (top_k + 1)")
    newest = np.full(steps, -1) if context is None else context - 1
    # Numbered, so that the maps are as large as the trace, not its text.
    tokens = np.unique(np.append(positions, newest))
    rows = np.where(positions >= 0, np.searchsorted(tokens, positions), -1)
    state = _make(policy, pool, len(tokens), rows, seed)
    fetched = np.zeros(steps, np.int64)
    for t in range(steps):
        state.now = t + 1  # steps count from 1, so that no window of stamps takes a used slot for a free one
        if context is not None and (t == 0 or context[t] > context[t - 1]):
            state.use(np.searchsorted(tokens, newest[t : t + 1]))
        fetched[t] = state.use(rows[t][rows[t] >= 0])
    return fetched


def _make(policy: str, pool: int, tokens: int, rows: Slots, seed: int) -> _Pool:
    """The pool of a policy; `rows` is int64 [steps, top_k], -1 for none."""
    if policy == "random":
        return _Random(pool, tokens, seed)
    if policy == "belady":
        return _Belady(pool, tokens, rows)
    kinds: dict[str, type[_Pool]] = {"lru": _Pool, "fifo": _Fifo, "echo": _Echo}
    if policy not in kinds:
        raise InvalidArgument(f"policy: {policy!r} given, expected one of {', '.join(POLICIES)}")
    return kinds[policy](pool, tokens)
