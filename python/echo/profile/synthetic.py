"""The attention of DeepSeek-V3.2 without a model: random rows, and index queries that drift from step to step.

A session's index queries are random and stay, apart from a fresh random part in every step. How large that part is
decides how much of a selection is new, and so what has to be recalled. All inputs of a step are made by a handful of
kernels before the first layer: between the layers there is nothing but the runtime's own work.
"""

from __future__ import annotations

from typing import Any

import echo
from echo.profile.workload import Workload

_FRESH = 509  # different fresh parts; a prime, so that sessions do not fall into step


def synthetic_workload(
    device: str, layers: int, batch: int, length: int, pool: float, drift: float, settings: dict[str, Any]
) -> Workload:
    """Makes the inputs.

    Args:
        device: 'cpu' or 'cuda:N'.
        layers: of the model.
        batch: sessions.
        length: tokens of each.
        pool: slots of a layer per session, in multiples of top-k.
        drift: size of the fresh part of index queries, relative to the part that stays.
        settings: others of the runtime.
    """
    import torch

    shape = echo.ModelShape(layers=layers)  # otherwise DeepSeek-V3.2's
    generator = torch.Generator(device).manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)

    new_rows, new_keys = random(_FRESH, shape.row_dim), random(_FRESH, shape.index_dim)
    fresh = random(_FRESH, shape.index_heads, shape.index_dim)
    lasting = random(layers, batch, shape.index_heads, shape.index_dim)
    weights = random(batch, shape.index_heads).float()
    queries = random(batch, shape.query_heads, shape.row_dim)
    out = torch.empty(batch, shape.query_heads, shape.latent_dim, device=device, dtype=torch.bfloat16)
    entries = torch.arange(batch, device=device)

    def forward(p: echo.ForwardPass) -> torch.Tensor:
        rows = p.rows
        pick = (torch.from_dlpack(p.positions).long().clamp(min=0) * batch + entries[:rows]) % _FRESH
        kv, key = new_rows[pick], new_keys[pick]
        index_q = torch.add(lasting[:, :rows], fresh[pick], alpha=drift)
        for layer in range(layers):
            p.attention(
                layer, kv=kv, index_key=key, index_q=index_q[layer], index_weights=weights[:rows],
                q=queries[:rows], scale=shape.row_dim**-0.5, out=out[:rows],
            )  # fmt: skip
        return out[:rows]

    def append(p: echo.ForwardPass) -> None:
        for layer in range(layers):
            p.append(layer, random(p.rows, shape.row_dim), random(p.rows, shape.index_dim))

    def fill(runtime: echo.Runtime, session: echo.Session, number: int) -> None:
        chunk = runtime.plan.config.prefill_chunk
        for first in range(0, length, chunk):
            runtime.prefill(session, [number] * min(chunk, length - first), append)

    return Workload(
        name="synthetic DeepSeek-V3.2",
        shape=shape,
        device=device,
        batch=batch,
        length=length,
        pool=pool,
        forward=forward,
        fill=fill,
        token=lambda number, _: number,
        settings=settings,
    )
