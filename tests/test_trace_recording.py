"""What a recorder takes from a model."""

from __future__ import annotations

import numpy as np
import pytest
from support.traces import Decoding

import echo
from echo.traces import SelectionRecorder
from echo.traces.recorder import best


def test_what_is_kept_of_scores():
    scores = np.array([1, 5, np.nan, 3], np.float32)
    kept = best(scores, 2, 6)
    assert kept["ranked"].tolist() == [1, 3, 0, 2, -1, -1] and kept["kth_score"] == 3
    np.testing.assert_array_equal(kept["scores"], np.array([5, 3, 1, np.nan, np.nan, np.nan], np.float32))
    for few, top_k in ((scores, 5), (scores, 4), (scores[:0], 1)):  # too few, a NaN as the last, unknown
        kept = best(few, top_k, 6)
        assert (kept["ranked"] == -1).all() and np.isnan(kept["scores"]).all() and np.isnan(kept["kth_score"])
    assert len(best(scores, 2, 0)["ranked"]) == 0


@pytest.mark.parametrize("ranks", [0, 33])
@pytest.mark.parametrize("captured", [False, True])
def test_a_recorder_keeps_what_the_model_selects(captured, ranks):
    hf = pytest.importorskip("echo.hf")
    import torch

    network = hf.tiny_model(seed=1, layers=2, top_k=32)
    recorder = SelectionRecorder(layers=2, ranks=ranks)
    seen: list[np.ndarray] = []
    scores: list[np.ndarray] = []

    def observer(p: echo.ForwardPass, tensors: object) -> None:
        recorder(p, tensors)
        seen.append(torch.from_dlpack(p.selection)[0].numpy().copy())
        if not p.is_prefill:
            scores.append(torch.from_dlpack(p.scores())[0].numpy().copy())

    model = hf.DsaModel(network, observer=observer)
    with pytest.raises(echo.StateError, match="no step"):
        recorder.trace()
    with echo.Runtime(
        model.shape("fp32", "fp32"), device="cpu", host_tokens=256, max_context=128, max_batch=2, threshold_alpha=0.0
    ) as runtime:
        session = runtime.open_session(100)
        runtime.prefill(session, list(range(29)), model.forward)
        if captured:
            runtime.capture(model.forward, batch_sizes=[2])  # with a padding row
        seen.clear()
        scores.clear()
        thresholds = []
        for token in range(6):
            runtime.step(echo.Batch([session], [token]), None if captured else model.forward)
            thresholds.append(runtime.thresholds(session))
            if ranks:
                with pytest.raises(echo.StateError, match="^kth_scores: they come with the ranks"):
                    recorder.kth_scores(thresholds[-1])
            else:
                recorder.kth_scores(thresholds[-1])
        trace = recorder.trace("tiny", "numbers", seed=1)
        both = echo.Batch([session, runtime.open_session(20)], [1, 2])
        with pytest.raises(echo.NotSupported, match="^sessions: a step of 2 rows"):
            runtime.step(both, None if captured else model.forward)
        for wrong, named in ((SelectionRecorder(layers=1), "layers: 1"), (SelectionRecorder(2, 31), "ranks: 31")):
            with pytest.raises(echo.InvalidArgument, match=f"^{named} given"):
                runtime.step(echo.Batch([session], [1]), hf.DsaModel(network, wrong).forward)
    assert (trace.steps, trace.layers, trace.top_k, trace.ranks) == (6, 2, 32, ranks)
    assert trace.context.tolist() == list(range(30, 36))  # 30 and 31 tokens: not all places are taken
    np.testing.assert_array_equal(trace.positions.reshape(12, 32), np.stack(seen))
    np.testing.assert_array_equal(trace.kth_score, np.stack(thresholds))
    if ranks:
        for t, layer in np.ndindex(6, 2):
            best_first = np.argsort(-scores[2 * t + layer][: 30 + t], kind="stable")[:33]
            expected = np.full(33, -1)
            expected[: len(best_first)] = best_first
            np.testing.assert_array_equal(trace.ranked[t, layer], expected if t >= 2 else np.full(33, -1))


def test_layers_that_share_a_selection_have_no_scores():
    decoding = Decoding(before=30, steps=5)
    recorder = SelectionRecorder(layers=3, ranks=20)
    decoding.misses(200, recorder)
    trace = recorder.trace()
    assert np.isnan(trace.kth_score).all(axis=0).tolist() == [False, True, False]
    np.testing.assert_array_equal(trace.positions[:, 1], trace.positions[:, 0])
    assert ((trace.ranked >= 0).sum(axis=2) == [20, 0, 20]).all()
