"""A pool that is replayed on a layer's steps, under LRU; other policies derive from it.

A pool is two maps, from slot to row and back, and a policy that names victims among slots that the current step does
not use. A step does what the product does: hits are marked as used, then the new token (no miss: its row is made on the
spot) and all misses get slots together. Free slots go first, in order. Cost of a step: a few passes of numpy over the
pool.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from echo.traces.layer_steps import LayerSteps

FREE = -1

Slots = NDArray[np.int64]  # or rows, as `LayerSteps` numbers them


class Pool:
    """Slots; the one goes whose last use is the longest ago.

    Args:
        steps: what the pool is replayed on.
        slots: at least one more than a step selects.

    Attributes:
        held: int64 [slots], row in each slot, -1 for none.
        slot_of: int64 [rows], -1 for none.
        stamp: int64 [slots], step of last use, -1 if free.
        used: slots that hold a row: the first ones.
        now: the step that runs or ran last; the first is 0.
    """

    def __init__(self, steps: LayerSteps, slots: int) -> None:
        """See the class."""
        self.steps = steps
        self.held = np.full(slots, FREE, np.int64)
        self.slot_of = np.full(len(steps.positions), FREE, np.int64)
        self.stamp = np.full(slots, FREE, np.int64)
        self.used = 0
        self.now = -1

    def step(self) -> Slots:
        """Runs the next step; returns the rows that it had to fetch, ascending."""
        self.now += 1
        self.begin()
        wanted = self.steps.wanted(self.now)
        slots = self.slot_of[wanted]
        self.stamp[slots[slots != FREE]] = self.now
        absent = wanted[slots == FREE]
        new = absent == self.steps.newest[self.now]
        missing: Slots = absent[~new]
        if len(absent):
            self._place(np.concatenate([absent[new], missing]))
        self.done()
        return missing

    def resident(self, rows: Slots) -> NDArray[np.bool_]:
        """Whether each of the rows is there; -1 is not."""
        there: NDArray[np.bool_] = (rows >= 0) & (self.slot_of[rows] != FREE)
        return there

    def absent(self) -> NDArray[np.bool_]:
        """Bool [ranks], which ranked rows of the next step are on the host only; the newest one is on its way there."""
        rows = self.steps.ranked[self.now + 1]
        lacking: NDArray[np.bool_] = (rows >= 0) & ~self.resident(rows) & (rows != self.steps.newest[self.now + 1])
        return lacking

    def _place(self, rows: Slots) -> None:
        taken = np.arange(self.used, min(self.used + len(rows), len(self.held)))
        self.used += len(taken)
        if len(taken) < len(rows):
            victims = self.victims(len(rows) - len(taken))
            self.slot_of[self.held[victims]] = FREE
            taken = np.concatenate([taken, victims])
        self.held[taken] = rows
        self.slot_of[rows] = taken
        self.stamp[taken] = self.now
        self.placed(taken)

    def victims(self, count: int) -> Slots:
        """Slots to be given away, of those that hold a row and have no use now: the first `count` in `order`."""
        candidates = np.flatnonzero((self.stamp < self.now) & (self.stamp != FREE))
        # Of equal ones the smaller position goes.
        keys = self.order(candidates) * len(self.slot_of) + self.held[candidates]
        return candidates[np.argpartition(keys, count - 1)[:count]]

    def order(self, slots: Slots) -> Slots:
        """int64 [slots], least for what goes first."""
        return self.stamp[slots]

    def begin(self) -> None:
        """Told that a step begins: nobody knows yet what it wants."""

    def placed(self, slots: Slots) -> None:
        """Told which slots got new rows."""

    def done(self) -> None:
        """Told that the step is over: all its rows are there."""
