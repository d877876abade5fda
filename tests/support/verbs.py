"""The verbs of a pass by name, with arguments that are all right for `small_shape()`."""

from __future__ import annotations

from typing import Any

import torch

import echo

ARGUMENTS = {
    "append": ("kv", "index_key"),
    "score": ("index_q", "index_weights"),
    "recall": ("selection",),
    "attend": ("q", "out"),
    "attention": ("kv", "index_key", "index_q", "index_weights", "q", "out"),
}

ROWS = 2  # of the steps in which they are called


def tensors(device: str) -> dict[str, torch.Tensor]:
    """Arguments of the verbs that are all right."""

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(ROWS, *shape, device=device)

    return {
        "kv": zeros(80),
        "index_key": zeros(16),
        "index_q": zeros(8, 16),
        "index_weights": zeros(8),
        "q": zeros(4, 80),
        "out": zeros(4, 64),
        "selection": torch.zeros(ROWS, 16, dtype=torch.int32, device=device),
    }


def call(p: echo.ForwardPass, verb: str, layer: int, given: dict[str, Any]) -> None:
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
