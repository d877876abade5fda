"""From times of batches that were run to tokens per second of a whole schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from echo.bench.measured import Batch, Counts, Timed
from echo.bench.schedule import Stretch
from echo.bench.systems import System

PAPER = {325_000: 2.15, 200_000: 3.10, 110_000: 4.12}
"""By pool: throughput over SGLang's in the ECHO paper (8 x H20, 80-100K tokens, 256 output; figures 12 and 13)."""


@dataclass(frozen=True)
class Served:
    """All requests of a load, served by one system: the schedule, put together from the batches that were run.

    Attributes:
        batches: all sizes that the schedule has, the one with most steps first.
    """

    batches: tuple[Batch, ...]

    @property
    def tokens(self) -> int:
        """That requests get."""
        return sum(batch.times * batch.steps * batch.requests for batch in self.batches)

    @property
    def steps(self) -> int:
        """That this takes."""
        return sum(batch.times * batch.steps for batch in self.batches)

    @property
    def seconds(self) -> float:
        """Without what is not attention."""
        return sum(batch.times * batch.seconds for batch in self.batches)

    @property
    def batch_most(self) -> int:
        """Requests in the largest batch."""
        return max(batch.requests for batch in self.batches)

    @property
    def batch(self) -> float:
        """Requests in a step, on average."""
        return self.tokens / self.steps

    @property
    def step_ms(self) -> float:
        """Milliseconds that a step takes, on average."""
        return 1e3 * self.seconds / self.steps

    @property
    def runs(self) -> list[Timed]:
        """Everything that was run."""
        return [run for batch in self.batches for run in batch.runs]

    @property
    def counts(self) -> Counts:
        """Of all steps."""
        return sum((batch.counts for batch in self.batches), Counts())

    @property
    def late(self) -> Counts:
        """Of the late steps that were run."""
        return sum((run.late for run in self.runs), Counts())

    def tokens_per_second(self, added_ms: float) -> float:
        """With so much more time for each step: what is not attention is modelled, nothing of it runs."""
        return self.tokens / (self.seconds + 1e-3 * added_ms * self.steps)


def account(stretches: Sequence[Stretch], timed: Mapping[int, Timed]) -> Served:
    """What all stretches come to, given some of each size."""
    runs: dict[tuple[int, int], list[Timed]] = {}
    for number, one in timed.items():
        runs.setdefault(_size(stretches[number]), []).append(one)
    times = Counter(map(_size, stretches))
    batches = [Batch(*size, times[size], tuple(of_size)) for size, of_size in runs.items()]
    assert len(batches) == len(times), "some size was not run"
    return Served(tuple(sorted(batches, key=lambda batch: -batch.times * batch.steps)))


def _size(stretch: Stretch) -> tuple[int, int]:
    return len(stretch.running), stretch.steps


@dataclass(frozen=True)
class Case:
    """A system at one size of the pool, and how it served the load."""

    system: System
    gpu: dict[str, int]
    served: Served

    def figures(self, base: Case | None, added: Sequence[float]) -> dict[str, Any]:
        """For a file of results; lists are by what is added to a step, `base` is what ratios are to."""
        served = self.served
        rates = [served.tokens_per_second(extra) for extra in added]
        bases = [base.served.tokens_per_second(extra) for extra in added] if base is not None else []
        return {
            "added_ms": list(added),
            "tokens_per_s": rates,
            "ratio_to_resident": [rate / other for rate, other in zip(rates, bases, strict=True)] if bases else None,
            "ratio_in_the_paper": PAPER.get(self.system.pool),
            "attention_ms_per_step": served.step_ms,
            "batch": served.batch,
            "batch_most": served.batch_most,
            "slots": self.system.slots,
            "gpu_bytes": self.gpu,
            "miss_rate": served.counts.share(served.counts.misses),
            "late_miss_rate": served.late.share(served.late.misses),
            "fetched_ahead_per_selected": served.counts.share(served.counts.ahead),
            "fetched_in_vain_per_selected": served.counts.share(served.counts.wasted),
            "spread": served.batches[0].spread,
            "repeats": len(served.batches[0].runs),
            "steps": served.steps,
            "steps_run": sum(run.steps for run in served.runs),
            "seconds_run": sum(run.seconds for run in served.runs),
            "measured": [batch.figures() for batch in served.batches],
        }


def base_of(cases: Sequence[Case], case: Case) -> Case | None:
    """`resident` at the same pool, if it was measured."""
    return next((one for one in cases if one.system.name == "resident" and one.system.pool == case.system.pool), None)
