"""What traces say about caching, apart from any one policy."""

from __future__ import annotations

import numpy as np
import pytest
from support.traces import growing, misses

import echo
from echo.traces import Trace, synthetic
from echo.traces.layer_steps import LayerSteps
from echo.traces.policies import make_pool
from echo.traces.statistics import clustering, forecasts, moving_average, overlap


def unscored(*rows: list[int], context: int = 1000) -> Trace:
    positions = np.asarray(rows, np.int32)[:, None]
    return Trace(positions, np.full(len(rows), context, np.int32), np.full((len(rows), 1), np.nan, np.float32))


def test_overlap_is_of_neighbouring_steps():
    trace = unscored([0, 1, 2, 3], [0, 1, 2, 9], [10, 11, 12, -1], [10, -1, -1, -1], [-1, -1, -1, -1])
    assert overlap(trace)[:, 0].tolist() == [0.75, 0.0, 1.0, 1.0]
    assert overlap(synthetic.generate("glm", steps=20, top_k=128, layers=2)).shape == (19, 2)


def test_overlap_of_regimes_is_in_their_order():
    shares = [overlap(synthetic.generate(r, 40, 256)).mean() for r in ("glm", "low_overlap", "v32_68k", "first_layers")]
    assert shares == sorted(shares, reverse=True) and shares[0] == pytest.approx(0.70, abs=0.03)
    assert shares[2] == pytest.approx(0.40, abs=0.03)  # as published for a prompt of 68K
    turns = overlap(synthetic.generate("glm", 40, 256, turn_every=10))[:, 0]
    assert np.flatnonzero(turns < 0.5).tolist() == [9, 19, 29]


def test_clusters_by_hand():
    """A pool for everything misses each row once: positions of the second half are all new."""
    pool = make_pool(LayerSteps(unscored([0, 1, 2, 3], [100, 101, 109, 250]), 0), 9, "lru")
    result = clustering(pool)
    assert result.misses == 4
    assert result.near == {1: 0.5, 8: 0.75, 64: 0.75, 100: 0.75}
    assert result.groups == 0.5
    assert clustering(make_pool(pool.steps, 9, "lru"), distances=(7, 150)).near == {7: 0.5, 150: 1.0}


def test_clusters_count_what_the_policy_misses():
    trace = growing(steps=60, top_k=8, first=200)
    steps = LayerSteps(trace, 0)
    result = clustering(make_pool(steps, 12, "echo"))
    assert result.misses == misses(steps, 12, "echo")[30:].sum()
    assert 0 <= result.near[1] <= result.near[8] <= result.near[64] <= result.near[100] <= 1
    assert result.near[100] > 0
    nothing = clustering(make_pool(LayerSteps(unscored([0, 1], [0, 1]), 0), 5, "lru"))
    assert nothing.misses == 0 and nothing.groups == 0


def test_a_moving_average_skips_what_is_unknown():
    scores = np.array([np.nan, 2, np.nan, np.inf, 4, 0], np.float32)
    np.testing.assert_array_equal(moving_average(scores, 0.5), [np.nan, np.nan, 2, 2, 2, 3])
    np.testing.assert_array_equal(moving_average(scores, 0.0), [np.nan, np.nan, 2, 2, 2, 4])


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        # Above 5 is only token 2; 3 is left to be missed.
        ([6, 5, 2, 1], {"candidates": 0.5, "wasted": 0, "misses_left": 0.5}),
        # Above -1 are all four; 0 is resident already, 4 is fetched in vain.
        ([6, -1, -4, -5], {"candidates": 2.0, "wasted": 0.5, "misses_left": 0}),
    ],
)
def test_forecasts_by_hand(first, expected):
    """Two steps: 0 and 1 are selected, then 2 and 3, which are not resident."""
    ranked = np.array([[[0, 1, 2, 3]], [[2, 3, 0, 4]]], np.int32)
    scores = np.array([[first], [[7, 3, 2, 0]]], np.float32)
    kth = scores[..., 1].copy()
    trace = Trace(np.sort(ranked[..., :2], axis=2), np.full(2, 10, np.int32), kth, ranked, scores)
    (result,) = forecasts(make_pool(LayerSteps(trace, 0), 8, "lru"), [0.0])
    assert {name: getattr(result, name) for name in expected} == expected and result.misses == 1
    assert result.error == pytest.approx(abs(first[1] - 3) / np.std([7, 3, 2, 0]))


def test_the_newest_token_is_not_missed():
    """It is made on the spot. Two steps of a growing context; the second selects its own token and 0."""
    ranked = np.array([[[0, 1, -1]], [[2, 0, 1]]], np.int32)
    scores = np.array([[[6, 5, np.nan]], [[7, 3, 2]]], np.float32)
    trace = Trace(np.sort(ranked[..., :2], axis=2), np.array([2, 3], np.int32), scores[..., 1].copy(), ranked, scores)
    (result,) = forecasts(make_pool(LayerSteps(trace, 0), 8, "lru"), [0.0])
    assert (result.misses, result.misses_left, result.wasted) == (0, 0, 0)


def test_forecasts_of_a_regime():
    trace = synthetic.generate("glm", steps=120, top_k=128, ranks=synthetic.ALL)
    pool = make_pool(LayerSteps(trace, 0), 256, "echo")
    alphas = (0.0, 0.5, 0.9)
    results = forecasts(pool, alphas)
    missed = misses(LayerSteps(trace, 0), 256, "echo")[60:].mean() / 128
    assert [result.alpha for result in results] == list(alphas)
    for result in results:
        assert result.misses == pytest.approx(missed) and 0 <= result.misses_left < result.misses
        assert 0.3 < result.candidates < 3 and 0 < result.wasted < result.candidates
        assert 0 < result.error < 0.5
    assert results[0].error < results[2].error  # the common shift jumps, and a slow average forgets it late


def test_forecasts_need_scores():
    pool = make_pool(LayerSteps(growing(steps=6, top_k=8, first=20), 0), 9, "lru")
    with pytest.raises(echo.InvalidArgument, match="^pool: "):
        forecasts(pool, [0.5])
