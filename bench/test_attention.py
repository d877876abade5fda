"""Sparse MLA decode attention against FlashMLA, in one run, layer after layer as in a decode step.

    cmake -S . -B build/bench -DECHO_CUDA=ON -DECHO_BUILD_BENCH=ON && cmake --build build/bench --target echo_bench
    pytest bench/test_attention.py

FlashMLA is optional: `pip install --no-deps sgl-flash-mla==1.0.0`. ECHO_BENCH_LIBRARY names the library if it is
elsewhere. What counts is the number of splits that a runtime for the batch has; ECHO_BENCH_ATTENTION_SPLITS names
others to measure beside it (default "1,2,4,5,8,16"). Results go to bench/results/attention.json.
"""

from __future__ import annotations

import ctypes
import os
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gates import Gates

torch = pytest.importorskip("torch")

TOP_K = 2048
LATENT, ROW_DIM = 512, 576
SCALE = 0.07
PAGE = 64  # FlashMLA's
REPLAYS = 30
SPLITS = {int(part) for part in os.environ.get("ECHO_BENCH_ATTENTION_SPLITS", "1,2,4,5,8,16").split(",")}
# What one H200 was measured to reach: bf16 products of random data, copies in device memory.
FLOPS_PER_US = 788e6
BYTES_PER_US = 4.27e6
CASES = [
    *((batch, 128, 656) for batch in (1, 8, 13, 32, 64, 102)),
    *((batch, 64, 656) for batch in (1, 13, 64)),
    *((batch, 128, 1152) for batch in (1, 13, 64)),
]


class Case(ctypes.Structure):
    """EchoAttendCase."""

    _fields_ = [
        ("layers", ctypes.c_int32),
        ("batch", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("row_bytes", ctypes.c_int32),
        ("top_k", ctypes.c_int32),
        ("splits", ctypes.c_int32),
        ("slots", ctypes.c_int32),
        ("scale", ctypes.c_float),
    ]


class Inputs:
    """Rows, slots and queries of so many layers that their rows are several times the L2 cache."""

    def __init__(self, batch: int, heads: int, row_bytes: int) -> None:
        self.batch, self.heads, self.row_bytes = batch, heads, row_bytes
        self.slots_per_layer = 2 * batch * TOP_K
        self.layers = max(8, min(61, (240 << 20) // (batch * TOP_K * row_bytes)))
        generator = torch.Generator("cuda").manual_seed(batch)
        self.pools = [self._rows(generator) for _ in range(self.layers)]
        self.slots = [
            torch.randperm(self.slots_per_layer, generator=generator, device="cuda")[: batch * TOP_K]
            .to(torch.int32)
            .view(batch, TOP_K)
            for _ in range(self.layers)
        ]
        self.q = [
            torch.randn(batch, heads, ROW_DIM, generator=generator, device="cuda").bfloat16()
            for _ in range(self.layers)
        ]
        self.out = [torch.empty(batch, heads, LATENT, dtype=torch.bfloat16, device="cuda") for _ in range(self.layers)]

    def _rows(self, generator: Any) -> Any:
        values = torch.randn(self.slots_per_layer, ROW_DIM, generator=generator, device="cuda")
        if self.row_bytes == 1152:
            return values.bfloat16().view(torch.uint8)
        rows = torch.empty(self.slots_per_layer, self.row_bytes, dtype=torch.uint8, device="cuda")
        rows[:, :LATENT] = (values[:, :LATENT] * 64).to(torch.float8_e4m3fn).view(torch.uint8)
        scales = torch.full((self.slots_per_layer, 4), 1 / 64, device="cuda")
        rows[:, LATENT : LATENT + 16] = scales.view(torch.uint8)
        rows[:, LATENT + 16 :] = values[:, LATENT:].bfloat16().contiguous().view(torch.uint8)
        return rows

    def ceiling_us(self) -> float:
        """What the matrix rate and the memory's rate allow, whichever is slower."""
        flops = 2.0 * self.batch * self.heads * TOP_K * (ROW_DIM + LATENT)
        size = self.batch * (TOP_K * self.row_bytes + self.heads * 2 * (ROW_DIM + LATENT))
        return max(flops / FLOPS_PER_US, size / BYTES_PER_US)


@pytest.fixture(scope="session")
def library() -> ctypes.CDLL:
    """The library of bench/native."""
    if not torch.cuda.is_available():
        pytest.skip("torch has no CUDA device")
    named = os.environ.get("ECHO_BENCH_LIBRARY")
    found = [Path(named)] if named else sorted(Path(__file__).parents[1].glob("build/*/libecho_bench.so"))
    if not found:
        pytest.skip("no libecho_bench.so below build/; the head of this file says how to build it")
    loaded = ctypes.CDLL(str(found[-1]))
    loaded.echo_attend_create.restype = ctypes.c_void_p
    loaded.echo_attend_problem.restype = ctypes.c_char_p
    loaded.echo_attend_replay.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.POINTER(ctypes.c_float)]
    loaded.echo_attend_nodes.argtypes = [ctypes.c_void_p]
    loaded.echo_attend_destroy.argtypes = [ctypes.c_void_p]
    return loaded


def pointers(tensors: list[Any]) -> Any:
    """An array of device pointers."""
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


@pytest.fixture
def ours(library: ctypes.CDLL) -> Iterator[Callable[[Inputs, int], tuple[Callable[[int], list[float]], int]]]:
    """Makes the graph of a case: what replays it and returns microseconds of each replay, and how many nodes it has."""
    made: list[int] = []

    def make(inputs: Inputs, splits: int) -> tuple[Callable[[int], list[float]], int]:
        case = Case(
            inputs.layers,
            inputs.batch,
            inputs.heads,
            inputs.row_bytes,
            TOP_K,
            splits,
            inputs.slots_per_layer,
            SCALE,
        )
        torch.cuda.synchronize()
        arrays = [pointers(tensors) for tensors in (inputs.pools, inputs.slots, inputs.q, inputs.out)]
        bench = library.echo_attend_create(ctypes.byref(case), *arrays)
        assert bench, library.echo_attend_problem().decode()
        made.append(bench)

        def replay(times: int) -> list[float]:
            us = (ctypes.c_float * times)()
            assert library.echo_attend_replay(bench, times, us) == 0, library.echo_attend_problem().decode()
            return list(us)

        return replay, library.echo_attend_nodes(bench)

    yield make
    for bench in made:
        library.echo_attend_destroy(bench)


def flash_mla(inputs: Inputs) -> tuple[Callable[[int], list[float]], list[Any]] | str:
    """The same with FlashMLA, and its outputs; or why there is none."""
    if inputs.row_bytes != 656:
        return "FlashMLA's decode kernel takes FP8 rows"
    try:
        import flash_mla as peer
    except (ImportError, OSError) as error:
        return f"sgl-flash-mla is not there: {error}"
    metadata = [peer.get_mla_metadata()[0] for _ in range(inputs.layers)]

    def run() -> list[Any]:
        return [
            peer.flash_mla_with_kvcache(
                inputs.q[i].unsqueeze(1),
                inputs.pools[i].view(-1, PAGE, 1, inputs.row_bytes).view(torch.float8_e4m3fn),
                None,
                None,
                LATENT,
                metadata[i],
                softmax_scale=SCALE,
                indices=inputs.slots[i].unsqueeze(1),
                use_legacy=True,
            )[0]
            for i in range(inputs.layers)
        ]

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()

    def replay(times: int) -> list[float]:
        us = []
        for _ in range(times):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            us.append(begin.elapsed_time(end) * 1000.0)
        return us

    return replay, outputs


@pytest.mark.parametrize(("batch", "heads", "row_bytes"), CASES)
def test_attention(
    benchmark: Any,
    library: ctypes.CDLL,
    ours: Any,
    gates: Callable[[str], Gates],
    batch: int,
    heads: int,
    row_bytes: int,
) -> None:
    """One launch per layer, FlashMLA's outputs, and how long it takes."""
    inputs = Inputs(batch, heads, row_bytes)
    by_splits = {}
    outputs = {}
    chosen = library.echo_attend_splits(batch, heads, TOP_K)
    for splits in (*sorted(SPLITS - {chosen}), chosen):
        replay, launches = ours(inputs, splits)
        replay(3)
        by_splits[splits] = statistics.median(replay(REPLAYS)) / inputs.layers
        outputs[splits] = [out.clone() for out in inputs.out]
    peer = flash_mla(inputs)
    peers: dict[str, float] = {}
    if not isinstance(peer, str):
        peer_replay, theirs = peer
        peer_replay(3)
        peers["flash_mla"] = statistics.median(peer_replay(REPLAYS)) / inputs.layers
        for mine in outputs.values():
            for a, b in zip(mine, theirs, strict=True):
                error = (a.float() - b.view_as(a).float()).norm() / b.float().norm()
                assert error < 1e-2, f"off from FlashMLA by {error}"
    us = by_splits[chosen]
    benchmark.extra_info.update(us=us, by_splits=by_splits, peers=peers, layers=inputs.layers)
    benchmark.pedantic(lambda: replay(1), rounds=10, warmup_rounds=1)
    figures: dict[str, Any] = {
        "us": round(us, 2),
        "splits": chosen,
        "launches_per_layer": launches / inputs.layers,
        "by_splits": {str(splits): round(value, 2) for splits, value in sorted(by_splits.items())},
        "ceiling_us": round(inputs.ceiling_us(), 2),
        "peers": {name: round(value, 2) for name, value in peers.items()},
        **({"no_peer": peer} if isinstance(peer, str) else {}),
    }
    keys = {"batch": batch, "heads": heads, "row_bytes": row_bytes}
    problems = gates("attention").add(keys, figures, exact=("splits", "launches_per_layer"), times=("us",))
    assert not problems, "\n".join(problems)
