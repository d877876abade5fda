"""What prefetch gains, drawn from prefetch.json: `prefetch_plot.py FILE PICTURE`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

_PAPER = {0.5: 1.29, 0.9: 1.51}  # the ECHO paper's figure 18, H20
_COLORS = {1: "#1f6f8b", 2: "#5aa469", 8: "#d4a017", 13: "#d2691e", 32: "#8e3b6f"}
_MARKS = {32_768: "o", 65_536: "s", 102_400: "^"}


def draw(cases: list[dict[str, Any]], picture: Path) -> None:
    """Left: time without prefetch over that with it. Right: time with prefetch over what is allowed."""
    on = [entry for entry in cases if entry["case"]["path"] == "on" and entry["case"]["hit_rate"] < 1.0]
    rates = sorted({entry["case"]["hit_rate"] for entry in on})
    figure, panels = pyplot.subplots(1, 2, figsize=(9.6, 4.0), layout="constrained")
    for entry in on:
        case = entry["case"]
        place = rates.index(case["hit_rate"]) + 0.13 * (list(_COLORS).index(case["batch"]) - 2)
        style: dict[str, Any] = {
            "color": _COLORS[case["batch"]],
            "marker": _MARKS[case["length"]],
            "fillstyle": "full" if case["row_bytes"] == 656 else "none",
            "ms": 5,
            "ls": "",
        }
        panels[0].plot(place, entry["speedup"], **style)
        panels[1].plot(place, entry["us"] / entry["us_allowed"], **style)
    for rate, ratio in _PAPER.items():
        if rate in rates:
            place = rates.index(rate)
            panels[0].plot([place - 0.4, place + 0.4], [ratio, ratio], color="#222222", lw=1.2)
            panels[0].annotate(f"ECHO paper {ratio}", (place + 0.4, ratio), ha="right", va="bottom", fontsize=8)
    for panel in panels:
        panel.axhline(1.0, color="#8a8a8a", lw=0.8, ls=":")
        panel.set_xticks(range(len(rates)), [f"{100 * rate:g} %" for rate in rates])
        panel.set_xlabel("selected rows that are resident")
        panel.grid(axis="y", alpha=0.3)
        panel.spines[["right", "top"]].set_visible(False)
    panels[0].set_title("score + select + recall: time without prefetch / with it", fontsize=9)
    panels[1].set_title("time with prefetch / (1.08 max(score alone, copy alone) + 12 us)", fontsize=9)
    for batch, color in _COLORS.items():
        panels[0].plot([], [], color=color, marker="s", ls="", label=f"batch {batch}")
    for length, mark in _MARKS.items():
        panels[0].plot([], [], color="#222222", marker=mark, ls="", label=f"{length // 1024}K tokens")
    panels[0].plot([], [], color="#222222", marker="o", fillstyle="none", ls="", label="1152 B rows")
    figure.legend(loc="outside lower center", fontsize=8, frameon=False, ncols=9, handletextpad=0.1, columnspacing=1.0)
    figure.savefig(picture, dpi=125, metadata={"Software": None})
    pyplot.close(figure)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text())["cases"], Path(sys.argv[2]))
