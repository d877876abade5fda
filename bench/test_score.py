"""Index scores: a CUDA graph of many layers, each with index keys of its own so that the L2 cache is cold.

`tools/gpu_check.sh bench-score`; medians, microseconds per layer. DeepGEMM runs in turns with it where it is
installed, so that both meet the same clocks. `of_floor` is the time over that of reading the keys at the
memory's datasheet speed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import pytest
from gates import Gates
from native.score_binding import Case, ScoreBench, skip_reason

ROUNDS = 15
WARM_UP = 10  # of both: the clocks come up
MEMORY_BYTES_PER_US = 4.8e6

CASES = [
    *(Case(batch, length) for batch in (1, 4, 8, 13, 32, 64) for length in (16_384, 65_536, 102_400, 131_072)),
    *(Case(batch, 131_072, ragged=True) for batch in (4, 13, 64)),
    *(Case(batch, 102_400, query_rows=2) for batch in (1, 8, 13)),
    Case(13, 102_400, query_rows=4),
    Case(13, 102_400, heads=32),
    Case(1, 102_400, query_rows=64),  # a row block of a prompt
]

# Microseconds of DeepGEMM on an H200, measured before with this protocol, by batch and length.
DEEP_GEMM = {
    (1, 16_384): 4.3, (1, 65_536): 6.0, (1, 102_400): 7.4, (1, 131_072): 8.3,
    (13, 16_384): 11.6, (13, 65_536): 33.7, (13, 102_400): 49.4, (13, 131_072): 61.4,
    (64, 16_384): 39.7, (64, 65_536): 143, (64, 102_400): 221, (64, 131_072): 281,
}  # fmt: skip


def deep_gemm_of(case: Case) -> Any | str:
    """The peer, or why there is none."""
    if case.query_rows > 2:
        return "DeepGEMM scores one or two rows of a session"
    try:
        from native import deep_gemm_peer
    except ImportError as error:
        return str(error)
    reason = deep_gemm_peer.missing()
    return reason if reason is not None else deep_gemm_peer.DeepGemmLogits(case)


@pytest.mark.benchmark(group="score")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_score(case: Case, benchmark: Any, gates: Callable[[str], Gates]) -> None:
    """One launch per layer, right scores, and how long it takes."""
    if (reason := skip_reason()) is not None:
        pytest.skip(reason)
    peer = deep_gemm_of(case)
    bench = ScoreBench(case)
    try:
        times: list[float] = []
        peer_times: list[float] = []

        def turn_of_peer() -> None:
            if not isinstance(peer, str):
                peer_times.append(peer.replay())

        benchmark.pedantic(
            lambda: times.append(bench.replay()), setup=turn_of_peer, rounds=ROUNDS, warmup_rounds=WARM_UP
        )
        bench.verify()
        launches = bench.launches_per_layer()
        assert launches == 1, "the generic kernel was taken"
    finally:
        bench.close()
    us = statistics.median(times[-ROUNDS:])
    floor = case.key_bytes / MEMORY_BYTES_PER_US
    figures: dict[str, Any] = {"us": us, "launches_per_layer": launches, "us_floor": floor, "of_floor": us / floor}
    if (before := DEEP_GEMM.get((case.batch, case.length))) and case == Case(case.batch, case.length):
        figures["us_deep_gemm_before"] = before
    figures["peers"] = {
        "deep_gemm": {"reason": peer} if isinstance(peer, str) else {"us": statistics.median(peer_times[-ROUNDS:])}
    }
    benchmark.extra_info["figures"] = figures
    problems = gates("score").add(case.keys(), figures, exact=("launches_per_layer",), times=("us",))
    assert not problems, "\n".join(problems)
