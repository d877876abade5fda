"""Forecasts: what just missed a step's selection is fetched for the next one, beside the steps.

The product's rule (cpp/reference/forecast.cpp) once more, in numpy: of the tokens that rank behind the selected ones,
as far as a forecast looks, the best that are not resident get slots of rows that are farther from being selected. What
the next step then still misses is what its recall has to wait for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from echo import InvalidArgument
from echo.traces.echo_rule import EchoPool
from echo.traces.layer_steps import LayerSteps
from echo.traces.pool import Slots
from echo.traces.trace import Trace

REACH = 1.5  # as in params.hpp, 1 + kForecastReach


@dataclass(frozen=True)
class Forecast:
    """What forecasts did in the second half of a trace, mean over layers, per selected row.

    Attributes:
        reach: ranks that they looked at, in multiples of top_k.
        cap: most rows of a step and layer, in multiples of top_k.
        misses: selected rows that were left to recalls.
        fetched: rows that were forecast.
        used: of them selected while they were still there.
    """

    reach: float
    cap: float
    misses: float
    fetched: float
    used: float


class ForecastPool(EchoPool):
    """The product's rule of replacement, with forecasts.

    Args:
        steps: what the pool is replayed on.
        slots: at least one more than a step selects.
        reach: ranks that are looked at, in multiples of top_k.
        cap: most rows that a step fetches.

    Attributes:
        fetched: rows that were forecast so far.
        hits: of them selected since.
    """

    def __init__(self, steps: LayerSteps, slots: int, reach: float = REACH, cap: int = 1 << 30) -> None:
        """See the class."""
        super().__init__(steps, slots)
        self._last = steps.top_k + int((reach - 1) * steps.top_k)
        self._cap = cap
        self.fetched = 0
        self.hits = 0

    def begin(self) -> None:
        """See `Pool`."""
        super().begin()
        slots = self.slot_of[self.steps.wanted(self.now)]
        held = slots[slots >= 0]
        self.hits += int(self.ahead[held].sum())
        self.ahead[held] = False

    def placed(self, slots: Slots) -> None:
        """See `Pool`."""
        self.ahead[slots] = False

    def done(self) -> None:
        """Forecasts, now that what the step selected is there."""
        rows, distance = self._near()
        if len(rows) == 0:
            return
        free = np.arange(self.used, min(self.used + len(rows), len(self.held)))
        taken = free
        if len(free) < len(rows):
            victims = self.coldest(len(rows) - len(free), beyond=distance)
            self.slot_of[self.held[victims]] = -1
            taken = np.concatenate([free, victims])
        rows = rows[: len(taken)]
        self.used += len(free)
        self.held[taken] = rows
        self.slot_of[rows] = taken
        self.stamp[taken] = self.now
        self.ahead[taken] = True
        self.fetched += len(rows)

    def _near(self) -> tuple[Slots, np.float32]:
        """Rows that are wanted, best first, and how far the last of them is below the k-th score."""
        steps, now = self.steps, self.now
        ranks = slice(steps.top_k, self._last)
        rows = steps.ranked[now, ranks]
        with np.errstate(invalid="ignore", over="ignore"):
            finite = np.isfinite(steps.kth_score[now] - steps.scores[now, ranks])
        wanted = np.flatnonzero(finite & (rows >= 0) & ~self.resident(rows) & (rows != steps.newest[now]))[: self._cap]
        distance = steps.distance[now, ranks][wanted]
        return rows[wanted], distance.max(initial=np.float32(0))


def compare_forecasts(
    trace: Trace,
    slots: Iterable[int],
    reaches: Sequence[float] = (1.1, REACH, 2.0),
    caps: Sequence[float] = (0.05, 0.1, 0.2),
    layers: Iterable[int] | None = None,
) -> list[list[Forecast]]:
    """Replays a trace through pools under the product's rule, with forecasts of several kinds.

    Args:
        trace: the selections, with scores.
        slots: of each pool, at least top_k + 1.
        reaches: ranks that forecasts look at, in multiples of top_k, more than 1.
        caps: most rows of a step and layer, in multiples of top_k.
        layers: of the trace; default all.

    Returns:
        By pool, then by reach and cap.

    Raises:
        InvalidArgument: naming `trace`, `reach` or `forecast`.
    """
    if trace.ranks == 0:
        raise InvalidArgument("trace: it has no scores, which forecasts go by")
    check_forecasts(reaches, caps)
    chosen = [LayerSteps(trace, layer) for layer in (range(trace.layers) if layers is None else layers)]
    return [
        [_forecast(chosen, pool, reach, cap) for reach in reaches for cap in caps]
        for pool in slots
    ]  # fmt: skip


def check_forecasts(reaches: Iterable[float], caps: Iterable[float]) -> None:
    """InvalidArgument naming `reach` or `forecast`, which are multiples of top_k."""
    for name, values, least in (("reach", reaches, 1), ("forecast", caps, 0)):
        for value in values:
            if not least < value <= 1 << 16:
                raise InvalidArgument(f"{name}: {value:g} given, expected more than {least} times top-k, to {1 << 16}")


def _forecast(layers: Sequence[LayerSteps], slots: int, reach: float, cap: float) -> Forecast:
    shares: list[NDArray[np.float64]] = []
    for steps in layers:
        pool = ForecastPool(steps, slots, reach, int(cap * steps.top_k))
        warm = steps.steps // 2
        for _ in range(warm):
            pool.step()
        fetched, used = pool.fetched, pool.hits
        misses = sum(len(pool.step()) for _ in range(warm, steps.steps))
        selected = max(1, int((steps.selected[warm:] >= 0).sum()))
        shares.append(np.array([misses, pool.fetched - fetched, pool.hits - used]) / selected)
    misses_left, rows, hits = (float(share) for share in np.mean(shares, axis=0))
    return Forecast(reach, cap, misses_left, rows, hits)
