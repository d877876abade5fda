"""A model without weights: everything a layer computes is looked up in random tables.

Tables are different for every layer and every kind of input, and are indexed by token id and by position. Looking
up and adding two floats gives the same bits in any batch, eager or replayed, on the CPU and on a GPU, so whatever
differs between two runs comes from the runtime. Padding rows are fed NaN (raw rows: 0xFF) and every output is filled
with NaN before the runtime writes it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

import echo

KINDS = ("kv", "index_key", "index_q", "index_weights", "q")
FLOAT_BYTES = {torch.float32: 4, torch.bfloat16: 2}


@dataclass
class LayerInputs:
    """What the model hands to one layer, in the runtime's shapes and types."""

    kv: torch.Tensor
    index_key: torch.Tensor
    index_q: torch.Tensor
    index_weights: torch.Tensor
    q: torch.Tensor


class SyntheticModel:
    """A forward for `echo.Runtime`.

    Calling it returns (outputs [rows, layers, query_heads, latent_dim], selections [rows, layers, top_k]); with raw
    rows, which cannot be attended to, the outputs have 0 heads. `last[rows]` keeps the results of the last pass of that
    many rows with its padding.

    Args:
        shape: sizes of the model.
        seed: of the tables.
        device: where the tables are.
        dtype: of all inputs but index_weights, and of the outputs.
        integers: index keys, queries and weights are small integers, so that scores are exact in any arithmetic and
            full of ties.
        shared: layers that attend to the selection of the layer before.
        positions: longest context.
    """

    scale = 0.2

    def __init__(
        self,
        shape: echo.ModelShape,
        *,
        seed: int = 0,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        integers: bool = False,
        shared: Collection[int] = (),
        positions: int = 1024,
        vocab: int = 61,
    ) -> None:
        self.shape = shape
        self.device = device
        self.dtype = dtype
        self.shared = frozenset(shared)
        self.vocab = vocab
        self.last: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._cpu_copy: SyntheticModel | None = None
        # Called with the name of a stage and the layer before the stage runs; tests fail or peek there.
        self.on_stage: Callable[[str, int, echo.ForwardPass], None] | None = None
        generator = torch.Generator().manual_seed(seed)
        heads, dim = shape.index_heads, shape.index_dim
        sizes = {
            "kv": (shape.row_bytes if shape.row_format == "raw" else shape.row_dim,),
            "index_key": (dim,),
            "index_q": (heads, dim),
            "index_weights": (heads,),
            "q": (shape.query_heads, shape.row_dim),
        }

        def table(kind: str, entries: int) -> torch.Tensor:
            size = (entries, *sizes[kind])
            if kind == "kv" and shape.row_format == "raw":
                return torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
            if integers and kind.startswith("index"):
                least = 0 if kind == "index_weights" else -2
                return torch.randint(least, 3, size, generator=generator).float()
            values = torch.randn(size, generator=generator)
            if kind == "kv":  # magnitudes that differ between tokens and along the row, as scales see them
                values *= 2.0 ** torch.randint(-3, 4, (entries, 1), generator=generator)
                values *= torch.linspace(0.25, 2.0, size[1])
            return values

        self.tables = [
            {kind: (table(kind, vocab).to(device), table(kind, positions).to(device)) for kind in KINDS}
            for _ in range(shape.layers)
        ]

    def on_cpu(self) -> SyntheticModel:
        """The same model on the CPU, made once."""
        if self._cpu_copy is None:
            self._cpu_copy = self if self.device == "cpu" else self.to("cpu")
        return self._cpu_copy

    def to(self, device: str) -> SyntheticModel:
        """The same model on another device."""
        other = copy.copy(self)
        other.device = device
        other._cpu_copy = None
        other.last = {}
        other.tables = [
            {kind: (tokens.to(device), positions.to(device)) for kind, (tokens, positions) in layer.items()}
            for layer in self.tables
        ]
        return other

    def inputs(self, layer: int, tokens: torch.Tensor, positions: torch.Tensor) -> LayerInputs:
        """Inputs of one layer for int tensors [rows] of token ids and positions."""
        return LayerInputs(**{kind: self._look_up(layer, kind, tokens, positions) for kind in KINDS})

    def _look_up(self, layer: int, kind: str, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        by_token, by_position = self.tables[layer][kind]
        padding = (positions < 0).view(-1, *[1] * (by_token.dim() - 1))
        token_part = by_token[tokens.long()]
        position_part = by_position[positions.long().clamp(min=0)]
        if by_token.dtype == torch.uint8:
            return (token_part ^ position_part).masked_fill(padding, 0xFF)
        value = (token_part + position_part).masked_fill(padding, float("nan"))
        return value if kind == "index_weights" else value.to(self.dtype)

    def __call__(self, forward_pass: echo.ForwardPass) -> tuple[torch.Tensor, torch.Tensor]:
        """All layers of one pass."""
        tokens = torch.from_dlpack(forward_pass.tokens)
        positions = torch.from_dlpack(forward_pass.positions)
        outputs, selections = [], []
        for layer in range(self.shape.layers):
            out = self.empty_output(forward_pass.rows)
            self.run_layer(forward_pass, layer, self.inputs(layer, tokens, positions), out)
            outputs.append(out)
            selections.append(torch.from_dlpack(forward_pass.selection).clone())
        result = torch.stack(outputs, 1), torch.stack(selections, 1)
        self.last[forward_pass.rows] = result
        return result

    def empty_output(self, rows: int) -> torch.Tensor:
        """Room for the output of one layer, poisoned."""
        heads = 0 if self.shape.row_format == "raw" else self.shape.query_heads
        size = (rows, heads, self.shape.latent_dim)
        return torch.full(size, float("nan"), dtype=self.dtype, device=self.device)

    def run_layer(self, forward_pass: echo.ForwardPass, layer: int, x: LayerInputs, out: torch.Tensor) -> None:
        """The verbs of one layer, one by one."""
        own = layer not in self.shared
        self._stage("append", layer, forward_pass)
        forward_pass.append(layer, x.kv, x.index_key if own else None)
        for block in forward_pass.blocks:
            if own:
                self._stage("score", layer, forward_pass)
                forward_pass.score(layer, x.index_q, x.index_weights, block)
                self._stage("select", layer, forward_pass)
                forward_pass.select(layer, block)
            self._stage("recall", layer, forward_pass)
            forward_pass.recall(layer, None, block)
            if self.shape.row_format != "raw":
                self._stage("attend", layer, forward_pass)
                forward_pass.attend(layer, x.q, self.scale, out, block)
        self._stage("end", layer, forward_pass)

    def _stage(self, stage: str, layer: int, forward_pass: echo.ForwardPass) -> None:
        if self.on_stage is not None:
            self.on_stage(stage, layer, forward_pass)


class FusedModel(SyntheticModel):
    """The same through `ForwardPass.attention`."""

    def run_layer(self, forward_pass: echo.ForwardPass, layer: int, x: LayerInputs, out: torch.Tensor) -> None:
        """The whole layer in one call."""
        index: dict[str, Any] = {}
        if layer not in self.shared:
            index = {"index_key": x.index_key, "index_q": x.index_q, "index_weights": x.index_weights}
        forward_pass.attention(layer, kv=x.kv, q=x.q, scale=self.scale, out=out, **index)


class ForwardFailed(Exception):
    """What a test's forward raises on purpose."""


def fail_at(stage: str, layer: int) -> Callable[[str, int, echo.ForwardPass], None]:
    """An `on_stage` that raises ForwardFailed before the given stage of the given layer."""

    def check(current: str, current_layer: int, _: echo.ForwardPass) -> None:
        if (current, current_layer) == (stage, layer):
            raise ForwardFailed(f"{stage} of layer {layer}")

    return check
