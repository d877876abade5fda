"""Takes a trace from a model while it decodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from echo import ForwardPass, InvalidArgument, NotSupported, StateError
from echo.traces.ranking import rank
from echo.traces.trace import Trace

if TYPE_CHECKING:
    from echo.hf import LayerTensors


class SelectionRecorder:
    """An observer of `echo.hf.DsaModel` that keeps the selections of one session's decode steps.

    Prefill and padding rows are passed over. Steps may be eager, or captured where the runtime is on the CPU: a
    GPU replays a graph without asking an observer. Each layer waits for the device.

    With `ranks`, the scores of so many tokens are kept too, and k-th scores with them; not of layers that share a
    selection, nor of steps with fewer than top_k tokens. Without, the runtime shows k-th scores as a moving average:
    with `threshold_alpha=0` that is the last step's, and `recorder.kth_scores(runtime.thresholds(session))` after a
    step adds them to the trace.

    Args:
        layers: layers of the model.
        ranks: tokens whose scores are kept, 0 or at least top_k.
    """

    def __init__(self, layers: int, ranks: int = 0) -> None:
        """See the class."""
        self._layers = layers
        self._ranks = ranks
        self._partial: list[dict[str, Any]] = []  # of the step that runs, by layer
        self._steps: list[dict[str, NDArray[Any]]] = []
        self._context: list[int] = []

    def __call__(self, p: ForwardPass, tensors: LayerTensors) -> None:
        """Sees a layer; a step counts when its last layer was seen.

        Raises:
            NotSupported: naming `sessions`, if the step has more than one row.
            InvalidArgument: naming `layers`, if the model has more, or `ranks`, if they are fewer than top_k.
            StateError: naming `session`, if it is shorter than it was in the step before.
        """
        if p.is_prefill:
            return
        positions = _on_host(p.positions)
        rows = np.flatnonzero(positions >= 0)
        if len(rows) == 0:
            return
        if len(rows) > 1:
            raise NotSupported(f"sessions: a step of {len(rows)} rows is recorded, expected one session and one token")
        if tensors.layer >= self._layers:
            raise InvalidArgument(f"layers: {self._layers} given, but the model has layer {tensors.layer}")
        row, context = int(rows[0]), int(positions[rows[0]]) + 1
        selection = np.sort(_on_host(p.selection, row))
        if 0 < self._ranks < len(selection):
            raise InvalidArgument(f"ranks: {self._ranks} given, expected 0 or at least {len(selection)} (top_k)")
        if tensors.layer == 0:
            self._partial = []
        scored = self._ranks > 0 and tensors.index_q is not None
        scores = _on_host(p.scores(), row)[:context] if scored else np.empty(0, np.float32)
        # Empty places were sorted to the front.
        selection = np.roll(selection, -int((selection < 0).sum()))
        self._partial.append({"positions": selection, **best(scores, len(selection), self._ranks)})
        if len(self._partial) == self._layers:
            self._keep(context)

    def _keep(self, context: int) -> None:
        if self._context and context < self._context[-1]:
            raise StateError(f"session: it has {context} tokens after a step with {self._context[-1]}; is it another?")
        if self._context and context == self._context[-1]:  # that step failed behind its last layer
            self._context.pop()
            self._steps.pop()
        self._steps.append({name: np.stack([layer[name] for layer in self._partial]) for name in self._partial[0]})
        self._context.append(context)
        self._partial = []

    def kth_scores(self, scores: Any) -> None:
        """Adds k-th scores, float32 [layers], to the latest step.

        Raises:
            StateError: no step was recorded, or `ranks` brings them already.
        """
        if not self._context or self._ranks:
            reason = "they come with the ranks" if self._ranks else "no step was recorded"
            raise StateError(f"kth_scores: {reason}")
        self._steps[-1]["kth_score"][:] = np.asarray(scores, np.float32)

    def trace(self, model: str = "", text: str = "", notes: str = "", seed: int = 0) -> Trace:
        """What was recorded so far; arguments as in `Trace`.

        Raises:
            StateError: nothing was.
        """
        if not self._context:
            raise StateError("trace: no step was recorded")
        arrays = {name: np.stack([step[name] for step in self._steps]) for name in self._steps[0]}
        if not self._ranks:
            del arrays["ranked"], arrays["scores"]
        return Trace(
            context=np.asarray(self._context, np.int32), model=model, text=text, notes=notes, seed=seed, **arrays
        )


def best(scores: NDArray[np.float32], top_k: int, ranks: int) -> dict[str, Any]:
    """What a trace keeps of the scores of one step and layer.

    Args:
        scores: float32 [tokens]; none where they are unknown.
        top_k: tokens that were selected, if there are so many.
        ranks: how many are kept.

    Returns:
        `ranked`, `scores` [ranks] and `kth_score`, as in `Trace`; unknown where there are fewer than top_k tokens, or
        where the k-th score is not finite.
    """
    ranked, kept, kth = np.full(ranks, -1, np.int32), np.full(ranks, np.nan, np.float32), np.float32(np.nan)
    if ranks and len(scores) >= top_k:
        order = rank(scores, ranks)
        if np.isfinite(scores[order[top_k - 1]]):
            kth = scores[order[top_k - 1]]
            ranked[: len(order)], kept[: len(order)] = order, scores[order]
    return {"ranked": ranked, "scores": kept, "kth_score": kth}


def _on_host(array: Any, row: int | None = None) -> NDArray[Any]:
    import torch

    tensor = torch.from_dlpack(array)
    copy: NDArray[Any] = (tensor if row is None else tensor[row]).cpu().numpy().copy()
    return copy
