"""The picture of a profile: one step as a timeline, a row for each part."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from echo import trace_options
from echo.profile.kernels import OTHER
from echo.profile.timeline import Profile, Step, part_names


def save_picture(path: Path, profile: Profile) -> None:
    """Draws the step whose length is the median, and means of the layers; the file's ending says in which format."""
    pyplot = trace_options.pyplot()
    step = _median_step(profile.steps)
    names = part_names([step])
    colors = {name: pyplot.get_cmap("tab10")(i % 10) if name != OTHER else "#b8c4d0" for i, name in enumerate(names)}
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(12, 6), layout="constrained")
    for row, name in enumerate(names):
        pieces = [(span.start - step.start, span.end - span.start) for span in step.spans if span.part == name]
        above.broken_barh(pieces, (row - 0.4, 0.8), color=colors[name])
    above.set(xlabel="us since the step began", xlim=(0, step.end - step.start))
    above.set_yticks(range(len(names)), names)
    above.invert_yaxis()
    above.set_title("one step" if profile.call_us is None else "one step, under the profiler (which widens gaps)")
    layers, bottom = np.arange(profile.layers), np.zeros(profile.layers)
    for name in names:
        times = profile.by_layer(name)
        if times.any():
            below.bar(layers, times, 0.8, bottom=bottom, color=colors[name], label=name)
            bottom += times
    below.set(xlabel="layer", ylabel="us, mean of all steps", xlim=(-0.6, profile.layers - 0.4))
    below.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.suptitle(f"{profile.workload}; {profile.device}")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _median_step(steps: list[Step]) -> Step:
    return sorted(steps, key=lambda step: step.end - step.start)[len(steps) // 2]
