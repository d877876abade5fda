"""DeepSeek-V3.2 with dense MLPs, written for training: the parameters of transformers' class under the same names.

Work is split so that what torch.compile fuses well sees one shape only, [tokens of all sequences, ...], whatever the
sequence length: `Block.project` and `Block.index` before attention, `Block.finish` after it, `head_loss` at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from attention import Dense, Indexing, Sparse, dense_attention, sparse_attention
from torch import Tensor, nn
from transformers import DeepseekV32Config

_COMMON = {
    "num_key_value_heads": 0,
    "n_group": 1,
    "topk_group": 1,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
    "tie_word_embeddings": True,
}


def make_config(**sizes: Any) -> DeepseekV32Config:
    """A configuration without experts, embeddings tied."""
    fields = {**_COMMON, **sizes}
    fields["num_key_value_heads"] = fields["num_attention_heads"]
    fields["first_k_dense_replace"] = fields["num_hidden_layers"]
    return DeepseekV32Config(**fields, architectures=["DeepseekV32ForCausalLM"])


def tiny_config(vocab: int) -> DeepseekV32Config:
    """7.6 M parameters. Row and index-key sizes are DeepSeek-V3.2's: 512 + 64 and 128."""
    return make_config(
        vocab_size=vocab,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=5,
        num_attention_heads=16,
        kv_lora_rank=512,
        q_lora_rank=64,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        index_n_heads=8,
        index_head_dim=128,
        index_topk=256,
        max_position_embeddings=16384,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
    )


def micro_config(vocab: int) -> DeepseekV32Config:
    """For tests of the training code on a CPU."""
    return make_config(
        vocab_size=vocab,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        kv_lora_rank=64,
        q_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        index_n_heads=4,
        index_head_dim=32,
        index_topk=16,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )


class RMSNorm(nn.Module):
    """As transformers': normalised in float32, scaled in the type of the input."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of neighbouring dimensions (MLA's); the two parts end up in two halves."""
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the two halves (the indexer's)."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Indexer(nn.Module):
    """Parameters of the indexer."""

    def __init__(self, config: DeepseekV32Config) -> None:
        super().__init__()
        self.wq_b = linear(config.q_lora_rank, config.index_n_heads * config.index_head_dim)
        self.wk = linear(config.hidden_size, config.index_head_dim)
        self.k_norm = nn.LayerNorm(config.index_head_dim, eps=1e-6)
        self.weights_proj = linear(config.hidden_size, config.index_n_heads)


class Attention(nn.Module):
    """Parameters of multi-head latent attention."""

    def __init__(self, config: DeepseekV32Config) -> None:
        super().__init__()
        heads, nope, rope = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
        self.q_a_proj = linear(config.hidden_size, config.q_lora_rank)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank)
        self.q_b_proj = linear(config.q_lora_rank, heads * (nope + rope))
        self.kv_a_proj_with_mqa = linear(config.hidden_size, config.kv_lora_rank + rope)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank)
        self.kv_b_proj = linear(config.kv_lora_rank, heads * (nope + config.v_head_dim))
        self.o_proj = linear(heads * config.v_head_dim, config.hidden_size)
        self.indexer = Indexer(config)


class Mlp(nn.Module):
    """Parameters of the gated MLP."""

    def __init__(self, config: DeepseekV32Config) -> None:
        super().__init__()
        self.gate_proj = linear(config.hidden_size, config.intermediate_size)
        self.up_proj = linear(config.hidden_size, config.intermediate_size)
        self.down_proj = linear(config.intermediate_size, config.hidden_size)


class Block(nn.Module):
    """One layer; [T, ...] stands for all tokens of all sequences."""

    def __init__(self, config: DeepseekV32Config) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = Mlp(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.heads, self.latent = config.num_attention_heads, config.kv_lora_rank
        self.nope, self.rope, self.v_width = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.index_heads, self.index_dim = config.index_n_heads, config.index_head_dim

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The indexer's two inputs, and q, k, v [T, heads, ...], from the stream [T, hidden]."""
        attn = self.self_attn
        cos, sin = cos[:, None], sin[:, None]
        hidden = self.input_layernorm(x)
        q_resid = attn.q_a_layernorm(attn.q_a_proj(hidden))
        q_nope, q_rope = attn.q_b_proj(q_resid).view(-1, self.heads, self.nope + self.rope).split(
            [self.nope, self.rope], -1
        )  # fmt: skip
        latent, k_rope = attn.kv_a_proj_with_mqa(hidden).split([self.latent, self.rope], -1)
        up = attn.kv_b_proj(attn.kv_a_layernorm(latent)).view(-1, self.heads, self.nope + self.v_width)
        k_nope, v = up.split([self.nope, self.v_width], -1)
        k_rope = rotate_pairs(k_rope[:, None], cos, sin).expand(-1, self.heads, -1)
        q = torch.cat([q_nope, rotate_pairs(q_rope, cos, sin)], -1)
        return hidden, q_resid, q, torch.cat([k_nope, k_rope], -1), v.contiguous()

    def index(self, hidden: Tensor, q_resid: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Index queries [T, heads, dim], keys [T, dim], and head weights with all constant factors [T, heads]."""
        indexer = self.self_attn.indexer
        sizes = [self.rope, self.index_dim - self.rope]
        q_rope, q_rest = indexer.wq_b(q_resid).view(-1, self.index_heads, self.index_dim).split(sizes, -1)
        k_rope, k_rest = indexer.k_norm(indexer.wk(hidden)).split(sizes, -1)
        queries = torch.cat([rotate_halves(q_rope, cos[:, None], sin[:, None]), q_rest], -1)
        keys = torch.cat([rotate_halves(k_rope, cos, sin), k_rest], -1)
        weights = indexer.weights_proj(hidden).float() * (self.index_heads * self.index_dim) ** -0.5
        return queries, keys, weights

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The stream after attention's output [T, heads * v] and the MLP."""
        x = x + self.self_attn.o_proj(attended)
        hidden = self.post_attention_layernorm(x)
        gated: Tensor = F.silu(self.mlp.gate_proj(hidden)) * self.mlp.up_proj(hidden)
        return x + self.mlp.down_proj(gated)


def head_loss(hidden: Tensor, norm: RMSNorm, embedding: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of each token, [T]."""
    logits = F.linear(norm(hidden), embedding)
    return F.cross_entropy(logits.float(), targets, reduction="none")


@dataclass
class Kernels:
    """What computes attention and index scores, and the four functions that may be compiled."""

    dense: Dense = dense_attention
    sparse: Sparse = sparse_attention
    indexing: Indexing = field(default_factory=Indexing)
    project: Callable[..., Any] = Block.project
    index: Callable[..., Any] = Block.index
    finish: Callable[..., Any] = Block.finish
    head_loss: Callable[..., Any] = head_loss

    @classmethod
    def compiled(cls, dense: Dense, sparse: Sparse) -> Kernels:
        """Compiled on first use, for one number of tokens."""
        functions = [torch.compile(f, dynamic=False) for f in (Block.project, Block.index, Block.finish, head_loss)]
        return cls(dense, sparse, Indexing(compile_scores=True), *functions)


@dataclass(frozen=True)
class Mode:
    """How a forward attends and what it trains.

    Attributes:
        top_k: tokens that each query attends to; 0 for all.
        index_queries: queries per sequence in the indexer's loss; 0 for no such loss.
        index_only: everything but the indexer is frozen.
    """

    top_k: int = 0
    index_queries: int = 0
    index_only: bool = False


class Body(nn.Module):
    """Embedding, layers and last norm."""

    def __init__(self, config: DeepseekV32Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class TinyDsa(nn.Module):
    """The model; its state dict is the one of `DeepseekV32ForCausalLM` with tied embeddings."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: DeepseekV32Config) -> None:
        super().__init__()
        self.config = config
        self.model = Body(config)
        width = config.qk_rope_head_dim
        theta = (config.rope_parameters or {})["rope_theta"]
        frequencies = 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float) / width)
        angles = torch.arange(config.max_position_embeddings)[:, None].float() * frequencies
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def initialise(self, seed: int) -> None:
        """Seeded random weights; those that write to the stream are smaller the more layers there are."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() == 2:
                    scale = 0.02 if "embed" in name else parameter.shape[1] ** -0.5
                    if name.endswith(("o_proj.weight", "down_proj.weight")):
                        scale *= (2 * self.config.num_hidden_layers) ** -0.5
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)

    def forward(self, tokens: Tensor, mode: Mode, kernels: Kernels) -> tuple[Tensor, Tensor]:
        """The stream [T, hidden] before the last norm, and the indexer's loss summed over layers."""
        batch, length = tokens.shape
        cos, sin = (table[:length].repeat(batch, 1) for table in (self.cos, self.sin))
        index_loss = torch.zeros((), device=tokens.device)
        positions = None
        if mode.index_queries:
            chosen = torch.randperm(length, device=tokens.device)[: mode.index_queries]
            positions = chosen.sort().values
        frozen = torch.no_grad if mode.index_only else nullcontext
        with frozen():
            x = self.model.embed_tokens(tokens).flatten(0, 1)
        for block in self.model.layers:
            with frozen():
                hidden, q_resid, *qkv = kernels.project(block, x, cos, sin)
                q, k, v = (tensor.view(batch, length, *tensor.shape[1:]).transpose(1, 2) for tensor in qkv)
            mask: Tensor | None = None
            index: tuple[Tensor, ...] = ()
            if mode.top_k or positions is not None:
                index = kernels.index(block, hidden.detach(), q_resid.detach(), cos, sin)
                index = tuple(tensor.view(batch, length, *tensor.shape[1:]) for tensor in index)
            with frozen():
                if mode.top_k:
                    queries, keys, weights = (tensor.detach() for tensor in index)
                    mask = kernels.indexing.select(queries, keys, weights, mode.top_k)
                    attended = kernels.sparse(q, k, v, mask)
                else:
                    attended = kernels.dense(q, k, v)
                x = kernels.finish(block, x, attended.transpose(1, 2).reshape(batch * length, -1))
            if positions is not None:
                index_loss = index_loss + kernels.indexing.loss(index, q, k, mask, positions)
        return x, index_loss

    def logits(self, tokens: Tensor, mode: Mode, kernels: Kernels) -> Tensor:
        """[batch, tokens, vocab]."""
        x, _ = self(tokens, mode, kernels)
        logits = F.linear(self.model.norm(x), self.model.embed_tokens.weight)
        return logits.view(*tokens.shape, -1)

    def token_losses(self, tokens: Tensor, mode: Mode, kernels: Kernels) -> tuple[Tensor, Tensor]:
        """Cross entropy of each next token [batch, tokens - 1], and the indexer's loss."""
        x, index_loss = self(tokens[:, :-1], mode, kernels)
        if mode.index_only:
            return torch.zeros(0, device=x.device), index_loss
        targets = tokens[:, 1:].reshape(-1)
        losses = kernels.head_loss(x, self.model.norm, self.model.embed_tokens.weight, targets)
        return losses.view(tokens.shape[0], -1), index_loss
