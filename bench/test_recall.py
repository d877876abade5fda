"""Recall: a CUDA graph of 61 calls, k = 2048, each call with its own pool, maps and slab of pinned host memory.

Every replay selects at random: `misses` rows per call that are not resident, the others resident, in every session,
on a cold L2 cache and on host rows that were not read lately. Times are those of the graph, by CUDA events; medians.
Counts are checked in every replay; maps, slots and bytes after the last one.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gates import Gates
from native.binding import LAYERS, Bench, Case, Kind, device_clock, skip_reason

ROUNDS = 15
WARM_UP = 3
GRIDS = (16, 32, 64, 132)  # blocks of 512 threads; the gather takes the best

# In order of the host rows they need, which are filled anew when that changes. Lengths: 100K tokens, or what fits into
# the host memory that 13 sessions of 100K take.
CASES = [
    Case(1, 0),
    Case(1, 41),
    Case(1, 1024),
    Case(8, 328),
    Case(13, 0),
    Case(13, 533),
    Case(13, 533, pool_slots=200_000),
    Case(13, 533, pool_slots=1_000_000),
    Case(13, 2665),
    Case(13, 13312),
    Case(64, 2624, length=20_000),
    Case(102, 4182, length=12_600),
    Case(13, 533, length=56_000, row_bytes=1152),
    Case(13, 2665, length=56_000, row_bytes=1152),
]

_PEERS = json.loads((Path(__file__).parent / "results" / "peers.json").read_text())
# By batch, misses and bytes of a row; `us_without_copy` and `us_per_call` of each peer.
PEERS: dict[tuple[int, int, int], dict[str, dict[str, float | None]]] = {
    (entry["case"]["batch"], entry["case"]["misses"], entry["case"]["row_bytes"]): entry["peers"]
    for entry in _PEERS["cases"]
}

pytestmark = pytest.mark.benchmark(group="recall", timer=device_clock)


@pytest.fixture(scope="session")
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """The library with as much pinned host memory as the largest of the chosen cases needs."""
    if (reason := skip_reason()) is not None:
        pytest.skip(reason)
    chosen = [item.callspec.params.get("case") for item in request.session.items if hasattr(item, "callspec")]
    made = Bench(max(case.host_bytes for case in chosen if isinstance(case, Case)))
    yield made
    made.close()


@pytest.fixture
def case(request: pytest.FixtureRequest, bench: Bench) -> Iterator[Case]:
    """The case, set up."""
    bench.create(request.param)
    yield request.param
    bench.destroy()


def median_of(bench: Bench, kind: Kind, blocks: int = 0, rounds: int = ROUNDS, warm_up: int = 1) -> float:
    """Median of some replays after a warm-up, us per call."""
    return statistics.median([bench.replay(kind, blocks) for _ in range(warm_up + rounds)][warm_up:])


def ceiling(bench: Bench, kind: Kind) -> tuple[float, int]:
    """Time of a plain gather with its best grid, and that grid."""
    grid = min(GRIDS, key=lambda blocks: median_of(bench, kind, blocks, rounds=5))
    return median_of(bench, kind, grid), grid


def benchmarked(bench: Bench, benchmark: Any, kind: Kind) -> float:
    """Median of the replays that pytest-benchmark runs, us per call."""
    times: list[float] = []
    benchmark.pedantic(lambda: times.append(bench.replay(kind)), rounds=ROUNDS, warmup_rounds=WARM_UP)
    benchmark.extra_info["us_per_call"] = times[-ROUNDS:]
    return statistics.median(times[-ROUNDS:])


def finish(
    case: Case, benchmark: Any, gates: Callable[[str], Gates], figures: dict[str, Any], times: tuple[str, ...]
) -> None:
    """Records a case whose verification succeeded, and compares it with the baseline."""
    figures["verified"] = True
    benchmark.extra_info["figures"] = figures
    problems = gates("recall").add(case.keys(), figures, exact=("launches_per_call",), times=times)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("case", CASES, indirect=True, ids=str)
def test_recall(case: Case, bench: Bench, benchmark: Any, gates: Callable[[str], Gates]) -> None:
    """Misses of all sizes, with what the copy costs and what the link could do."""
    figures: dict[str, Any] = {"us_per_call": benchmarked(bench, benchmark, Kind.RECALL)}
    figures["launches_per_call"] = bench.launches_per_call(Kind.RECALL)
    bench.verify()
    if case.misses > 0:
        figures["us_gather_sorted"], figures["gather_blocks"] = ceiling(bench, Kind.GATHER_SORTED)
        figures["us_gather_random"], _ = ceiling(bench, Kind.GATHER_RANDOM)
        figures["of_ceiling"] = figures["us_per_call"] / figures["us_gather_sorted"]
    figures["us_without_copy"] = median_of(bench, Kind.WITHOUT_COPY, warm_up=WARM_UP)
    bench.verify()
    if case.slots == 4096 * case.batch:
        figures["peers"] = PEERS.get((case.batch, case.misses, case.row_bytes), {})
    finish(case, benchmark, gates, figures, times=("us_without_copy", "us_per_call"))


@pytest.mark.parametrize("case", [Case(13, 37, new_rows=1)], indirect=True, ids=str)
def test_step_with_new_rows(case: Case, bench: Bench, benchmark: Any, gates: Callable[[str], Gates]) -> None:
    """All cache management of a step: begin, a new token of each session with its slot and backup, few misses."""
    per_call = benchmarked(bench, benchmark, Kind.RECALL)
    bench.verify()
    gather, blocks = ceiling(bench, Kind.GATHER_SORTED)
    figures = {
        "ms_per_step": 1e-3 * LAYERS * per_call,
        "us_per_call": per_call,
        "us_gather_sorted": gather,
        "gather_blocks": blocks,
        "launches_per_call": bench.launches_per_call(Kind.RECALL),
        "peers": _PEERS["step"],
    }
    finish(case, benchmark, gates, figures, times=("ms_per_step",))


@pytest.mark.parametrize("case", [Case(13, 533, length=92_000, released=100_000)], indirect=True, ids=str)
def test_release(case: Case, bench: Bench, benchmark: Any, gates: Callable[[str], Gates]) -> None:
    """What a step takes longer when a session of 100K tokens is released right before it."""
    released = benchmarked(bench, benchmark, Kind.RELEASED)
    bench.verify()
    alone = median_of(bench, Kind.RECALL, warm_up=WARM_UP)
    bench.verify()
    figures = {
        "us_per_step": LAYERS * alone,
        "us_per_step_with_release": LAYERS * released,
        "us_of_release": LAYERS * (released - alone),
        "launches_per_call": bench.launches_per_call(Kind.RECALL),
    }
    finish(case, benchmark, gates, figures, times=("us_per_step", "us_per_step_with_release"))
