"""The picture of a profile: one step as a timeline, a row for each part."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from echo import trace_options
from echo.profile.kernels import OTHER
from echo.profile.timeline import Profile, Step, part_names

_ZOOMED = 3  # layers that are drawn once more where there are many
_MANY = 8


def save_picture(path: Path, profile: Profile) -> None:
    """Draws the step whose length is the median, and means of the layers; the file's ending says in which format."""
    pyplot = trace_options.pyplot()
    step = _median_step(profile.steps)
    names = part_names([step])
    colors = {name: pyplot.get_cmap("tab10")(i % 10) if name != OTHER else "#b8c4d0" for i, name in enumerate(names)}
    zoomed = profile.layers > _MANY
    figure, panels = pyplot.subplots(2 + zoomed, 1, figsize=(12, 6 + 3 * zoomed), layout="constrained")
    _draw_timeline(panels[0], step, colors, step.end)
    panels[0].set_title("one step" if profile.call_us is None else "one step, under the profiler")
    if zoomed:
        first = [span.end for span in step.spans if span.layer is not None and span.layer < _ZOOMED]
        _draw_timeline(panels[1], step, colors, max(first, default=step.end))
        panels[1].set_title(f"its first {_ZOOMED} layers")
    layers, bottom = np.arange(profile.layers), np.zeros(profile.layers)
    for name in names:
        times = profile.by_layer(name)
        if times.any():
            panels[-1].bar(layers, times, 0.8, bottom=bottom, color=colors[name], label=name)
            bottom += times
    panels[-1].set(xlabel="layer", ylabel="us, mean of all steps", xlim=(-0.6, profile.layers - 0.4))
    panels[-1].legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.suptitle(f"{profile.workload}; {profile.device}")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_timeline(panel: Any, step: Step, colors: dict[str, Any], end: float) -> None:
    """A row for each part, up to `end`."""
    for row, (name, color) in enumerate(colors.items()):
        pieces = [(span.start - step.start, span.end - span.start) for span in step.spans if span.part == name]
        panel.broken_barh(pieces, (row - 0.4, 0.8), color=color)
    panel.set(xlabel="us since the step began", xlim=(0, end - step.start))
    panel.set_yticks(range(len(colors)), list(colors))
    panel.invert_yaxis()


def _median_step(steps: Sequence[Step]) -> Step:
    return sorted(steps, key=lambda step: step.end - step.start)[len(steps) // 2]
