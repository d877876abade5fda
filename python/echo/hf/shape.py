"""The runtime's view of a Hugging Face configuration."""

from __future__ import annotations

from typing import Any

from echo import ModelShape, NotSupported

# model_type -> whether the indexer rotates neighbouring dimensions (otherwise: halves).
INTERLEAVED_INDEX = {"deepseek_v32": False, "glm_moe_dsa": True}


def shape_of(config: Any, row_format: str = "fp8_656", index_key_format: str = "fp8") -> ModelShape:
    """Sizes for `echo.Runtime` from a `transformers` configuration.

    Args:
        config: a `DeepseekV32Config` or a `GlmMoeDsaConfig`.
        row_format: how rows are stored: "fp8_656", "bf16_1152", or "fp32" for exact comparisons.
        index_key_format: how index keys are stored: "fp8" or "fp32".

    Raises:
        NotSupported: the model has no sparse attention that echo knows.
        InvalidArgument: a format is unknown, or a size is one that echo does not take; the message names it.
    """
    require_dsa(config)
    return ModelShape(
        layers=config.num_hidden_layers,
        index_heads=config.index_n_heads,
        index_dim=config.index_head_dim,
        query_heads=config.num_attention_heads,
        latent_dim=config.kv_lora_rank,
        rope_dim=config.qk_rope_head_dim,
        top_k=config.index_topk,
        row_format=row_format,
        index_key_format=index_key_format,
    )


def require_dsa(config: Any) -> None:
    """Raises NotSupported unless it is a model with DeepSeek sparse attention."""
    kind = getattr(config, "model_type", type(config).__name__)
    if kind not in INTERLEAVED_INDEX:
        raise NotSupported(f"config: model type {kind!r} given, expected {' or '.join(INTERLEAVED_INDEX)}")
