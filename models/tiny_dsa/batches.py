"""Batches of token windows, drawn on the device: training never waits for the host."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor


class Batches:
    """Windows of the corpus in random order, each once per epoch, with some synthetic retrieval text among them.

    Args:
        folder: what data.py wrote.
        device: where batches are made.
        seed: of the order.
        retrieval_share: of the sequences, synthetic ones.
    """

    def __init__(self, folder: Path, device: torch.device, seed: int, retrieval_share: float) -> None:
        self._tokens = torch.from_numpy(np.load(folder / "train.npy")).to(device)
        self._retrieval = {
            int(file.stem.split("_")[1]): torch.from_numpy(np.load(file)).to(device)
            for file in sorted(folder.glob("retrieval_*.npy"))
        }
        self._share = retrieval_share
        self._random = np.random.default_rng(seed)
        self._starts: dict[int, Tensor] = {}
        self._used: dict[int, int] = {}
        self._owed = 0.0

    def next(self, rows: int, length: int) -> Tensor:
        """int64 [rows, length + 1]: each token's target is the one after it."""
        synthetic = self._retrieval.get(length)
        self._owed += self._share * rows
        count = min(rows, int(self._owed)) if synthetic is not None else 0
        self._owed -= count
        starts = torch.stack([self._next_start(length) for _ in range(rows - count)]) if count < rows else None
        parts = []
        if starts is not None:
            parts.append(self._tokens[starts[:, None] + torch.arange(length + 1, device=starts.device)])
        if synthetic is not None and count:
            picks = self._random.integers(len(synthetic), size=count)
            parts.append(synthetic[torch.from_numpy(picks).to(synthetic.device)])
        return torch.cat(parts).long()

    def _next_start(self, length: int) -> Tensor:
        position = self._used.get(length, 0)
        if length not in self._starts or position == len(self._starts[length]):
            self._starts[length] = self._epoch(length)
            position = 0
        self._used[length] = position + 1
        return self._starts[length][position]

    def _epoch(self, length: int) -> Tensor:
        room = len(self._tokens) - length - 1
        if room < 0:
            raise ValueError(f"the corpus has {len(self._tokens)} tokens, expected more than {length}")
        first = int(self._random.integers(min(length, room + 1)))  # other windows in each epoch
        starts = self._random.permutation(np.arange(first, room + 1, length))
        return torch.from_numpy(starts).to(self._tokens.device)
