"""The picture of `echo-kv bench decode`: throughput by pool, a bar for each system."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from echo import trace_options
from echo.bench.figures import PAPER, Case, base_of
from echo.bench.systems import SYSTEMS

_COLORS = dict(zip(SYSTEMS, ("#b8c4d0", "#7d8b99", "#e0a030", "#1f6f8b", "#c0392b", "#6c4f9c"), strict=True))


def save_picture(path: Path, cases: Sequence[Case], added: Sequence[float], title: str) -> None:
    """Draws a panel for each time that is added to a step; bars of a pool stand together."""
    pyplot = trace_options.pyplot()
    pools = list(dict.fromkeys(case.system.pool for case in cases))
    names = [name for name in SYSTEMS if any(case.system.name == name for case in cases)]
    figure, panels = pyplot.subplots(
        1, len(added), figsize=(3.4 * len(added) + 1, 4), layout="constrained", squeeze=False
    )
    width = 0.84 / len(names)
    for panel, extra in zip(panels[0], added, strict=True):
        for case in cases:
            x = pools.index(case.system.pool) + (names.index(case.system.name) - (len(names) - 1) / 2) * width
            rate = case.served.tokens_per_second(extra)
            panel.bar(x, rate, 0.92 * width, color=_COLORS[case.system.name])
            if (base := base_of(cases, case)) is not None and base is not case:
                ratio = rate / base.served.tokens_per_second(extra)
                panel.annotate(f"{ratio:.1f}x", (x, rate), ha="center", va="bottom", fontsize=6)
            elif case.system.pool in PAPER:
                paper = PAPER[case.system.pool] * rate
                panel.plot(pools.index(case.system.pool) + np.array([-0.42, 0.42]), [paper] * 2, "k:", lw=1)
        panel.set_xticks(range(len(pools)), [f"{pool / 1000:g}K" for pool in pools])
        panel.set(xlabel="rows per layer that fit the GPU", title=f"+ {extra:g} ms per step")
        panel.grid(axis="y", alpha=0.3)
    panels[0][0].set_ylabel("tokens per second")
    labels = [pyplot.Rectangle((0, 0), 1, 1, color=_COLORS[name]) for name in names]
    if any(pool in PAPER for pool in pools):
        labels.append(pyplot.Line2D([], [], color="k", ls=":", lw=1))
        names = [*names, "resident x the paper's ratio"]
    figure.legend(labels, names, loc="outside lower center", ncols=len(names), frameon=False, fontsize="small")
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
