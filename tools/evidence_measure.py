"""What docs/evidence.md reports of a trace: overlap, misses under policies and where they lie, what thresholds do."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from echo.predictor import averages
from echo.traces import Trace, shipped, synthetic
from echo.traces.comparison import Comparison, compare, slots_of
from echo.traces.drive import drive
from echo.traces.layer_steps import LayerSteps
from echo.traces.policies import make_pool
from echo.traces.pool import Pool
from echo.traces.predictor import Guess
from echo.traces.statistics import Clustering, Forecast, clustering, forecasts, moving_average, overlap

POOLS = (1, 1.5, 2, 3, 4, 8)  # x top-k
POOL = 2  # of them, where only one is looked at
ALPHAS = tuple(i / 10 for i in range(10))
DISTANCES = (1, 8, 64)
RANKS = 4  # x top-k: scores that the k-th is compared with, in all traces as many
BLOCK = 64  # tokens whose index keys lie together
SAMPLE = 8  # of so many blocks one
CAPS = (1.2, 5.0, math.inf)  # rows prefetched for each 1,000 scored tokens
GENERATED = {"steps": 144, "top_k": 256, "ranks": 8 * 256}  # as `code` has them; the other traces that ship, 4 k ranks


@dataclass(frozen=True)
class Prefetch:
    """What a threshold for each step would do; means of the second half's scored steps, per top_k, without unit.

    Attributes:
        reach: float64 [3], tokens above the threshold: 5th, 50th and 95th percentile over steps.
        wasted: neither resident nor selected, but above it.
        left: selected, but neither resident nor above it.
    """

    reach: NDArray[np.float64]
    wasted: float
    left: float


@dataclass(frozen=True)
class Driven:
    """What the runtime itself did in the second half, prefetching without a cap in a pool of POOL; per top_k.

    Attributes:
        wasted: prefetched and not selected in the same step.
        left: recalled.
        full: share of query rows whose candidates did not do.
    """

    wasted: float
    left: float
    full: float


@dataclass(frozen=True)
class Measured:
    """What there is to say about a trace.

    Attributes:
        name: of the trace or regime.
        trace: the selections.
        overlap: float64 [steps - 1, layers].
        misses: in pools of POOLS, all policies.
        clusters: by layer, of the product's rule in a pool of POOL.
        scattered: by layer, share of the same number of misses that would have another one within DISTANCES if they
            lay anywhere among what is not resident.
        forecasts: by layer, for ALPHAS.
        prefetches: by layer, of a moving average of alpha 0.5.
        sampled: by layer, of the threshold that one in SAMPLE blocks of the step's own scores gives.
        guesses: ways to foretell, under CAPS in a pool of POOL; means over layers.
        driven: the runtime on this trace.
    """

    name: str
    trace: Trace
    overlap: NDArray[np.float64]
    misses: Comparison
    clusters: list[Clustering]
    scattered: list[dict[int, float]]
    forecasts: list[list[Forecast]]
    prefetches: list[Prefetch]
    sampled: list[Prefetch]
    guesses: list[Guess]
    driven: Driven


def load(name: str) -> Trace:
    """A trace that ships."""
    return Trace.load(shipped.path_of(name))


def generate(regime: str) -> Trace:
    """A generated trace of the same sizes."""
    return synthetic.generate(regime, **GENERATED)


def measure(name: str, trace: Trace) -> Measured:
    """All of it."""
    slots = slots_of(trace, POOL)
    few = few_ranks(trace)
    clusters, scattered, foretold, averaged, sampled = [], [], [], [], []
    for layer in range(trace.layers):
        steps = LayerSteps(trace, layer)
        clusters.append(clustering(make_pool(steps, slots, "echo"), DISTANCES))
        scattered.append(scatter(make_pool(steps, slots, "echo"), trace.context))
        steps = LayerSteps(few, layer)
        foretold.append(forecasts(make_pool(steps, slots, "echo"), ALPHAS))
        averaged.append(prefetch(make_pool(steps, slots, "echo"), moving_average(steps.kth_score, 0.5)))
        sampled.append(prefetch(make_pool(steps, slots, "echo"), thresholds_of_samples(steps)))
    shares, rates = overlap(trace), misses(trace)
    return Measured(
        name, trace, shares, rates, clusters, scattered, foretold, averaged, sampled, guess(trace), driven(trace)
    )


def guess(trace: Trace) -> list[Guess]:
    """A moving average, the last selection scored anew, and the product's rule."""
    return averages(few_ranks(trace), slots_of(trace, POOL), [0.5], CAPS)


def driven(trace: Trace) -> Driven:
    """The runtime selects, prefetches and recalls what the trace's scores ask for."""
    counts = drive(trace, slots_of(trace, POOL), device="cpu", prefetch_cap=1000)
    second = slice(trace.steps // 2, None)
    selected = counts.misses[second].size * trace.top_k
    wasted = (counts.prefetched - counts.prefetched_used)[second].sum() / selected
    full = counts.full_selects[second].mean()
    return Driven(float(wasted), float(counts.misses[second].sum() / selected), float(full))


def misses(trace: Trace) -> Comparison:
    """In all pools, under all policies."""
    return compare(trace, [slots_of(trace, pool) for pool in POOLS])


def turns(trace: Trace) -> range:
    """Steps that begin another text, as `echo-kv record --turn-every` notes them."""
    found = re.search(r"next text every (\d+) steps", trace.notes)
    every = int(found[1]) if found else trace.steps
    return range(every, trace.steps, every)


def few_ranks(trace: Trace) -> Trace:
    """The trace with scores of RANKS x top-k tokens, so that errors of different traces have the same unit."""
    assert trace.ranked is not None and trace.scores is not None
    count = RANKS * trace.top_k
    return replace(trace, ranked=trace.ranked[..., :count].copy(), scores=trace.scores[..., :count].copy())


def scatter(pool: Pool, context: NDArray[np.int32]) -> dict[int, float]:
    """`Clustering.near` if misses lay anywhere among the positions that are not resident."""
    draws = np.random.default_rng(0)
    count, near = 0, dict.fromkeys(DISTANCES, 0)
    for t, length in enumerate(context):
        there = pool.held[pool.held >= 0]
        missing = len(pool.step())
        if t < len(context) // 2 or missing == 0:
            continue
        absent = np.setdiff1d(np.arange(length), pool.steps.positions[there], assume_unique=True)
        gaps = np.diff(np.sort(draws.permutation(absent)[:missing]), prepend=-1 << 40, append=1 << 40)
        count += missing
        for distance in DISTANCES:
            near[distance] += int((np.minimum(gaps[1:], gaps[:-1]) <= distance).sum())
    return {distance: number / max(1, count) for distance, number in near.items()}


def thresholds_of_samples(steps: LayerSteps) -> NDArray[np.float64]:
    """float64 [steps]: of one block in SAMPLE, the score that a SAMPLE-th of top_k reach; NaN where there are fewer."""
    thresholds = np.full(steps.steps, np.nan)
    place = steps.top_k // SAMPLE - 1
    for t in np.flatnonzero(steps.scored):
        blocks = np.where(steps.ranked[t] >= 0, steps.positions[steps.ranked[t]] // BLOCK, 0)
        scores = steps.scores[t][(blocks % SAMPLE == SAMPLE // 2) & (steps.ranked[t] >= 0)]
        thresholds[t] = scores[place] if len(scores) > place else steps.scores[t][-1]
    return thresholds


def prefetch(pool: Pool, thresholds: NDArray[np.float64]) -> Prefetch:
    """What fetching all that is scored above them would do, in a pool that is not changed by it."""
    steps = pool.steps
    reached, sums = [], np.zeros(2)
    for t in range(steps.steps):
        absent = pool.absent()
        pool.step()
        if t < steps.steps // 2 or not steps.scored[t] or np.isnan(thresholds[t]):
            continue
        above = steps.scores[t] > thresholds[t]
        selected = np.arange(len(above)) < steps.top_k
        reached.append(above.sum())
        sums += (absent & above & ~selected).sum(), (absent & ~above & selected).sum()
    wasted, left = sums / len(reached) / steps.top_k
    return Prefetch(np.percentile(reached, [5, 50, 95]) / steps.top_k, float(wasted), float(left))
