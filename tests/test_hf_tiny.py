"""The small random models: seeded, without side effects, and worth testing with."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.hf_reference import hf, random_bytes, recorded_indexers, torch

import echo

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.mark.parametrize("make", [hf.tiny_model, hf.tiny_glm_model])
def test_global_generators_are_left_alone(make: object) -> None:
    before = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    make(seed=5)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert str(np.random.get_state()) == before[2]


def test_weights_depend_on_the_seed_only() -> None:
    torch.manual_seed(1)
    first = hf.tiny_model(seed=3).state_dict()
    torch.manual_seed(2)
    again, other = hf.tiny_model(seed=3).state_dict(), hf.tiny_model(seed=4).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_other_types_have_the_same_weights_rounded() -> None:
    exact, rounded = hf.tiny_model(0).state_dict(), hf.tiny_model(0, dtype=torch.bfloat16).state_dict()
    for name, weights in rounded.items():
        torch.testing.assert_close(weights.float(), exact[name].float(), rtol=2**-8, atol=0.0, msg=name)


def test_sizes_can_be_chosen() -> None:
    config = hf.tiny_config(layers=2, vocab=300, top_k=32, num_attention_heads=8, num_key_value_heads=8)
    shape = hf.shape_of(config, row_format="bf16_1152")
    assert (shape.layers, shape.top_k, shape.query_heads) == (2, 32, 8)
    assert (shape.row_format, shape.index_key_format) == ("bf16_1152", "fp8")
    assert hf.tiny_model(config=config).lm_head.weight.shape[0] == 300


def test_selections_follow_the_text_and_change_slowly() -> None:
    def last_selections(seed: int) -> list[set[int]]:
        with recorded_indexers(model) as (_, selected), torch.no_grad():
            model(random_bytes(512, seed)[None], use_cache=False)
        return [set(row.tolist()) for row in selected[0][-8:]]

    model = hf.tiny_model(0)
    mine, other = last_selections(1), last_selections(2)
    overlap = np.mean([len(a & b) / 64 for a, b in itertools.pairwise(mine)])
    assert 0.5 < overlap < 0.99
    assert len(mine[0] & other[0]) / 64 < 0.4  # chance: 0.125


@pytest.mark.parametrize("make", [hf.tiny_model, hf.tiny_glm_model])
def test_tokens_no_head_looks_at_score_lowest(make: Callable[..., Any]) -> None:
    """Above others, their common score of 0 would make ties for the k-th place."""
    model = make(0)
    with recorded_indexers(model) as (scores, _), torch.no_grad():
        model(random_bytes(512, 0)[None], use_cache=False)
    for rows in scores.values():
        assert rows.tril().min() == 0


def test_outputs_depend_on_what_is_selected() -> None:
    model, ids = hf.tiny_model(0), random_bytes(512, 0)[None]
    with torch.no_grad():
        sparse = model(ids, use_cache=False).logits[0, -1]
        for layer in model.model.layers:
            layer.self_attn.indexer.index_topk = 512
        dense = model(ids, use_cache=False).logits[0, -1]
    assert (sparse - dense).abs().max() > 1.0


def test_a_shape_of_another_model_is_refused() -> None:
    transformers = pytest.importorskip("transformers")
    with pytest.raises(echo.NotSupported, match=r"^config: .*llama"):
        hf.shape_of(transformers.LlamaConfig())
    with pytest.raises(echo.InvalidArgument, match=r"^row_format"):
        hf.shape_of(hf.tiny_config(), row_format="fp7")
