"""What a trained model can do, measured on files it has never seen; all of it stops at a deadline.

Every forward has the training step's number of tokens, so nothing is compiled anew.
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from attention import attention_distribution
from data import RetrievalText, Tokens, token_bytes
from model import Kernels, Mode, TinyDsa
from tokenizers import Tokenizer
from torch import Tensor

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
SAMPLES_PER_ROUND = 16


@dataclass
class Evaluator:
    """The model with what it takes to run it.

    Attributes:
        batch_tokens: tokens of every forward.
        autocast: makes the context of a forward.
        deadline: `time.time()` after which nothing new is begun.
    """

    model: TinyDsa
    kernels: Kernels
    tokenizer: Tokenizer
    held_out: Tokens
    batch_tokens: int
    autocast: Callable[[], AbstractContextManager[Any]]
    deadline: float

    @property
    def top_k(self) -> int:
        return int(self.model.config.index_topk)

    def run(self, length: int, contexts: tuple[int, ...], folder: Path) -> dict[str, Any]:
        """Everything; what fails is reported as failed."""
        results: dict[str, Any] = {}
        parts: dict[str, Callable[[], Any]] = {
            "held_out": lambda: {name: self.held_out_loss(length, k) for name, k in self._selections()},
            "indexer": lambda: self.indexer_quality(length),
            "transformers": lambda: self.compare_with_transformers(folder, min(1024, length)),
            "sample": lambda: self.sample(min(400, length), 120),
            "needle": lambda: self.needles(contexts),
        }
        for name, part in parts.items():
            started = time.time()
            try:
                with torch.no_grad():
                    results[name] = part()
            except Exception:  # weights are saved by now; the other parts are still wanted
                results[name] = {"failed": traceback.format_exc()[-2000:]}
            print(f"evaluated {name} in {time.time() - started:.1f} s", flush=True)
        return results

    def _selections(self) -> list[tuple[str, int]]:
        return [(f"k={self.top_k}", self.top_k), ("k=all", 0)]

    def _tensor(self, rows: list[Tokens]) -> Tensor:
        return torch.from_numpy(np.stack(rows).astype(np.int64)).to(self.model.cos.device)

    def held_out_loss(self, length: int, top_k: int) -> dict[str, float]:
        """Loss per token and per byte at a context length, over non-overlapping windows."""
        count = (len(self.held_out) - 1) // length
        if count < 1:
            raise ValueError(f"held-out text has {len(self.held_out)} tokens, expected more than {length}")
        windows = [self.held_out[i * length : (i + 1) * length + 1] for i in range(count)]
        batch = max(1, self.batch_tokens // length)
        sizes = torch.from_numpy(token_bytes(self.tokenizer)).to(self.model.cos.device)
        nats, tokens, size = 0.0, 0, 0
        for start in range(0, count, batch):
            if start and time.time() > self.deadline:
                break
            rows = windows[start : start + batch]
            inputs = self._tensor([*rows, *[rows[0]] * (batch - len(rows))])
            with self.autocast():
                losses, _ = self.model.token_losses(inputs, Mode(top_k), self.kernels)
            nats += float(losses[: len(rows)].sum())
            size += int(sizes[inputs[: len(rows), 1:]].sum())
            tokens += len(rows) * length
        per_bit = size * math.log(2)
        return {"nats_per_token": nats / tokens, "bits_per_byte": nats / per_bit, "tokens": tokens, "bytes": size}

    def indexer_quality(self, length: int) -> list[dict[str, float]]:
        """For each layer: attention mass that the selection keeps, the most that any selection could keep, how
        much a recency window would keep, and the share of a query's selection that its successor selects, too."""
        report: list[dict[str, float]] = []
        k = self.top_k

        def observed(q: Tensor, keys: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            positions = torch.arange(min(2 * k, length // 2), length, max(1, length // 64), device=q.device)
            rows = mask[:, positions]
            window = _causal(positions, length) & ~_causal(positions - k, length)
            target = attention_distribution(q[:, :, positions], keys, _causal(positions, length)[None])
            both = (mask[:, positions - 1] & rows).sum(-1).float() / k
            report.append(
                {
                    "kept": float((target * rows).sum(-1).mean()),
                    "best": float(target.topk(k, dim=-1).values.sum(-1).mean()),
                    "recent": float((target * window[None]).sum(-1).mean()),
                    "overlap_with_previous": float(both.mean()),
                }
            )
            return self.kernels.sparse(q, keys, v, mask)

        batch = max(1, self.batch_tokens // length)
        starts = np.linspace(0, len(self.held_out) - length - 1, batch).astype(int)
        inputs = self._tensor([self.held_out[start : start + length] for start in starts])
        with self.autocast():
            self.model(inputs, Mode(k), replace(self.kernels, sparse=observed))
        return report

    def needles(self, contexts: tuple[int, ...], rounds: int = 10) -> dict[str, Any]:
        """Exact matches of the answer, [hits, tries] for each selection, context and depth.

        One forward over question and answer tells what greedy decoding would write: the answer, if and only if each of
        its tokens is the likeliest one after those before it.
        """
        text = RetrievalText(self.tokenizer, self.held_out, seed=1)
        counts = {
            name: {context: {depth: [0, 0] for depth in DEPTHS} for context in contexts}
            for name, _ in self._selections()
        }
        drawn = 0
        for _ in range(rounds):
            for context in contexts:
                batch = max(1, self.batch_tokens // context)
                for _ in range(max(1, SAMPLES_PER_ROUND // batch)):
                    if time.time() > self.deadline:
                        return counts
                    depths = [DEPTHS[(drawn + row) % len(DEPTHS)] for row in range(batch)]
                    drawn += batch
                    rows = [text.test_sequence(context, depth) for depth in depths]
                    for name, k in self._selections():
                        for depth, hit in zip(depths, self._hits(rows, k), strict=True):
                            counts[name][context][depth][0] += hit
                            counts[name][context][depth][1] += 1
        return counts

    def _hits(self, rows: list[tuple[Tokens, int]], top_k: int) -> list[bool]:
        inputs = self._tensor([tokens for tokens, _ in rows])
        longest = max(answer for _, answer in rows) + 1
        with self.autocast():
            x, _ = self.model(inputs, Mode(top_k), self.kernels)
            ends = self.model.model.norm(x.view(*inputs.shape, -1)[:, -longest:])
            likeliest = F.linear(ends, self.model.model.embed_tokens.weight).argmax(-1)
        right = (likeliest[:, :-1] == inputs[:, -longest + 1 :]).cpu()
        return [bool(right[row, -answer:].all()) for row, (_, answer) in enumerate(rows)]

    def sample(self, prompt_tokens: int, new_tokens: int, temperature: float = 0.7) -> dict[str, str]:
        """A continuation of the beginning of held-out text, sparse, recomputed for each token."""
        generator = torch.Generator().manual_seed(0)
        tokens = self._tensor([self.held_out[:prompt_tokens]])
        for _ in range(new_tokens):
            if time.time() > self.deadline:
                break
            with self.autocast():
                logits = self.model.logits(tokens, Mode(self.top_k), Kernels())[0, -1]
            chances = (logits.float() / temperature).softmax(-1).cpu()
            token = torch.multinomial(chances, 1, generator=generator).to(tokens.device)
            tokens = torch.cat([tokens, token[None]], 1)
        ids = tokens[0].tolist()
        decode = self.tokenizer.decode
        return {"prompt": decode(ids[:prompt_tokens]), "continuation": decode(ids[prompt_tokens:])}

    def compare_with_transformers(self, folder: Path, length: int) -> dict[str, float]:
        """The saved folder loaded by transformers against the training forward, on one held-out text."""
        from transformers import AutoModelForCausalLM

        theirs: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        theirs = theirs.to(self.model.cos.device).eval()
        tokens = self._tensor([self.held_out[:length]])
        a = theirs(tokens).logits.float()
        b = self.model.logits(tokens, Mode(self.top_k), Kernels()).float()
        return {
            "largest_logit": float(b.abs().max()),
            "largest_difference": float((a - b).abs().max()),
            "same_likeliest_token": float((a.argmax(-1) == b.argmax(-1)).float().mean()),
        }


def _causal(positions: Tensor, tokens: int) -> Tensor:
    return positions[:, None] >= torch.arange(tokens, device=positions.device)[None]
