"""Plans: all sizes before memory is touched."""

from __future__ import annotations

import pytest
from support.rig import small_shape

import echo


def plan_of(shape: echo.ModelShape, limits: echo.MachineLimits | None = None, **settings) -> echo.Plan:
    """A plan without a runtime."""
    config = echo.RuntimeConfig(**{"device": "cuda", **settings})
    return echo.make_plan(shape, config, limits or echo.MachineLimits())


def item(plan: echo.Plan, name: str) -> echo.MemoryItem:
    """One line of a plan."""
    return next(item for item in plan.items if item.name == name)


@pytest.mark.parametrize(
    ("name", "row_format", "row_bytes", "key_bytes"),
    [
        ("deepseek_v32", "fp8_656", 40_016, 8_052),
        ("deepseek_v32", "bf16_1152", 70_272, 8_052),
        ("glm_5", "fp8_656", 51_168, 10_296),
        ("glm_5", "bf16_1152", 89_856, 10_296),
    ],
)
def test_bytes_per_token_of_known_models(name, row_format, row_bytes, key_bytes):
    tokens = 1 << 20
    plan = plan_of(getattr(echo.ModelShape, name)(row_format), host_tokens=tokens)
    assert item(plan, "host_pool").total == row_bytes * tokens
    assert item(plan, "index_keys").total == key_bytes * tokens
    assert item(plan, "host_pool").place == "host" and item(plan, "index_keys").place == "device"


def test_two_hundred_thousand_slots_take_8_gb():
    plan = plan_of(echo.ModelShape.deepseek_v32(), gpu_slots=200_000, max_batch=64)
    assert item(plan, "slots").total == 61 * 200_000 * 656
    assert item(plan, "slots").count == 61


@pytest.mark.parametrize(("host_tokens", "gpu_slots"), [(1 << 20, 200_000), (64, 128), (400_000, 2_049)])
def test_residency_takes_four_bytes_a_host_row_and_twelve_a_slot(host_tokens, gpu_slots):
    """Per layer, hand and counters included; who owns a host block is kept once for all layers."""
    shape = echo.ModelShape.deepseek_v32() if host_tokens > 64 else small_shape()
    plan = plan_of(shape, host_tokens=host_tokens, gpu_slots=gpu_slots, max_batch=1)
    data = {"host_pool", "slots", "index_keys", "scratch"}
    maps = [i for i in plan.items if i.count == shape.layers and i.name not in data]
    assert sum(i.bytes for i in maps) == 4 * host_tokens + 12 * gpu_slots
    books = sum(item(plan, name).total for name in ("replacement", "counters"))
    assert books % shape.layers == 0
    assert sum(i.bytes for i in maps) + books // shape.layers <= 4 * host_tokens + 13 * gpu_slots
    assert item(plan, "owners").total == 8 * plan.host_blocks


def test_automatic_values_are_filled_in():
    plan = plan_of(small_shape(), host_tokens=1000, max_batch=3, query_rows=2, max_context=1 << 20)
    assert plan.config.host_tokens == 1024 and plan.host_blocks == 16
    assert plan.minimum_slots == plan.config.gpu_slots == 3 * 2 * 17
    assert plan.host_row_stride == plan.config.host_row_stride == small_shape().row_bytes == 320
    assert plan.config.max_context == 1024
    assert plan_of(small_shape(), host_tokens=1000, max_context=65).config.max_context == 128
    assert plan.config.attention_splits == 4
    assert plan_of(echo.ModelShape.deepseek_v32(), max_batch=32).config.attention_splits == 2
    assert plan.host_bytes == 1024 * 3 * 320
    assert plan.device_bytes == sum(i.total for i in plan.items if i.place == "device")
    assert all(i.total == i.bytes * i.count > 0 and i.formula for i in plan.items)


def test_a_plan_fits_or_says_what_does_not():
    shape = echo.ModelShape.deepseek_v32()
    plan = plan_of(shape, host_tokens=1 << 20)
    exact = echo.MachineLimits(device_bytes=plan.device_bytes, host_bytes=plan.host_bytes)
    assert plan_of(shape, exact, host_tokens=1 << 20).fits
    for limits, place in (
        (echo.MachineLimits(device_bytes=plan.device_bytes - 1, host_bytes=plan.host_bytes), "gpu"),
        (echo.MachineLimits(device_bytes=plan.device_bytes, host_bytes=plan.host_bytes - 1), "host"),
    ):
        tight = plan_of(shape, limits, host_tokens=1 << 20)
        assert not tight.fits
        refused = [line for line in tight.table().splitlines() if "DOES NOT FIT" in line]
        assert len(refused) == 1 and refused[0].split()[:2] == ["total", place]
    for entry in plan.items:
        assert entry.name in plan.table()
    assert "(not checked)" in plan.table()


def test_on_the_cpu_everything_counts_as_host_memory():
    plan = plan_of(small_shape(), device="cpu")
    together = plan.host_bytes + plan.device_bytes
    assert plan_of(small_shape(), echo.MachineLimits(host_bytes=together), device="cpu").fits
    assert not plan_of(small_shape(), echo.MachineLimits(host_bytes=together - 1), device="cpu").fits


def test_a_runtime_that_does_not_fit_shows_the_table_and_takes_nothing():
    with pytest.raises(echo.CapacityError, match="^host_tokens, gpu_slots: the runtime does not fit") as caught:
        echo.Runtime(echo.ModelShape.deepseek_v32(), device="cpu", host_tokens=1 << 30)
    assert "host_pool" in str(caught.value) and "DOES NOT FIT" in str(caught.value)
    assert "TiB" in str(caught.value)


def test_a_plan_is_for_a_device_that_there_could_be():
    for device in ("auto", "cpu", "cuda", "cuda:7"):
        assert echo.make_plan(small_shape(), echo.RuntimeConfig(device=device)).config.device == device
    for device in ("tpu", "", "cuda:", "cuda:-1", "cuda:x", "CPU"):
        with pytest.raises(echo.InvalidArgument, match=f"^device: '{device}' given, expected auto, cpu, cuda or cuda"):
            echo.make_plan(small_shape(), echo.RuntimeConfig(device=device))


def test_the_largest_sizes_do_not_wrap_around():
    shape = small_shape(
        layers=1024,
        index_heads=1024,
        index_dim=4096,
        query_heads=4096,
        top_k=32768,
        row_format="raw",
        raw_row_bytes=1 << 20,
    )
    most = (1 << 31) - 64
    plan = plan_of(shape, host_tokens=most, max_context=1 << 30, max_batch=1024, query_rows=63, gpu_slots=(1 << 31) - 2)
    assert all(i.bytes > 0 and i.total > 0 for i in plan.items)
    assert plan.host_bytes == 1024 * most * (1 << 20)
    assert plan.device_bytes > 1024 * ((1 << 31) - 2) * (1 << 20) - 1
    assert not plan_of(shape, echo.MachineLimits(host_bytes=1 << 50), host_tokens=most, max_batch=1).fits
    with pytest.raises(echo.InvalidArgument, match="^max_context: 1073741825 given, expected 1 to 1073741824"):
        plan_of(small_shape(), host_tokens=most, max_context=(1 << 30) + 1)
    with pytest.raises(echo.InvalidArgument, match="^prefill_chunk: 65536 given, expected at most 2047"):
        plan_of(small_shape(top_k=1 << 20), prefill_chunk=65536)


def test_sessions_of_counts_blocks_sessions_and_context():
    plan = plan_of(small_shape(), host_tokens=640, max_sessions=7, max_context=320)
    assert [plan.sessions_of(n) for n in (1, 64, 65, 128, 129, 320, 321, 0, -1)] == [7, 7, 5, 5, 3, 2, 0, 0, 0]


def test_a_new_runtime_has_done_nothing_yet(make_runtime):
    runtime = make_runtime(small_shape())
    stats = runtime.stats()
    assert stats.device_bytes == runtime.plan.device_bytes and stats.host_bytes == runtime.plan.host_bytes
    assert stats.host_tokens == stats.free_host_tokens == runtime.plan.config.host_tokens
    assert stats.row_bytes == 320 and stats.sessions == stats.steps == stats.prefill_tokens == 0
    assert stats.hit_rate == 1.0 and stats.recalled_bytes == 0 and len(stats.layers) == 3
    assert runtime.plan.limits.host_bytes > 0
    assert repr(runtime.shape) == repr(small_shape())
