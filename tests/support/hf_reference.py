"""What transformers computes with a model, and the same through a runtime, side by side."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import echo

pytest.importorskip("transformers", minversion="5.17")
hf = pytest.importorskip("echo.hf")

PerLayer = dict[int, Any]  # selecting layer -> tensor


def random_bytes(length: int, seed: int) -> Any:
    """int64 [length] token ids."""
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed))


@contextmanager
def recorded_indexers(model: Any) -> Iterator[tuple[PerLayer, PerLayer]]:
    """Index scores [rows, tokens] and selected positions [rows, k] of transformers' own indexers."""
    scores: PerLayer = {}
    selected: PerLayer = {}
    topk = torch.Tensor.topk
    hooks = []

    def watch(number: int, indexer: Any) -> None:
        def enter(*_: Any) -> None:
            def recording(tensor: Any, *args: Any, **options: Any) -> Any:
                scores[number] = tensor[0].clone()
                return topk(tensor, *args, **options)

            torch.Tensor.topk = recording  # the indexer returns no scores, so they are taken where it ranks them

        def leave(_: Any, __: Any, positions: Any) -> None:
            torch.Tensor.topk = topk
            selected[number] = positions[0]

        hooks.extend([indexer.register_forward_pre_hook(enter), indexer.register_forward_hook(leave)])

    for number, layer in enumerate(model.model.layers):
        if layer.self_attn.indexer is not None:
            watch(number, layer.self_attn.indexer)
    try:
        yield scores, selected
    finally:
        torch.Tensor.topk = topk
        for hook in hooks:
            hook.remove()


@dataclass
class Recorder:
    """An observer that keeps what the selecting layers of one session's passes saw, row after row."""

    keys: PerLayer = field(default_factory=dict)
    scores: PerLayer = field(default_factory=dict)  # lists of float64 [tokens so far]
    selected: PerLayer = field(default_factory=dict)  # lists of sets

    def __call__(self, p: echo.ForwardPass, tensors: Any) -> None:
        """Sees a layer."""
        if tensors.index_q is None:
            return
        known = self.keys.get(tensors.layer, tensors.index_key.new_empty(0, tensors.index_key.shape[1]))
        keys = self.keys[tensors.layer] = torch.cat([known, tensors.index_key])
        products = torch.einsum("rhd,sd->rhs", tensors.index_q.double(), keys.double()).relu()
        scores = torch.einsum("rh,rhs->rs", tensors.index_weights.double(), products)
        selection = torch.from_dlpack(p.selection).tolist()
        for row, position in enumerate(torch.from_dlpack(p.positions).tolist()):
            self.scores.setdefault(tensors.layer, []).append(scores[row, : position + 1])
            self.selected.setdefault(tensors.layer, []).append(set(selection[row]) - {-1})


@dataclass
class Comparison:
    """One text in transformers and in a runtime.

    Attributes:
        expected: logits [tokens, vocab] of transformers.
        got: logits [tokens, vocab] of the runtime.
        margins: for each row with more than k tokens and each selecting layer, the gap between the k-th and the next
            index score, in units of the largest difference between both sides' scores of that row.
        differing: rows (layer, position) with different selections.
    """

    expected: Any
    got: Any
    margins: list[float]
    differing: list[tuple[int, int]]


def compare(
    make_runtime: Callable[..., echo.Runtime], model: Any, tokens: Any, prompt: int, chunk: int = 512
) -> Comparison:
    """Runs a text: its first `prompt` tokens prefilled in chunks, one decode step for each of the others."""
    with recorded_indexers(model) as (scores, selected), torch.no_grad():
        expected = model(tokens[None], use_cache=False).logits[0]
    recorder = Recorder()
    dsa = hf.DsaModel(model, recorder)
    rt = make_runtime(dsa.shape("fp32", "fp32"), max_batch=1, prefill_chunk=chunk)
    all_rows = functools.partial(dsa.forward, all_rows=True)
    with rt.open_session(len(tokens)) as session:
        ids = tokens.tolist()
        logits = [rt.prefill(session, ids[i : min(i + chunk, prompt)], all_rows) for i in range(0, prompt, chunk)]
        logits += [rt.step(echo.Batch([session], [token]), dsa.forward) for token in ids[prompt:]]
    k = model.config.index_topk
    margins, differing = [], []
    for layer, rows in recorder.scores.items():
        for position, ours in enumerate(rows):
            theirs = scores[layer][position, : position + 1].double()
            if position >= k:
                ranked = theirs.sort(descending=True).values
                noise = (theirs - ours).abs().max().clamp_min(1e-30)
                margins.append(float((ranked[k - 1] - ranked[k]) / noise))
            wanted = {s for s in selected[layer][position].tolist() if s <= position}
            if recorder.selected[layer][position] != wanted:
                differing.append((layer, position))
    return Comparison(expected, torch.cat(logits), margins, differing)
