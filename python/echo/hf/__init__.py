"""Hugging Face models with DeepSeek sparse attention (DeepSeek-V3.2, GLM-5), their KV in a Runtime.

    model = echo.hf.DsaModel.from_pretrained("checkpoint")
    with echo.Runtime(model.shape(), host_tokens=200_000, max_batch=4) as rt:
        texts = echo.hf.generate(rt, model, prompts, max_new_tokens=128)

Needs torch and transformers: `pip install ".[hf]"` in the source tree.
"""

from __future__ import annotations

from echo.extras import HF, reason

try:
    from echo.hf.attention import LayerTensors
    from echo.hf.generate import generate
    from echo.hf.model import DsaModel, Observer
    from echo.hf.shape import shape_of
    from echo.hf.tiny import tiny_config, tiny_glm_config, tiny_glm_model, tiny_model
    from echo.hf.tiny_dsa import tiny_dsa_model, tiny_dsa_path, tiny_dsa_tokenizer
except ImportError as error:
    raise ImportError(f"echo.hf: {reason(error)}; torch and transformers >= 5.17 are needed: {HF}") from error

__all__ = [
    "DsaModel",
    "LayerTensors",
    "Observer",
    "generate",
    "shape_of",
    "tiny_config",
    "tiny_dsa_model",
    "tiny_dsa_path",
    "tiny_dsa_tokenizer",
    "tiny_glm_config",
    "tiny_glm_model",
    "tiny_model",
]
