"""Score, select and recall of DeepSeek-V3.2 with and without prefetch, at hit rates from a half to all.

The same harness as test_layer.py, without new tokens and without attention; two dozen layers, or as many as fit.
`path` is on (score lists what may be selected, and fetches what probably will be), off (neither), or candidates (it
lists, but fetches nothing). Beside them, of the same data: score alone, score that lists, and a plain gather of the
rows to be missed, fresh and in order of address, with its best grid. The longer of score and gather is what can be
reached at best, and `us_allowed` what is aimed at: 1.08 times that and 12 us. Medians, microseconds per layer. With all
rows resident, also in the steps before, prefetch may cost 3 %.

Scores change from step to step as in traces of the long-context kind, and k-th scores with them (step_inputs.cu): what
is predicted is the average of those before, as in a runtime. `listed` and `full_selects` say how good it is.

Writes prefetch.json, and prefetch.png where matplotlib is installed. All of it takes two minutes; `-k "b13 and l102400
and 656"` chooses cases.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import record
from gates import Gates
from native.binding import device_clock
from native.step_binding import PREFETCH_CAP, TOP_K, Case, Part, Result, StepBench

ROUNDS = 5
WARM_UP = 2
SETTLED = 5  # replays without misses, after which k-th scores are foretold as well as ever
GRIDS = (32, 132)  # blocks of 512 threads; the gather takes the better one
HOST_BYTES = 54e9  # of slabs
MOST_LAYERS = 24
HIT_RATES = (0.5, 0.9, 0.97, 0.99, 1.0)
MOST_COST = 1.03  # of prefetch where all rows are resident


def case_of(batch: int, length: int, row_bytes: int) -> Case:
    """With as many layers as fit."""
    one = Case(batch, length, layers=1, row_bytes=row_bytes, new_rows=False)
    layers = min(MOST_LAYERS, int(HOST_BYTES // one.host_bytes))
    return Case(batch, length, layers=layers, row_bytes=row_bytes, new_rows=False)


CASES = [
    case_of(batch, length, row_bytes)
    for row_bytes in (656, 1152)
    for length in (32_768, 65_536, 102_400)
    for batch in (1, 2, 8, 13, 32)
]

_MEASURED = pytest.StashKey[list[dict[str, Any]]]()

pytestmark = pytest.mark.benchmark(group="indexer", timer=device_clock)


@pytest.fixture(scope="session")
def alone() -> dict[Case, tuple[float, float, int]]:
    """Time of score alone, without and with lists, and nodes that are not of a layer, by case."""
    return {}


@pytest.fixture(scope="session", autouse=True)
def plotted(request: pytest.FixtureRequest) -> Iterator[None]:
    """Draws what was measured."""
    yield
    try:
        import prefetch_plot
    except ImportError:
        return
    made = request.config.stash.get(_MEASURED, [])
    if made:
        prefetch_plot.draw(made, record.RESULTS / "prefetch.png")


def median(case: Case, results: list[Result]) -> float:
    """Microseconds per layer."""
    return float(statistics.median([result.microseconds for result in results])) / case.layers


def figures_of(case: Case, results: list[Result], frame: int) -> dict[str, Any]:
    """Time, and counts per layer; `frame` nodes are not of a layer."""
    calls = case.layers * len(results)
    return {
        "us": median(case, results),
        "layers": case.layers,
        "launches_per_layer": (results[0].nodes - frame) / case.layers,
        "misses": sum(result.misses for result in results) / calls,
        "prefetched": sum(result.prefetched for result in results) / calls,
        "prefetched_used": sum(result.prefetched_used for result in results) / calls,
        "prefetches_capped": sum(result.prefetches_capped for result in results) / calls,
        "full_selects": sum(result.full_selects for result in results) / calls / case.batch,
        "listed": sum(result.candidates for result in results) / calls / case.batch / TOP_K,
        "natural_miss_rate": sum(result.natural_misses for result in results) / calls / case.batch / TOP_K,
    }


@pytest.mark.parametrize("hit_rate", HIT_RATES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_indexer(
    case: Case,
    hit_rate: float,
    step_bench: StepBench,
    alone: dict[Case, tuple[float, float, int]],
    benchmark: Any,
    gates: Callable[[str], Gates],
    request: pytest.FixtureRequest,
) -> None:
    """Both paths at one hit rate, and what limits them."""
    step_bench.create(case)
    misses = case.misses(1.0 - hit_rate)

    def replays(part: Part, rounds: int = ROUNDS, warm_up: int = 1, **options: Any) -> list[Result]:
        return [step_bench.replay(part, misses, **options) for _ in range(warm_up + rounds)][warm_up:]

    def listing() -> Iterator[Result]:
        for _ in range(ROUNDS):
            step_bench.replay(Part.RECALL, 0, sift=True)  # a step later the prediction is known, and not old
            yield step_bench.replay(Part.SCORE, 0, sift=True)

    if case not in alone:
        score = median(case, replays(Part.SCORE))
        replays(Part.RECALL, rounds=2)
        alone[case] = score, median(case, list(listing())), step_bench.replay(Part.NOTHING).nodes
    score, score_listing, frame = alone[case]
    warm_up = WARM_UP if misses else SETTLED
    gathers = [median(case, replays(Part.GATHER, rounds=3, blocks=blocks)) for blocks in GRIDS if misses]
    gather = min(gathers, default=0.0)
    results = {"off": replays(Part.RECALL), "candidates": replays(Part.RECALL, warm_up=warm_up, sift=True)}
    step_bench.verify()
    on: list[Result] = []
    benchmark.pedantic(
        lambda: on.append(step_bench.replay(Part.RECALL, misses, sift=True, prefetch_cap=PREFETCH_CAP)),
        rounds=ROUNDS,
        warmup_rounds=warm_up,
    )
    step_bench.verify()
    results["on"] = on[-ROUNDS:]
    times = {path: median(case, of_path) for path, of_path in results.items()}
    allowed = 1.08 * max(score, gather) + 12.0
    keys = {"batch": case.batch, "length": case.length, "hit_rate": hit_rate, "row_bytes": case.row_bytes}
    problems = []
    if not misses and times["on"] > MOST_COST * times["off"]:
        problems.append(f"prefetch costs {times['on']:.1f} us instead of {times['off']:.1f}, all rows resident")
    for path, of_path in results.items():
        figures = figures_of(case, of_path, frame)
        if path == "on":
            figures |= {"us_score": score, "us_score_listing": score_listing, "us_gather_sorted": gather}
            figures |= {"us_allowed": allowed}
            figures |= {"within": times["on"] <= allowed, "speedup": times["off"] / times["on"]}
            figures |= {"speedup_of_prefetch": times["candidates"] / times["on"]}
        request.config.stash.setdefault(_MEASURED, []).append({"case": {**keys, "path": path}, **figures})
        benchmark.extra_info[path] = figures
        problems += gates("prefetch").add({**keys, "path": path}, figures, exact=("launches_per_layer",), times=("us",))
    assert not problems, "\n".join(problems)
