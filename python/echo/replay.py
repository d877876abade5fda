"""`echo-kv replay`: a trace drives a runtime's pools, selection and predictor, without a model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import echo
from echo import settings, trace_options
from echo.decoding import device_of
from echo.settings import readable
from echo.traces import Trace
from echo.traces.comparison import Comparison, compare, slots_of
from echo.traces.drive import Driven, drive
from echo.traces.layer_steps import LayerSteps
from echo.traces.policies import make_pool
from echo.traces.statistics import Forecast, forecasts, moving_average

_POLICIES = ("lru", "belady")
_ALPHAS = "0,0.3,0.5,0.7,0.9"


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


def add_command(commands: Any) -> None:
    """Adds `replay` to the commands."""
    parser = commands.add_parser("replay", help="drive a runtime's pools and predictor with a trace, without a model")
    parser.add_argument("trace", metavar="TRACE", help=f"one of: {trace_options.SOURCES})")
    trace_options.add_flags(parser, pools="1,1.5,2,4,8", plot="draw hit rates over pool sizes, and the predictor")
    settings.add_device(parser)
    parser.add_argument(
        "--alpha",
        metavar="LIST",
        help=f"weights of the past in the moving average of the k-th score (default {_ALPHAS}); the runtime runs with "
        "the first (default: ECHO_THRESHOLD_ALPHA, else 0.5)",
    )
    parser.add_argument(
        "--prefetch-cap",
        type=float,
        metavar="N",
        help="rows that the runtime prefetches for each 1,000 scored tokens, at most, when it is driven once more with "
        "prefetches; -1 for what the device can fetch (default: ECHO_PREFETCH_CAP, else -1)",
    )
    parser.add_argument(
        "--forecast-cap",
        type=int,
        metavar="N",
        help="rows that a layer of a step fetches for the next step, at most, when the runtime is driven once more "
        "with forecasts; 0 for not, -1 for all that they look at (default: ECHO_FORECAST_CAP, else a tenth of top-k)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints what the pools did layer by layer, then what the predictor would have fetched."""
    pools, layers = trace_options.check(options, [options.trace])
    alphas = trace_options.numbers("alpha", _ALPHAS if options.alpha is None else options.alpha, float)
    if not all(0 <= alpha <= 1 for alpha in alphas):
        raise echo.InvalidArgument(f"alpha: {options.alpha!r} given, expected numbers from 0 to 1")
    alpha = alphas[0] if options.alpha is not None else echo.RuntimeConfig().threshold_alpha
    cap = echo.RuntimeConfig().prefetch_cap if options.prefetch_cap is None else options.prefetch_cap
    forecast_cap = echo.RuntimeConfig().forecast_cap if options.forecast_cap is None else options.forecast_cap
    settings.check({"prefetch_cap": cap, "threshold_alpha": alpha, "forecast_cap": forecast_cap})
    device = device_of(settings.device(options))
    trace = trace_options.load(options.trace, options)
    slots = [slots_of(trace, pool) for pool in pools]
    compared = compare(trace, slots, _POLICIES, layers)
    driven = [drive(trace, size, compared.layers, device=device, alpha=alpha) for size in slots]
    results = [layer_counts(trace, compared, i, driven[i], alphas) for i in range(len(pools))]
    ahead = _prefetches(trace, slots, compared.layers, alpha, device, cap)
    if options.forecast_cap is None and forecast_cap == 0:
        forecast_cap = max(1, trace.top_k // 10)
    nexts = _with_forecasts(trace, slots, compared.layers, alpha, device, forecast_cap)
    first = driven[0]
    print(f"{trace.model}: {trace.summary()}; rows of {first.row_bytes} B on {first.device}")
    _print_pools(pools, results)
    _print_forecasts(pools, results, alphas)
    _print_prefetches(trace, pools, results, ahead)
    _print_layer_forecasts(trace, pools, results, nexts, forecast_cap)
    deviation = deviation_of(trace, compared.layers, first, alpha)
    if deviation is not None:
        print(f"the runtime's own average at alpha {alpha:g} differs from it by {deviation:.1g} at most")
    if options.json is not None:
        report = {**_report(trace, pools, alphas, driven, results), "runtime_alpha": alpha}
        report["runtime_average_off_by"] = deviation
        for pool, layers_ahead in zip(report["pools"], ahead, strict=False):
            pool["prefetches"] = [asdict(one) for one in layers_ahead]
        for pool, of_layers in zip(report["pools"], nexts, strict=False):
            pool["next_step"] = {"forecast_cap": forecast_cap, "layers": [asdict(one) for one in of_layers]}
        options.json.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
    if options.plot is not None:
        _plot(options.plot, trace, pools, results)
    return 0


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
        lru, belady = (1 - float(compared.rates[name][pool, i]) for name in _POLICIES)
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


def _late_sums(driven: Driven, names: Sequence[str]) -> list[dict[str, int]]:
    """Counters of the second half of the steps, by layer."""
    warm = len(driven.misses) // 2
    layers = driven.misses.shape[1]
    return [{name: int(getattr(driven, name)[warm:, i].sum()) for name in names} for i in range(layers)]


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


def _prefetches(
    trace: Trace, slots: Sequence[int], layers: Sequence[int], alpha: float, device: str, cap: float
) -> list[list[LayerPrefetches]]:
    """By pool; empty if there is nothing to prefetch by."""
    if trace.ranks == 0:
        return []
    driven = [drive(trace, size, layers, device=device, alpha=alpha, prefetch_cap=cap) for size in slots]
    return [layer_prefetches(one, layers) for one in driven]


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


def _with_forecasts(
    trace: Trace, slots: Sequence[int], layers: Sequence[int], alpha: float, device: str, cap: int
) -> list[list[LayerForecasts]]:
    """By pool; empty if there is nothing to go by, or no forecast is asked for."""
    if trace.ranks == 0 or cap == 0:
        return []
    driven = [drive(trace, size, layers, device=device, alpha=alpha, forecast_cap=cap) for size in slots]
    return [layer_forecasts(one, layers) for one in driven]


def deviation_of(trace: Trace, layers: Sequence[int], driven: Driven, alpha: float) -> float | None:
    """By how much the runtime's moving averages and those of the trace's k-th scores differ; None without scores."""
    if trace.ranks == 0:
        return None
    expected = np.stack([moving_average(trace.kth_score[:, layer], alpha) for layer in layers], axis=1)
    known = ~np.isnan(expected)
    return float(np.abs(expected - driven.foretold)[known].max()) if known.any() else None


def _forecasts(steps: LayerSteps, slots: int, alphas: Sequence[float]) -> list[Forecast]:
    try:
        return forecasts(make_pool(steps, slots, "echo"), alphas)
    except echo.InvalidArgument:  # nothing is scored after another step
        return []


def _print_pools(pools: Sequence[float], results: Sequence[list[LayerCounts]]) -> None:
    print(
        f"{'pool / top-k':<13}{'layer':>6}{'hits':>11}{'misses':>10}{'evictions':>11}{'recalled':>12}"
        f"{'hit rate, %':>13}{'LRU, %':>9}{'Belady, %':>11}"
    )
    for pool, layers in zip(pools, results, strict=True):
        for counts in layers:
            _print_row(f"{pool:g}", str(counts.layer), [counts])
        if len(layers) > 1:
            _print_row(f"{pool:g}", "all", layers)
    print("counted in the second half of the steps; * some pool was not full yet: misses are first uses, too\n")


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


def _print_forecasts(pools: Sequence[float], results: Sequence[list[LayerCounts]], alphas: Sequence[float]) -> None:
    if not any(counts.forecasts for counts in results[0]):
        print("no scores: nothing to predict")
        return
    print("k-th score, foretold by its moving average: error (standard deviations) / candidates above it per top-k")
    print(f"{'layer':<13}" + "".join(f"{f'alpha {alpha:g}':>16}" for alpha in alphas))
    for counts in results[0]:
        cells = [f"{one.error:.2f} / {one.candidates:.2f}" for one in counts.forecasts] or ["no scores"]
        print(f"{counts.layer:<13}" + "".join(f"{cell:>16}" for cell in cells))
    print("prefetch of the candidates, mean over layers, % of top-k: fetched in vain / misses left")
    print(f"{'pool / top-k':<13}" + "".join(f"{f'alpha {alpha:g}':>16}" for alpha in alphas) + f"{'without':>10}")
    for pool, layers in zip(pools, results, strict=True):
        wasted, left, misses = (100 * _mean(layers, name) for name in ("wasted", "misses_left", "misses"))
        cells = [f"{a:.1f} / {b:.1f}" for a, b in zip(wasted, left, strict=True)]
        print(f"{pool:<13g}" + "".join(f"{cell:>16}" for cell in cells) + f"{misses[0]:>10.1f}")


def _print_prefetches(
    trace: Trace,
    pools: Sequence[float],
    results: Sequence[list[LayerCounts]],
    ahead: Sequence[list[LayerPrefetches]],
) -> None:
    if not ahead:
        return
    heads = ("candidates", "prefetched", "of them used", "in vain", "capped", "still missed", "without")
    print("the runtime with prefetches, mean over layers, % of top-k, and query rows whose candidates did not do, %")
    print(f"{'pool / top-k':<13}" + "".join(f"{head:>13}" for head in heads) + f"{'full selects':>14}")
    rows = trace.steps - trace.steps // 2
    names = ("candidates", "prefetched", "prefetched_used", "prefetched_wasted", "prefetches_capped", "misses")
    for pool, layers, without in zip(pools, ahead, results, strict=True):
        each = rows * trace.top_k * len(layers)
        shares = [sum(getattr(one, name) for one in layers) / each for name in names]
        shares.append(sum(one.misses for one in without) / each)
        full = sum(one.full_selects for one in layers) / rows / len(layers)
        print(f"{pool:<13g}" + "".join(f"{100 * share:>13.1f}" for share in shares) + f"{100 * full:>14.1f}")


def _print_layer_forecasts(
    trace: Trace,
    pools: Sequence[float],
    results: Sequence[list[LayerCounts]],
    nexts: Sequence[list[LayerForecasts]],
    cap: int,
) -> None:
    if not nexts:
        return
    heads = ("forecast", "of them used", "in vain", "still missed", "without")
    rows = "as many rows as they look at" if cap == -1 else f"up to {cap} rows"
    print(f"the runtime with forecasts of {rows} per step, mean over layers, % of top-k")
    print(f"{'pool / top-k':<13}" + "".join(f"{head:>13}" for head in heads))
    names = ("forecast", "forecast_used", "forecast_wasted", "misses")
    for pool, layers, without in zip(pools, nexts, results, strict=True):
        each = (trace.steps - trace.steps // 2) * trace.top_k * len(layers)
        shares = [sum(getattr(one, name) for one in layers) / each for name in names]
        shares.append(sum(one.misses for one in without) / each)
        print(f"{pool:<13g}" + "".join(f"{100 * share:>13.1f}" for share in shares))


def _mean(layers: Sequence[LayerCounts], name: str) -> Any:
    """float64 [alphas], over layers with scores."""
    scored = [counts.forecasts for counts in layers if counts.forecasts]
    return np.mean([[getattr(one, name) for one in each] for each in scored], axis=0)


def _report(
    trace: Trace,
    pools: Sequence[float],
    alphas: Sequence[float],
    driven: Sequence[Driven],
    results: Sequence[list[LayerCounts]],
) -> dict[str, Any]:
    return {
        "build": echo.build_info(),
        "device": driven[0].device,
        "trace": trace_options.figures(trace),
        "counted_steps": [trace.steps // 2, trace.steps],
        "row_bytes": driven[0].row_bytes,
        "alphas": list(alphas),
        "pools": [
            {"pool": pool, "slots": each.slots, "layers": [asdict(counts) for counts in layers]}
            for pool, each, layers in zip(pools, driven, results, strict=True)
        ],
    }


def _plot(path: Path, trace: Trace, pools: Sequence[float], results: Sequence[list[LayerCounts]]) -> None:
    pyplot = trace_options.pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for name, label, color, style in (
        ("hit_rate", "runtime", "#c0392b", "-"),
        ("lru", "LRU", "#1f6f8b", "-"),
        ("belady", "Belady", "#222222", "--"),
    ):
        rates = [100 * np.mean([getattr(counts, name) for counts in layers]) for layers in results]
        left.plot(pools, rates, style, marker="o", ms=3, color=color, label=label)
    left.set_xscale("log", base=2)
    left.set_xticks(pools, [f"{pool:g}" for pool in pools])
    left.set(xlabel="pool, multiples of top-k", ylabel="hit rate, %", title=trace.model)
    if any(counts.forecasts for counts in results[0]):
        alphas = _mean(results[0], "alpha")
        for i, (pool, layers) in enumerate(zip(pools, results, strict=True)):
            color = pyplot.get_cmap("viridis")(i / max(1, len(pools) - 1) * 0.9)
            right.plot(alphas, 100 * _mean(layers, "wasted"), marker="o", ms=3, color=color, label=f"{pool:g} k")
            right.plot(alphas, 100 * _mean(layers, "misses_left"), "--", marker="o", ms=3, color=color)
    right.set(xlabel="alpha", ylabel="% of top-k", title="fetched in vain (—), misses left (- -)")
    for panel in (left, right):
        panel.grid(alpha=0.3)
        if panel.get_legend_handles_labels()[0]:
            panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=5, frameon=False, fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
