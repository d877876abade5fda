"""Reading the text once, and continuing it in all sessions at once with a pool of a given size."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import echo
from echo.decoding import TEMPERATURE, draw, read

if TYPE_CHECKING:
    from echo.hf import DsaModel, LayerTensors

_CHUNK = 512  # tokens of a prefill call
_OPENING_CHUNK = 64


@dataclass
class Decoded:
    """What one run of decoding gave.

    Attributes:
        pool: slots per layer.
        tokens: int32 [steps, sessions].
        selections: int32 [steps, layers, sessions, top_k].
        hit_rate: float64 [steps, layers], of single steps.
        misses: int64 [layers], rows that recalls fetched, over all steps.
        prefetched: int64 [layers], rows fetched while scoring.
        prefetched_used: int64 [layers], of them selected in the same step.
        forecast: int64 [layers], rows fetched for the next step.
        step_ms: float64 [steps].
        plan: sizes of the runtime.
    """

    pool: int
    tokens: NDArray[np.int32]
    selections: NDArray[np.int32]
    hit_rate: NDArray[np.float64]
    misses: NDArray[np.int64]
    prefetched: NDArray[np.int64]
    prefetched_used: NDArray[np.int64]
    forecast: NDArray[np.int64]
    step_ms: NDArray[np.float64]
    plan: echo.Plan

    @property
    def fetched(self) -> NDArray[np.int64]:
        """int64 [layers], all rows that came from the host: missed and fetched ahead."""
        return self.misses + self.prefetched + self.forecast


@dataclass
class LastSelections:
    """An observer of the model that keeps the selections of the last decode step.

    Attributes:
        buffer: int32 tensor [layers, sessions, top_k], at a fixed address so that a graph can fill it.
    """

    buffer: Any = None

    def __call__(self, p: echo.ForwardPass, tensors: LayerTensors) -> None:
        """Copies the selection of one layer."""
        import torch

        if not p.is_prefill:
            self.buffer[tensors.layer].copy_(torch.from_dlpack(p.selection))


@dataclass
class Workload:
    """Sessions that continue one text, and the model that writes.

    Attributes:
        model: the model; `observed` is its observer.
        observed: the selections of the last step.
        shape: sizes of the model with the formats of its rows.
        device: 'cpu' or 'cuda:N'.
        text: tokens that all sessions have read.
        openings: tokens that each session reads next, at least one.
        new_tokens: how many each session writes.
    """

    model: DsaModel
    observed: LastSelections
    shape: echo.ModelShape
    device: str
    text: list[int]
    openings: list[list[int]]
    new_tokens: int

    @property
    def capacity(self) -> int:
        """Tokens of the longest session."""
        return len(self.text) + max(map(len, self.openings)) + self.new_tokens

    @property
    def least_slots(self) -> int:
        """Slots per layer without which no step is possible."""
        return len(self.openings) * (self.shape.top_k + 1)

    @property
    def all_slots(self) -> int:
        """Slots per layer that hold all rows of all sessions."""
        return max(self.least_slots, len(self.openings) * self.capacity)

    def read(self) -> tuple[echo.KvRuns, float]:
        """Prefills the text once; its KV outlives the runtime. Also the seconds it took."""
        from rich.progress import track

        length = len(self.text)
        started = time.perf_counter()
        with echo.Runtime(
            self.shape,
            device=self.device,
            host_tokens=length,
            max_context=length,
            max_batch=1,
            query_rows=1,
            gpu_slots=max(length, 64 * (self.shape.top_k + 1)),
            prefill_chunk=_CHUNK,
        ) as runtime:
            session = runtime.open_session(length)
            for first in track(range(0, length, _CHUNK), description="reading the text         "):
                runtime.prefill(session, self.text[first : first + _CHUNK], self.model.forward)
            return runtime.export_kv(session), time.perf_counter() - started

    def decode(self, kv: echo.KvRuns, slots: int, label: str) -> Decoded:
        """Continues the text in all sessions at once, with a pool of `slots` rows per layer.

        Tokens are drawn on the host, by a generator for each session that every call seeds alike: equal logits
        give equal tokens.
        """
        import torch
        from rich.progress import track

        shape, count = self.shape, len(self.openings)
        self.observed.buffer = torch.full((shape.layers, count, shape.top_k), -1, dtype=torch.int32, device=self.device)
        draws = [torch.Generator().manual_seed(number) for number in range(count)]
        with echo.Runtime(
            shape,
            device=self.device,
            host_tokens=count * (self.capacity + 63),
            max_context=self.capacity,
            max_sessions=count,
            max_batch=count,
            query_rows=1,
            gpu_slots=slots,
            prefill_chunk=_OPENING_CHUNK,
        ) as runtime:
            runtime.capture(self.model.forward, batch_sizes=[count])
            sessions: list[echo.Session] = []
            following: list[int] = []
            for opening, own in zip(self.openings, draws, strict=True):
                session = runtime.open_session(self.capacity)
                runtime.import_kv(session, kv)
                logits = read(runtime, session, opening)
                sessions.append(session)
                following += self._draw(logits[-1:], [own])
            tokens, selections, hit_rate, step_ms = [], [], [], []
            before = start = runtime.stats()
            for _ in track(range(self.new_tokens), description=f"decoding, {label:<15}"):
                started = time.perf_counter()
                logits = runtime.step(echo.Batch(list(sessions), list(following)))
                runtime.synchronize()
                step_ms.append(1e3 * (time.perf_counter() - started))
                tokens.append(following)
                following = self._draw(logits, draws)
                selections.append(self.observed.buffer.cpu().numpy().copy())
                after = runtime.stats()
                hit_rate.append([_rate(a, b) for a, b in zip(before.layers, after.layers, strict=True)])
                before = after
            counts = {
                name: np.array(
                    [getattr(b, name) - getattr(a, name) for a, b in zip(start.layers, before.layers, strict=True)]
                )
                for name in ("misses", "prefetched", "prefetched_used", "forecast")
            }
            return Decoded(
                pool=slots,
                tokens=np.asarray(tokens, dtype=np.int32),
                selections=np.stack(selections),
                hit_rate=np.asarray(hit_rate),
                **counts,
                step_ms=np.asarray(step_ms),
                plan=runtime.plan,
            )

    def _draw(self, logits: Any, draws: list[Any]) -> list[int]:
        """A token for each row of [rows, vocab]; none of those that end a text, since all sessions write on."""
        return draw(logits, TEMPERATURE, draws, without=self.model.stop_tokens)


def _rate(before: echo.LayerStats, after: echo.LayerStats) -> float:
    hits, misses = after.hits - before.hits, after.misses - before.misses
    return hits / (hits + misses) if hits + misses else 1.0
