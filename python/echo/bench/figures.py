"""From times of stretches to tokens per second."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from echo.bench.schedule import Stretch
from echo.bench.systems import System

PAPER = {325_000: 2.15, 200_000: 3.10, 110_000: 4.12}
"""By pool: throughput over SGLang's in the ECHO paper (8 x H20, 80-100K tokens, 256 output; figures 12 and 13)."""


@dataclass(frozen=True)
class Counts:
    """What pools did, all layers together.

    Attributes:
        hits, misses: entries of selections; misses are rows that a recall fetched.
        prefetched: rows fetched before that, while the indexer scored.
        wasted: those of them that were not selected in the same step.
    """

    hits: int = 0
    misses: int = 0
    prefetched: int = 0
    wasted: int = 0

    @classmethod
    def of(cls, layers: Iterable[Any]) -> Counts:
        """The sum of the statistics of layers."""
        sums = [0, 0, 0, 0]
        for layer in layers:
            for i, name in enumerate(("hits", "misses", "prefetched", "prefetched_wasted")):
                sums[i] += getattr(layer, name)
        return cls(*sums)

    def __add__(self, other: Counts) -> Counts:
        """Both together."""
        return Counts(
            self.hits + other.hits,
            self.misses + other.misses,
            self.prefetched + other.prefetched,
            self.wasted + other.wasted,
        )

    def __sub__(self, earlier: Counts) -> Counts:
        """What was counted since."""
        return self + Counts(-earlier.hits, -earlier.misses, -earlier.prefetched, -earlier.wasted)

    def share(self, rows: int) -> float:
        """Of all selected rows."""
        selected = self.hits + self.misses
        return rows / selected if selected else 0.0


@dataclass(frozen=True)
class Timed:
    """A stretch that was run.

    Attributes:
        seconds: of all steps.
        counts: of all steps.
        late: of the second half of them, when pools have filled.
    """

    seconds: float
    counts: Counts
    late: Counts


@dataclass(frozen=True)
class Served:
    """All requests of a load, served by one system.

    Attributes:
        tokens: that requests got.
        steps: that this took.
        batch_most: requests in the largest batch.
        seconds: without what is not attention; stretches that were not run last as long as the others of their size.
        run_steps: steps that were run.
        run_seconds: their part of `seconds`.
        repeats: how often the most frequent stretch was run.
        spread: of its times, (longest - shortest) / mean.
        counts: of the steps that were run.
        late: of the second half of each stretch.
    """

    tokens: int
    steps: int
    batch_most: int
    seconds: float
    run_steps: int
    run_seconds: float
    repeats: int
    spread: float
    counts: Counts
    late: Counts

    @property
    def batch(self) -> float:
        """Requests in a step, on average."""
        return self.tokens / self.steps

    @property
    def step_ms(self) -> float:
        """Milliseconds that a step took, on average."""
        return 1e3 * self.seconds / self.steps

    def tokens_per_second(self, added_ms: float) -> float:
        """With so much more time for each step: what is not attention is modelled, nothing of it runs."""
        return self.tokens / (self.seconds + 1e-3 * added_ms * self.steps)


def account(stretches: Sequence[Stretch], timed: Mapping[int, Timed]) -> Served:
    """What all stretches come to, given some of each size."""
    sizes: dict[tuple[int, int], list[float]] = {}
    for number, one in timed.items():
        sizes.setdefault(_size(stretches[number]), []).append(one.seconds)
    seconds = 0.0
    frequency: dict[tuple[int, int], int] = {}
    for number, stretch in enumerate(stretches):
        size = _size(stretch)
        frequency[size] = frequency.get(size, 0) + stretch.steps
        seconds += timed[number].seconds if number in timed else sum(sizes[size]) / len(sizes[size])
    repeated = sizes[max(frequency, key=lambda size: frequency[size])]
    runs = timed.values()
    return Served(
        tokens=sum(stretch.tokens for stretch in stretches),
        steps=sum(stretch.steps for stretch in stretches),
        batch_most=max(len(stretch.running) for stretch in stretches),
        seconds=seconds,
        run_steps=sum(stretches[number].steps for number in timed),
        run_seconds=sum(one.seconds for one in runs),
        repeats=len(repeated),
        spread=(max(repeated) - min(repeated)) / (sum(repeated) / len(repeated) or 1.0),
        counts=sum((one.counts for one in runs), Counts()),
        late=sum((one.late for one in runs), Counts()),
    )


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
            "prefetched_per_selected": served.counts.share(served.counts.prefetched),
            "prefetched_in_vain_per_selected": served.counts.share(served.counts.wasted),
            "spread": served.spread,
            "repeats": served.repeats,
            "steps": served.steps,
            "steps_run": served.run_steps,
            "seconds_run": served.run_seconds,
        }


def base_of(cases: Sequence[Case], case: Case) -> Case | None:
    """`resident` at the same pool, if it was measured."""
    return next((one for one in cases if one.system.name == "resident" and one.system.pool == case.system.pool), None)
