"""The small trained model that comes with the package: code and documentation as text, 16,384 positions.

`tiny_model` has random weights of any size and is for tests. This one (models/tiny_dsa in the repository) has learned
what to select, so its hit rates and its working sets have the structure that training gives.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV32ForCausalLM, PreTrainedTokenizerBase

from echo import NotSupported
from echo.decoding import runtime_device

_FOLDER = Path(__file__).parents[1] / "data" / "tiny_dsa"
_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def tiny_dsa_path() -> Path:
    """The folder of the trained model, as `DsaModel.from_pretrained` and transformers take it.

    Raises:
        NotSupported: naming `tiny_dsa` and the files that this installation lacks.
    """
    missing = [name for name in _FILES if not (_FOLDER / name).is_file()]
    if missing:
        raise NotSupported(f"tiny_dsa: {', '.join(missing)} missing in {_FOLDER}; install echo-kv with its data")
    return _FOLDER


def tiny_dsa_model(
    *, dtype: torch.dtype = torch.float32, device: str | torch.device = "auto"
) -> DeepseekV32ForCausalLM:
    """The trained model: 5 layers, 16 heads, 8 index heads, 256 selected tokens, vocabulary of 2,048.

    Args:
        dtype: of the weights, float32 or bfloat16; they are stored in bfloat16, so neither rounds them.
        device: where the weights go; "auto": where a runtime goes that is told no other device.

    Raises:
        NotSupported: see `tiny_dsa_path`.
    """
    if device == "auto":
        device = runtime_device()
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_dsa_path(), dtype=dtype, local_files_only=True)
    return cast(DeepseekV32ForCausalLM, model.to(device).eval())


def tiny_dsa_tokenizer() -> PreTrainedTokenizerBase:
    """The tokenizer of the trained model; its end of text, token 0, stands in front of each file in training.

    Raises:
        NotSupported: see `tiny_dsa_path`.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_dsa_path(), local_files_only=True)
    return cast(PreTrainedTokenizerBase, tokenizer)
