"""What the pools of a runtime did in the second half of a trace, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import echo
from echo.traces import Trace
from echo.traces.comparison import Comparison
from echo.traces.drive import Driven
from echo.traces.layer_steps import LayerSteps
from echo.traces.policies import make_pool
from echo.traces.statistics import Forecast, forecasts, moving_average

POLICIES = ("lru", "belady")
"""What a pool is compared with."""


@dataclass(frozen=True)
class LayerCounts:
    """What one layer's pool did in the second half of a trace; `echo.LayerStats` says what is counted.

    Attributes:
        layer: of the trace.
        hits, misses, evictions: misses are the rows fetched.
        recalled_bytes: of the rows fetched.
        hit_rate: hits per selected row, 1 if none was selected.
        lru, belady: the same of exact LRU and of Belady's optimum.
        full: whether the pool of LRU was full when counting began; else some misses are first uses.
        forecasts: by alpha, of a threshold of prefetches; empty if the layer has no scores.
    """

    layer: int
    hits: int
    misses: int
    evictions: int
    recalled_bytes: int
    hit_rate: float
    lru: float
    belady: float
    full: bool
    forecasts: list[Forecast]


@dataclass(frozen=True)
class LayerPrefetches:
    """The same pool with prefetches, in the second half of a trace; `echo.LayerStats` says what is counted.

    Attributes:
        layer: of the trace.
        misses: rows that recalls fetched.
        candidates, full_selects, prefetched, prefetched_used, prefetches_capped: as there.
        prefetched_wasted, prefetched_bytes: of the rows that were prefetched.
    """

    layer: int
    misses: int
    candidates: int
    full_selects: int
    prefetched: int
    prefetched_used: int
    prefetches_capped: int
    prefetched_wasted: int
    prefetched_bytes: int


@dataclass(frozen=True)
class LayerForecasts:
    """The same pool with forecasts but no prefetches, in the second half of a trace.

    Attributes:
        layer: of the trace.
        misses: rows that recalls fetched.
        evictions: slots that were taken from another row.
        forecast, forecast_used, forecast_wasted, forecast_bytes: as in `echo.LayerStats`.
    """

    layer: int
    misses: int
    evictions: int
    forecast: int
    forecast_used: int
    forecast_wasted: int
    forecast_bytes: int


def layer_counts(
    trace: Trace, compared: Comparison, pool: int, driven: Driven, alphas: Sequence[float]
) -> list[LayerCounts]:
    """Of one pool, the layers beside LRU, Belady and the predictor.

    Args:
        trace: what was replayed.
        compared: of "lru" and "belady".
        pool: its place in `compared.slots`.
        driven: the runtime with that pool, on the layers of `compared`.
        alphas: of `LayerCounts.forecasts`.
    """
    warm = trace.steps // 2
    counts = []
    for i, layer in enumerate(compared.layers):
        hits, misses, evictions = (int(part[warm:, i].sum()) for part in (driven.hits, driven.misses, driven.evictions))
        lru, belady = (1 - float(compared.rates[name][pool, i]) for name in POLICIES)
        steps = LayerSteps(trace, layer)
        counts.append(
            LayerCounts(
                layer=layer,
                hits=hits,
                misses=misses,
                evictions=evictions,
                recalled_bytes=misses * driven.row_bytes,
                hit_rate=hits / (hits + misses) if hits + misses else 1.0,
                lru=lru,
                belady=belady,
                full=bool(compared.full[pool, i]),
                forecasts=_forecasts(steps, driven.slots, alphas),
            )
        )
    return counts


def layer_prefetches(driven: Driven, layers: Sequence[int]) -> list[LayerPrefetches]:
    """What a runtime that prefetched did in the second half, by layer."""
    names = ("misses", "candidates", "full_selects", "prefetched", "prefetched_used", "prefetches_capped")
    return [
        LayerPrefetches(
            layer=layer,
            prefetched_wasted=sums["prefetched"] - sums["prefetched_used"],
            prefetched_bytes=sums["prefetched"] * driven.row_bytes,
            **sums,
        )
        for layer, sums in zip(layers, _late_sums(driven, names), strict=True)
    ]


def layer_forecasts(driven: Driven, layers: Sequence[int]) -> list[LayerForecasts]:
    """What a runtime that made forecasts did in the second half, by layer."""
    return [
        LayerForecasts(
            layer=layer,
            forecast_wasted=sums["forecast"] - sums["forecast_used"],
            forecast_bytes=sums["forecast"] * driven.row_bytes,
            **sums,
        )
        for layer, sums in zip(
            layers, _late_sums(driven, ("misses", "evictions", "forecast", "forecast_used")), strict=True
        )
    ]


def mean_over_layers(layers: Sequence[LayerCounts], name: str) -> Any:
    """float64 [alphas], of a field of `LayerCounts.forecasts`; over layers with scores."""
    scored = [counts.forecasts for counts in layers if counts.forecasts]
    return np.mean([[getattr(one, name) for one in each] for each in scored], axis=0)


def deviation_of(trace: Trace, layers: Sequence[int], driven: Driven, alpha: float) -> float | None:
    """By how much the runtime's moving averages and those of the trace's k-th scores differ; None without scores."""
    if trace.ranks == 0:
        return None
    expected = np.stack([moving_average(trace.kth_score[:, layer], alpha) for layer in layers], axis=1)
    known = ~np.isnan(expected)
    return float(np.abs(expected - driven.foretold)[known].max()) if known.any() else None


def _late_sums(driven: Driven, names: Sequence[str]) -> list[dict[str, int]]:
    """Counters of the second half of the steps, by layer."""
    warm = len(driven.misses) // 2
    layers = driven.misses.shape[1]
    return [{name: int(getattr(driven, name)[warm:, i].sum()) for name in names} for i in range(layers)]


def _forecasts(steps: LayerSteps, slots: int, alphas: Sequence[float]) -> list[Forecast]:
    try:
        return forecasts(make_pool(steps, slots, "echo"), alphas)
    except echo.InvalidArgument:  # nothing is scored after another step
        return []
