"""Policies of replacement, and what a pool has to fetch under each.

"lru" and "fifo" go by age, "random" by nothing, "score" gives up the rows that the step scored lowest, "echo" is the
product's rule, and "belady" knows the future: no policy without prefetch misses less.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from echo import InvalidArgument
from echo.traces.echo_rule import EchoPool
from echo.traces.layer_steps import LayerSteps
from echo.traces.pool import Pool, Slots


class _Fifo(Pool):
    """The row goes that came first."""

    def __init__(self, steps: LayerSteps, slots: int) -> None:
        super().__init__(steps, slots)
        self._since = np.zeros(slots, np.int64)

    def order(self, slots: Slots) -> Slots:
        return self._since[slots]

    def placed(self, slots: Slots) -> None:
        self._since[slots] = self.now


class _Random(Pool):
    """Any row goes."""

    def __init__(self, steps: LayerSteps, slots: int, seed: int) -> None:
        super().__init__(steps, slots)
        self._draws = np.random.default_rng(seed)

    def order(self, slots: Slots) -> Slots:
        return self._draws.permutation(len(slots))


class _Score(Pool):
    """The row goes that this step scored lowest; those beyond the trace's ranks first, of them the oldest."""

    def order(self, slots: Slots) -> Slots:
        ranked = self.steps.ranked[self.now]
        ranked = ranked[ranked >= 0]
        worth = np.zeros(len(self.slot_of), np.int64)
        worth[ranked] = np.arange(len(ranked), 0, -1)
        return worth[self.held[slots]] * self.steps.steps + self.stamp[slots]


class _Belady(Pool):
    """The row goes that is selected again the latest."""

    def __init__(self, steps: LayerSteps, slots: int) -> None:
        super().__init__(steps, slots)
        self._next = np.zeros(slots, np.int64)

    def order(self, slots: Slots) -> Slots:
        return -self._next[slots]

    def done(self) -> None:
        rows = np.append(self.steps.selected[self.now], self.steps.newest[self.now])
        known = rows >= 0
        self._next[self.slot_of[rows[known]]] = self.steps.next_use[self.now][known]


POLICIES = ("lru", "fifo", "random", "score", "echo", "belady")


def make_pool(steps: LayerSteps, slots: int, policy: str, seed: int = 0) -> Pool:
    """An empty pool whose `step` replays the steps, one a call.

    Args:
        steps: what one layer selects.
        slots: of the pool.
        policy: one of `POLICIES`.
        seed: of "random".

    Raises:
        InvalidArgument: naming `slots`, if they are fewer than top_k + 1, or `policy`.
    """
    if slots < steps.top_k + 1:
        raise InvalidArgument(f"slots: {slots} given, expected at least {steps.top_k + 1} (top_k + 1)")
    if policy == "random":
        return _Random(steps, slots, seed)
    kinds: dict[str, type[Pool]] = {"lru": Pool, "fifo": _Fifo, "score": _Score, "echo": EchoPool, "belady": _Belady}
    if policy not in kinds:
        raise InvalidArgument(f"policy: {policy!r} given, expected one of {', '.join(POLICIES)}")
    return kinds[policy](steps, slots)


def misses(steps: LayerSteps, slots: int, policy: str, seed: int = 0) -> NDArray[np.int64]:
    """Rows that are fetched in each step, int64 [steps]; arguments and errors as in `make_pool`."""
    pool = make_pool(steps, slots, policy, seed)
    return np.asarray([len(pool.step()) for _ in range(steps.steps)], np.int64)
