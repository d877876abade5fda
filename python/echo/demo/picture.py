"""The picture of a demonstration: hit rate per layer, and the working set from step to step."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from echo import trace_options
from echo.demo.decode import Decoded
from echo.demo.figures import WINDOW, working_set
from echo.settings import counted


def save_picture(path: Path, resident: Decoded, offloaded: Decoded) -> None:
    """Draws both runs into a file; its ending says in which format."""
    pyplot = trace_options.pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    layers = np.arange(offloaded.hit_rate.shape[1])
    hits = 100 * offloaded.hit_rate.mean(axis=0)
    first_uses = 100 - 100 * resident.hit_rate.mean(axis=0)
    left.bar(layers, hits, 0.6, label="in the pool", color="#1f6f8b")
    left.bar(layers, first_uses, 0.6, bottom=hits, label="missed, first use", color="#b8c4d0")
    left.bar(layers, np.maximum(0, 100 - hits - first_uses), 0.6, bottom=hits + first_uses,
             label="missed again", color="#c0392b")  # fmt: skip
    left.set(xlabel="layer", ylabel="selected rows, %", xticks=layers, ylim=(0, 100))
    left.set_title(f"Hit rate per layer, pool of {offloaded.pool:,} slots")
    left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3, frameon=False)
    counts = working_set(offloaded.selections)
    for layer in layers:
        color = pyplot.get_cmap("viridis")(layer / len(layers))
        right.plot(counts[:, layer], label=f"layer {layer}", color=color)
    right.axhline(offloaded.pool, color="#c0392b", linestyle="--", label="slots in the pool")
    right.set(xlabel="step", ylabel="rows", ylim=(0, 1.05 * max(offloaded.pool, counts.max())))
    right.set_title(f"Working set: rows selected in the last {WINDOW} steps")
    right.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3, frameon=False, fontsize="small")
    sessions = offloaded.tokens.shape[1]
    tokens = f"{resident.pool:,} tokens, {offloaded.pool / resident.pool:.0%} of them in the pool"
    figure.suptitle(f"{counted(sessions, 'session')}, {tokens}")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
