"""What a run leaves behind: a folder that transformers and echo.hf load, a record, a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from data import END
from model import TinyDsa
from safetensors.torch import save_file


def save_model(model: TinyDsa, tokenizer_file: Path, out: Path) -> None:
    """Weights in bfloat16, configuration, tokenizer."""
    from transformers import PreTrainedTokenizerFast

    weights = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()
    }
    partial = out / "model.safetensors.partial"
    save_file(weights, partial, metadata={"format": "pt"})
    partial.replace(out / "model.safetensors")
    model.config.dtype = torch.bfloat16
    model.config.save_pretrained(out)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer_file),
        bos_token=END,
        eos_token=END,
        clean_up_tokenization_spaces=False,
        model_max_length=model.config.max_position_embeddings,
    )
    tokenizer.save_pretrained(out)


def write_json(file: Path, value: Any) -> None:
    """Replaces the file as a whole."""
    partial = file.with_name(file.name + ".partial")
    partial.write_text(json.dumps(value, indent=1, default=str))
    partial.replace(file)


def plot(metrics: dict[str, Any], file: Path) -> None:
    """Both losses over the tokens seen; nothing without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for axis, column, title in ((axes[0], 4, "next token, nats"), (axes[1], 5, "indexer, KL summed over layers")):
        for stage in metrics["stages"]:
            points = [(point[2] / 1e6, point[column]) for point in stage["curve"] if point[column] != 0]
            if points:
                axis.plot(*zip(*points, strict=True), label=f"{stage['name']} ({stage['length']})", linewidth=1)
        axis.set(xlabel="million tokens", title=title, yscale="log")
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(fontsize=8)
    figure.savefig(file, dpi=120)
    plt.close(figure)
