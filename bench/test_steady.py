"""Steady decode steps of a real runtime of DeepSeek-V3.2's attention: counts, all of them exact.

What the host asks of CUDA for each replayed step (one graph launch, one copy from pinned memory; no synchronisation, no
allocation, no pageable copy), as CUPTI saw it, and how many nodes the graph has: for a layer, by verb, and besides.
`settings` are those of the runtime: its defaults, or everything off that fetches rows ahead.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gates import Gates

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support.gpu import host_work, recorded, steady  # noqa: E402

sys.path.pop(0)

import echo  # noqa: E402
from echo.bench import systems  # noqa: E402
from echo.bench.regimes import REGIMES  # noqa: E402
from echo.bench.schedule import Load, schedule  # noqa: E402
from echo.bench.serve import Server  # noqa: E402
from echo.profile.kernels import OTHER, VERBS, part_of  # noqa: E402

STEPS, LENGTH = 20, 4096
WINDOW = "steady steps"


def issue(step: Callable[[], None], count: int) -> None:
    """So many steps, like a scheduler that sees the tokens of a step before it issues the one after the next."""
    events = [torch.cuda.Event(), torch.cuda.Event()]
    for number in range(count):
        step()
        events[number % 2].record()
        while number > 0 and not events[(number - 1) % 2].query():
            pass
    while not events[(count - 1) % 2].query():
        pass


def nodes_of(trace: Path, steps: int, layers: int) -> dict[str, Any]:
    """Kernels and fills of a step that a trace has: for a layer, by verb, and besides, by what they are."""
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("ph") == "X"]
    parts = Counter(part_of(event["name"]) for event in events if event.get("cat") == "kernel")
    parts[OTHER] += sum(event.get("cat") == "gpu_memset" for event in events)
    layer = {part: count / steps / layers for part, count in sorted(parts.items()) if set(part.split("+")) & {*VERBS}}
    besides = {part: count / steps for part, count in sorted(parts.items()) if part not in layer and count}
    return {"nodes_per_layer": sum(layer.values()), "nodes_by_verb": layer, "nodes_besides": besides}


@pytest.mark.benchmark(group="steady")
@pytest.mark.parametrize("settings", ["off", "defaults"])
@pytest.mark.parametrize("batch", [1, 13])
def test_steady(batch: int, settings: str, benchmark: Any, gates: Callable[[str], Gates], tmp_path: Path) -> None:
    """Of replayed steps, 61 layers."""
    if not torch.cuda.is_available() or "CUDA" not in echo.build_info():
        pytest.skip("no CUDA device can be used")
    shape, load = echo.ModelShape(), Load((LENGTH,) * batch, (8 * STEPS,) * batch)
    off = systems.settings_of("echo", shape) if settings == "off" else {}
    slots = batch * (shape.top_k + 1)
    with Server(shape, load, batch, REGIMES["glm"], device="cuda", gpu_slots=slots, **off) as server:
        runtime, stretch = server.runtime, schedule(load, batch)[0]
        step = server.steady_step(stretch)
        issue(step, STEPS)
        runtime.synchronize()
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            with torch.profiler.record_function(WINDOW):
                issue(step, STEPS)
            runtime.synchronize()
        profile.export_chrome_trace(str(tmp_path / "trace.json"))

        def synchronous_step() -> None:
            step()
            runtime.synchronize()

        benchmark.pedantic(synchronous_step, rounds=STEPS)
    calls, copies, _ = recorded(tmp_path / "trace.json", WINDOW)
    host = host_work(calls, copies)
    assert host == steady(STEPS), f"{dict(calls)}, {dict(copies)}"
    figures = {
        "host_calls_per_step": {name: count / STEPS for name, count in host.items()},
        **nodes_of(tmp_path / "trace.json", STEPS, shape.layers),
    }
    benchmark.extra_info["figures"] = figures
    problems = gates("steady").add({"batch": batch, "settings": settings}, figures, exact=tuple(figures))
    assert not problems, "\n".join(problems)
