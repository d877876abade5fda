"""The verbs of a pass by name, with arguments that are all right."""

from __future__ import annotations

from typing import Any

import torch

import echo
from support.rig import small_shape

ARGUMENTS = {
    "append": ("kv", "index_key"),
    "score": ("index_q", "index_weights"),
    "recall": ("selection",),
    "attend": ("q", "out"),
    "attention": ("kv", "index_key", "index_q", "index_weights", "q", "out"),
}

ROWS = 2  # of the steps in which they are called


def tensors(device: str, shape: echo.ModelShape | None = None) -> dict[str, torch.Tensor]:
    """Arguments of the verbs that are all right for a model, or for `small_shape()`."""
    shape = shape or small_shape()
    row_dim = shape.latent_dim + shape.rope_dim

    def zeros(*sizes: int) -> torch.Tensor:
        return torch.zeros(ROWS, *sizes, device=device)

    return {
        "kv": zeros(row_dim),
        "index_key": zeros(shape.index_dim),
        "index_q": zeros(shape.index_heads, shape.index_dim),
        "index_weights": zeros(shape.index_heads),
        "q": zeros(shape.query_heads, row_dim),
        "out": zeros(shape.query_heads, shape.latent_dim),
        "selection": torch.zeros(ROWS, shape.top_k, dtype=torch.int32, device=device),
    }


def call(p: echo.ForwardPass, verb: str, layer: Any, given: dict[str, Any]) -> None:
    """One verb with the given arguments."""
    if verb == "append":
        p.append(layer, given["kv"], given["index_key"])
    elif verb == "score":
        p.score(layer, given["index_q"], given["index_weights"])
    elif verb == "recall":
        p.recall(layer, given["selection"])
    elif verb == "attend":
        p.attend(layer, given["q"], 1.0, given["out"])
    else:
        names = ("kv", "q", "out", "index_key", "index_q", "index_weights")
        p.attention(layer, scale=1.0, **{name: given[name] for name in names})
