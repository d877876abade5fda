"""Takes a trace from a model while it decodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from echo import ForwardPass, InvalidArgument, NotSupported, StateError
from echo.traces.trace import Trace

if TYPE_CHECKING:
    from echo.hf import LayerTensors


class SelectionRecorder:
    """An observer of `echo.hf.DsaModel` that keeps the selections of one session's decode steps.

    Prefill and padding rows are passed over. Steps may be eager, or captured where the runtime is on the CPU: a
    GPU replays a graph without asking an observer. Each layer waits for the device.

    The runtime shows k-th scores as a moving average. With `threshold_alpha=0` that is the last step's, and
    `recorder.kth_scores(runtime.thresholds(session))` after a step adds them to the trace.

    Args:
        layers: layers of the model.
    """

    def __init__(self, layers: int) -> None:
        """See the class."""
        self._layers = layers
        self._partial: list[NDArray[np.int32]] = []  # of the step that runs, by layer
        self._positions: list[NDArray[np.int32]] = []
        self._context: list[int] = []
        self._kth_score: list[NDArray[np.float32]] = []

    def __call__(self, p: ForwardPass, tensors: LayerTensors) -> None:
        """Sees a layer; a step counts when its last layer was seen.

        Raises:
            NotSupported: naming `sessions`, if the step has more than one row.
            InvalidArgument: naming `layers`, if the model has more.
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
        if tensors.layer == 0:
            self._partial = []
        self._partial.append(np.sort(_on_host(p.selection)[rows[0]]))
        if len(self._partial) == self._layers:
            self._keep(int(positions[rows[0]]) + 1)

    def _keep(self, context: int) -> None:
        if self._context and context < self._context[-1]:
            raise StateError(f"session: it has {context} tokens after a step with {self._context[-1]}; is it another?")
        if self._context and context == self._context[-1]:  # that step failed behind its last layer
            for column in (self._positions, self._context, self._kth_score):
                column.pop()
        # Empty places were sorted to the front.
        self._positions.append(np.stack([np.roll(row, -int((row < 0).sum())) for row in self._partial]))
        self._context.append(context)
        self._kth_score.append(np.full(self._layers, np.nan, np.float32))
        self._partial = []

    def kth_scores(self, scores: Any) -> None:
        """Adds k-th scores, float32 [layers], to the latest step.

        Raises:
            StateError: no step was recorded.
        """
        if not self._context:
            raise StateError("kth_scores: no step was recorded")
        self._kth_score[-1][:] = np.asarray(scores, np.float32)

    def trace(self, model: str = "", text: str = "", seed: int = 0) -> Trace:
        """What was recorded so far; arguments as in `Trace`.

        Raises:
            StateError: nothing was.
        """
        if not self._context:
            raise StateError("trace: no step was recorded")
        return Trace(
            positions=np.stack(self._positions),
            context=np.asarray(self._context, np.int32),
            kth_score=np.stack(self._kth_score),
            model=model,
            text=text,
            seed=seed,
        )


def _on_host(array: Any) -> NDArray[np.int32]:
    import torch

    copy: NDArray[np.int32] = torch.from_dlpack(array).cpu().numpy().astype(np.int32)
    return copy
