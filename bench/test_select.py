"""Top-k selection: a CUDA graph of 16 layers, each with scores of its own that were written just before, as in a step.

`tools/gpu_check.sh bench-select`; microseconds per layer: the median of the graph minus that of the same graph without
select. torch.topk is measured likewise in the same run. What it selects has no order; ours is checked against a
stable sort. "list of 1.5 k": score has left a list with 1.5 k tokens.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import pytest
from gates import Gates
from native.select_binding import LAYERS, Case, SelectBench, difference, skip_reason

torch = pytest.importorskip("torch")

ROUNDS = 15
WARM_UP = 3

LENGTHS = (16_384, 65_536, 102_400, 131_072)
CASES = [
    *(Case(batch, length) for batch in (1, 13, 102) for length in LENGTHS),
    *(Case(batch, 102_400) for batch in (4, 8, 16, 32, 64)),
    *(Case(batch, 102_400, listed) for batch in (1, 13, 102) for listed in (1.25, 1.5, 2.0)),
    *(Case(13, length, 1.5) for length in LENGTHS if length != 102_400),
    *(Case(batch, 102_400, 1.5) for batch in (4, 8, 16, 32, 64)),
    Case(1, 1_048_576),
    Case(1, 1_048_576, 1.5),
    Case(13, 102_400, k=512),
    *(Case(13, 102_400, scores=scores) for scores in ("equal", "zeros", "narrow", "recent", "outliers")),
]

# Microseconds on an H200, measured before: 13 rows, k = 2048, by length. SGLang's is not always exact.
PEERS = {
    16_384: {"sglang_v2": 7.9, "vllm_cooperative": 9.9, "cub": 12.4, "flashinfer": 19.8},
    65_536: {"sglang_v2": 8.1, "vllm_cooperative": 13.3, "cub": 14.7, "flashinfer": 37.4},
    102_400: {"sglang_v2": 9.4, "vllm_cooperative": 15.6, "cub": 18.1, "flashinfer": 46.4},
    131_072: {"sglang_v2": 9.3, "vllm_cooperative": 16.8, "cub": 18.2, "flashinfer": 55.6},
}


def make_scores(case: Case, generator: Any) -> Any:
    """Scores of a layer; the tail behind the length is one that must not be looked at."""
    shape = (case.batch, case.score_stride)
    scores = torch.randn(shape, generator=generator, device="cuda")
    match case.scores:
        case "equal":
            scores.fill_(0.5)
        case "zeros":
            scores = torch.where(scores > 2.3, scores, 0.0)  # 1.1 % are not 0
        case "narrow":
            scores = 1.0 + 0.245 * torch.rand(shape, generator=generator, device="cuda")
        case "recent":
            scores[:, case.length - 2000 : case.length] += 10.0
        case "outliers":
            scores = 1.0 + 0.245 * torch.rand(shape, generator=generator, device="cuda")
            scores[:, ::1000] = torch.randn((case.batch, scores[:, ::1000].shape[1]), device="cuda") * 1e20
    scores[:, case.length :] = torch.inf
    return scores


class Inputs:
    """Arrays of all layers."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator("cuda").manual_seed(case.batch)
        self.case = case
        self.positions = torch.full((case.batch,), case.length - 1, dtype=torch.int32, device="cuda")
        self.scores = [make_scores(case, generator) for _ in range(LAYERS)]
        self.selection = [torch.full((case.batch, case.k), -7, dtype=torch.int32, device="cuda") for _ in range(LAYERS)]
        self.kth_score = torch.zeros(case.batch, device="cuda")
        self.bounds = None
        if case.listed:
            listed = round(case.listed * case.k)
            self.bounds = torch.stack([scores[:, : case.length].topk(listed).values[:, -1] for scores in self.scores])

    def bench(self, own_kernels: bool) -> SelectBench:
        torch.cuda.synchronize()
        return SelectBench(
            self.case, own_kernels, self.positions, self.scores, self.bounds, self.selection, self.kth_score
        )

    def verify(self) -> None:
        """The first and the last layer: the k best, ties to the smaller position, ascending."""
        for layer in (0, LAYERS - 1):
            scores = self.scores[layer][:, : self.case.length]
            best = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, : self.case.k]
            assert torch.equal(self.selection[layer], best.sort(dim=1).values.int())

    def topk_us(self) -> float:
        """Of torch.topk, by the same protocol."""

        def replay_of(select: bool) -> Callable[[], float]:
            def run() -> None:
                for scores in self.scores:
                    scores.mul_(1.0)
                    if select:
                        torch.topk(scores[:, : self.case.length], self.case.k, dim=1, sorted=False)

            run()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()

            def replay() -> float:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                milliseconds: float = begin.elapsed_time(end)
                return 1000.0 * milliseconds / LAYERS

            return replay

        medians = []
        for select in (True, False):
            replay = replay_of(select)
            medians.append(statistics.median([replay() for _ in range(WARM_UP + 5)][WARM_UP:]))
        return medians[0] - medians[1]


def general_us(inputs: Inputs) -> float:
    """Of the general kernel."""
    bench = inputs.bench(own_kernels=False)
    try:
        return difference([bench.replay() for _ in range(WARM_UP + 5)][WARM_UP:])
    finally:
        bench.close()


@pytest.mark.benchmark(group="select")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_select(case: Case, benchmark: Any, gates: Callable[[str], Gates]) -> None:
    """One launch per layer, the exact selection, and how long it takes."""
    if (reason := skip_reason()) is not None:
        pytest.skip(reason)
    inputs = Inputs(case)
    bench = inputs.bench(own_kernels=True)
    try:
        times: list[tuple[float, float]] = []
        benchmark.pedantic(lambda: times.append(bench.replay()), rounds=ROUNDS, warmup_rounds=WARM_UP)
        inputs.verify()
        launches = bench.launches_per_layer()
        assert bench.full_selects() == 0, "a list was not used"
    finally:
        bench.close()
    figures: dict[str, Any] = {"us": difference(times[-ROUNDS:]), "launches_per_layer": launches}
    if not case.listed:
        figures["us_general"] = general_us(inputs)
        inputs.verify()
        figures["peers"] = {"torch_topk": inputs.topk_us()}
        if case == Case(13, case.length):
            figures["us_peers_before"] = PEERS[case.length]
    benchmark.extra_info["figures"] = figures
    problems = gates("select").add(case.keys(), figures, exact=("launches_per_layer",), times=("us",))
    assert not problems, "\n".join(problems)
