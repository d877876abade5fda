"""Scores that a forward can read: what the indexer said of every token, in eager and replayed passes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.rig import Rig, small_shape
from support.synthetic import FusedModel, LayerInputs

import echo

WIDTH = 256  # max_context


class ReadsScores(FusedModel):
    """Keeps the scores of every layer and pass, as a recorder of traces would."""

    def run_layer(self, forward_pass: echo.ForwardPass, layer: int, x: LayerInputs, out: torch.Tensor) -> None:
        """The layer, then what it scored."""
        super().run_layer(forward_pass, layer, x, out)
        block = forward_pass.blocks[-1]
        scores = torch.from_dlpack(forward_pass.scores(block))
        assert scores.dtype == torch.float32 and scores.shape == (block[1], WIDTH)
        self.read[forward_pass.rows, layer] = scores.clone()  # a replay writes to the same memory again

    read: dict[tuple[int, int], torch.Tensor]


def rig_that_reads(make_rig, device: str, **settings) -> Rig:
    """Integer scores, so that they are exact."""
    model = ReadsScores(small_shape(), device=device, integers=True)
    model.read = {}
    return make_rig(model.shape, model=model, max_context=WIDTH, **settings)


def assert_read(rig: Rig, rows: int, read_row: int, pair, position: int) -> None:
    """The scores that were read for a row are the oracle's for that position."""
    for number, layer in enumerate(pair.oracle.layers):
        given = rig.model.read[rows, number][read_row, : position + 1].cpu().numpy()
        np.testing.assert_array_equal(given, layer.scores[position])


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_scores_of_a_step_are_the_indexers(make_rig, device, captured):
    rig = rig_that_reads(make_rig, device, query_rows=2, max_batch=3)
    if captured:
        rig.runtime.capture(rig.model, [3], 2)
    pairs = [rig.open(200), rig.open(200)]
    for i, pair in enumerate(pairs):
        rig.prefill(pair, [(3 * j + i) % 61 for j in range(40 + 70 * i)])
    rows = 6 if captured else 4
    for turn in range(6):
        rig.step([(pair, [turn, 60 - turn]) for pair in pairs], captured=captured)
        for i, pair in enumerate(pairs):
            for j in range(2):
                assert_read(rig, rows, 2 * i + j, pair, pair.session.length - 2 + j)


def test_scores_of_a_prefill_are_those_of_its_last_block(make_rig, device):
    rig = rig_that_reads(make_rig, device, max_batch=1, gpu_slots=7 * 17)
    pair = rig.open(200)
    rig.prefill(pair, [(5 * j) % 61 for j in range(60)])
    for row in range(60 % 7):
        assert_read(rig, 60, row, pair, 60 - 60 % 7 + row)


def test_scores_are_refused_where_there_are_none(make_rig):
    rig = make_rig(small_shape(), max_batch=2)
    pair = rig.open(64)
    rig.prefill(pair, list(range(20)))
    refusals: list[str] = []

    def refused(p: echo.ForwardPass, error: type[echo.Error], message: str, *block) -> None:
        with pytest.raises(error, match=message):
            p.scores(*block)
        refusals.append(message)

    def on_stage(stage: str, layer: int, p: echo.ForwardPass) -> None:
        if (stage, layer) == ("append", 0):  # nor those of the pass before
            refused(p, echo.StateError, "^block: the last score was not of rows 0")
        if (stage, layer) == ("select", 1):
            refused(p, echo.InvalidArgument, "^block: rows 0 . 7 given", (0, 7))
            torch.from_dlpack(p.scores())
        if (stage, layer) == ("append", 2):
            torch.from_dlpack(p.scores(p.blocks[0]))  # still layer 1's

    rig.model.on_stage = on_stage
    rig.step([(pair, 1)])
    assert len(refusals) == 2

    def two_blocks(p: echo.ForwardPass) -> None:
        assert len(p.blocks) > 1
        refused(p, echo.InvalidArgument, "^block: this pass has")
        rig.model(p)
        torch.from_dlpack(p.scores(p.blocks[-1]))
        refused(p, echo.StateError, "^block: the last score was not of rows 0", p.blocks[0])

    rig.model.on_stage = None
    rig.runtime.prefill(rig.open(64).session, list(range(40)), two_blocks)
    assert len(refusals) == 4


def test_scores_live_as_long_as_somebody_holds_them(make_rig):
    """Like all arrays of a pass: the runtime may be closed before."""
    rig = make_rig(small_shape())
    kept: list[torch.Tensor] = []
    rig.model.on_stage = lambda stage, layer, p: kept.append(torch.from_dlpack(p.scores())) if stage == "end" else None
    rig.step([(rig.open(64), 1)])
    rig.runtime.close()
    assert kept[-1].shape == (1, 1024) and np.isfinite(kept[-1].cpu().numpy()[0, 0])
