"""Small models with random weights, for tests and demonstrations.

Plainly random weights make a poor test of sparse attention: index scores are nearly flat, attention averages
its rows away, greedy decoding falls into one repeated byte, and each token selects other rows than the one
before. So the weights here are shaped:

- each matrix is scaled by what its output is for (`_GAINS`): attention is sharp, and what it returns, not the
  token's own embedding, dominates the residual stream;
- a few hidden dimensions are steady, the same positive number for every token. Only the indexer reads them, and it
  makes most of its query from them, so that the selections of neighbouring tokens overlap by six to nine tenths.
  (Those of trained models overlap more.)
- it makes most of its head weights from them, too, so that hardly any is negative. With weights of both signs the
  score of a token on which all heads' ReLUs are off, exactly 0, could be the k-th score, and such tokens would tie
  for that place. As it is, 0 is a lowest score: such ties are left to texts hardly longer than k.

What such a model writes is nonsense all the same.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
)

_SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "index_n_heads": 8,
    "index_head_dim": 128,
    "max_position_embeddings": 65536,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

# Standard deviation of a matrix's output for inputs of unit size, by the end of its name; 1 for all others.
_GAINS = {
    "q_b_proj.weight": 6.0,
    "indexer.wq_b.weight": 2.0,
    "o_proj.weight": 3.0,
    "down_proj.weight": 2.0,
    "lm_head.weight": 4.0,
}

_STEADY = 16  # leading dimensions of hidden state and compressed query that are the same for all tokens
_STEADY_SIZE = 8.0  # their size next to the other dimensions of an embedding
_STEADY_QUERY_GAIN = 8.0  # their weight in index queries next to that of the other dimensions
_STEADY_HEAD_GAIN = 2.0  # their weight in the indexer's head weights; large enough that hardly any is negative
_WRITERS = ("o_proj.weight", "down_proj.weight", "experts.down_proj")
_READERS = (
    "kv_a_proj_with_mqa.weight",
    "indexer.wk.weight",
    "gate_proj.weight",
    "up_proj.weight",
    "gate.weight",
    "experts.gate_up_proj",
    "lm_head.weight",
)


def tiny_config(
    layers: int = 3, vocab: int = 256, top_k: int = 64, dense_layers: int | None = None, **sizes: Any
) -> DeepseekV32Config:
    """Sizes of a small DeepSeek-V3.2: rows of 512 + 64, 16 query heads, 8 index heads of 128.

    Args:
        layers: decoder layers.
        vocab: tokens; with 256 every token is a byte. There are no special tokens.
        top_k: tokens each query attends to.
        dense_layers: leading layers with a dense MLP, the others are mixtures of 8 experts; default all.
        **sizes: any other field of `transformers.DeepseekV32Config`.
    """
    return DeepseekV32Config(**_fields(layers, vocab, top_k, dense_layers, sizes))


def tiny_glm_config(
    layers: int = 4,
    vocab: int = 256,
    top_k: int = 64,
    dense_layers: int | None = None,
    indexer_types: list[str] | None = None,
    **sizes: Any,
) -> GlmMoeDsaConfig:
    """Sizes of a small GLM-5 whose layers share selections.

    Args:
        layers: decoder layers.
        vocab: tokens; with 256 every token is a byte. There are no special tokens.
        top_k: tokens each query attends to.
        dense_layers: leading layers with a dense MLP, the others are mixtures of 8 experts; default all.
        indexer_types: "full" or "shared" for each layer; default: every second layer shares.
        **sizes: any other field of `transformers.GlmMoeDsaConfig`.
    """
    if indexer_types is None:
        indexer_types = ["shared" if layer % 2 else "full" for layer in range(layers)]
    fields = _fields(layers, vocab, top_k, dense_layers, sizes)
    return GlmMoeDsaConfig(indexer_types=indexer_types, **fields)


def tiny_model(
    seed: int = 0,
    *,
    config: DeepseekV32Config | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    **sizes: Any,
) -> DeepseekV32ForCausalLM:
    """A small DeepSeek-V3.2 with seeded random weights; torch's global generators stay as they are.

    Args:
        seed: the same seed gives the same weights, rounded to `dtype`.
        config: sizes; default `tiny_config(**sizes)`.
        dtype: of the weights, float32 or bfloat16.
        device: where the weights go.
        **sizes: arguments of `tiny_config`.
    """
    return cast(DeepseekV32ForCausalLM, _seeded(config or tiny_config(**sizes), seed, dtype, device))


def tiny_glm_model(
    seed: int = 0,
    *,
    config: GlmMoeDsaConfig | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    **sizes: Any,
) -> GlmMoeDsaForCausalLM:
    """A small GLM-5 with index sharing and seeded random weights; see `tiny_model`."""
    return cast(GlmMoeDsaForCausalLM, _seeded(config or tiny_glm_config(**sizes), seed, dtype, device))


def _fields(layers: int, vocab: int, top_k: int, dense_layers: int | None, sizes: dict[str, Any]) -> dict[str, Any]:
    return {
        **_SIZES,
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "index_topk": top_k,
        "first_k_dense_replace": layers if dense_layers is None else dense_layers,
        **sizes,
    }


def _seeded(config: Any, seed: int, dtype: torch.dtype, device: str | torch.device) -> Any:
    # The constructor draws from the global generator, in vain: all its weights are overwritten.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        # By name: the order in which modules are registered is no promise of transformers'.
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() > 1:  # norms keep their ones and zeros
                parameter.copy_(_weights(name, parameter.shape, generator))
    return model.to(device).eval()


def _weights(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """[..., out, in], in float32 whatever the model's type is, so that all types get the same values."""
    embedding = name.endswith("embed_tokens.weight")
    gain = next((gain for end, gain in _GAINS.items() if name.endswith(end)), 1.0)
    weights = torch.randn(shape, generator=generator) * gain * (1.0 if embedding else shape[-1] ** -0.5)
    steady = slice(0, _STEADY)
    if embedding:
        weights[:, steady] = _STEADY_SIZE
    elif name.endswith(_WRITERS):
        weights[..., steady, :] = 0
    elif name.endswith(_READERS):
        weights[..., steady] = 0
    elif name.endswith("q_a_proj.weight"):  # steady in, steady out
        weights[steady, _STEADY:] = 0
        weights[_STEADY:, steady] = 0
    elif name.endswith("q_b_proj.weight"):
        weights[:, steady] = 0
    elif name.endswith("indexer.wq_b.weight"):
        weights[:, steady] *= _STEADY_QUERY_GAIN
    elif name.endswith("indexer.weights_proj.weight"):
        weights[:, steady] = weights[:, steady].abs() * _STEADY_HEAD_GAIN
    return weights
