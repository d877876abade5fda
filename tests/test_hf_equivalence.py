"""The same model in transformers and in a runtime: with fp32 rows and fp32 index keys both must agree.

Selections must be the same sets. That can only be asked where the k-th index score stands clear of the next one, by
more than both sides' scores differ through rounding; so each text is one for which that holds in every row, and the
test asserts that it does. Logits, whose size is about 4 (at most 20), may then differ by rounding only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.hf_reference import compare, hf, random_bytes, torch

import echo

pytestmark = pytest.mark.usefixtures("one_torch_thread")

TOP_K = 64
STEPS = 16
# (tokens in all, seed of a text with clear k-th scores)
LENGTHS = [(1, 1), (TOP_K - 1, 1), (TOP_K, 1), (TOP_K + 1, 1), (200, 30)]

MODELS: dict[str, Callable[[], Any]] = {
    "v32": lambda: hf.tiny_model(0),
    "glm": lambda: hf.tiny_glm_model(0),
    "experts": lambda: hf.tiny_model(0, dense_layers=1),
    "yarn": lambda: hf.tiny_model(
        0,
        max_position_embeddings=1024,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    ),
    "consecutive_sharing": lambda: hf.tiny_glm_model(0, indexer_types=["full", "shared", "shared", "full"]),
}


@pytest.fixture
def device() -> str:
    """A GPU's kernels round differently, so that its k-th scores are another matter."""
    return "cpu"


def assert_equal(
    make_runtime: Callable[..., echo.Runtime], model: Any, seed: int, prompt: int, chunk: int = 512
) -> None:
    result = compare(make_runtime, model, random_bytes(prompt + STEPS, seed), prompt, chunk)
    assert min(result.margins, default=2.0) >= 2.0, "a near tie: this text says nothing, choose another seed"
    assert result.differing == []
    torch.testing.assert_close(result.got, result.expected, rtol=1e-4, atol=5e-4)


@pytest.mark.parametrize(("prompt", "seed"), [*LENGTHS, (496, 25)])
def test_deepseek_v32(make_runtime: Callable[..., echo.Runtime], prompt: int, seed: int) -> None:
    assert_equal(make_runtime, MODELS["v32"](), seed, prompt)


@pytest.mark.parametrize(("prompt", "seed"), [*LENGTHS, (496, 39)])
def test_glm_with_shared_selections(make_runtime: Callable[..., echo.Runtime], prompt: int, seed: int) -> None:
    assert_equal(make_runtime, MODELS["glm"](), seed, prompt)


@pytest.mark.parametrize(("kind", "seed"), [("experts", 56), ("yarn", 35), ("consecutive_sharing", 75)])
def test_variants(make_runtime: Callable[..., echo.Runtime], kind: str, seed: int) -> None:
    assert_equal(make_runtime, MODELS[kind](), seed, prompt=284)


@pytest.mark.parametrize("chunk", [1, 48, 64, 100])
def test_a_prompt_in_chunks(make_runtime: Callable[..., echo.Runtime], chunk: int) -> None:
    assert_equal(make_runtime, MODELS["v32"](), seed=30, prompt=200, chunk=chunk)


@pytest.mark.parametrize("kind", ["v32", "glm", "experts"])
def test_greedy_tokens(make_runtime: Callable[..., echo.Runtime], kind: str) -> None:
    model = MODELS[kind]()
    dsa = hf.DsaModel(model)
    rt = make_runtime(dsa.shape("fp32", "fp32"))
    prompts = [random_bytes(length, seed=13) for length in (30, TOP_K, 150)]
    expected = [
        model.generate(prompt[None], attention_mask=torch.ones(1, len(prompt)), max_new_tokens=64, do_sample=False)[
            0, len(prompt) :
        ].tolist()
        for prompt in prompts
    ]
    assert hf.generate(rt, dsa, [prompt.tolist() for prompt in prompts], max_new_tokens=64) == expected
    assert all(len(set(text)) > 8 for text in expected), "texts of a few tokens would compare little"
