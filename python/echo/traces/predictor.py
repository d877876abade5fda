"""What could be listed and fetched while a step is scored, under several ways to foretell its k-th score.

"alpha A" is what the product does: a moving average of the k-th scores of the steps before, with a margin below it for
candidates (sifting.py). "rescore" scores the last selection first: its lowest score is a bound that no selected token
is below. "sample" scores one block of keys in eight first, and takes two bounds from that (sample.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from echo import InvalidArgument
from echo.traces.layer_steps import LayerSteps
from echo.traces.pool import Pool
from echo.traces.sample import sampled_bounds
from echo.traces.sifting import capacity_of, predicted_bounds
from echo.traces.statistics import in_deviations, moving_average

_ALPHA = 0.5  # of the prediction that says where the sample is looked at


@dataclass(frozen=True)
class Guess:
    """A way to foretell the k-th score, under a cap; means of the steps that were counted, without unit.

    Attributes:
        name: "alpha A", "rescore" or "sample".
        cap: rows that may be fetched for each 1,000 scored tokens; inf for all.
        error: root mean square of bound of prefetch minus k-th score, in units of the ranked scores' standard deviation
            in a step; NaN if there never was one.
        candidates: tokens at or above the bound of candidates, per top_k; those beyond the ranks are not counted.
        full: share of steps whose candidates are fewer than top_k or more than a list has room for, or that have none.
        prefetched: rows fetched while scoring, per top_k.
        wasted: of them not selected, per top_k.
        left: selected rows that are neither resident nor prefetched, per top_k.
        misses: selected rows that are not resident, per top_k.
    """

    name: str
    cap: float
    error: float
    candidates: float
    full: float
    prefetched: float
    wasted: float
    left: float
    misses: float


def guesses(
    pool: Pool, context: NDArray[np.int32], alphas: Sequence[float], caps: Sequence[float] = (np.inf,)
) -> list[Guess]:
    """Replays a fresh pool once and asks what each way would have done; by way, then by cap.

    What is resident is what the pool holds without prefetches: rows fetched in vain push nothing out. Counts the scored
    steps of the second half that come after another scored one. Under a cap, rows go in the order of positions.

    Args:
        pool: of `make_pool`, on a trace with scores.
        context: int32 [steps], of the trace.
        alphas: weights of the past, 0 for the last step's k-th score.
        caps: rows for each 1,000 scored tokens.

    Raises:
        InvalidArgument: naming `pool`, if its trace has no such step.
    """
    steps = pool.steps
    average = moving_average(steps.kth_score, _ALPHA)
    counted = steps.scored & ~np.isnan(average) & (np.arange(steps.steps) >= steps.steps // 2)
    if not counted.any():
        raise InvalidArgument("pool: no step in the second half of its trace is scored after another one")
    ways: dict[str, tuple[NDArray[np.floating], NDArray[np.floating]]] = {
        f"alpha {alpha:g}": predicted_bounds(steps.kth_score, alpha) for alpha in alphas
    }
    ways["rescore"] = (rescored_bounds(steps),) * 2
    ways["sample"] = sampled_bounds(steps, context, average)
    lists = np.zeros((len(ways), 2))  # candidates, full
    rows = np.zeros((len(ways), len(caps), 3))  # prefetched, wasted, left
    misses = 0
    for t in range(steps.steps):
        ranked, scores = steps.ranked[t], steps.scores[t]
        absent = pool.absent()
        pool.step()
        if not counted[t]:
            continue
        selected = np.arange(len(scores)) < steps.top_k
        misses += int((absent & selected).sum())
        in_order = np.argsort(ranked)  # rows are numbered by position
        for i, (low, high) in enumerate(ways.values()):
            listed = int((scores >= low[t]).sum())
            lists[i] += listed, not steps.top_k <= listed <= capacity_of(steps.top_k)
            wanted = in_order[(absent & (scores >= high[t]))[in_order]]
            for j, cap in enumerate(caps):
                fetched = wanted[: int(min(cap * context[t] / 1000, len(wanted)))]
                used = int(selected[fetched].sum())
                rows[i, j] += len(fetched), len(fetched) - used, int((absent & selected).sum()) - used
    number = int(counted.sum())
    lists[:, 0] /= steps.top_k
    rows /= number * steps.top_k
    errors = [_error(steps, high, counted) for _, high in ways.values()]
    return [
        Guess(
            name=name,
            cap=cap,
            error=errors[i],
            candidates=float(lists[i, 0]) / number,
            full=float(lists[i, 1]) / number,
            prefetched=float(rows[i, j, 0]),
            wasted=float(rows[i, j, 1]),
            left=float(rows[i, j, 2]),
            misses=misses / number / steps.top_k,
        )
        for i, name in enumerate(ways)
        for j, cap in enumerate(caps)
    ]


def rescored_bounds(steps: LayerSteps) -> NDArray[np.float64]:
    """float64 [steps], the lowest score of what the step before selected; -inf beyond the ranks, NaN where unknown."""
    bounds = np.full(steps.steps, np.nan)
    for t in np.flatnonzero(steps.scored[1:]) + 1:
        before = steps.selected[t - 1]
        if (before < 0).any():
            continue
        score_of = np.full(len(steps.positions) + 1, -np.inf)
        score_of[steps.ranked[t]] = steps.scores[t]
        bounds[t] = score_of[before].min()
    return bounds


def _error(steps: LayerSteps, bound: NDArray[np.floating], counted: NDArray[np.bool_]) -> float:
    known = counted & np.isfinite(bound)
    if not known.any():
        return np.nan
    spreads = [np.std(row[np.isfinite(row)], dtype=np.float64) for row in steps.scores[known]]
    return in_deviations(np.sqrt(np.mean((bound - steps.kth_score)[known] ** 2)), spreads)
