"""Index queries that change slowly, so that selections of neighbouring steps overlap; `regimes.py` says how."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

import echo
from echo.bench.regimes import Regime

_SPREAD = 1 << 22  # elements of noise more than a step needs: where it is read from changes


class Queries:
    """The queries of all layers and all rows of a batch.

    Attributes:
        layers: bf16 [layers, rows, heads, dim], at a fixed address; the first rows are in use.
        key: bf16 [rows, dim], index keys of the new tokens.
    """

    def __init__(self, shape: echo.ModelShape, rows: int, regime: Regime, device: str, seed: int) -> None:
        """Takes memory for `rows` requests; none runs yet."""
        self._regime = regime
        self._draw = torch.Generator(device).manual_seed(seed)
        self._where = np.random.default_rng(seed)
        size = (shape.layers, rows, shape.index_heads, shape.index_dim)
        self._topic = torch.zeros(size, device=device)
        self._slow = torch.zeros(size, device=device)
        self._noise = torch.randn(self._topic.numel() + _SPREAD, generator=self._draw, device=device)
        self._device = device
        self.layers = torch.zeros(size, device=device, dtype=torch.bfloat16)
        self.key = torch.zeros(rows, shape.index_dim, device=device, dtype=torch.bfloat16)

    def start(self, row: int) -> None:
        """A new request in this row."""
        for part in (self._topic, self._slow):
            part[:, row] = torch.randn(part[:, row].shape, generator=self._draw, device=self._device)

    def keep(self, rows: Sequence[int]) -> None:
        """Only these go on, and become the first ones."""
        kept = torch.tensor(list(rows), dtype=torch.long, device=self._device)
        for part in (self._topic, self._slow):
            part[:, : len(kept)] = part[:, kept]

    def advance(self, rows: int) -> None:
        """Queries and keys of the next step, of the first rows."""
        regime, slow = self._regime, self._slow[:, :rows]
        fresh = (1 - regime.rho**2) ** 0.5
        slow.mul_(regime.rho).add_(self._some(slow), alpha=fresh)
        query = torch.add(self._topic[:, :rows], slow, alpha=regime.slow)
        self.layers[:, :rows] = query.add_(self._some(slow), alpha=regime.fast)
        self.key[:rows] = self._some(self.key[:rows])

    def _some(self, like: torch.Tensor) -> torch.Tensor:
        """Noise of this shape, from anywhere in a table: drawing it anew would cost more than the rest."""
        first = int(self._where.integers(_SPREAD // 64)) * 64
        return self._noise[first : first + like.numel()].view(like.shape)
