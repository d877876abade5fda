"""A trace drives a runtime: its indexer, selection, prefetch, cache manager and predictor at work, without a model.

One session gets the trace's contexts, in rows of zeros: they are as large as real ones, and nobody reads them. A
token's index key holds its scores of all steps, a dimension for each, and a step's query asks for its own: so `score`
finds the trace's scores to the bit, and what follows from them is the product's. Steps without scores give `recall` the
selection, and rows go by age.

Tokens beyond the trace's ranks score below the last one, the lower the longer ago they were selected; scores that are
not finite are the least or the largest numbers. A step whose context did not grow appends its last token anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echo import Batch, ForwardPass, InvalidArgument, ModelShape, Runtime, StateError
from echo.extras import TORCH, lacking
from echo.traces.trace import Trace

_CHUNK = 1024
_HEADS, _DIM, _MOST_DIMS = 8, 16, 4096  # of an indexer: fewest heads, grain of dimensions
_LARGEST = np.finfo(np.float32).max
_COUNTED = (
    "hits",
    "misses",
    "evictions",
    "candidates",
    "full_selects",
    "prefetched",
    "prefetched_used",
    "prefetches_capped",
    "forecast",
    "forecast_used",
)


@dataclass(frozen=True)
class Driven:
    """What a runtime did in each step of a trace.

    Attributes:
        device: 'cpu' or 'cuda:N'.
        slots: of the pools, one for each layer.
        row_bytes: of a row.
        hits, misses, evictions, candidates, full_selects, prefetched, prefetched_used, prefetches_capped, forecast,
            forecast_used: int64 [steps, layers], as in `echo.LayerStats`; misses are the rows that recalls fetched.
        foretold: float32 [steps, layers], the moving average of the k-th score before each step, NaN for none.
    """

    device: str
    slots: int
    row_bytes: int
    hits: NDArray[np.int64]
    misses: NDArray[np.int64]
    evictions: NDArray[np.int64]
    candidates: NDArray[np.int64]
    full_selects: NDArray[np.int64]
    prefetched: NDArray[np.int64]
    prefetched_used: NDArray[np.int64]
    prefetches_capped: NDArray[np.int64]
    forecast: NDArray[np.int64]
    forecast_used: NDArray[np.int64]
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

    def steps(self) -> dict[str, NDArray[np.int64]]:
        """By name of the counter, int64 [steps, layers], what each step added."""
        seen = np.asarray(self._seen, np.int64)
        return dict(zip(_COUNTED, np.moveaxis(seen[1:] - seen[:-1], 2, 0), strict=True))

    def _now(self) -> list[list[int]]:
        self._runtime.synchronize()
        return [[getattr(layer, name) for name in _COUNTED] for layer in self._runtime.stats().layers]


def drive(
    trace: Trace,
    slots: int,
    layers: Iterable[int] | None = None,
    *,
    device: str = "auto",
    alpha: float = 0.5,
    prefetch_cap: float = 0.0,
    forecast_cap: int = 0,
    row_format: str = "fp8_656",
) -> Driven:
    """Replays a trace through a runtime whose pools are empty at first.

    Args:
        trace: the selections.
        slots: of each layer's pool, at least top_k + 1.
        layers: of the trace, each with a pool of its own; default all.
        device: as of `echo.Runtime`; a GPU needs torch.
        alpha: weight of the past in the moving average of the k-th score, 0 to 1.
        prefetch_cap: as of `echo.Runtime`, most rows that are prefetched for each 1,000 scored tokens; -1 for what
            the device can fetch.
        forecast_cap: as of `echo.Runtime`, most rows that a layer of a step fetches for the next one.
        row_format: of `echo.ModelShape`; sets how many bytes a row has.

    Raises:
        InvalidArgument: naming `slots`, `layers`, `alpha`, `prefetch_cap`, `forecast_cap`, `device` or `row_format`;
            naming `trace`, if it has more than 4,096 steps with scores.
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
    dims = _DIM if trace.ranks == 0 else -(-trace.steps // _DIM) * _DIM
    if dims > _MOST_DIMS:
        raise InvalidArgument(f"trace: {trace.steps} steps with scores given, expected at most {_MOST_DIMS}")
    shape = ModelShape(
        layers=len(chosen), index_heads=_HEADS, index_dim=dims, query_heads=1, top_k=trace.top_k,
        row_format=row_format, index_key_format="fp32",
    )  # fmt: skip
    capacity = int(trace.context[-1])
    with Runtime(
        shape, device=device, gpu_slots=slots, threshold_alpha=alpha, host_tokens=capacity, max_context=capacity,
        max_batch=1, query_rows=1, prefill_chunk=min(_CHUNK, capacity), prefetch_cap=prefetch_cap,
        forecast_cap=forecast_cap,
    ) as runtime:  # fmt: skip
        feed = _Feed(trace, chosen, shape, _Host() if runtime.device == "cpu" else _Gpu(runtime.device))
        session = runtime.open_session(capacity)
        counters = Counters(runtime)
        foretold = []
        for step in range(trace.steps):
            before = int(trace.context[step]) - 1
            if session.length > before:
                session.truncate(before)
            while session.length < before:
                feed.first = session.length
                runtime.prefill(session, [0] * min(_CHUNK, before - session.length), feed.append)
            foretold.append(np.array(runtime.thresholds(session), np.float32))
            feed.step = step
            runtime.step(Batch([session], [0]), feed.decode)
            counters.note()
        return Driven(runtime.device, slots, shape.row_bytes, **counters.steps(), foretold=np.stack(foretold))


class _Feed:
    """Forwards that do what a trace says."""

    def __init__(self, trace: Trace, layers: tuple[int, ...], shape: ModelShape, arrays: _Host | _Gpu) -> None:
        self.step = 0
        self.first = 0  # position of the first row of a prefill
        self._trace = trace
        self._layers = layers
        self._arrays = arrays
        self._scores = [_scores(trace, layer, shape.index_dim) for layer in layers]
        self._kv = arrays.given(np.zeros((min(_CHUNK, int(trace.context[-1])), shape.row_bytes), np.uint8))
        # x = relu(x) - relu(-x): one head asks for the score, another for its negative.
        weights = np.zeros((1, _HEADS), np.float32)
        weights[0, :2] = 1, -1
        self._weights = arrays.given(weights)

    def append(self, p: ForwardPass) -> None:
        """Rows and keys alone, as in a prefill."""
        for number in range(len(self._layers)):
            p.append(number, self._kv[: p.rows], self._keys(number, self.first, p.rows))

    def decode(self, p: ForwardPass) -> None:
        """The current step."""
        for number, layer in enumerate(self._layers):
            p.append(number, self._kv[:1], self._keys(number, int(self._trace.context[self.step]) - 1, 1))
            positions = self._trace.positions[self.step, layer]
            if not _scored(self._trace, self.step, layer):
                p.recall(number, self._arrays.given(positions[None]))
                continue
            query = np.zeros((1, _HEADS, self._scores[number].shape[1]), np.float32)
            query[0, :2, self.step] = 1, -1
            p.score(number, self._arrays.given(query), self._weights)
            selected = self._arrays.read(p.select(number))[0]
            if not np.array_equal(selected, positions):
                raise StateError(f"selection: step {self.step}, layer {layer}: it is not that of the trace")
            p.recall(number)

    def _keys(self, number: int, first: int, count: int) -> Any:
        return self._arrays.given(self._scores[number][first : first + count])


def _scored(trace: Trace, step: int, layer: int) -> bool:
    return trace.ranks > 0 and bool(np.isfinite(trace.kth_score[step, layer]))


def _scores(trace: Trace, layer: int, dims: int) -> NDArray[np.float32]:
    """float32 [last context, dims], what each token scores in each step of a layer; 0 where there is no score."""
    scores = np.zeros((int(trace.context[-1]), dims), np.float32)
    used = np.full(len(scores), -1, np.int64)  # step that selected or made a token
    for step in range(trace.steps):
        context = int(trace.context[step])
        if _scored(trace, step, layer):
            of_step = _scores_of_step(trace, step, layer, used[:context])
            scores[:context, step] = np.where(np.isnan(of_step), -_LARGEST, np.clip(of_step, -_LARGEST, _LARGEST))
        positions = trace.positions[step, layer]
        used[positions[positions >= 0]] = used[context - 1] = step
    return scores


def _scores_of_step(trace: Trace, step: int, layer: int, used: NDArray[np.int64]) -> NDArray[np.float32]:
    """float32 [context]."""
    assert trace.ranked is not None and trace.scores is not None
    kth, ranked = trace.kth_score[step, layer], trace.ranked[step, layer]
    ranked = ranked[ranked >= 0]
    best = trace.scores[step, layer, : len(ranked)].copy()
    # On a file's grid tokens that were not selected may equal the k-th score.
    best[trace.top_k :] = np.minimum(best[trace.top_k :], _below(kth))
    # As far below the last rank as that is below the k-th score, at most: much farther, and all that are ranked
    # would seem equally warm.
    last = best[-1]
    share = (step - used) / np.float32(step + 1)
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

    def read(self, array: Any) -> NDArray[Any]:
        """An array of the runtime, on the host."""
        return np.asarray(array)


class _Gpu:
    """The same through torch. Raises NotSupported without it."""

    def __init__(self, device: str) -> None:
        try:
            import torch
        except ImportError as error:
            raise lacking(error, TORCH, f"device: a replay on {device}") from error
        self._torch = torch
        self._device = device

    def given(self, values: NDArray[Any]) -> Any:
        return self._torch.from_numpy(values.copy()).to(self._device)

    def read(self, array: Any) -> NDArray[Any]:
        on_host: NDArray[Any] = self._torch.from_dlpack(array).cpu().numpy()
        return on_host
