"""The product against the oracle: selections, outputs, host rows and thresholds, for every format."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.rig import full_width_shape, small_shape

SHAPES = {
    "fp32": small_shape(),
    "fp32 rows, fp8 keys": small_shape(index_key_format="fp8"),
    "no rope": small_shape(rope_dim=0),
    "fp8_656": full_width_shape("fp8_656"),
    "bf16_1152": full_width_shape("bf16_1152"),
    "fp8_656, keys of 128": full_width_shape("fp8_656", index_heads=64, index_dim=128),
    "bf16_1152, fp32 keys": full_width_shape("bf16_1152", index_key_format="fp32"),
    "raw": small_shape(row_format="raw", raw_row_bytes=48),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", SHAPES)
def test_selections_outputs_and_host_rows_are_the_oracles(make_rig, name, dtype):
    rig = make_rig(SHAPES[name], model={"dtype": dtype, "seed": 1})
    rng = np.random.default_rng(0)
    a, b = rig.open(128), rig.open(80)
    rig.prefill(a, rng.integers(61, size=70).tolist())
    rig.prefill(b, rng.integers(61, size=7).tolist())
    rig.check()
    for _ in range(12):
        rig.step([(b, int(rng.integers(61))), (a, int(rng.integers(61)))])
    rig.check()
    # Scores as close as rounding are rare, so nearly every selection must have been the oracle's own.
    assert rig.inexact <= 0.05 * rig.rows * rig.model.shape.layers


@pytest.mark.parametrize(("key_format", "index_dim"), [("fp32", 16), ("fp8", 16), ("fp8", 128)])
def test_selections_are_exactly_the_oracles_where_scores_are_integers(make_rig, key_format, index_dim):
    """Integer scores are exact in any arithmetic, so ties and order leave no tolerance."""
    rig = make_rig(small_shape(index_key_format=key_format, index_dim=index_dim), model={"integers": True})
    rng = np.random.default_rng(1)
    pair = rig.open(256)
    rig.prefill(pair, rng.integers(61, size=130).tolist())
    for _ in range(20):
        rig.step([(pair, int(rng.integers(61)))])
        assert rig.inexact == 0
    rig.check()


@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.5, 1.0])
def test_thresholds_are_the_moving_average_of_the_exact_kth_scores(make_rig, alpha):
    rig = make_rig(small_shape(top_k=8), model={"integers": True}, threshold_alpha=alpha)
    pair = rig.open(64)
    rig.prefill(pair, [1, 2, 3, 4, 5])
    assert np.isnan(rig.runtime.thresholds(pair.session)).all()  # fewer than k tokens: unknown
    for token in range(12):
        rig.step([(pair, token)])
        given = rig.runtime.thresholds(pair.session)
        expected = [layer.threshold for layer in pair.oracle.layers]
        np.testing.assert_allclose(given, np.array(expected), rtol=1e-6)


@pytest.mark.parametrize("fused", [False, True], ids=["verbs", "attention"])
def test_layers_without_an_indexer_attend_to_the_selection_of_the_layer_before(make_rig, fused):
    rig = make_rig(small_shape(layers=4), model={"shared": (1, 3)}, fused=fused)
    pair = rig.open(128)
    rng = np.random.default_rng(2)
    _, selections = rig.prefill(pair, rng.integers(61, size=100).tolist())
    assert torch.equal(selections[:, 0], selections[:, 1]) and torch.equal(selections[:, 2], selections[:, 3])
    assert not torch.equal(selections[:, 0], selections[:, 2])
    for token in range(5):
        rig.step([(pair, token)])
    assert np.isnan(rig.runtime.thresholds(pair.session)[[1, 3]]).all()
    rig.check()


def test_several_query_rows_see_tokens_up_to_their_own(make_rig):
    rig = make_rig(small_shape(), query_rows=3)
    rng = np.random.default_rng(3)
    a, b = rig.open(128), rig.open(128)
    rig.prefill(a, rng.integers(61, size=62).tolist())
    for _ in range(6):
        rig.step([(a, rng.integers(61, size=3).tolist()), (b, rng.integers(61, size=3).tolist())])
    rig.check()
