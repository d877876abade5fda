"""What the command prints."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from echo.profile.kernels import OTHER
from echo.profile.timeline import Profile

_BARS = "▁▂▃▄▅▆▇█"
_ALL_LAYERS = 8  # up to so many are shown, of more those that recall most
_MOST = 5


def print_tables(profile: Profile) -> None:
    """Verbs, then layers."""
    for line in (*verb_lines(profile), "", *layer_lines(profile)):
        print(line)


def verb_lines(profile: Profile) -> list[str]:
    """A line for each part of the step, their sum, and what was measured beside them."""
    parts = profile.parts()
    on_cpu = profile.call_us is None
    count = "calls" if on_cpu else "launches"
    lines = [f"{'':<16}{'us per layer':>14}{'us per step':>14}{'share':>9}{count:>10}"]
    for part in parts:
        per_layer = "" if part.us_per_layer is None else f"{part.us_per_layer:,.2f}"
        pieces = part.launches and not (on_cpu and part.name == OTHER)
        times = f"{part.launches:,.0f}" if pieces else ""
        lines.append(f"{part.name:<16}{per_layer:>14}{part.us:>14,.1f}{part.share:>9.1%}{times:>10}")
    total = sum(part.us for part in parts)
    lines.append(f"{'step':<16}{total / profile.layers:>14,.2f}{total:>14,.1f}{1:>9.1%}")
    if profile.call_us is None:
        lines.append("on the CPU: verbs one by one; other is the model; begin and commit include the host's work")
    else:
        lines.append(
            f"a step takes {profile.step_us:,.1f} us without the profiler; its call keeps the host "
            f"{profile.call_us:,.1f} us"
        )
        if total > 1.05 * profile.step_us:
            lines.append("kernels take longer under the profiler than the step takes without: mind the shares")
    return lines


def layer_lines(profile: Profile) -> list[str]:
    """Recall layer by layer."""
    times = profile.by_layer("recall")
    if not times.any():
        return ["no kernel could be put down to a layer"]
    missed, hit_rate = profile.misses, profile.hit_rate()
    lines = [
        f"recall by layer, 0 to {profile.layers - 1}",
        f"us        {sparkline(times)}  {times.min():,.1f} to {times.max():,.1f}",
        f"missed    {sparkline(missed)}  {missed.min():,.1f} to {missed.max():,.1f} rows per step",
        "",
        f"{'':<47}rows per step",
        f"{'layer':<8}{'recall, us':>12}{'of all recall':>15}{'missed':>12}{'prefetched':>12}{'used':>8}"
        f"{'forecast':>10}{'used':>8}{'hit rate':>10}",
    ]
    shown = range(profile.layers) if profile.layers <= _ALL_LAYERS else np.argsort(-times, kind="stable")[:_MOST]
    for layer in shown:
        lines.append(
            f"{layer:<8}{times[layer]:>12,.1f}{times[layer] / times.sum():>15.1%}"
            f"{missed[layer]:>12,.1f}{profile.prefetched[layer]:>12,.1f}{profile.prefetched_used[layer]:>8,.1f}"
            f"{profile.forecast[layer]:>10,.1f}{profile.forecast_used[layer]:>8,.1f}{hit_rate[layer]:>10.1%}"
        )
    if len(shown) < profile.layers:
        lines.append(f"the {len(shown)} layers that recall longest; --json writes all")
    return lines


def sparkline(values: Sequence[float] | np.ndarray) -> str:
    """A bar for each, from 0 to the largest."""
    most = max(float(np.max(values)), 1e-9)
    return "".join(_BARS[min(int(len(_BARS) * float(value) / most), len(_BARS) - 1)] for value in values)
