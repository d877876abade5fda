"""One layer of a trace, prepared for replay.

Rows are numbers from 0, so that maps are as large as the trace, not the text; what policies ask for in each step is
looked up once for all of them.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from echo import InvalidArgument
from echo.traces.trace import Trace

_FARTHEST = np.float32(3.0e38)  # of a score that is NaN, as in cpp/cache_manager/replacement.hpp


class LayerSteps:
    """What a layer's pool is asked for in each step, and what the scores of the step say.

    Args:
        trace: the selections.
        layer: of them.

    Attributes:
        positions: int64 [rows], position of each row, ascending.
        selected: int64 [steps, top_k] rows, -1 for none.
        newest: int64 [steps], the row that a step appends, -1 where its context did not grow.
        kth_score: float32 [steps].
        ranked: int64 [steps, ranks] rows in order of score, best first, -1 for none; ranks is 0 without scores.
        scores: float32 [steps, ranks], of `ranked`.
        below: float32 [steps, ranks], k-th score minus the row's, infinite where the row's is NaN, -infinite where the
            k-th is.
        distance: float32 [steps, ranks], the same, at least 0: the product's `score_distance`.
        scored: bool [steps], whether there are any.
    """

    def __init__(self, trace: Trace, layer: int) -> None:
        """See the class.

        Raises:
            InvalidArgument: naming `layer`.
        """
        if not 0 <= layer < trace.layers:
            raise InvalidArgument(f"layer: {layer} given, expected 0 to {trace.layers - 1}")
        grew = np.diff(trace.context, prepend=0) > 0
        newest = np.where(grew, trace.context - 1, -1)
        given = [trace.positions[:, layer], newest]
        if trace.ranked is not None:
            given.append(trace.ranked[:, layer])
        mentioned = np.unique(np.concatenate([part.ravel() for part in given]))
        self.positions = mentioned[mentioned >= 0].astype(np.int64)
        self.selected = self.rows_of(trace.positions[:, layer])
        self.newest = self.rows_of(newest)
        self.kth_score = trace.kth_score[:, layer]
        self.ranked = np.empty((trace.steps, 0), np.int64)
        self.scores = np.empty((trace.steps, 0), np.float32)
        if trace.ranked is not None and trace.scores is not None:
            self.ranked = self.rows_of(trace.ranked[:, layer])
            self.scores = trace.scores[:, layer]
        distance = self.kth_score[:, None] - self.scores
        self.below = np.where(np.isnan(distance), np.float32(np.inf), distance)
        self.below[np.isnan(self.kth_score)] = -np.inf
        self.distance = np.where(np.isnan(distance), _FARTHEST, np.maximum(distance, np.float32(0)))
        self.scored = np.asarray((self.ranked >= 0).any(axis=1))

    def rows_of(self, positions: NDArray[np.integer]) -> NDArray[np.int64]:
        """Rows of positions that the trace mentions, -1 for -1."""
        return np.where(positions >= 0, np.searchsorted(self.positions, positions), -1)

    @property
    def steps(self) -> int:
        """Decode steps."""
        return len(self.selected)

    @property
    def top_k(self) -> int:
        """Most rows that a step selects."""
        return int(self.selected.shape[1])

    def wanted(self, step: int) -> NDArray[np.int64]:
        """Rows that a step needs, ascending: what it selects and what it appends."""
        rows = np.append(self.selected[step], self.newest[step])
        return np.unique(rows[rows >= 0])

    @cached_property
    def next_use(self) -> NDArray[np.int64]:
        """int64 [steps, top_k + 1], the next step that selects each row of `selected`, and `newest`; `steps`: none."""
        rows = np.concatenate([self.selected, self.newest[:, None]], axis=1)
        steps = np.broadcast_to(np.arange(self.steps)[:, None], rows.shape)
        uses = rows.ravel() * (self.steps + 1) + steps.ravel()
        selects = np.ones(rows.shape, np.bool_)
        selects[:, -1] = False  # being appended is no use
        wanted = np.sort(uses[selects.ravel() & (rows.ravel() >= 0)])
        place = np.searchsorted(wanted, uses, side="right")
        following = np.append(wanted, -1)[place]
        same = following // (self.steps + 1) == rows.ravel()
        return np.where(same, following % (self.steps + 1), self.steps).reshape(rows.shape)
