"""What else a trace says about caching: overlap, where misses lie, how well the k-th score is foretold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from echo import InvalidArgument
from echo.traces.pool import Pool
from echo.traces.trace import Trace

_GROUP = 100  # positions that one transfer could bring: rows of 656 B, 64 KiB


def overlap(trace: Trace) -> NDArray[np.float64]:
    """float64 [steps - 1, layers], share of a step's selection that the step before selected too."""
    shares = np.ones((trace.steps - 1, trace.layers))
    for t, layer in np.ndindex(*shares.shape):
        before, now = trace.positions[t, layer], trace.positions[t + 1, layer]
        now = now[now >= 0]
        if len(now):
            shares[t, layer] = np.isin(now, before, assume_unique=True).mean()
    return shares


@dataclass(frozen=True)
class Clustering:
    """How near to each other the misses of a step are.

    Attributes:
        misses: how many were looked at.
        near: by distance, share of the misses that have another miss of the same step within so many positions.
        groups: distinct aligned groups of 100 positions that hold misses, per miss; 1 where each has its own.
    """

    misses: int
    near: dict[int, float]
    groups: float


def clustering(pool: Pool, distances: Sequence[int] = (1, 8, 64, 100)) -> Clustering:
    """Replays a fresh pool and looks at where its misses lie in the second half of the steps.

    Args:
        pool: of `make_pool`.
        distances: of `Clustering.near`.
    """
    steps = pool.steps
    count, groups, near = 0, 0, dict.fromkeys(distances, 0)
    for t in range(steps.steps):
        positions = steps.positions[pool.step()]
        if t < steps.steps // 2 or len(positions) == 0:
            continue
        gaps = np.diff(positions, prepend=-1 << 40, append=1 << 40)
        nearest = np.minimum(gaps[1:], gaps[:-1])
        count += len(positions)
        groups += len(np.unique(positions // _GROUP))
        for distance in distances:
            near[distance] += int((nearest <= distance).sum())
    whole = max(1, count)
    return Clustering(count, {distance: number / whole for distance, number in near.items()}, groups / whole)


@dataclass(frozen=True)
class Forecast:
    """A moving average of the k-th score as threshold of a prefetch that runs while a step is scored.

    Attributes:
        alpha: weight of the past.
        error: root mean square of prediction minus k-th score, in units of the ranked scores' standard deviation in a
            step (of all tokens, if all are ranked); NaN where all of a step's scores are equal.
        candidates: ranked tokens above the prediction, per top_k.
        wasted: candidates that were neither resident nor selected, per top_k.
        misses_left: selected tokens that were neither resident nor candidates, per top_k.
        misses: selected tokens that were not resident, per top_k. The token that a step appends is in none of these.
    """

    alpha: float
    error: float
    candidates: float
    wasted: float
    misses_left: float
    misses: float


def forecasts(pool: Pool, alphas: Sequence[float]) -> list[Forecast]:
    """Replays a fresh pool once and asks what prefetches above each moving average would have done.

    What is resident is what the pool holds without prefetches: wasted rows push nothing out. Counts the scored steps of
    the second half.

    Args:
        pool: of `make_pool`, on a trace with scores.
        alphas: weights of the past, 0 for the last step's k-th score; prediction = alpha * prediction + (1 - alpha) *
            k-th score after each step.

    Raises:
        InvalidArgument: naming `pool`, if its trace has no scored step after another one in the second half.
    """
    steps = pool.steps
    predictions = np.stack([moving_average(steps.kth_score, alpha) for alpha in alphas])
    counted = steps.scored & ~np.isnan(predictions[0]) & (np.arange(steps.steps) >= steps.steps // 2)
    if not counted.any():
        raise InvalidArgument("pool: no step in the second half of its trace is scored after another one")
    sums = np.zeros((len(alphas), 4))
    spreads = []
    for t in range(steps.steps):
        absent = pool.absent()
        pool.step()
        if not counted[t]:
            continue
        scores = steps.scores[t]
        selected = np.arange(len(scores)) < steps.top_k
        spreads.append(np.std(scores[np.isfinite(scores)], dtype=np.float64))
        for i in range(len(alphas)):
            above = scores > predictions[i, t]
            wasted, left = above & absent & ~selected, ~above & absent & selected
            sums[i] += above.sum(), wasted.sum(), left.sum(), (absent & selected).sum()
    means = sums / counted.sum() / steps.top_k
    errors = np.sqrt(np.mean((predictions - steps.kth_score)[:, counted] ** 2, axis=1))
    return [Forecast(alphas[i], in_deviations(errors[i], spreads), *means[i].tolist()) for i in range(len(alphas))]


def in_deviations(error: float, deviations: Sequence[float]) -> float:
    """An error of predictions, in units of these standard deviations' mean; NaN where that is 0."""
    mean = float(np.mean(deviations))
    return float(error) / mean if mean > 0 else np.nan


def moving_average(kth_score: NDArray[np.float32], alpha: float) -> NDArray[np.float64]:
    """float64 [steps], what is foretold before each step: NaN until a k-th score is known; NaN ones are skipped."""
    predicted = np.full(len(kth_score), np.nan)
    value = np.nan
    for t, score in enumerate(kth_score):
        predicted[t] = value
        if np.isfinite(score):
            value = float(score) if np.isnan(value) else alpha * value + (1 - alpha) * float(score)
    return predicted
