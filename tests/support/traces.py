"""Traces for tests, and a runtime whose scores are the source of one."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np

import echo
from echo.traces import SelectionRecorder, Trace
from echo.traces.layer_steps import LayerSteps
from echo.traces.policies import make_pool
from echo.traces.ranking import rank
from support.rig import small_shape


def growing(steps: int, top_k: int, first: int, layers: int = 1, seed: int = 0, ranks: int = 0) -> Trace:
    """A trace whose context grows by a token in each step; the newest tokens are often selected, then go cold.

    Without ranks, some steps select one or two tokens less than top_k.
    """
    draws = np.random.default_rng(seed)
    worth = draws.standard_normal((layers, first + steps)).astype(np.float32)
    positions = np.full((steps, layers, top_k), -1, np.int32)
    kth_score = np.full((steps, layers), np.nan, np.float32)
    ranked = np.full((steps, layers, ranks), -1, np.int32)
    kept = np.full((steps, layers, ranks), np.nan, np.float32)
    for t, layer in itertools.product(range(steps), range(layers)):
        length = first + t
        fresh = 2 * np.exp(-np.arange(length)[::-1] / 20) + (0.4 + layer) * draws.standard_normal(length)
        scores = (worth[layer, :length] + fresh).astype(np.float32)
        some = min(length, top_k if ranks else top_k - int(draws.integers(3)))
        positions[t, layer, :some] = np.sort(rank(scores, some))
        if some == top_k:
            best = rank(scores, max(ranks, top_k))
            kth_score[t, layer] = scores[best[top_k - 1]]
            if ranks:
                ranked[t, layer, : len(best)], kept[t, layer, : len(best)] = best, scores[best]
    context = np.arange(first, first + steps, dtype=np.int32)
    scored = {"ranked": ranked, "scores": kept} if ranks else {}
    return Trace(positions, context, kth_score, **scored, model="a", text="ü", notes="turn at 7", seed=seed)


def misses(steps: LayerSteps, slots: int, policy: str, seed: int = 0) -> np.ndarray:
    """Rows that are fetched in each step, int64 [steps]."""
    pool = make_pool(steps, slots, policy, seed)
    return np.asarray([len(pool.step()) for _ in range(steps.steps)], np.int64)


class Decoding:
    """One session of a small model without weights: fixed keys, queries that drift. Layer 1 shares layer 0's selection.

    Args:
        before: tokens of the prompt.
        steps: decode steps.
        integers: all numbers are small integers, so that many scores are equal.
    """

    def __init__(self, before: int, steps: int, integers: bool = False) -> None:
        draws = np.random.default_rng(5)
        self.shape = small_shape(layers=3)
        self.before, self.steps = before, steps
        heads, dim = self.shape.index_heads, self.shape.index_dim
        drift = np.zeros((steps, 3, heads, dim))
        drift[0] = draws.standard_normal(drift.shape[1:])
        for t in range(1, steps):
            drift[t] = 0.9 * drift[t - 1] + 0.44 * draws.standard_normal(drift.shape[1:])
        self.index_q = drift + 0.3 * draws.standard_normal(drift.shape)
        self.index_key = draws.standard_normal((3, before + steps, dim))
        self.weights = draws.random((3, 1, heads))
        if integers:
            self.index_q, self.index_key, self.weights = (
                np.rint(values) for values in (self.index_q, self.index_key, 2 * self.weights)
            )

    def misses(self, pool: int, recorder: SelectionRecorder | None = None, forecast_cap: int = 0) -> np.ndarray:
        """int64 [steps, layers] misses of a real runtime on the CPU with pools of so many slots."""
        kv, q, out = np.zeros((1, 80), np.float32), np.zeros((1, 4, 80), np.float32), np.zeros((1, 4, 64), np.float32)
        step = 0

        def prefill(p: echo.ForwardPass) -> None:
            for layer in range(3):
                keys = self.index_key[layer, : self.before].astype(np.float32)
                p.append(layer, np.zeros((self.before, 80), np.float32), keys)

        def decode(p: echo.ForwardPass) -> None:
            for layer in range(3):
                index = {} if layer == 1 else {
                    "index_key": self.index_key[layer, self.before + step][None].astype(np.float32),
                    "index_q": self.index_q[step, layer][None].astype(np.float32),
                    "index_weights": self.weights[layer].astype(np.float32),
                }  # fmt: skip
                p.attention(layer, kv=kv, q=q, scale=1.0, out=out, **index)
                if recorder is not None:
                    recorder(p, SimpleNamespace(layer=layer, index_q=index.get("index_q")))

        capacity = self.before + self.steps
        misses = np.zeros((self.steps + 1, 3), np.int64)
        with echo.Runtime(
            self.shape, device="cpu", host_tokens=capacity, max_context=capacity, max_batch=1, gpu_slots=pool,
            prefill_chunk=self.before, threads=1, prefetch="off",
            forecast_cap=forecast_cap,
        ) as runtime:  # fmt: skip
            session = runtime.open_session(capacity)
            runtime.prefill(session, [0] * self.before, prefill)
            for step in range(self.steps):
                runtime.step(echo.Batch([session], [0]), decode)
                misses[step + 1] = [layer.misses for layer in runtime.stats().layers]
        return np.diff(misses, axis=0)
