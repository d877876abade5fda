"""DeepGEMM's paged MQA logits over the same amount of index keys: a peer where it is installed.

`sgl-deep-gemm==0.1.5` with `apache-tvm-ffi==0.1.11`. It takes queries that are FP8 already, while echo's score
quantises them, and a schedule that was computed before; both stay outside of what is timed.
"""

from __future__ import annotations

from typing import Any

import torch
from native.score_binding import BLOCK_BYTES, Case

_DIM = 128


def missing() -> str | None:
    """Why the peer cannot be measured, None if it can."""
    try:
        import deep_gemm
    except Exception as error:  # its import looks for CUDA, and what it raises without is not documented
        return f"deep_gemm cannot be imported (sgl-deep-gemm==0.1.5, apache-tvm-ffi==0.1.11): {error}"
    return None if hasattr(deep_gemm, "fp8_paged_mqa_logits") else "deep_gemm has no fp8_paged_mqa_logits"


class DeepGemmLogits:
    """A CUDA graph of the case's layers, each with keys of its own.

    Args:
        case: what to score.
    """

    def __init__(self, case: Case) -> None:
        import deep_gemm

        generator = torch.Generator("cuda").manual_seed(0)
        rows = case.batch * case.query_rows
        q = torch.randn(case.batch, case.query_rows, case.heads, _DIM, generator=generator, device="cuda")
        weights = torch.randn(rows, case.heads, generator=generator, device="cuda")
        blocks = case.batch * case.blocks
        table = torch.randperm(blocks, generator=generator, device="cuda").int().view(case.batch, case.blocks)
        behind = torch.arange(1 - case.query_rows, 1, device="cuda")
        lengths = (torch.tensor(case.lengths, device="cuda")[:, None] + behind).int().contiguous()
        self._keep: list[Any] = [self._keys(blocks, generator) for _ in range(case.layers)]
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        schedule = deep_gemm.get_paged_mqa_logits_metadata(lengths, 64, sms)
        fp8 = q.to(torch.float8_e4m3fn)

        def layer(keys: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = deep_gemm.fp8_paged_mqa_logits(
                fp8, keys, weights, lengths, table, schedule, case.blocks * 64, clean_logits=False
            )
            return logits

        layer(self._keep[0])  # compiles
        torch.cuda.synchronize()
        self._layers = case.layers
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for keys in list(self._keep):
                layer(keys)  # its logits go back to the graph's pool at once: the next layer writes to the same place
        self._keep += [fp8, weights, lengths, table, schedule]

    @staticmethod
    def _keys(blocks: int, generator: torch.Generator) -> torch.Tensor:
        keys = torch.randint(0, 256, (blocks, BLOCK_BYTES), generator=generator, device="cuda", dtype=torch.uint8)
        keys &= 0xDF  # no NaN
        keys[:, 64 * _DIM :].view(torch.float32).fill_(2.0**-7)
        return keys.view(blocks, 64, 1, _DIM + 4)

    def replay(self) -> float:
        """Runs the graph; microseconds per layer."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self._graph.replay()
        end.record()
        end.synchronize()
        return 1000.0 * float(begin.elapsed_time(end)) / self._layers
