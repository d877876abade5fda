"""The figures of a demonstration."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import echo
from echo.demo.decode import Decoded

WINDOW = 16  # steps over which the working set is counted


def working_set(selections: NDArray[np.int32], window: int = WINDOW) -> NDArray[np.int64]:
    """Distinct rows that all sessions selected in the last `window` steps.

    Args:
        selections: int32 [steps, layers, sessions, top_k], -1 for none.
        window: steps.

    Returns:
        int64 [steps, layers].
    """
    steps, layers, sessions, _ = selections.shape
    counts = np.zeros((steps, layers), dtype=np.int64)
    for step in range(steps):
        recent = selections[max(0, step - window + 1) : step + 1]
        for layer in range(layers):
            per_session = (np.unique(recent[:, layer, s]) for s in range(sessions))
            counts[step, layer] = sum(int((rows >= 0).sum()) for rows in per_session)
    return counts


def figures(
    resident: Decoded, offloaded: Decoded, seconds: dict[str, float], text_tokens: int, device: str
) -> dict[str, Any]:
    """What `--json` writes, apart from the texts.

    Args:
        resident: the run in which everything fits.
        offloaded: the run with the small pool.
        seconds: "prefill" and "total".
        text_tokens: tokens that all sessions have read.
        device: 'cpu' or 'cuda:N'.
    """
    shape = offloaded.plan.shape
    runs = {"resident": resident, "offloaded": offloaded}
    steps, sessions = offloaded.tokens.shape
    return {
        "device": device,
        "build": echo.build_info(),
        "model": "tiny_dsa",
        "row_format": shape.row_format,
        "layers": shape.layers,
        "top_k": shape.top_k,
        "text_tokens": text_tokens,
        "sessions": sessions,
        "new_tokens": steps,
        "tokens_equal": bool(np.array_equal(resident.tokens, offloaded.tokens)),
        "selections_equal": bool(np.array_equal(resident.selections, offloaded.selections)),
        "pool_slots": {name: one.pool for name, one in runs.items()},
        "gpu_pool_bytes": {name: one.pool * shape.row_bytes * shape.layers for name, one in runs.items()},
        "host_pool_bytes": offloaded.plan.host_bytes,
        "hit_rate": [float(rate) for rate in offloaded.hit_rate.mean(axis=0)],
        "missed_rows": [int(rows) for rows in offloaded.misses],
        "prefetched_rows": [int(rows) for rows in offloaded.prefetched],
        "prefetched_used": [int(rows) for rows in offloaded.prefetched_used],
        "forecast_rows": [int(rows) for rows in offloaded.forecast],
        # Where everything stays, a row is fetched once and never again.
        "fetched_again": [int(rows) for rows in offloaded.fetched - resident.fetched],
        "fetched_bytes": int(offloaded.fetched.sum()) * shape.row_bytes,
        "step_ms": {name: float(np.median(one.step_ms)) for name, one in runs.items()},
        "prefill_seconds": seconds["prefill"],
        "seconds": seconds["total"],
    }
