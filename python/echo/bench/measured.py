"""Batches of a schedule as they were run: seconds, and what pools did meanwhile."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Any


@dataclass(frozen=True)
class Counts:
    """What pools did, all layers together.

    Attributes:
        hits, misses: entries of selections; misses are rows that a recall fetched.
        ahead: rows fetched before that: while the indexer scored, or in the step before.
        wasted: those of them that were not selected then.
    """

    hits: int = 0
    misses: int = 0
    ahead: int = 0
    wasted: int = 0

    @classmethod
    def of(cls, layers: Iterable[Any]) -> Counts:
        """The sum of the statistics of layers."""
        return sum(
            (
                cls(
                    layer.hits,
                    layer.misses,
                    layer.prefetched + layer.forecast,
                    layer.prefetched_wasted + layer.forecast_wasted,
                )
                for layer in layers
            ),
            cls(),
        )

    def __add__(self, other: Counts) -> Counts:
        """Both together."""
        return Counts(*(one + more for one, more in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, earlier: Counts) -> Counts:
        """What was counted since."""
        return self + earlier.times(-1)

    def times(self, factor: float) -> Counts:
        """So many times as much."""
        return Counts(*(round(factor * count) for count in astuple(self)))

    def share(self, rows: int) -> float:
        """Of all selected rows."""
        selected = self.hits + self.misses
        return rows / selected if selected else 0.0


@dataclass(frozen=True)
class Timed:
    """The first steps of a stretch, as they were run.

    Attributes:
        steps: how many.
        seconds: of all of them.
        counts: of all of them.
        late_steps: the second half of them, when pools have filled.
        late_seconds, late: of those.
    """

    steps: int
    seconds: float
    counts: Counts
    late_steps: int
    late_seconds: float
    late: Counts

    def lasting(self, steps: int) -> float:
        """Seconds of so many steps: those that were not run take as long as the late ones."""
        return self.seconds + self._late_again(steps) * self.late_seconds

    def counting(self, steps: int) -> Counts:
        """Counts of so many steps, likewise."""
        return self.counts + self.late.times(self._late_again(steps))

    def figures(self) -> dict[str, Any]:
        """For a file of results."""
        return {
            "steps": self.steps,
            "ms_per_step": 1e3 * self.seconds / self.steps,
            "late_ms_per_step": 1e3 * self.late_seconds / self.late_steps if self.late_steps else None,
            "miss_rate": self.counts.share(self.counts.misses),
            "late_miss_rate": self.late.share(self.late.misses),
        }

    def _late_again(self, steps: int) -> float:
        """How many times the late steps are missing from so many."""
        return (steps - self.steps) / self.late_steps if steps != self.steps else 0.0


@dataclass(frozen=True)
class Batch:
    """Stretches of one size: how often a schedule has them, and those that were run.

    Attributes:
        requests: in the batch.
        steps: of a stretch.
        times: how many stretches the schedule has.
        runs: of some of them, each with requests of its own.
    """

    requests: int
    steps: int
    times: int
    runs: tuple[Timed, ...]

    @property
    def seconds(self) -> float:
        """Of one stretch, on average."""
        return sum(run.lasting(self.steps) for run in self.runs) / len(self.runs)

    @property
    def spread(self) -> float:
        """(longest - shortest) / mean of the runs."""
        each = [run.lasting(self.steps) for run in self.runs]
        return (max(each) - min(each)) / (self.seconds or 1.0)

    @property
    def counts(self) -> Counts:
        """Of all its stretches."""
        return sum((run.counting(self.steps) for run in self.runs), Counts()).times(self.times / len(self.runs))

    def figures(self) -> dict[str, Any]:
        """What was measured of it, for a file of results."""
        return {
            "batch": self.requests,
            "steps": self.steps,
            "times_in_schedule": self.times,
            "runs": [run.figures() for run in self.runs],
        }
