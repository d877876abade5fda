"""One layer of a decode step of DeepSeek-V3.2: score, select, recall and attend, through the CUDA backend.

A graph of as many layers as fit, 61 where possible, all different, begins and commits like a step of the runtime. Every
replay appends a token to each session; scores change from step to step as those of a model, and select, in each layer,
just the share of rows that is to be missed, at random, on cold caches. Score lists candidates for select, and fetches
rows, as it does in a runtime, unless something else is said. `system`:

- resident: nothing is missed, nor was in the steps before;
- echo: 2 % of the selected rows are not there when the layer begins;
- no_prefetch: the same, but score does nothing but score, and recall fetches all of them;
- changing: what is missed is what scores have changed in pools, of 4 top-k slots per session, that steps before left;
- forecast: the same with forecasts of up to FORECAST_CAP rows per session and layer;
- forecast_resident: these forecasts, but nothing is missed: what they cost;
- without_offload: all rows lie on the GPU at fixed places, nothing is looked up or fetched.

Medians, microseconds per layer. `verbs` are differences between graphs that end after one verb or the next. Counts are
checked in every replay; selections, maps, bytes and outputs (against the rows of the host) in some.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from gates import Gates
from native.binding import device_clock
from native.step_binding import NATURAL, PREFETCH_CAP, TOP_K, Case, Part, Result, StepBench

ROUNDS = 12
PART_ROUNDS = 3
MISS_RATE = 0.02
FORECAST_CAP = TOP_K // 10
SETTLING = 20
"""Replays after which k-th scores are foretold as well as ever, and pools hold what the steps before left."""
PARTS = {
    Part.NOTHING: "begin_commit", Part.SCORE: "score", Part.SELECT: "select", Part.RECALL: "recall",
}  # fmt: skip

SYSTEMS = ("resident", "echo")
CHANGING = ("changing", "forecast", "forecast_resident")
CASES = [
    *((Case(13, 102_400), system) for system in SYSTEMS),
    *((Case(13, 32_768), system) for system in SYSTEMS),
    *((Case(13, length), "no_prefetch") for length in (102_400, 32_768)),
    *((Case(32, 41_600), system) for system in SYSTEMS),
    *((Case(8, 102_400), system) for system in SYSTEMS),
    *((Case(8, 32_768), system) for system in SYSTEMS),
    *((Case(1, 102_400), system) for system in SYSTEMS),
    *((Case(1, 32_768), system) for system in SYSTEMS),
    *(
        (Case(batch, length, pool_slots=4 * TOP_K * batch), system)
        for batch, length in ((13, 102_400), (13, 32_768), (32, 41_600), (1, 102_400))
        for system in CHANGING
    ),
    *((Case(1, 4096, pool_slots=8192, without_offload=True), system) for system in ("without_offload", "resident")),
]
# The best stack of peers, each measured on its own on an H200: DeepGEMM's logits, SGLang's top-k (not always exact),
# its HiSparse recall, FlashMLA.
PEERS = {(13, 102_400): {"score": 49.4, "select": 9.4, "recall": 37.7, "attend": 34.1, "us": 130.6}}

pytestmark = pytest.mark.benchmark(group="layer", timer=device_clock)


@pytest.fixture(scope="session")
def times() -> dict[tuple[Case, str], float]:
    """Of what was measured."""
    return {}


def of_step(bench: StepBench, case: Case, system: str, part: Part) -> Result:
    """One replay of a part of the step."""
    if system == "without_offload":
        return bench.replay(Part.WITHOUT_OFFLOAD if part == Part.ATTEND else part, sift=True)
    if system == "no_prefetch":
        return bench.replay(part, case.misses(MISS_RATE))
    misses = NATURAL if system in ("changing", "forecast") else case.misses(MISS_RATE) if system == "echo" else 0
    return bench.replay(part, misses, sift=True, prefetch_cap=PREFETCH_CAP)


def verbs_of(bench: StepBench, case: Case, system: str, step: Result, us: float) -> dict[str, Any]:
    """What each verb adds, and launches of a layer."""
    times = {}
    nodes = 0
    for part, name in PARTS.items():
        if system == "without_offload" and part == Part.RECALL:
            continue
        results = [of_step(bench, case, system, part) for _ in range(1 + PART_ROUNDS)][1:]
        times[name] = statistics.median([result.microseconds for result in results]) / case.layers
        nodes = results[0].nodes if part == Part.NOTHING else nodes
    times["attend"] = us
    names = list(times)
    verbs = {name: times[name] - times[before] for before, name in itertools.pairwise(names)}
    return {
        "verbs": {"begin_commit": times["begin_commit"], **verbs},
        "launches_per_layer": (step.nodes - nodes) / case.layers,
    }


@pytest.mark.parametrize(("case", "system"), CASES, ids=str)
def test_layer(
    case: Case,
    system: str,
    step_bench: StepBench,
    times: dict[tuple[Case, str], float],
    benchmark: Any,
    gates: Callable[[str], Gates],
) -> None:
    """Times of a layer, of its verbs and of all layers, and what was recalled."""
    step_bench.create(replace(case, forecast_cap=FORECAST_CAP) if system.startswith("forecast") else case)
    results: list[Result] = []
    benchmark.pedantic(
        lambda: results.append(of_step(step_bench, case, system, Part.ATTEND)),
        rounds=ROUNDS,
        warmup_rounds=SETTLING,
    )
    step_bench.verify()
    results = results[-ROUNDS:]
    us = times[case, system] = statistics.median([result.microseconds for result in results]) / case.layers
    calls = case.layers * ROUNDS
    figures: dict[str, Any] = {
        "us": us,
        "ms_per_step": 1e-3 * us * case.layers,
        "layers": case.layers,
        **verbs_of(step_bench, case, system, results[-1], us),
        "misses": sum(result.misses for result in results) / calls,
        "prefetched": sum(result.prefetched for result in results) / calls,
        "prefetched_used": sum(result.prefetched_used for result in results) / calls,
        "full_selects": sum(result.full_selects for result in results) / calls / case.batch,
        "natural_miss_rate": sum(result.natural_misses for result in results) / calls / case.batch / TOP_K,
    }
    if system.startswith("forecast"):
        figures["forecast"] = sum(result.forecast for result in results) / calls
        figures["forecast_used"] = sum(result.forecast_used for result in results) / calls
    if system.startswith("echo") and (case.batch, case.length) in PEERS:
        figures["peers"] = PEERS[case.batch, case.length]
    if (without := times.get((case, "without_offload"))) is not None and system != "without_offload":
        figures["of_without_offload"] = us / without
    benchmark.extra_info["figures"] = figures
    keys = {"batch": case.batch, "length": case.length, "system": system}
    problems = gates("layer").add(keys, figures, exact=("launches_per_layer",), times=("us",))
    assert not problems, "\n".join(problems)
