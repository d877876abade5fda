"""A pass whose verbs are timed, for backends that are done when a verb returns."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from echo import Batch, Forward, ForwardPass, Runtime
from echo.profile.kernels import BEGIN, COMMIT, OTHER
from echo.profile.timeline import Span, Step

_TRACK = "cpu"


class TimedPass:
    """Takes the place of a ForwardPass; everything that is no verb is the pass's own.

    `attention` calls the verbs one by one. So new rows and keys are appended on their own, not by recall and score.
    """

    def __init__(self, p: ForwardPass) -> None:
        """See the class."""
        self.spans: list[Span] = []
        self._pass = p

    def __getattr__(self, name: str) -> Any:
        """What the pass has."""
        return getattr(self._pass, name)

    def append(self, layer: int, kv: Any, index_key: Any = None) -> None:
        """See ForwardPass."""
        with self._timed("append", layer):
            self._pass.append(layer, kv, index_key)

    def score(self, layer: int, index_q: Any, index_weights: Any, block: Any = None) -> None:
        """See ForwardPass."""
        with self._timed("score", layer):
            self._pass.score(layer, index_q, index_weights, block)

    def select(self, layer: int, block: Any = None) -> Any:
        """See ForwardPass."""
        with self._timed("select", layer):
            return self._pass.select(layer, block)

    def recall(self, layer: int, selection: Any = None, block: Any = None) -> Any:
        """See ForwardPass."""
        with self._timed("recall", layer):
            return self._pass.recall(layer, selection, block)

    def attend(self, layer: int, q: Any, scale: float, out: Any, block: Any = None) -> None:
        """See ForwardPass."""
        with self._timed("attend", layer):
            self._pass.attend(layer, q, scale, out, block)

    def attention(
        self,
        layer: int,
        *,
        kv: Any,
        q: Any,
        scale: float,
        out: Any,
        index_key: Any = None,
        index_q: Any = None,
        index_weights: Any = None,
    ) -> None:
        """See ForwardPass."""
        self.append(layer, kv, index_key)
        for block in self._pass.blocks:
            if index_q is not None:
                self.score(layer, index_q, index_weights, block)
                self.select(layer, block)
            self.recall(layer, None, block)
            self.attend(layer, q, scale, out, block)

    @contextmanager
    def _timed(self, verb: str, layer: int) -> Iterator[None]:
        start = now()
        yield
        self.spans.append(Span(verb, start, now(), _TRACK, layer))


def timed_step(runtime: Runtime, batch: Batch, forward: Forward) -> Step:
    """Runs one eager step. What comes before the forward is its begin, what follows its commit, host work included."""
    passes: list[tuple[float, TimedPass, float]] = []

    def run(p: ForwardPass) -> None:
        timed = TimedPass(p)
        entered = now()
        forward(timed)  # type: ignore[arg-type]
        passes.append((entered, timed, now()))

    start = now()
    runtime.step(batch, run)
    end = now()
    ((entered, timed, left),) = passes
    spans = [Span(BEGIN, start, entered, _TRACK)]
    for span in timed.spans:
        spans += [Span(OTHER, spans[-1].end, span.start, _TRACK), span]
    spans += [Span(OTHER, spans[-1].end, left, _TRACK), Span(COMMIT, left, end, _TRACK)]
    return Step(start, end, spans)


def now() -> float:
    """Microseconds."""
    return time.perf_counter_ns() / 1e3
