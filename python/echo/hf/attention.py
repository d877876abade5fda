"""One attention layer of a Hugging Face DSA model, computed through a ForwardPass.

transformers expands every cached latent into keys and values of each head. The runtime stores and attends to
latents only, so the expansion moves to the side of the query ("absorbed" attention):

    q . (W_UK latent) = (W_UK^T q) . latent        sum_s p_s (W_UV latent_s) = W_UV (sum_s p_s latent_s)

with W_UK and W_UV the two parts of `kv_b_proj`. Only the rounding differs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.deepseek_v32.modeling_deepseek_v32 import (
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_interleave,
)

from echo import ForwardPass


@dataclass(frozen=True)
class LayerTensors:
    """What one layer handed to the runtime and what it got back.

    Attributes:
        layer: layer of the model.
        kv: [rows, latent + rope], the latent after its norm, the key's rotary part after its rotation.
        index_key: [rows, index_dim]; None where the layer shares the selection of an earlier one.
        index_q: [rows, index_heads, index_dim]; None likewise.
        index_weights: float32 [rows, index_heads], constant factors folded in; None likewise.
        q: [rows, heads, latent + rope], W_UK absorbed.
        out: [rows, heads, latent], before W_UV.
    """

    layer: int
    kv: Tensor
    index_key: Tensor | None
    index_q: Tensor | None
    index_weights: Tensor | None
    q: Tensor
    out: Tensor


class SparseAttention:
    """Computes what a layer's `self_attn` computes, from its own projections and norms.

    Args:
        module: the layer's attention module.
        layer: its number.
        interleaved_index: whether the indexer rotates neighbouring dimensions (GLM) or halves (DeepSeek).
    """

    def __init__(self, module: Any, layer: int, interleaved_index: bool) -> None:
        """See the class."""
        self._module = module
        self._layer = layer
        self._rotate_index = apply_rotary_pos_emb_interleave if interleaved_index else apply_rotary_pos_emb
        nope = module.qk_nope_head_dim
        norm = module.kv_a_layernorm.weight  # never quantised: its type and device are the model's
        up = _weight_of(module.kv_b_proj, norm.dtype, norm.device)
        up = up.view(module.num_heads, nope + module.v_head_dim, module.kv_lora_rank)
        self._up_key = up[:, :nope]  # W_UK, [heads, nope, latent]
        self._up_value = up[:, nope:].transpose(1, 2)  # W_UV, [heads, latent, v]

    def __call__(self, p: ForwardPass, hidden: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, LayerTensors]:
        """Runs the layer's attention for all rows of a pass.

        Args:
            p: the pass.
            hidden: [rows, hidden], after the input norm.
            rotary: cosines and sines of the rows' positions, [rows, rope] each.

        Returns:
            [rows, hidden], after the output projection; and what crossed to the runtime.
        """
        module = self._module
        q_compressed = module.q_a_layernorm(module.q_a_proj(hidden))
        q, kv = self._queries_and_row(hidden, q_compressed, rotary)
        index_key, index_q, index_weights = self._index(hidden, q_compressed, rotary)
        out = q.new_empty(q.shape[0], module.num_heads, module.kv_lora_rank)
        p.attention(
            self._layer,
            kv=kv,
            q=q,
            scale=module.scaling,
            out=out,
            index_key=index_key,
            index_q=index_q,
            index_weights=index_weights,
        )
        values = torch.bmm(out.transpose(0, 1), self._up_value).transpose(0, 1)
        attended = module.o_proj(values.reshape(hidden.shape[0], -1))
        return attended, LayerTensors(self._layer, kv, index_key, index_q, index_weights, q, out)

    def _queries_and_row(
        self, hidden: Tensor, q_compressed: Tensor, rotary: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        module = self._module
        rows, rope = hidden.shape[0], module.qk_rope_head_dim
        q_heads = module.q_b_proj(q_compressed).view(rows, module.num_heads, -1)
        q_nope, q_rope = q_heads.split([module.qk_nope_head_dim, rope], dim=-1)
        latent, k_rope = module.kv_a_proj_with_mqa(hidden).split([module.kv_lora_rank, rope], dim=-1)
        q_rope, k_rope = apply_rotary_pos_emb_interleave(q_rope, k_rope[:, None], *rotary, unsqueeze_dim=1)
        q_latent = torch.bmm(q_nope.transpose(0, 1), self._up_key).transpose(0, 1)
        q = torch.cat([q_latent, q_rope], dim=-1)
        return q, torch.cat([module.kv_a_layernorm(latent), k_rope[:, 0]], dim=-1)

    def _index(
        self, hidden: Tensor, q_compressed: Tensor, rotary: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor] | tuple[None, None, None]:
        indexer = self._module.indexer
        if indexer is None:
            return None, None, None
        sizes = [indexer.qk_rope_head_dim, indexer.head_dim - indexer.qk_rope_head_dim]
        q_heads = indexer.wq_b(q_compressed).view(-1, indexer.n_heads, indexer.head_dim)
        q_rope, q_rest = q_heads.split(sizes, dim=-1)
        k_rope, k_rest = indexer.k_norm(indexer.wk(hidden)).split(sizes, dim=-1)
        q_rope, k_rope = self._rotate_index(q_rope, k_rope[:, None], *rotary, unsqueeze_dim=1)
        index_q = torch.cat([q_rope, q_rest], dim=-1)
        index_key = torch.cat([k_rope[:, 0], k_rest], dim=-1)
        # transformers scales each q . k before the ReLU; the scale is positive, so it may as well follow it.
        head_weights = indexer.weights_proj(hidden.to(indexer.weights_proj.weight.dtype)).float()
        return index_key, index_q, head_weights * (indexer.n_heads**-0.5 * indexer.softmax_scale)


def _weight_of(linear: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[out, in] of a projection; of a quantised or adapted one, as what it makes of the unit vectors."""
    if isinstance(linear, nn.Linear) and linear.weight.dtype == dtype:
        return linear.weight.detach()
    with torch.no_grad():
        columns: Tensor = linear(torch.eye(linear.in_features, dtype=dtype, device=device))
    return columns.t().contiguous()
