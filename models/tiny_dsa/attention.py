"""The three pieces of DeepSeek sparse attention that training needs, over whole sequences at once.

- attention itself, causal over all tokens or over a boolean mask, by the fastest of several torch implementations that
  is right on this device (`choose_dense`, `choose_sparse`);
- index scores and the mask of each query's top-k (`select`), computed for a chunk of queries at a time;
- the indexer's loss (`index_loss`): KL divergence from the attention distribution, summed over heads and normalised,
  to the softmax of the index scores, for a sample of the queries.

Shapes: q, k [batch, heads, tokens, nope + rope]; v [batch, heads, tokens, v]; index queries [batch, tokens, index
heads, index dim], index keys [batch, tokens, index dim], head weights [batch, tokens, index heads]; masks [batch,
queries, tokens], true where attended.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Dense = Callable[[Tensor, Tensor, Tensor], Tensor]
Sparse = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

_CHUNK_ELEMENTS = 2**29  # of a chunk's scores of all index heads: 1 GiB in bfloat16
_FLEX_BLOCK = 128


def dense_attention(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend | None = None, pad: bool = False) -> Tensor:
    """Causal attention over all tokens; `pad` widens the values for kernels that want one head size."""
    width = v.shape[-1]
    if pad:
        v = F.pad(v, (0, q.shape[-1] - width))
    with nullcontext() if backend is None else sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)[..., :width]


def sparse_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, backend: SDPBackend | None = None) -> Tensor:
    """Attention over the tokens of a mask that is causal already."""
    with nullcontext() if backend is None else sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])


class FlexSparse:
    """Sparse attention by a generated kernel that skips what causality excludes and reads the mask bytes itself.

    Args:
        compiled: compile it; without, it computes all scores at once, for tests of small sizes.
        options: tile sizes for the kernel.
        width: queries and keys are widened to this, for kernels that want a power of two.
    """

    def __init__(self, compiled: bool = True, options: dict[str, int] | None = None, width: int = 0) -> None:
        from torch.nn.attention.flex_attention import flex_attention

        self._run: Any = torch.compile(flex_attention, dynamic=False) if compiled else flex_attention
        self._options = options
        self._width = width
        self._blocks: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import BlockMask

        def selected(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return mask[b, query, key]

        counts, indices = self._causal_blocks(mask.shape[1], mask.device)
        block_mask = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=_FLEX_BLOCK, mask_mod=selected)
        scale = q.shape[-1] ** -0.5
        if self._width > q.shape[-1]:
            q, k = (F.pad(tensor, (0, self._width - tensor.shape[-1])) for tensor in (q, k))
        out: Tensor = self._run(q, k, v, block_mask=block_mask, scale=scale, kernel_options=self._options)
        return out

    def _causal_blocks(self, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
        key = (tokens, device)
        if key not in self._blocks:
            count = -(-tokens // _FLEX_BLOCK)
            numbers = torch.arange(count, dtype=torch.int32, device=device)
            # All of them are partial blocks, in flex_attention's terms: the mask decides inside each.
            indices = numbers.expand(1, 1, count, count).contiguous()
            self._blocks[key] = ((numbers + 1).view(1, 1, count), indices)
        return self._blocks[key]


def weighted_relu(logits: Tensor, weights: Tensor) -> Tensor:
    """sum_h weights[..., h] * relu(logits[..., h, :]), in float32."""
    return (F.relu(logits).float() * weights.float()[..., None]).sum(-2)


class Indexing:
    """Index scores, selections and the indexer's loss; `compile_scores` fuses what follows the matrix product."""

    def __init__(self, compile_scores: bool = False) -> None:
        self._compiled = compile_scores
        self._weighted_relu = torch.compile(weighted_relu) if compile_scores else weighted_relu

    def scores(self, queries: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
        """[batch, queries, tokens] in float32, for queries [batch, queries, heads, dim]."""
        batch, count, heads, dim = queries.shape
        products = queries.reshape(batch, count * heads, dim) @ keys.to(queries.dtype).transpose(1, 2)
        products, weights = products.view(batch, count, heads, -1), weights.contiguous()
        if self._compiled:  # for all sizes but the number of heads, over which the generated code then unrolls
            torch._dynamo.maybe_mark_dynamic(products, (0, 1, 3))
            torch._dynamo.maybe_mark_dynamic(weights, (0, 1))
        scores: Tensor = self._weighted_relu(products, weights)
        return scores

    @torch.no_grad()
    def select(self, queries: Tensor, keys: Tensor, weights: Tensor, top_k: int) -> Tensor:
        """The causal mask [batch, tokens, tokens] of the min(position + 1, top_k) best tokens of each query."""
        batch, tokens, heads, _ = queries.shape
        mask = torch.zeros(batch, tokens, tokens, dtype=torch.bool, device=queries.device)
        chunk = max(1, min(tokens, _CHUNK_ELEMENTS // (batch * heads * tokens)))
        for start in range(0, tokens, chunk):
            end = min(start + chunk, tokens)
            causal = _causal(torch.arange(start, end, device=mask.device), end)
            if end <= top_k:
                mask[:, start:end, :end] = causal
                continue
            scores = self.scores(queries[:, start:end], keys[:, :end], weights[:, start:end])
            best = scores.masked_fill_(~causal, -torch.inf).topk(top_k, dim=-1, sorted=False).indices
            rows = mask[:, start:end, :end]
            rows.scatter_(2, best, True)
            rows &= causal  # the first queries have fewer than top_k tokens to choose from
        return mask

    def loss(self, index: tuple[Tensor, ...], q: Tensor, k: Tensor, mask: Tensor | None, positions: Tensor) -> Tensor:
        """Mean KL divergence at the queries of `positions`, over all causal tokens or over those of a mask.

        Gradients reach `index` (queries, keys, weights) only.
        """
        queries, keys, weights = index
        allowed = _causal(positions, q.shape[2])[None] if mask is None else mask[:, positions]
        target = attention_distribution(q.detach()[:, :, positions], k.detach(), allowed)
        scores = self.scores(queries[:, positions], keys, weights[:, positions])
        predicted = scores.masked_fill(~allowed, -torch.inf).log_softmax(-1).masked_fill(~allowed, 0.0)
        entropy = torch.xlogy(target, target).sum(-1)
        return (entropy - (target * predicted).sum(-1)).mean()


@torch.no_grad()
def attention_distribution(q: Tensor, k: Tensor, allowed: Tensor) -> Tensor:
    """[batch, queries, tokens]: attention probabilities summed over heads, divided by their sum."""
    heads, width = q.shape[1], q.shape[-1]
    total = torch.zeros(q.shape[0], q.shape[2], k.shape[2], device=q.device)
    for head in range(heads):  # one at a time: all heads' probabilities would not be small
        logits = (q[:, head] @ k[:, head].transpose(1, 2)).float() * width**-0.5
        total += logits.masked_fill_(~allowed, -torch.inf).softmax(-1)
    return total.div_(heads)


def _causal(positions: Tensor, tokens: int) -> Tensor:
    return positions[:, None] >= torch.arange(tokens, device=positions.device)[None]


def choose_dense(shape: tuple[int, int, int, int], v_width: int, device: torch.device) -> tuple[Dense, dict[str, Any]]:
    """The fastest causal attention on this device, and what was measured."""
    if device.type != "cuda":
        return dense_attention, {"chosen": "torch's choice"}
    candidates: dict[str, Dense] = {}
    for name, backend, pad in (
        ("flash, padded values", SDPBackend.FLASH_ATTENTION, True),  # cuDNN's is faster, and training diverged with it
        ("memory-efficient", SDPBackend.EFFICIENT_ATTENTION, False),
    ):
        candidates[name] = partial(dense_attention, backend=backend, pad=pad)
    trials: dict[str, Sparse] = {name: partial(_without_mask, f) for name, f in candidates.items()}
    name, report = _fastest(trials, shape, v_width, device, dense=True)
    return candidates[name], report


def choose_sparse(
    shape: tuple[int, int, int, int], v_width: int, device: torch.device, compiled: bool
) -> tuple[Sparse, dict[str, Any]]:
    """The fastest masked attention on this device, and what was measured."""
    if device.type != "cuda":
        return sparse_attention, {"chosen": "torch's choice"}
    candidates: dict[str, Sparse] = {
        "memory-efficient": partial(sparse_attention, backend=SDPBackend.EFFICIENT_ATTENTION)
    }
    if compiled:  # one at a time: each costs seconds to compile
        candidates["flex"] = FlexSparse()
        candidates["flex, widened to 128"] = FlexSparse(width=128)
        candidates["flex, small tiles"] = FlexSparse(options={"BLOCK_M": 64, "BLOCK_N": 64})
    name, report = _fastest(candidates, shape, v_width, device, dense=False, enough=2)
    return candidates[name], report


def _without_mask(dense: Dense, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return dense(q, k, v)


def _fastest(
    candidates: dict[str, Sparse], shape: tuple[int, int, int, int], v_width: int, device: torch.device, dense: bool,
    enough: int = 99,
) -> tuple[str, dict[str, Any]]:  # fmt: skip
    """Times forward and backward of candidates until `enough` of them work; one that fails or is wrong is out."""
    measured: dict[str, Any] = {}
    times: dict[str, float] = {}
    for name, function in candidates.items():
        if len(times) == enough:
            break
        try:
            error, milliseconds = _measure(function, shape, v_width, device, dense)
            measured[name] = {"relative_error": error, "ms": milliseconds}
            if error < 0.03:
                times[name] = milliseconds
        except Exception as problem:  # a kernel that does not exist here, in whatever way it says so
            measured[name] = {"failed": f"{type(problem).__name__}: {problem}"[:300]}
        torch.cuda.empty_cache()
    chosen = min(times, key=lambda name: times[name], default=next(iter(candidates)))
    return chosen, {"chosen": chosen, "measured": measured}


def _measure(
    function: Sparse, shape: tuple[int, int, int, int], v_width: int, device: torch.device, dense: bool
) -> tuple[float, float]:
    """Relative error of output and gradients of two heads, and milliseconds."""
    error, times = 0.0, []
    for _ in range(4):  # each with new tensors: what would compile again each time shows
        leaves, mask = _inputs(shape, v_width, device, dense)
        step = torch.randn(shape[0], shape[2], shape[1], v_width, device=device, dtype=torch.bfloat16).transpose(1, 2)
        _wait(device)
        started = time.perf_counter()
        out = function(*leaves, mask)
        out.backward(step)
        _wait(device)
        times.append(1000 * (time.perf_counter() - started))
        error = max(error, _error(leaves, mask, out, step))
        del leaves, mask, out
    return error, max(times[2:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _inputs(
    shape: tuple[int, int, int, int], v_width: int, device: torch.device, dense: bool
) -> tuple[list[Tensor], Tensor]:
    batch, heads, tokens, width = shape
    sizes = (width, width, v_width)
    tensors = [torch.randn(batch, tokens, heads, n, device=device, dtype=torch.bfloat16) for n in sizes]
    leaves = [tensor.transpose(1, 2).requires_grad_() for tensor in tensors]  # strided as in the model
    mask = torch.rand(batch, tokens, tokens, device=device) < (1.0 if dense else min(0.5, 256 / tokens))
    mask |= torch.eye(tokens, dtype=torch.bool, device=device)
    return leaves, mask.tril_()


def _error(leaves: list[Tensor], mask: Tensor, out: Tensor, step: Tensor) -> float:
    """Largest relative error of output and gradients, in the first sequence's first head and the last one's last."""
    errors = []
    for end in (slice(0, 1), slice(-1, None)):
        exact = [leaf.detach()[end, end].float().requires_grad_() for leaf in leaves]
        wanted = sparse_attention(*exact, mask[end], SDPBackend.MATH)
        wanted.backward(step[end, end].float())
        pairs = [(out, wanted)] + [(leaf.grad, true.grad) for leaf, true in zip(leaves, exact, strict=True)]
        errors += [float(((a[end, end].float() - b).norm() / b.norm()).detach()) for a, b in pairs]
    return max(errors) if all(error == error for error in errors) else float("inf")
