"""Sifting: candidates and prefetches are guesses that decide nothing but speed, whatever they are made from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.gpu import hopper_scores
from support.rig import Pair, Rig, assert_same_bits, full_width_shape, small_shape, tokens_of

SHAPES = {
    "fp32": small_shape(),
    "fp8_656, keys of 128": full_width_shape("fp8_656", index_dim=128, top_k=32),
    "bf16_1152, keys of 128": full_width_shape("bf16_1152", index_dim=128, top_k=64),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "off": {"prefetch": "off"},
    "0": {"prefetch_cap": 0},
    "few": {"prefetch_cap": 4},
    "default": {"prefetch_cap": -1},
    "all": {"prefetch_cap": 1000},
}
# Of the k-th score and its deviation, from the right ones; what is not finite counts as unknown.
WRONG = {
    "right": lambda right, spread: (right, spread),
    "a little low": lambda right, spread: (right - 0.05 * np.abs(right), spread),
    "a little high": lambda right, spread: (right + 0.05 * np.abs(right), spread),
    "lowest": lambda right, spread: (np.full_like(right, -3.4e38), spread),
    "highest": lambda right, spread: (np.full_like(right, 3.4e38), spread),
    "-inf": lambda right, spread: (np.full_like(right, -np.inf), spread),
    "inf": lambda right, spread: (np.full_like(right, np.inf), spread),
    "nan": lambda right, spread: (np.full_like(right, np.nan), spread),
    "zero": lambda right, spread: (np.zeros_like(right), np.zeros_like(spread)),
    "random": lambda right, spread: (
        np.random.default_rng(0).normal(0, 1 + np.abs(right)).astype(np.float32),
        np.random.default_rng(1).normal(0, 1 + np.abs(right)).astype(np.float32),
    ),
    "sure": lambda right, spread: (right, np.zeros_like(spread)),
    "unsure": lambda right, spread: (right, np.full_like(spread, 1e38)),
    "of unknown deviation": lambda right, spread: (right, np.full_like(spread, np.nan)),
    "of no deviation": lambda right, spread: (right, -spread),
}
NAMES = ("candidates", "full_selects", "prefetched", "prefetched_used", "prefetched_wasted", "prefetches_capped")


@pytest.fixture(autouse=True)
def prefetch() -> None:
    """Not once more with each setting: these tests choose their own."""


def totals(rig: Rig) -> dict[str, int]:
    """Counters of sifting, over all layers."""
    return {name: sum(getattr(layer, name) for layer in rig.stats().layers) for name in NAMES}


def sifts(rig: Rig) -> bool:
    """Whether the backend sifts."""
    return rig.kind == "cpu" or hopper_scores(rig.runtime.shape, rig.runtime.plan.config.kernels)


def loaded(rig: Rig, tokens: list[int], wrong: str) -> Pair:
    """A session that was imported with predictions of that kind."""
    source, pair = rig.open(256), rig.open(256)
    rig.prefill(source, tokens, verify=False)
    kv = rig.runtime.export_kv(source.session)
    assert np.isfinite(kv.deviations).all() and min(kv.deviations) >= 0
    wrong_ones = WRONG[wrong](np.array(kv.thresholds, np.float32), np.array(kv.deviations, np.float32))
    kv.thresholds, kv.deviations = (values.tolist() for values in wrong_ones)
    rig.runtime.import_kv(pair.session, kv)
    pair.oracle = source.oracle.copy()
    given = rig.runtime.thresholds(pair.session)
    assert (np.isnan(given) == ~np.isfinite(kv.thresholds)).all()
    spread = rig.runtime.export_kv(pair.session).deviations
    assert (np.isnan(spread) == ~np.isfinite(kv.deviations)).all()
    for layer, value in zip(pair.oracle.layers, given.tolist(), strict=True):
        layer.threshold = value
    rig.close(source)
    return pair


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", SHAPES)
def test_no_setting_and_no_prediction_changes_a_bit(make_rig, name, wrong):
    """Whatever is listed and fetched ahead, in the least pool: results are those without."""
    expected = None
    model = None
    for settings in SETTINGS.values():
        rig = make_rig(SHAPES[name], model=model or {"integers": name == "fp32"}, max_batch=2, **settings)
        model = rig.model
        pairs = [loaded(rig, tokens_of(3, 190), wrong), loaded(rig, tokens_of(4, 150), wrong)]
        rng = np.random.default_rng(5)
        results = [rig.step([(pair, int(rng.integers(61))) for pair in pairs], verify=False) for _ in range(8)]
        rig.check(thresholds=name == "fp32")
        if wrong == "right" and sifts(rig):
            assert (totals(rig)["candidates"] > 0) == (settings != SETTINGS["off"])
        if expected is not None:
            for given, wanted in zip(results, expected, strict=True):
                assert_same_bits(given, wanted)
        expected = expected or results


def test_a_step_prefetches_no_more_than_the_cap(make_rig):
    """In rows per 1,000 tokens that a layer scores; what exceeds it is counted."""
    shape = small_shape()
    for cap, most in ((0, 0), (4.9, 1), (10.1, 3), (1000, 310)):
        rig = make_rig(shape, prefetch="on", prefetch_cap=cap, max_batch=2)
        pairs = [loaded(rig, tokens_of(i, 153), "right") for i in (3, 4)]
        for token in range(2):
            before = rig.stats().layers
            rig.step([(pair, token) for pair in pairs])
            for old, new in zip(before, rig.stats().layers, strict=True):
                assert new.prefetched - old.prefetched <= most
        counted = totals(rig)
        if sifts(rig):
            assert counted["candidates"] > 0
            assert (counted["prefetched"] > 0) == (cap > 0)
            assert (counted["prefetches_capped"] > 0) == (0 < cap < 1000)


def test_what_is_prefetched_and_selected_is_a_hit(make_rig):
    """Imported rows are on the host alone: each entry is fetched by one of the two, and once."""
    on = make_rig(small_shape(), prefetch="on", prefetch_cap=1000, gpu_slots=2048)
    off = make_rig(small_shape(), model=on.model, prefetch="off", gpu_slots=2048)
    for rig in (on, off):
        pair = loaded(rig, tokens_of(3, 190), "right")
        for token in range(4):
            rig.step([(pair, token)])
        rig.check(thresholds=False)
    for one, other in zip(on.stats().layers, off.stats().layers, strict=True):
        assert one.hits + one.misses == other.hits + other.misses
        assert one.prefetched_used <= other.misses - one.misses  # later ones of what was wasted at first, too
        assert one.misses + one.prefetched >= other.misses
        assert other.recalled_bytes == other.misses * 320
    assert not any(totals(off).values())
    if sifts(on):
        counted = totals(on)
        assert counted["prefetched_used"] > 0.8 * counted["prefetched_wasted"] > 0, "predictions were not far off"
        assert on.stats().prefetched_bytes == counted["prefetched"] * 320


@pytest.mark.parametrize("how", ["prefill", "import", "fork", "pause"])
def test_predictions_go_where_their_session_goes(make_rig, how):
    """The first step of whoever has read a context sifts, on what is known of that session and no other."""
    rig = make_rig(small_shape(), prefetch="on", model={"integers": True}, max_batch=2)
    other = rig.open(256)
    rig.prefill(other, tokens_of(8, 100), verify=False)
    pair = rig.open(256)
    rig.prefill(pair, tokens_of(3, 190), verify=False)
    known = rig.runtime.thresholds(pair.session)
    spread = rig.runtime.export_kv(pair.session).deviations
    assert np.isfinite(known).all() and (known != rig.runtime.thresholds(other.session)).any()
    if how == "import":
        twin = rig.open(256)
        rig.runtime.import_kv(twin.session, rig.runtime.export_kv(pair.session))
        twin.oracle = pair.oracle.copy()
        rig.close(pair)
        pair = twin
    elif how == "fork":
        child = rig.fork(pair)
        rig.close(pair)
        pair = child
    elif how == "pause":
        rig.pause(pair)
        rig.step([(other, 1)])
        pair.session.resume()
    np.testing.assert_array_equal(rig.runtime.thresholds(pair.session), known)
    np.testing.assert_array_equal(rig.runtime.export_kv(pair.session).deviations, spread)
    before = totals(rig)
    rig.step([(other, 2), (pair, 1)])  # not in the row that it had
    after = totals(rig)
    if sifts(rig):
        rows = after["full_selects"] - before["full_selects"]
        assert after["candidates"] > before["candidates"] and rows < 2 * 3
    rig.check()


def test_captured_steps_sift_like_eager_ones(make_rig, device):
    if device != "cpu":
        pytest.skip("on a GPU it is a question of time what is prefetched")
    rigs: list[Rig] = []
    for captured in (False, True):
        rig = make_rig(small_shape(), model=rigs[0].model if rigs else {}, prefetch="on", prefetch_cap=20)
        rigs.append(rig)
        rig.runtime.capture(rig.model, [3])
        pairs = [loaded(rig, tokens_of(i, 120), "right") for i in range(3)]
        for token in range(10):
            rig.step([(pair, token) for pair in pairs], captured=captured)
    assert totals(rigs[0]) == totals(rigs[1])
    assert totals(rigs[0])["prefetched"] > 0
