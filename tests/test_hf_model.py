"""DsaModel: loading, what it refuses, padding rows, pools of any size."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.hf_reference import Recorder, hf, random_bytes, torch

import echo

pytestmark = pytest.mark.usefixtures("one_torch_thread")

MakeRuntime = Callable[..., echo.Runtime]
PROMPTS = [random_bytes(length, seed=length).tolist() for length in (20, 90, 150, 64)]


def prefilled(rt: echo.Runtime, dsa: Any, prompts: list[list[int]]) -> list[echo.Session]:
    sessions = []
    for prompt in prompts:
        sessions.append(rt.open_session(256))
        for i in range(0, len(prompt), 64):
            rt.prefill(sessions[-1], prompt[i : i + 64], dsa.forward)
    return sessions


def decoded(rt: echo.Runtime, sessions: list[echo.Session], steps: int, forward: Any = None) -> Any:
    """Logits [steps, sessions, vocab]; every session gets tokens of its own."""
    tokens = [[(7 * step + 31 * row) % 256 for row in range(len(sessions))] for step in range(steps)]
    return torch.stack([rt.step(echo.Batch(sessions, row), forward).clone() for row in tokens])


def test_save_and_load(make_runtime: MakeRuntime, device: str, tmp_path: Path) -> None:
    saved = hf.tiny_glm_model(1, dense_layers=2)
    saved.save_pretrained(tmp_path)
    models = [
        hf.DsaModel(saved.to(device)),
        hf.DsaModel.from_pretrained(tmp_path, device=device, experts_implementation="eager"),
    ]
    assert models[1].dtype == torch.float32
    logits = []
    for dsa in models:
        dsa.model.set_experts_implementation("eager")
        rt = make_runtime(dsa.shape("fp32", "fp32"))
        logits.append(rt.prefill(rt.open_session(64), PROMPTS[0], functools.partial(dsa.forward, all_rows=True)))
    assert logits[0].shape == (20, 256)
    assert torch.equal(*logits)


def test_loading_in_another_type(tmp_path: Path) -> None:
    hf.tiny_model(0).save_pretrained(tmp_path)
    dsa = hf.DsaModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert dsa.dtype == torch.bfloat16
    assert dsa.model.lm_head.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(("row_format", "key_format"), [("bf16_1152", "fp32"), ("fp8_656", "fp8")])
def test_bfloat16(make_runtime: MakeRuntime, device: str, row_format: str, key_format: str) -> None:
    """One layer: sharp attention on random weights magnifies bf16 rounding from layer to layer."""
    exact = hf.DsaModel(hf.tiny_model(0, device=device, layers=1))
    rounded = hf.DsaModel(hf.tiny_model(0, device=device, layers=1, dtype=torch.bfloat16))
    logits = []
    for dsa, formats in ((exact, ("fp32", "fp32")), (rounded, (row_format, key_format))):
        rt = make_runtime(dsa.shape(*formats))
        logits.append(decoded(rt, prefilled(rt, dsa, PROMPTS[:2]), 2, dsa.forward))
    assert logits[1].dtype == torch.bfloat16
    correlation = torch.corrcoef(torch.stack([part.float().flatten() for part in logits]))[0, 1]
    assert correlation > 0.98


def test_a_prefill_gives_its_last_row(make_runtime: MakeRuntime, device: str) -> None:
    dsa = hf.DsaModel(hf.tiny_model(0, device=device))
    rt = make_runtime(dsa.shape("fp32", "fp32"))
    last = rt.prefill(rt.open_session(64), PROMPTS[0], dsa.forward)
    rows = rt.prefill(rt.open_session(64), PROMPTS[0], functools.partial(dsa.forward, all_rows=True))
    assert last.shape == (1, 256)
    torch.testing.assert_close(last, rows[-1:], rtol=1e-4, atol=5e-4)


@pytest.mark.parametrize("make", [hf.tiny_model, hf.tiny_glm_model])
def test_padding_rows_change_nothing(make_runtime: MakeRuntime, device: str, make: Callable[..., Any]) -> None:
    dsa = hf.DsaModel(make(0, device=device))

    def run(sessions: int, captured: bool) -> Any:
        rt = make_runtime(dsa.shape("fp32", "fp32"))
        if captured:
            rt.capture(dsa.forward, batch_sizes=[4])
        opened = prefilled(rt, dsa, PROMPTS[:sessions])
        return decoded(rt, opened, 6, None if captured else dsa.forward)[:, :3]

    padded = run(3, captured=True)
    # Same shapes, so the same arithmetic: a padding row and another session's row are all the same to the others.
    assert torch.equal(padded, run(4, captured=True))
    # Without padding torch multiplies other shapes, in another order of additions.
    torch.testing.assert_close(padded, run(3, captured=False), rtol=1e-4, atol=5e-4)


def test_any_pool_size_gives_the_same_bits(make_runtime: MakeRuntime, device: str) -> None:
    dsa = hf.DsaModel(hf.tiny_model(0, device=device))

    def run(gpu_slots: int) -> tuple[Any, int]:
        rt = make_runtime(dsa.shape("fp32", "fp32"), gpu_slots=gpu_slots)
        logits = decoded(rt, prefilled(rt, dsa, PROMPTS), 6, dsa.forward)
        rt.synchronize()
        return logits, sum(layer.misses for layer in rt.stats().layers)

    (small, misses), (large, fewer) = run(0), run(2048)
    assert misses > fewer
    assert torch.equal(small, large)


def test_several_new_tokens_per_session(make_runtime: MakeRuntime, device: str) -> None:
    dsa = hf.DsaModel(hf.tiny_model(0, device=device))
    tokens = [3, 141, 59]
    rt = make_runtime(dsa.shape("fp32", "fp32"), query_rows=3)
    sessions = prefilled(rt, dsa, [PROMPTS[1]] * 2)
    together = rt.step(echo.Batch([sessions[0]], [tokens]), dsa.forward)
    one_by_one = [rt.step(echo.Batch([sessions[1]], [token]), dsa.forward) for token in tokens]
    torch.testing.assert_close(together, torch.cat(one_by_one), rtol=1e-4, atol=5e-4)


class Scaled(torch.nn.Module):
    """A projection that keeps its weights as int8 and one scale."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.scale = linear.weight.detach().abs().max() / 127
        codes = (linear.weight.detach() / self.scale).round().to(torch.int8)
        self.weight = torch.nn.Parameter(codes, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weight * self.scale).t()


def test_quantised_projections(make_runtime: MakeRuntime, device: str) -> None:
    logits = []
    for keep_quantised in (True, False):
        model = hf.tiny_model(0, device=device)
        for layer in model.model.layers:
            scaled = Scaled(layer.self_attn.kv_b_proj)
            if keep_quantised:
                layer.self_attn.kv_b_proj = scaled
            else:
                layer.self_attn.kv_b_proj.weight.data = scaled.weight * scaled.scale
        dsa = hf.DsaModel(model)
        rt = make_runtime(dsa.shape("fp32", "fp32"))
        logits.append(rt.prefill(rt.open_session(64), PROMPTS[0], dsa.forward))
    torch.testing.assert_close(*logits, rtol=1e-4, atol=5e-4)


def test_the_observer_sees_every_layer(make_runtime: MakeRuntime, device: str) -> None:
    recorder, seen = Recorder(), []

    def observer(p: echo.ForwardPass, tensors: Any) -> None:
        recorder(p, tensors)
        seen.append((tensors.layer, tensors.index_q is None, tuple(tensors.out.shape)))

    dsa = hf.DsaModel(hf.tiny_glm_model(0, device=device), observer)
    rt = make_runtime(dsa.shape("fp32", "fp32"))
    rt.prefill(rt.open_session(64), PROMPTS[0], dsa.forward)
    assert seen == [(layer, layer % 2 == 1, (20, 16, 512)) for layer in range(4)]
    assert recorder.selected[2][9] == set(range(10))


def test_what_can_be_captured() -> None:
    assert hf.DsaModel(hf.tiny_model(0)).capturable
    experts = hf.tiny_model(0, dense_layers=1)
    experts.set_experts_implementation("eager")
    assert not hf.DsaModel(experts).capturable
    experts.set_experts_implementation("batched_mm")
    assert hf.DsaModel(experts).capturable


def test_captured_experts(make_runtime: MakeRuntime, device: str) -> None:
    model = hf.tiny_model(0, device=device, dense_layers=1)
    model.set_experts_implementation("batched_mm")
    dsa = hf.DsaModel(model)
    logits = []
    for captured in (True, False):
        rt = make_runtime(dsa.shape("fp32", "fp32"))
        if captured:
            rt.capture(dsa.forward, batch_sizes=[2])
        logits.append(decoded(rt, prefilled(rt, dsa, PROMPTS[:2]), 4, None if captured else dsa.forward))
    torch.testing.assert_close(*logits, rtol=1e-4, atol=5e-4)


def test_stop_tokens_come_from_the_checkpoint() -> None:
    assert hf.DsaModel(hf.tiny_model(0)).stop_tokens == ()
    model = hf.tiny_model(0)
    model.generation_config.eos_token_id = [4, 5]
    assert hf.DsaModel(model).stop_tokens == (4, 5)
    model.generation_config.eos_token_id = 7
    assert hf.DsaModel(model).stop_tokens == (7,)


def test_models_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    with pytest.raises(echo.InvalidArgument, match=r"^folder: "):
        hf.DsaModel.from_pretrained(tmp_path / "nothing")
    transformers.LlamaConfig().save_pretrained(tmp_path)
    with pytest.raises(echo.NotSupported, match="llama"):
        hf.DsaModel.from_pretrained(tmp_path)
    with pytest.raises(echo.InvalidArgument, match=r"^model: .*float16"):
        hf.DsaModel(hf.tiny_model(0, dtype=torch.float16))
    dynamic = hf.tiny_model(0)
    dynamic.config.rope_parameters["rope_type"] = "dynamic"
    with pytest.raises(echo.NotSupported, match=r"^model: .*dynamic"):
        hf.DsaModel(dynamic)
    spread = hf.tiny_model(0)
    spread.lm_head.to("meta")
    with pytest.raises(echo.NotSupported, match=r"^model: spread"):
        hf.DsaModel(spread)


@pytest.mark.parametrize("given", ["deepseek-ai/DeepSeek-V3.2", None, 3])
def test_what_is_no_model_is_refused(given: object) -> None:
    with pytest.raises(echo.InvalidArgument, match=r"^model: .* given, expected a model of transformers"):
        hf.DsaModel(given)


def test_a_pass_on_another_device_is_refused(make_runtime: MakeRuntime) -> None:
    dsa = hf.DsaModel(hf.tiny_model(0, device="meta"))
    rt = make_runtime(dsa.shape())
    session = rt.open_session(64)
    expected = f"^device: the model is on meta, the runtime on {rt.device}"
    for call in (
        lambda: rt.prefill(session, [1, 2], dsa.forward),
        lambda: rt.capture(dsa.forward, [1]),
    ):
        with pytest.raises(echo.InvalidArgument, match=expected):
            call()
    assert session.length == 0
