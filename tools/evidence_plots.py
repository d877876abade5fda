"""The pictures of docs/evidence.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from evidence_measure import ALPHAS, POOLS, SAMPLE, Measured, turns

from echo.policies import LINES

matplotlib.use("Agg")
from matplotlib import pyplot

_LAYERS = ("#1f6f8b", "#5aa469", "#d4a017", "#d2691e", "#8e3b6f")
_TRACES = ("#222222", "#4a6fa5", "#7a9e7e", "#b08968")
_GREY = "#8a8a8a"
_STYLE: Any = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 9,
    "font.size": 9,
    "grid.alpha": 0.3,
    "legend.fontsize": 8,
    "legend.frameon": False,
}


def draw(folder: Path, real: Sequence[Measured], made: Sequence[Measured]) -> None:
    """Writes all pictures into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with pyplot.rc_context(_STYLE):
        _save(folder / "overlap.png", _overlap(real, made))
        _save(folder / "policies.png", _policies([*real, *made[:2]]))
        _save(folder / "kth_score.png", _kth_score(real, made))
        _save(folder / "prefetch.png", _prefetch(real))
        _save(folder / "regimes.png", _regimes(real, made))


def _save(path: Path, figure: Any) -> None:
    figure.savefig(path, dpi=125, metadata={"Software": None})
    pyplot.close(figure)


def _panels(rows: int, columns: int, width: float = 8.4, height: float = 2.7, **options: Any) -> tuple[Any, Any]:
    return pyplot.subplots(rows, columns, figsize=(width, height * rows), layout="constrained", **options)


def _overlap(real: Sequence[Measured], made: Sequence[Measured]) -> Any:
    figure, (left, right) = _panels(1, 2, height=3.1, gridspec_kw={"width_ratios": [3, 2]})
    layers = real[0].trace.layers
    for i, (one, color) in enumerate(zip(real, _TRACES, strict=True)):
        for layer in range(layers):
            _box(left, layer + 0.18 * (i - 1.5), 100 * one.overlap[:, layer], color)
        left.plot([], [], color=color, lw=5, label=one.name)
    places = [layers + 0.5 + 0.6 * i for i in range(len(made))]
    for place, one in zip(places, made, strict=True):
        _box(left, place, 100 * one.overlap[:, 0], _GREY)
    names = [*(f"layer {layer}" for layer in range(layers)), *(one.name for one in made)]
    left.set_xticks([*range(layers), *places], names, rotation=40, ha="right")
    left.set(ylabel="selected in the step before, too, %", ylim=(0, 100), title="all steps (5, 25, 50, 75, 95 %)")
    left.legend(ncols=4, loc="lower left")
    changing = next(one for one in real if turns(one.trace))
    for layer, color in enumerate(_LAYERS):
        right.plot(range(1, changing.trace.steps), 100 * changing.overlap[:, layer], color=color, lw=0.9)
    for turn in turns(changing.trace):
        right.axvline(turn, color="#222222", lw=0.8, ls=":")
    right.set(xlabel="decode step (dotted: another text)", ylim=(0, 100), title=f"{changing.name}, step by step")
    for layer, color in enumerate(_LAYERS):
        right.plot([], [], color=color, lw=2, label=f"layer {layer}" if layer == 0 else f"{layer}")
    right.legend(ncols=len(_LAYERS), loc="lower left", handlelength=1.2, columnspacing=1.0)
    return figure


def _box(panel: Any, place: float, shares: Any, color: str) -> None:
    low, first, median, third, high = np.percentile(shares, [5, 25, 50, 75, 95])
    panel.plot([place, place], [low, high], color=color, lw=1)
    panel.plot([place, place], [first, third], color=color, lw=5, solid_capstyle="butt")
    panel.plot([place - 0.07, place + 0.07], [median, median], color="white", lw=1.2)


def _policies(measured: Sequence[Measured]) -> Any:
    figure, panels = _panels(2, -(-len(measured) // 2), sharex=True)
    for panel, one in zip(panels.flat, measured, strict=False):
        for name, (color, style) in LINES.items():
            rates = 100 - 100 * one.misses.mean(name)
            order = 4 if name == "score" else 3  # hardly different from echo: dots on its line
            panel.plot(POOLS, rates, style, marker="o", ms=2.5, lw=1.3, color=color, label=name, zorder=order)
        panel.set_xscale("log", base=2)
        panel.set_xticks(POOLS, [f"{pool:g}" for pool in POOLS])
        panel.minorticks_off()
        panel.set_title(_title(one))
    for panel in panels[:, 0]:
        panel.set_ylabel("hit rate, %")
    for panel in panels[-1]:
        panel.set_xlabel("pool, multiples of top-k")
    panels[0, 0].legend(loc="lower right")
    return figure


def _title(one: Measured) -> str:
    made = one.trace.model.startswith("synthetic")
    return f"{one.name} (generated)" if made else f"{one.name}, {one.trace.context[0] / 1000:.0f}K tokens"


def _kth_score(real: Sequence[Measured], made: Sequence[Measured]) -> Any:
    figure, panels = _panels(1, len(real) + 1, sharey=True)
    for panel, one in zip(panels, real, strict=False):
        for layer, forecasts in enumerate(one.forecasts):
            panel.plot(ALPHAS, [f.error for f in forecasts], color=_LAYERS[layer], lw=1.5, label=f"layer {layer}")
        panel.set(title=_title(one), xlabel="alpha")
    for one, style in zip(made, ("-", "--", "-.", ":", (0, (1, 3))), strict=True):
        errors = [f.error for f in one.forecasts[0]]
        panels[-1].plot(ALPHAS, errors, color=_GREY, ls=style, lw=1.3, label=one.name)
    panels[-1].set(title="generated", xlabel="alpha")
    panels[0].set(ylabel="error, standard deviations", ylim=(0, None))
    panels[len(real) - 1].legend(loc="upper right")
    panels[-1].legend(loc="upper left")
    return figure


def _prefetch(real: Sequence[Measured]) -> Any:
    figure, panels = _panels(1, len(real), sharey=True)
    for panel, one in zip(panels, real, strict=True):
        for name, label, color, style in (
            ("misses", "missed without prefetch", "#222222", "--"),
            ("misses_left", "missed all the same", "#1f6f8b", "-"),
            ("wasted", "fetched in vain", "#c0392b", "-"),
        ):
            means = np.mean([[getattr(f, name) for f in layer] for layer in one.forecasts], axis=0)
            panel.plot(ALPHAS, 100 * means, style, color=color, lw=1.5, label=label)
        for name, color in (("left", "#1f6f8b"), ("wasted", "#c0392b")):
            mean = np.mean([getattr(sampled, name) for sampled in one.sampled])
            panel.plot([1.15], [100 * mean], "D", ms=4, color=color, clip_on=False)
        panel.set_xticks([0, 0.3, 0.6, 0.9, 1.15], ["0", "0.3", "0.6", "0.9", f"1 in {SAMPLE}"])
        panel.set(title=_title(one), xlabel="alpha")
    panels[0].set(ylabel="rows per step, % of top-k", ylim=(0, None))
    panels[-1].legend(loc="upper right")
    return figure


def _regimes(real: Sequence[Measured], made: Sequence[Measured]) -> Any:
    figure, panel = pyplot.subplots(figsize=(8.4, 3.4), layout="constrained")
    for one in real:
        for layer, color in enumerate(_LAYERS):
            rates = 100 * one.misses.rates["lru"][:, layer]
            panel.plot(POOLS, rates, color=color, lw=1, alpha=0.8, label=f"layer {layer}" if one is real[0] else None)
    for one, mark in zip(made, "ovs^D", strict=True):
        panel.plot(POOLS, 100 * one.misses.mean("lru"), color=_GREY, marker=mark, ms=4, lw=1.2, label=one.name)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(POOLS, [f"{pool:g}" for pool in POOLS])
    panel.set_yticks([1, 3, 10, 30, 100], ["1", "3", "10", "30", "100"])
    panel.minorticks_off()
    panel.set(xlabel="pool, multiples of top-k", ylabel="missed under LRU, %", ylim=(0.2, 100))
    panel.legend(ncols=2, loc="lower left")
    return figure
