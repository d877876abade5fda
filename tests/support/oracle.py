"""What a runtime must compute: sessions as lists of tokens; scores, selections and attention in float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import numpy as np
import torch

from support.formats import decode_rows, encode_rows, index_values
from support.synthetic import SyntheticModel

# Relative rounding of one addition in an index score. Tensor cores add FP8 products with fewer bits than fp32 has.
SCORE_ROUNDING = {
    ("cpu", "fp8"): 2.0**-24,
    ("cpu", "fp32"): 2.0**-24,
    ("cuda", "fp8"): 2.0**-13,
    ("cuda", "fp32"): 2.0**-23,
}
# Largest error of an output, relative to the largest value attended to: fp32 throughout on the CPU and for fp32
# rows; on a GPU bf16 tensor cores round queries and softmax weights to 8 bits.
OUTPUT_TOLERANCE = {
    ("cpu", "fp32"): 1e-5,
    ("cpu", "bf16_1152"): 1e-5,
    ("cpu", "fp8_656"): 1e-5,
    ("cuda", "fp32"): 1e-4,
    ("cuda", "bf16_1152"): 2e-2,
    ("cuda", "fp8_656"): 2e-2,
}


def top_k(scores: np.ndarray, k: int) -> list[int]:
    """Positions of the k highest scores, ascending; ties to the smaller position, NaN lowest, -0.0 = +0.0."""
    missing = np.isnan(scores)
    order = np.lexsort((np.arange(len(scores)), -np.where(missing, 0.0, scores), missing))
    return sorted(order[:k].tolist())


class OracleLayer:
    """What one layer caches for each token, and what each token's query asked for."""

    def __init__(self) -> None:
        self.rows = np.empty((0, 0), np.uint8)  # encoded
        self.values = np.empty((0, 0))  # the same, decoded
        self.keys = torch.empty(0, 0)
        self.key_values = np.empty((0, 0))
        self.q = np.empty((0, 0, 0))
        self.scores: list[np.ndarray] = []  # of the query at each position, for all tokens up to it
        self.sizes: list[np.ndarray] = []  # sums of the absolute values of the scores' terms
        self.threshold = math.nan


class OracleSession:
    """One session: its tokens, and what follows from them."""

    def __init__(self, model: SyntheticModel, alpha: float = 0.5) -> None:
        self.model = model.on_cpu()
        self.shape = model.shape
        self.alpha = alpha
        self.tokens: list[int] = []
        self.layers = [OracleLayer() for _ in range(self.shape.layers)]

    def copy(self) -> OracleSession:
        """An independent session with the same contents."""
        other = copy.copy(self)
        other.tokens = list(self.tokens)
        other.layers = [copy.copy(layer) for layer in self.layers]
        for layer in other.layers:
            layer.scores, layer.sizes = list(layer.scores), list(layer.sizes)
        return other

    def truncate(self, length: int) -> None:
        """Forgets all tokens from `length` on; the moving averages keep what they have seen."""
        del self.tokens[length:]
        for layer in self.layers:
            for name in ("rows", "values", "keys", "key_values", "q", "scores", "sizes"):
                setattr(layer, name, getattr(layer, name)[:length])

    def append(self, tokens: Sequence[int]) -> None:
        """New tokens, one after the other."""
        first = len(self.tokens)
        self.tokens += tokens
        positions = torch.arange(first, len(self.tokens))
        for number, layer in enumerate(self.layers):
            x = self.model.inputs(number, torch.tensor(list(tokens)), positions)
            rows = encode_rows(x.kv, self.shape)

            def grown(old: np.ndarray, new: np.ndarray, start: int = first) -> np.ndarray:
                return np.concatenate([old, new]) if start else new

            layer.rows = grown(layer.rows, rows)
            layer.values = grown(layer.values, decode_rows(rows, self.shape))
            layer.q = grown(layer.q, x.q.double().numpy())
            if number in self.model.shared:
                continue
            layer.keys = torch.cat([layer.keys, x.index_key]) if first else x.index_key
            layer.key_values = grown(layer.key_values, index_values(x.index_key, self.shape))
            queries = index_values(x.index_q, self.shape)
            for position in positions.tolist():
                self._score(
                    layer, position, queries[position - first], x.index_weights[position - first].double().numpy()
                )

    def _score(self, layer: OracleLayer, position: int, queries: np.ndarray, weights: np.ndarray) -> None:
        keys = layer.key_values[: position + 1]
        scores = np.maximum(keys @ queries.T, 0.0) @ weights
        layer.scores.append(scores)
        layer.sizes.append(np.abs(keys) @ (np.abs(weights) @ np.abs(queries)))
        if position + 1 >= self.shape.top_k:
            kth = np.sort(scores)[-self.shape.top_k]
            if not math.isfinite(kth):
                return
            old = layer.threshold
            layer.threshold = kth if math.isnan(old) else self.alpha * old + (1.0 - self.alpha) * kth

    def output(self, layer: int, position: int, selection: Sequence[int]) -> np.ndarray:
        """float64 [query_heads, latent_dim]: attention of the query at `position` over the selected tokens."""
        rows = self.layers[layer].values[list(selection)]
        logits = self.model.scale * self.layers[layer].q[position] @ rows.T
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        return weights / weights.sum(axis=1, keepdims=True) @ rows[:, : self.shape.latent_dim]

    def check_selection(self, layer: int, position: int, selection: list[int], device: str) -> bool:
        """Asserts that a selection is right; True if it is the oracle's own, not just as good within rounding."""
        k = min(position + 1, self.shape.top_k)
        chosen = selection[:k]
        assert selection[k:] == [-1] * (self.shape.top_k - k)
        assert chosen == sorted(set(chosen)), "positions must be ascending and distinct"
        assert chosen[0] >= 0 and chosen[-1] <= position
        scores, sizes = self.layers[layer].scores[position], self.layers[layer].sizes[position]
        if chosen == top_k(scores, k):
            return True
        additions = self.shape.index_dim + self.shape.index_heads + 2
        error = additions * SCORE_ROUNDING[device, self.shape.index_key_format] * sizes
        left_out = np.setdiff1d(np.arange(position + 1), chosen)
        best_left_out = (scores[left_out] - error[left_out]).max()
        assert best_left_out <= (scores[chosen] + error[chosen]).min(), "a better token was left out"
        return False

    def check_row(self, position: int, outputs: torch.Tensor, selections: torch.Tensor, device: str) -> int:
        """Asserts that one query row's results, on the CPU, are right in all layers.

        Returns:
            How many selections were not the oracle's.
        """
        inexact = 0
        own = 0
        for number, layer in enumerate(self.layers):
            own = own if number in self.model.shared else number
            selection = selections[number].tolist()
            inexact += not self.check_selection(own, position, selection, device)
            if self.shape.row_format == "raw":
                continue
            chosen = [s for s in selection if s != -1]
            expected = self.output(number, position, chosen)
            tolerance = OUTPUT_TOLERANCE[device, self.shape.row_format]
            if outputs.dtype == torch.bfloat16:
                tolerance += 2.0**-8
            error = np.abs(outputs[number].double().numpy() - expected).max()
            largest = np.abs(layer.values[chosen, : self.shape.latent_dim]).max()
            assert error <= tolerance * largest, f"layer {number}, position {position}: off by {error}"
        return inexact
