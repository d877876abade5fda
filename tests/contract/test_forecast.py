"""Forecasts: what is fetched for the next step is a guess that decides nothing but speed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.rig import Rig, assert_same_bits, full_width_shape, small_shape, tokens_of

CAPS = (0, 1, 5, 65536)
SHAPES = {
    "fp32": small_shape(top_k=32),
    "fp8_656, keys of 128": full_width_shape("fp8_656", index_dim=128, top_k=64),
    "bf16_1152": full_width_shape("bf16_1152", top_k=32),
}


@pytest.fixture(autouse=True)
def prefetch() -> None:
    """Not once more with each setting: these tests choose their own."""


def forecasts(rig: Rig) -> bool:
    """Whether the device has forecasts: of a GPU's kernels, those made for it."""
    return rig.kind == "cpu" or rig.runtime.plan.config.kernels != "generic"


def totals(rig: Rig, name: str = "forecast") -> int:
    """Of all layers."""
    return sum(getattr(layer, name) for layer in rig.stats().layers)


def decode(rig: Rig, steps: int, captured: bool = False, seed: int = 5) -> list[Any]:
    """Steps of three sessions, of which two share a prompt."""
    first = rig.open(256)
    rig.prefill(first, tokens_of(3, 170), verify=False)
    second = rig.fork(first)
    third = rig.open(256)
    rig.prefill(third, tokens_of(4, 120), verify=False)
    rng = np.random.default_rng(seed)
    return [
        rig.step([(pair, int(rng.integers(61))) for pair in (first, second, third)], captured=captured, verify=False)
        for _ in range(steps)
    ]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("prefetch_cap", [0, 1000])
def test_no_cap_changes_a_bit(make_rig, name, prefetch_cap):
    """In the least pool and in one that holds some more, eager and captured."""
    expected = None
    model = None
    for cap in CAPS:
        for slots in (0, 300):
            settings = {"max_batch": 3, "forecast_cap": cap, "prefetch_cap": prefetch_cap, "gpu_slots": slots}
            rig = make_rig(SHAPES[name], model=model or {"integers": name == "fp32"}, **settings)
            model = rig.model
            rig.runtime.capture(model, [3])
            results = decode(rig, 10, captured=slots > 0)
            rig.check(thresholds=name == "fp32")
            if expected is not None:
                for given, wanted in zip(results, expected, strict=True):
                    assert_same_bits(given, wanted)
            expected = expected or results
            assert cap > 0 or totals(rig) == 0


def test_a_step_forecasts_no_more_than_the_cap(make_rig):
    for cap, most in ((0, 0), (1, 3), (5, 15), (65536, 48)):
        rig = make_rig(small_shape(top_k=32), max_batch=3, gpu_slots=400, forecast_cap=cap)
        assert rig.runtime.plan.config.forecast_cap == most // 3
        before = rig.stats().layers
        decode(rig, 1)
        for old, new in zip(before, rig.stats().layers, strict=True):
            assert new.forecast - old.forecast <= most
        assert (totals(rig) > 0) == (most > 0 and forecasts(rig))


def test_forecasts_are_hits_later(make_rig):
    """Each entry is a hit or a miss, with forecasts more often a hit."""
    with_ = make_rig(small_shape(top_k=32), max_batch=3, gpu_slots=400, forecast_cap=16)
    without = make_rig(small_shape(top_k=32), model=with_.model, max_batch=3, gpu_slots=400, forecast_cap=0)
    if not forecasts(with_):
        pytest.skip("generic kernels have no forecasts")
    for rig in (with_, without):
        decode(rig, 12)
        rig.check(thresholds=False)
    for one, other in zip(with_.stats().layers, without.stats().layers, strict=True):
        assert one.hits + one.misses == other.hits + other.misses
        assert one.forecast_used <= one.hits and other.forecast == other.forecast_used == 0
    assert totals(with_, "misses") < totals(without, "misses")
    assert totals(with_, "forecast_used") > 0
    assert with_.stats().forecast_bytes == totals(with_) * with_.runtime.shape.row_bytes


def test_none_by_default(make_rig, monkeypatch):
    monkeypatch.delenv("ECHO_FORECAST_CAP", raising=False)
    rig = make_rig(small_shape(top_k=32), max_batch=3, gpu_slots=400)
    decode(rig, 2)
    assert rig.runtime.plan.config.forecast_cap == totals(rig) == 0


def test_minus_one_is_a_tenth_of_top_k_on_a_gpu(make_rig):
    rig = make_rig(small_shape(top_k=32), max_batch=3, gpu_slots=400, forecast_cap=-1)
    decode(rig, 2)
    can = rig.kind == "cuda" and forecasts(rig)
    assert rig.runtime.plan.config.forecast_cap == (3 if can else 0)
    assert (totals(rig) > 0) == can
