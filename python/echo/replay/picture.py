"""The picture that the command draws."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from echo import trace_options
from echo.replay.counts import LayerCounts, mean_over_layers
from echo.traces import Trace


def save_picture(path: Path, trace: Trace, pools: Sequence[float], results: Sequence[list[LayerCounts]]) -> None:
    """Hit rates over pools, and what prefetches by the predictor would fetch in vain over weights of the past."""
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
        alphas = mean_over_layers(results[0], "alpha")
        for i, (pool, layers) in enumerate(zip(pools, results, strict=True)):
            wasted, missed = (100 * mean_over_layers(layers, name) for name in ("wasted", "misses_left"))
            color = pyplot.get_cmap("viridis")(i / max(1, len(pools) - 1) * 0.9)
            right.plot(alphas, wasted, marker="o", ms=3, color=color, label=f"{pool:g} k")
            right.plot(alphas, missed, "--", marker="o", ms=3, color=color)
    right.set(xlabel="alpha", ylabel="% of top-k", title="fetched in vain (—), misses left (- -)")
    for panel in (left, right):
        panel.grid(alpha=0.3)
        if panel.get_legend_handles_labels()[0]:
            panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=5, frameon=False, fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
