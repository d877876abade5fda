"""A trace drives a runtime: its cache manager, selection and predictor at work, without a model.

One session gets the trace's contexts, in rows of zeros: they are as large as real ones, and nobody reads them. Where a
step has scores, `score` is called with zeros and the trace's scores are written over what it left, so `select` finds
the selection, the recall sees the scores, and the k-th score goes into the runtime's moving average. Elsewhere
`recall` is given the selection, and rows go by age.

What differs from a model that calls `attention`: a new row gets its slot in `append`, so its victim goes by age, in the
smallest pools even where the step selects it.
Tokens beyond the trace's ranks score below the last one, the lower the longer ago they were selected. A step whose
context did not grow appends its last token anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echo import Batch, ForwardPass, InvalidArgument, ModelShape, NotSupported, Runtime, StateError
from echo.traces.trace import Trace

_CHUNK = 1024
_HEADS, _DIM = 8, 16  # of an indexer that says nothing


@dataclass(frozen=True)
class Driven:
    """What a runtime did in each step of a trace.

    Attributes:
        device: 'cpu' or 'cuda:N'.
        slots: of the pools, one for each layer.
        row_bytes: of a row.
        hits, misses, evictions: int64 [steps, layers], as in `echo.LayerStats`; misses are the rows fetched.
        foretold: float32 [steps, layers], the moving average of the k-th score before each step, NaN for none.
    """

    device: str
    slots: int
    row_bytes: int
    hits: NDArray[np.int64]
    misses: NDArray[np.int64]
    evictions: NDArray[np.int64]
    foretold: NDArray[np.float32]


class Counters:
    """A runtime's counters, step by step."""

    def __init__(self, runtime: Runtime) -> None:
        """Counts from now on."""
        self._runtime = runtime
        self._seen = [self._now()]

    def note(self) -> None:
        """A step is over. On a GPU, waits for it."""
        self._seen.append(self._now())

    def steps(self) -> NDArray[np.int64]:
        """int64 [steps, layers, 3], hits, misses and evictions of each step."""
        seen = np.asarray(self._seen, np.int64)
        return seen[1:] - seen[:-1]

    def _now(self) -> list[tuple[int, int, int]]:
        self._runtime.synchronize()
        return [(layer.hits, layer.misses, layer.evictions) for layer in self._runtime.stats().layers]


def drive(
    trace: Trace,
    slots: int,
    layers: Iterable[int] | None = None,
    *,
    device: str = "auto",
    alpha: float = 0.5,
    row_format: str = "fp8_656",
) -> Driven:
    """Replays a trace through a runtime whose pools are empty at first.

    Args:
        trace: the selections.
        slots: of each layer's pool, at least top_k + 1.
        layers: of the trace, each with a pool of its own; default all.
        device: as of `echo.Runtime`; a GPU needs torch.
        alpha: weight of the past in the moving average of the k-th score, 0 to 1.
        row_format: of `echo.ModelShape`; sets how many bytes a row has.

    Raises:
        InvalidArgument: naming `slots`, `layers`, `alpha`, `device` or `row_format`.
        CapacityError: the trace's rows do not fit this machine.
        NotSupported: naming `device`, on a GPU without torch.
        StateError: naming `selection`, if the runtime does not select what the trace has.
    """
    chosen = tuple(range(trace.layers) if layers is None else layers)
    if not chosen or not all(0 <= layer < trace.layers for layer in chosen):
        raise InvalidArgument(f"layers: {list(chosen)} given, expected numbers from 0 to {trace.layers - 1}")
    if slots < trace.top_k + 1:
        raise InvalidArgument(f"slots: {slots} given, expected at least {trace.top_k + 1} (top_k + 1)")
    if not 0 <= alpha <= 1:
        raise InvalidArgument(f"alpha: {alpha} given, expected 0 to 1")
    shape = ModelShape(
        layers=len(chosen), index_heads=_HEADS, index_dim=_DIM, query_heads=1, top_k=trace.top_k,
        row_format=row_format, index_key_format="fp32",
    )  # fmt: skip
    capacity = int(trace.context[-1])
    with Runtime(
        shape, device=device, gpu_slots=slots, threshold_alpha=alpha, host_tokens=capacity, max_context=capacity,
        max_batch=1, query_rows=1, prefill_chunk=min(_CHUNK, capacity),
    ) as runtime:  # fmt: skip
        feed = _Feed(trace, chosen, shape.row_bytes, _Host() if runtime.device == "cpu" else _Gpu(runtime.device))
        session = runtime.open_session(capacity)
        counters = Counters(runtime)
        foretold = []
        for step in range(trace.steps):
            before = int(trace.context[step]) - 1
            if session.length > before:
                session.truncate(before)
            while session.length < before:
                runtime.prefill(session, [0] * min(_CHUNK, before - session.length), feed.append)
            foretold.append(np.array(runtime.thresholds(session), np.float32))
            feed.step = step
            runtime.step(Batch([session], [0]), feed.decode)
            counters.note()
        counts = counters.steps()
        return Driven(
            runtime.device, slots, shape.row_bytes, counts[..., 0], counts[..., 1], counts[..., 2], np.stack(foretold)
        )


class _Feed:
    """Forwards that do what a trace says."""

    def __init__(self, trace: Trace, layers: tuple[int, ...], row_bytes: int, arrays: _Host | _Gpu) -> None:
        self.step = 0
        self._trace = trace
        self._layers = layers
        self._arrays = arrays
        self._used = np.full((len(layers), int(trace.context[-1])), -1, np.int64)  # step that selected or made a token
        rows = min(_CHUNK, int(trace.context[-1]))
        self._kv = arrays.given(np.zeros((rows, row_bytes), np.uint8))
        self._keys = arrays.given(np.zeros((rows, _DIM), np.float32))
        self._queries = arrays.given(np.zeros((1, _HEADS, _DIM), np.float32))
        self._weights = arrays.given(np.zeros((1, _HEADS), np.float32))

    def append(self, p: ForwardPass) -> None:
        """Rows alone, as in a prefill."""
        for number in range(len(self._layers)):
            p.append(number, self._kv[: p.rows], self._keys[: p.rows])

    def decode(self, p: ForwardPass) -> None:
        """The current step."""
        for number, layer in enumerate(self._layers):
            p.append(number, self._kv[:1], self._keys[:1])
            positions, used = self._trace.positions[self.step, layer], self._used[number]
            scores = self._scores(layer, used)
            used[positions[positions >= 0]] = used[self._trace.context[self.step] - 1] = self.step
            if scores is None:
                p.recall(number, self._arrays.given(positions[None]))
                continue
            p.score(number, self._queries, self._weights)
            self._arrays.held(p.scores())[0, : len(scores)] = self._arrays.given(scores)
            selected = self._arrays.read(p.select(number))[0]
            if not np.array_equal(selected, positions):
                raise StateError(f"selection: step {self.step}, layer {layer}: it is not that of the trace")
            p.recall(number)

    def _scores(self, layer: int, used: NDArray[np.int64]) -> NDArray[np.float32] | None:
        """float32 [context], None where there are none."""
        trace = self._trace
        if trace.ranked is None or trace.scores is None or not np.isfinite(trace.kth_score[self.step, layer]):
            return None
        kth, ranked = trace.kth_score[self.step, layer], trace.ranked[self.step, layer]
        ranked = ranked[ranked >= 0]
        best = trace.scores[self.step, layer, : len(ranked)].copy()
        # On a file's grid tokens that were not selected may equal the k-th score.
        best[trace.top_k :] = np.minimum(best[trace.top_k :], _below(kth))
        # As far below the last rank as that is below the k-th score, at most: much farther, and all that are ranked
        # would seem equally warm.
        last = best[-1]
        share = (self.step - used[: trace.context[self.step]]) / np.float32(self.step + 1)
        unknown = np.minimum(last - share * ((kth - last) or np.float32(1)), _below(last))
        scores: NDArray[np.float32] = unknown.astype(np.float32)
        scores[ranked] = best
        return scores


def _below(score: np.float32) -> np.float32:
    """The next smaller number; NaN of NaN."""
    return np.float32(np.nextafter(score, np.float32(-np.inf)))


class _Host:
    """Arrays where the runtime is on the CPU."""

    def given(self, values: NDArray[Any]) -> Any:
        return values

    def held(self, array: Any) -> Any:
        """An array of the runtime, to be written to."""
        return array

    def read(self, array: Any) -> NDArray[Any]:
        """An array of the runtime, on the host."""
        return np.asarray(array)


class _Gpu:
    """The same through torch. Raises NotSupported without it."""

    def __init__(self, device: str) -> None:
        try:
            import torch
        except ImportError as error:
            raise NotSupported(f"device: a replay on {device} needs torch; pip install 'echo-kv[hf]'") from error
        self._torch = torch
        self._device = device

    def given(self, values: NDArray[Any]) -> Any:
        return self._torch.from_numpy(values.copy()).to(self._device)

    def held(self, array: Any) -> Any:
        return self._torch.from_dlpack(array)

    def read(self, array: Any) -> NDArray[Any]:
        on_host: NDArray[Any] = self.held(array).cpu().numpy()
        return on_host
