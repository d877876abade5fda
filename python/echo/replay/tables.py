"""What the command prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from echo.replay.counts import LayerCounts, LayerForecasts, LayerPrefetches, mean_over_layers
from echo.settings import readable
from echo.traces import Trace


def print_pools(pools: Sequence[float], results: Sequence[list[LayerCounts]]) -> None:
    """Each pool, layer by layer."""
    print(
        f"{'pool / top-k':<13}{'layer':>6}{'hits':>11}{'misses':>10}{'evictions':>11}{'recalled':>12}"
        f"{'hit rate, %':>13}{'LRU, %':>9}{'Belady, %':>11}"
    )
    for pool, layers in zip(pools, results, strict=True):
        for counts in layers:
            _print_row(f"{pool:g}", str(counts.layer), [counts])
        if len(layers) > 1:
            _print_row(f"{pool:g}", "all", layers)
    full = all(counts.full for layers in results for counts in layers)
    print(
        "counted in the second half of the steps"
        + ("" if full else "; * some pool was not full yet: misses are first uses, too")
        + "\n"
    )


def print_predictor(pools: Sequence[float], results: Sequence[list[LayerCounts]], alphas: Sequence[float]) -> None:
    """How well the k-th score is foretold, and what prefetches by that would fetch."""
    if not any(counts.forecasts for counts in results[0]):
        print("no scores: nothing to predict")
        return
    print("k-th score, foretold by its moving average: error (standard deviations) / candidates above it per top-k")
    print(f"{'layer':<13}" + "".join(f"{f'alpha {alpha:g}':>16}" for alpha in alphas))
    for counts in results[0]:
        cells = [f"{one.error:.2f} / {one.candidates:.2f}" for one in counts.forecasts] or ["no scores"]
        print(f"{counts.layer:<13}" + "".join(f"{cell:>16}" for cell in cells))
    print("\nprefetch of the candidates, mean over layers, % of top-k: fetched in vain / misses left")
    print(f"{'pool / top-k':<13}" + "".join(f"{f'alpha {alpha:g}':>16}" for alpha in alphas) + f"{'without':>10}")
    for pool, layers in zip(pools, results, strict=True):
        wasted, left, misses = (100 * mean_over_layers(layers, name) for name in ("wasted", "misses_left", "misses"))
        cells = [f"{a:.1f} / {b:.1f}" for a, b in zip(wasted, left, strict=True)]
        print(f"{pool:<13g}" + "".join(f"{cell:>16}" for cell in cells) + f"{misses[0]:>10.1f}")


def print_prefetches(
    trace: Trace,
    pools: Sequence[float],
    results: Sequence[list[LayerCounts]],
    ahead: Sequence[list[LayerPrefetches]],
) -> None:
    """What the runtime did with prefetches, by pool."""
    heads = ("candidates", "prefetched", "of them used", "in vain", "capped", "still missed", "without")
    print("\nthe runtime with prefetches, mean over layers, % of top-k, and query rows whose candidates did not do, %")
    print(f"{'pool / top-k':<13}" + "".join(f"{head:>13}" for head in heads) + f"{'full selects':>14}")
    names = ("candidates", "prefetched", "prefetched_used", "prefetched_wasted", "prefetches_capped", "misses")
    for pool, layers, without in zip(pools, ahead, results, strict=True):
        full = sum(one.full_selects for one in layers) / _counted_steps(trace) / len(layers)
        print(f"{pool:<13g}{_shares(trace, layers, names, without)}{100 * full:>14.1f}")


def print_forecasts(
    trace: Trace,
    pools: Sequence[float],
    results: Sequence[list[LayerCounts]],
    nexts: Sequence[list[LayerForecasts]],
    cap: int,
) -> None:
    """What it did with forecasts of up to `cap` rows, by pool."""
    heads = ("forecast", "of them used", "in vain", "still missed", "without")
    print(f"\nthe runtime with forecasts of up to {cap} rows per step, mean over layers, % of top-k")
    print(f"{'pool / top-k':<13}" + "".join(f"{head:>13}" for head in heads))
    names = ("forecast", "forecast_used", "forecast_wasted", "misses")
    for pool, layers, without in zip(pools, nexts, results, strict=True):
        print(f"{pool:<13g}{_shares(trace, layers, names, without)}")


def _print_row(pool: str, layer: str, counts: Sequence[LayerCounts]) -> None:
    hits, misses, evictions, fetched = (
        sum(getattr(one, name) for one in counts) for name in ("hits", "misses", "evictions", "recalled_bytes")
    )
    rates = [100 * float(np.mean([getattr(one, name) for one in counts])) for name in ("hit_rate", "lru", "belady")]
    mark = "" if all(one.full for one in counts) else "*"
    print(
        f"{pool:<13}{layer:>6}{hits:>11,}{misses:>10,}{evictions:>11,}{readable(fetched):>12}"
        f"{rates[0]:>13.2f}{rates[1]:>9.2f}{rates[2]:>11.2f}{mark}"
    )


def _shares(trace: Trace, layers: Sequence[Any], names: Sequence[str], without: Sequence[LayerCounts]) -> str:
    """Cells of these counters and of the misses of a runtime that fetches nothing ahead, % of what is selected."""
    counts = [sum(getattr(one, name) for one in layers) for name in names] + [sum(one.misses for one in without)]
    selected = _counted_steps(trace) * trace.top_k * len(layers)
    return "".join(f"{100 * count / selected:>13.1f}" for count in counts)


def _counted_steps(trace: Trace) -> int:
    return trace.steps - trace.steps // 2
