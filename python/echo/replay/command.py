"""What the command is asked for, and what it has the runtime do."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import echo
from echo import files, settings, trace_options
from echo.decoding import device_of
from echo.replay.counts import (
    POLICIES,
    LayerCounts,
    LayerForecasts,
    LayerPrefetches,
    deviation_of,
    layer_counts,
    layer_forecasts,
    layer_prefetches,
)
from echo.replay.picture import save_picture
from echo.replay.tables import print_forecasts, print_pools, print_predictor, print_prefetches
from echo.traces import Trace
from echo.traces.comparison import compare, slots_of
from echo.traces.drive import Driven, drive

_ALPHAS = "0,0.3,0.5,0.7,0.9"


def add_command(commands: Any) -> None:
    """Adds `replay` to the commands."""
    parser = commands.add_parser(
        "replay",
        help="drive a runtime's pools and predictor with a trace, without a model",
        description="A trace drives a runtime without the model: what its pools hit, evict and fetch, beside LRU and "
        "Belady's optimum; then the same with prefetches, and with forecasts.",
    )
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
        "with forecasts; 0 for not, -1 for a tenth of top-k (default: ECHO_FORECAST_CAP, else -1)",
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
    compared = compare(trace, slots, POLICIES, layers)
    driven = [drive(trace, size, compared.layers, device=device, alpha=alpha) for size in slots]
    results = [layer_counts(trace, compared, i, driven[i], alphas) for i in range(len(pools))]
    ahead = _prefetches(trace, slots, compared.layers, alpha, device, cap)
    if forecast_cap == -1 or (options.forecast_cap is None and forecast_cap == 0):  # on the CPU, too
        forecast_cap = max(1, trace.top_k // 10)
    nexts = _with_forecasts(trace, slots, compared.layers, alpha, device, forecast_cap)
    first = driven[0]
    print(f"{trace.model}: {trace.summary()}; rows of {first.row_bytes} B on {first.device}")
    print_pools(pools, results)
    print_predictor(pools, results, alphas)
    if ahead:
        print_prefetches(trace, pools, results, ahead)
    if nexts:
        print_forecasts(trace, pools, results, nexts, forecast_cap)
    deviation = deviation_of(trace, compared.layers, first, alpha)
    if deviation is not None:
        print(
            f"\nat alpha {alpha:g} the runtime's own average of k-th scores differs from the trace's by {deviation:.1g}"
        )
    if options.json is not None:
        report = {**_report(trace, pools, alphas, driven, results), "runtime_alpha": alpha}
        report["runtime_average_off_by"] = deviation
        for pool, layers_ahead in zip(report["pools"], ahead, strict=False):
            pool["prefetches"] = [asdict(one) for one in layers_ahead]
        for pool, of_layers in zip(report["pools"], nexts, strict=False):
            pool["next_step"] = {"forecast_cap": forecast_cap, "layers": [asdict(one) for one in of_layers]}
        files.write_text(options.json, json.dumps(trace_options.finite(report), indent=1, allow_nan=False) + "\n")
    if options.plot is not None:
        save_picture(options.plot, trace, pools, results)
    return 0


def _prefetches(
    trace: Trace, slots: Sequence[int], layers: Sequence[int], alpha: float, device: str, cap: float
) -> list[list[LayerPrefetches]]:
    """By pool; empty if there is nothing to prefetch by."""
    if trace.ranks == 0:
        return []
    driven = [drive(trace, size, layers, device=device, alpha=alpha, prefetch_cap=cap) for size in slots]
    return [layer_prefetches(one, layers) for one in driven]


def _with_forecasts(
    trace: Trace, slots: Sequence[int], layers: Sequence[int], alpha: float, device: str, cap: int
) -> list[list[LayerForecasts]]:
    """By pool; empty if there is nothing to go by, or no forecast is asked for."""
    if trace.ranks == 0 or cap == 0:
        return []
    driven = [drive(trace, size, layers, device=device, alpha=alpha, forecast_cap=cap) for size in slots]
    return [layer_forecasts(one, layers) for one in driven]


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
