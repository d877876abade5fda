"""A worker of the size of DeepSeek-V3.2: constructs, fills one session, steps and closes.

Random projections instead of a model (all rows gather from small tables, so that nothing but the runtime takes time);
what is reported is how long construction takes (pinning dominates), steps, and closing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import record
import torch

import echo


def forward_of(shape: echo.ModelShape, rows: int, device: str) -> echo.Forward:
    """A forward over all layers with the same random arrays in each, differing by row and position."""
    generator = torch.Generator(device).manual_seed(0)

    def table(*size: int) -> torch.Tensor:
        return torch.randn(4096, *size, generator=generator, device=device, dtype=torch.bfloat16)

    kv, key = table(shape.row_dim), table(shape.index_dim)
    index_q, q = table(shape.index_heads, shape.index_dim), table(shape.query_heads, shape.row_dim)
    weights = table(shape.index_heads).float()
    outs = torch.empty(rows, shape.query_heads, shape.latent_dim, device=device, dtype=torch.bfloat16)

    def forward(p: echo.ForwardPass) -> torch.Tensor:
        tokens = torch.from_dlpack(p.tokens).long()
        positions = torch.from_dlpack(p.positions).long()
        out = outs[: p.rows]
        for layer in range(shape.layers):
            pick = (tokens * 31 + positions * 7 + layer * 101) % 4096
            p.attention(
                layer, kv=kv[pick], index_key=key[pick], index_q=index_q[pick], index_weights=weights[pick],
                q=q[pick], scale=shape.row_dim**-0.5, out=out,
            )  # fmt: skip
        return out

    return forward


def main() -> None:
    """Runs the worker and records `worker.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host-gib", type=float, default=64)
    parser.add_argument("--batch", type=int, default=13)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--slots", type=int, default=65536)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    shape = echo.ModelShape.deepseek_v32()
    tokens = int(options.host_gib * 2**30 / (shape.layers * shape.row_bytes)) // 64 * 64
    figures: dict[str, Any] = {}

    started = time.perf_counter()
    runtime = echo.Runtime(
        shape, device=options.device, host_tokens=tokens, gpu_slots=options.slots, max_batch=options.batch,
        max_context=max(131072, options.context), prefill_chunk=512,
    )  # fmt: skip
    figures["construct_s"] = time.perf_counter() - started
    print(runtime.plan.table())
    print(f"constructed in {figures['construct_s']:.1f} s on {runtime.device}", flush=True)

    device = runtime.device
    forward = forward_of(shape, 512, device)
    first = runtime.open_session(options.context + 64)
    started = time.perf_counter()
    for begin in range(0, options.context, 512):
        count = min(512, options.context - begin)
        runtime.prefill(first, [(begin + i) % 977 for i in range(count)], forward)
    runtime.synchronize()
    figures["prefill_s"] = time.perf_counter() - started
    sessions = [first, *(first.fork() for _ in range(options.batch - 1))]
    for extra, session in enumerate(sessions):
        runtime.prefill(session, [extra], forward)
    runtime.capture(forward, [options.batch])
    times = []
    for step in range(options.steps):
        started = time.perf_counter()
        runtime.step(echo.Batch(list(sessions), [step * 17 + i for i in range(options.batch)]))
        runtime.synchronize()
        times.append(1e6 * (time.perf_counter() - started))
    figures["step_us"] = statistics.median(times)
    figures["hit_rate"] = runtime.stats().hit_rate
    started = time.perf_counter()
    runtime.close()
    figures["close_s"] = time.perf_counter() - started
    case = {"batch": options.batch, "length": options.context, "host_gib": options.host_gib, "slots": options.slots}
    print(record.write("worker", [{"case": case, **figures}]).read_text())


if __name__ == "__main__":
    main()
