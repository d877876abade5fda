"""The product's rule of replacement once more, in numpy: cpp/cache_manager/replacement.hpp says what it does and why.

The same bits: distances and coldness are float32, ages int64, a slot for the new token is taken as the step begins,
by a hint of the step before or by age, and one caller takes all others, as the CPU backend does. The product knows
the score of every row, a trace those of its ranks. A row beyond them is taken for colder than any other, and of such
rows the oldest goes first: all are below the last rank, so age is the best guess there. The rule is the product's,
then, where ranks reach down to the rows that are evicted (four times the pool will do), and between it and LRU else.
Where a step has no scores, rows go by age, in the product too.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from echo.traces.layer_steps import LayerSteps
from echo.traces.pool import FREE, Pool, Slots

# As in replacement.hpp.
_COLDEST = 63
_WINDOW = 512
_SPREAD = 32
_LEAST_SPREAD = 8
_WINDOW_GRAIN = 32
_UNUSED_AGE = 64
_HINTS = 64
_LEAST_LEFT = 4


class EchoPool(Pool):
    """Windows behind a hand that goes round; the coldest slots of each go."""

    def __init__(self, steps: LayerSteps, slots: int) -> None:
        """See `Pool`."""
        super().__init__(steps, slots)
        self._hand = 0
        self._hints: list[tuple[int, int]] = []  # slots and their stamps
        self._next: Slots = np.empty(0, np.int64)  # of the last window, which would have gone next
        self.ahead = np.zeros(slots, np.bool_)  # holds what was forecast and not used since
        self._begins = False

    def begin(self) -> None:
        """The new token gets its slot first: nothing is scored yet."""
        newest = self.steps.newest[self.now]
        if newest >= 0 and self.slot_of[newest] == FREE:
            self._begins = True
            self._place(np.array([newest]))
            self._begins = False

    def victims(self, count: int) -> Slots:
        """Slots in the order in which they are taken."""
        if self._begins:
            for slot, stamp in self._hints:
                if self.stamp[slot] == stamp:
                    return np.array([slot])
        return self.coldest(count)

    def _place(self, rows: Slots) -> None:
        evicts = self.used + len(rows) > len(self.held)
        super()._place(rows)
        if evicts and not self._begins:
            self._leave_hints(rows)

    def _leave_hints(self, fetched: Slots) -> None:
        below = np.full(len(self.slot_of) + 1, -np.inf, np.float32)
        below[self.steps.ranked[self.now]] = self.steps.below[self.now]
        by = below[fetched]
        farthest = fetched[np.argsort(-by, kind="stable")]
        slots = np.concatenate([self._next, self.slot_of[farthest[below[farthest] > -np.inf]]])
        most = min(_HINTS, len(self.held) // 2)
        self._hints = [(int(slot), int(self.stamp[slot])) for slot in slots[:most]]

    def coldest(self, count: int, beyond: np.float32 | None = None) -> Slots:
        """Slots that the rule gives away; fewer, if rows that are scored have to be more than `beyond` away."""
        slots = len(self.held)
        distance = self._distances()
        window = window_slots(count, slots)
        planned = (count - 1) // max(1, window // _LEAST_SPREAD) + 1
        taken: list[Slots] = []
        left = count
        for i in range(planned + -(-slots // window)):
            if left == 0:
                break
            quota = -(-left // (planned - i)) if i < planned else left
            places: Slots = (self._hand + np.arange(window)) % slots
            self._hand = (self._hand + window) % slots
            candidates = places[(self.stamp[places] < self.now) & (self.stamp[places] != FREE)]
            if distance is not None and beyond is not None:
                away = distance[self.held[candidates]]
                candidates = candidates[(away < 0) | (away > beyond)]
            self._next = candidates[:0]
            if len(candidates) == 0:
                continue
            age = self.now - self.stamp[candidates]
            age += np.where(self.ahead[candidates] & (age > 1), _UNUSED_AGE, 0)
            known = None if distance is None else distance[self.held[candidates]]
            cold = coldness_by_age(age) if known is None else coldness_by_score(known, age)
            order = np.argsort(-cold, kind="stable")
            coldest = candidates[order[:quota]]
            rest = candidates[order[quota:]]
            self._next = rest if len(rest) >= _LEAST_LEFT else rest[:0]
            self.stamp[coldest] = self.now  # later windows may come by again
            taken.append(coldest)
            left -= len(coldest)
        return np.concatenate(taken) if taken else np.empty(0, np.int64)

    def _distances(self) -> NDArray[np.float32] | None:
        """float32 [rows], how far each row is below the k-th score, -1 beyond the ranks; None if all are unknown."""
        if self._begins or not self.steps.scored[self.now]:
            return None
        distance = np.full(len(self.slot_of) + 1, -1, np.float32)
        distance[self.steps.ranked[self.now]] = self.steps.distance[self.now]
        return distance[:-1]  # where row -1 was put does not count


def window_slots(needed: int, slots: int) -> int:
    """Slots that are looked at together."""
    return min(slots, max(2 * _WINDOW_GRAIN, min(_WINDOW, needed * _SPREAD)))


def coldness_by_age(age: NDArray[np.int64]) -> NDArray[np.int64]:
    """0 ... 63, of the rows of a window."""
    share = age.astype(np.float32) / np.float32(age.max())
    cold: NDArray[np.int64] = (share * np.float32(_COLDEST)).astype(np.int64)
    return cold


def coldness_by_score(distance: NDArray[np.float32], age: NDArray[np.int64]) -> NDArray[np.int64]:
    """0 ... 63, of the rows of a window whose distance is known; more for those of distance -1."""
    farthest = distance.max()
    with np.errstate(divide="ignore", invalid="ignore"):  # 0 / 0 and inf / inf are the farthest
        share = np.where(distance >= farthest, np.float32(1), np.maximum(distance / farthest, np.float32(0)))
    by_score: NDArray[np.int64] = (share * np.float32(_COLDEST)).astype(np.int64)
    return np.where(distance >= 0, by_score, age + _COLDEST)
