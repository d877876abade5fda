"""Shapes of models and settings of runtimes: defaults, sources, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from support.rig import small_shape

import echo

PRESETS = {
    "deepseek_v32": {"layers": 61, "index_heads": 64, "query_heads": 128, "top_k": 2048},
    "glm_5": {"layers": 78, "index_heads": 32, "query_heads": 64, "top_k": 2048},
    "tiny": {"layers": 2, "index_heads": 8, "query_heads": 16, "top_k": 64},
}


@pytest.mark.parametrize("row_format", ["fp8_656", "bf16_1152", "fp32"])
@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_published_sizes(name, row_format):
    shape = getattr(echo.ModelShape, name)(row_format)
    for field, value in PRESETS[name].items():
        assert getattr(shape, field) == value
    assert (shape.index_dim, shape.latent_dim, shape.rope_dim, shape.row_dim) == (128, 512, 64, 576)
    assert shape.row_format == row_format
    assert shape.row_bytes == {"fp8_656": 656, "bf16_1152": 1152, "fp32": 2304}[row_format]
    assert f"layers={shape.layers}" in repr(shape) and f"row_format='{row_format}'" in repr(shape)


def test_a_plain_shape_is_deepseek_v32():
    assert repr(echo.ModelShape()) == repr(echo.ModelShape.deepseek_v32())
    assert echo.ModelShape().index_block_bytes == 8448


BAD_SHAPES = [
    ("layers", 0),
    ("layers", True),
    ("layers", -1),
    ("layers", 1 << 30),
    ("layers", 1 << 31),
    ("layers", -1 << 100),
    ("layers", "many"),
    ("index_heads", 0),
    ("index_heads", 12),
    ("index_heads", -8),
    ("index_dim", 8),
    ("index_dim", 24),
    ("index_dim", 1 << 30),
    ("query_heads", 0),
    ("query_heads", (1 << 31) - 1),
    ("top_k", 0),
    ("top_k", (1 << 31) - 1),
    ("top_k", 2.0),
    ("raw_row_bytes", 1 << 64),
    ("latent_dim", 0),
    ("latent_dim", 24),
    ("latent_dim", 1 << 30),
    ("rope_dim", -16),
    ("rope_dim", 8),
    ("raw_row_bytes", 64),
    ("row_format", "fp8"),
    ("row_format", ""),
    ("index_key_format", "bf16"),
]


@pytest.mark.parametrize(("field", "value"), BAD_SHAPES)
def test_sizes_that_cannot_be_are_refused_by_name(field, value):
    with pytest.raises(echo.InvalidArgument, match=f"^{field}: '?{value}"):
        small_shape(**{field: value})


def test_row_formats_fix_their_dimensions():
    for row_format in ("fp8_656", "bf16_1152"):
        with pytest.raises(echo.InvalidArgument, match="^latent_dim: 64 given, expected 512"):
            small_shape(row_format=row_format, rope_dim=64)
        with pytest.raises(echo.InvalidArgument, match="^rope_dim: 0 given, expected 64"):
            small_shape(row_format=row_format, latent_dim=512, rope_dim=0)
    for raw_row_bytes in (0, 8, 24, -16, 1 << 24):
        with pytest.raises(echo.InvalidArgument, match=f"^raw_row_bytes: {raw_row_bytes} given"):
            small_shape(row_format="raw", raw_row_bytes=raw_row_bytes)
    for name in ("deepseek_v32", "glm_5", "tiny"):
        with pytest.raises(echo.InvalidArgument, match="^row_format: 'fp4' is unknown, expected one of fp8_656,"):
            getattr(echo.ModelShape, name)("fp4")


def test_defaults_are_documented_and_used():
    config = echo.RuntimeConfig()
    fields = echo.config_fields()
    assert len({field.name for field in fields}) == len(fields) > 5
    for field in fields:
        assert field.doc and getattr(config, field.name) == field.default
        assert isinstance(field.default, field.type)
        assert f"{field.name}={field.default!r}" in repr(config)
    with pytest.raises(AttributeError, match="gpu_slot"):
        _ = config.gpu_slot


def test_a_keyword_beats_the_variable_and_the_variable_beats_the_default(monkeypatch):
    for field in echo.config_fields():
        if field.type is str:
            values = {"device": ("cuda:3", "cpu"), "kernels": ("generic", "auto"), "prefetch": ("off", "on")}
            first, second = values[field.name]
        elif field.type is float:
            first, second = 0.25, 0.75
        else:
            first, second = 7, 11
        monkeypatch.setenv(f"ECHO_{field.name.upper()}", str(first))
        assert getattr(echo.RuntimeConfig(), field.name) == first != field.default
        assert getattr(echo.RuntimeConfig(**{field.name: second}), field.name) == second
        monkeypatch.delenv(f"ECHO_{field.name.upper()}")
        assert getattr(echo.RuntimeConfig(), field.name) == field.default


def test_integers_of_any_kind_are_integers():
    config = echo.RuntimeConfig(host_tokens=np.int64(640), gpu_slots=np.uint8(7))
    assert (config.host_tokens, config.gpu_slots) == (640, 7)
    assert small_shape(layers=np.int32(2)).layers == 2
    for value in (640.0, np.float64(640), np.bool_(True), True, "640", None, 1 << 63):
        with pytest.raises(echo.InvalidArgument, match="^host_tokens: .* given, expected an integer"):
            echo.RuntimeConfig(host_tokens=value)


def test_text_that_is_no_utf_8_is_refused_by_name(monkeypatch):
    for field in echo.config_fields():
        if field.type is str:
            with pytest.raises(echo.InvalidArgument, match=f"^{field.name}: '.udcff' given, expected {field.choices}$"):
                echo.RuntimeConfig(**{field.name: "\udcff"})
        with monkeypatch.context() as patch:
            patch.setenv(f"ECHO_{field.name.upper()}", "\udcff")
            with pytest.raises(echo.InvalidArgument, match=rf"^ECHO_{field.name.upper()}: '\\xff' given, expected "):
                echo.RuntimeConfig()


def test_both_choices_of_kernels_run_without_a_gpu():
    """There they choose nothing."""
    for kernels in ("auto", "generic"):
        with echo.Runtime(small_shape(), device="cpu", host_tokens=640, kernels=kernels) as runtime:
            assert runtime.plan.config.kernels == kernels


def test_a_runtime_reads_the_environment(monkeypatch):
    monkeypatch.setenv("ECHO_HOST_TOKENS", "640")
    monkeypatch.setenv("ECHO_DEVICE", "cpu")
    with echo.Runtime(small_shape(), max_batch=1) as runtime:
        assert runtime.device == "cpu" and runtime.plan.config.host_tokens == 640


@pytest.mark.parametrize("text", ["", "many", "1.5", "0x10", " 7", "7 ", "1e3", "99999999999999999999"])
def test_variables_that_are_no_numbers_are_refused_by_name(monkeypatch, text):
    monkeypatch.setenv("ECHO_MAX_BATCH", text)
    with pytest.raises(echo.InvalidArgument, match=f"^ECHO_MAX_BATCH: '{text}' given, expected a number"):
        echo.RuntimeConfig()


def test_variables_that_are_no_choice_are_refused_by_name(monkeypatch):
    for field in echo.config_fields():
        assert bool(field.choices) == (field.type is str)
        if field.choices:
            with pytest.raises(echo.InvalidArgument, match=f"^{field.name}: True given, expected {field.choices}$"):
                echo.RuntimeConfig(**{field.name: True})
            for text in ("", "maybe", "or", "cuda:", "cuda:N", "cuda:1x"):
                with monkeypatch.context() as patch:
                    patch.setenv(f"ECHO_{field.name.upper()}", text)
                    message = f"^ECHO_{field.name.upper()}: '{text}' given, expected {field.choices}$"
                    with pytest.raises(echo.InvalidArgument, match=message):
                        echo.RuntimeConfig()


BAD_SETTINGS = [
    ("max_batch", "7"),
    ("max_batch", 1.0),
    ("max_batch", True),
    ("max_batch", None),
    ("max_batch", 1 << 70),
    ("threshold_alpha", "0.5"),
    ("threshold_alpha", False),
    ("device", 0),
    ("device", None),
    ("kernels", True),
    ("kernels", None),
    ("prefetch", True),
    ("prefetch", 1),
    ("prefetch_cap", "1"),
    ("prefetch_cap", True),
]


@pytest.mark.parametrize(("name", "value"), BAD_SETTINGS)
def test_settings_of_the_wrong_type_are_refused_by_name(name, value):
    with pytest.raises(echo.InvalidArgument, match=f"^{name}: .* given, expected"):
        echo.RuntimeConfig(**{name: value})


def test_unknown_settings_are_refused_by_name():
    for make in (echo.RuntimeConfig, lambda **kw: echo.Runtime(small_shape(), **kw)):
        with pytest.raises(echo.InvalidArgument, match=r"^gpu_slot: no such setting.*; did you mean gpu_slots\?$"):
            make(gpu_slot=3)
        with pytest.raises(echo.InvalidArgument, match="^xyz: no such setting of the runtime$"):
            make(xyz=3)


OUT_OF_RANGE = [
    ("host_tokens", 0),
    ("host_tokens", -64),
    ("host_tokens", 1 << 31),
    ("gpu_slots", -1),
    ("gpu_slots", 8 * 17 - 1),
    ("gpu_slots", 1 << 31),
    ("max_batch", 0),
    ("max_batch", 1 << 20),
    ("query_rows", 0),
    ("query_rows", 65),
    ("max_sessions", 0),
    ("max_context", 0),
    ("max_context", 1 << 40),
    ("prefill_chunk", 0),
    ("prefill_chunk", 1 << 20),
    ("host_row_stride", 16),
    ("host_row_stride", 328),
    ("host_row_stride", 1 << 40),
    ("attention_splits", -1),
    ("attention_splits", 65),
    ("threshold_alpha", -0.1),
    ("threshold_alpha", 1.5),
    ("threshold_alpha", float("nan")),
    ("threads", -1),
    ("device", "gpu"),
    ("device", "cuda:"),
    ("device", "cuda:x"),
    ("device", "cuda:-1"),
    ("device", "CPU"),
    ("device", ""),
    ("kernels", "fast"),
    ("kernels", "Auto"),
    ("kernels", ""),
    ("prefetch", "yes"),
    ("prefetch", "ON"),
    ("prefetch", ""),
    ("prefetch_cap", -0.5),
    ("prefetch_cap", -2.0),
    ("prefetch_cap", 1000.1),
    ("prefetch_cap", float("inf")),
    ("prefetch_cap", float("nan")),
]


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE)
def test_settings_out_of_range_are_refused_by_name(name, value):
    settings = {"device": "cpu", "host_tokens": 1024, name: value}
    with pytest.raises(echo.InvalidArgument, match=f"^{name}: .* given, expected"):
        echo.Runtime(small_shape(), **settings)
    if name != "device":
        with pytest.raises(echo.InvalidArgument, match=f"^{name}: .* given, expected"):
            echo.make_plan(small_shape(), echo.RuntimeConfig(**settings))


def test_devices_that_are_not_there_are_refused_with_what_there_is():
    with pytest.raises(echo.NotSupported, match=r"^device: 'cuda:99' given, but .* offer \d+ CUDA devices \(echo "):
        echo.Runtime(small_shape(), device="cuda:99")
    assert echo.machine_limits("cpu").host_bytes > 1 << 28
    assert echo.machine_limits("cpu").device_bytes == 0
