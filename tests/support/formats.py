"""The stored formats, written once more from the documentation, through torch's own casts.

Rows and index keys as bytes and as the numbers that these bytes mean. Shares no code with the product.
"""

from __future__ import annotations

import numpy as np
import torch

import echo


def power_of_two_scales(groups: torch.Tensor) -> torch.Tensor:
    """For each group (last dimension) the smallest power of two that brings it into e4m3's range; 1 for zeros."""
    largest = groups.double().abs().nan_to_num(nan=0.0).amax(-1, keepdim=True)
    mantissa, exponent = torch.frexp(largest / 448.0)  # mantissa in [0.5, 1)
    exponent = (exponent - (mantissa == 0.5).int()).clamp(-126, 127)
    return torch.where(largest == 0.0, 1.0, torch.exp2(exponent.double())).float()


def to_fp8(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 codes of groups of values [..., n], and their scales [..., 1]."""
    scales = power_of_two_scales(groups)
    return (groups.float() / scales).clamp(-448.0, 448.0).to(torch.float8_e4m3fn), scales


def as_bytes(values: torch.Tensor) -> np.ndarray:
    """uint8 [rows, bytes] of a tensor [rows, n]."""
    return values.contiguous().view(torch.uint8).numpy()


def encode_rows(kv: torch.Tensor, shape: echo.ModelShape) -> np.ndarray:
    """uint8 [rows, row_bytes]: KV rows as the host pool has to hold them."""
    if shape.row_format == "raw":
        return kv.numpy()
    if shape.row_format == "fp32":
        return as_bytes(kv.float())
    if shape.row_format == "bf16_1152":
        return as_bytes(kv.to(torch.bfloat16))
    codes, scales = to_fp8(kv[:, : shape.latent_dim].unflatten(1, (-1, 128)))
    rope = kv[:, shape.latent_dim :].to(torch.bfloat16)
    return np.concatenate([as_bytes(codes.flatten(1)), as_bytes(scales.flatten(1)), as_bytes(rope)], axis=1)


def decode_rows(rows: np.ndarray, shape: echo.ModelShape) -> np.ndarray:
    """float64 [rows, n] of encoded rows."""
    data = torch.from_numpy(rows)
    if shape.row_format == "raw":
        return data.double().numpy()
    if shape.row_format == "fp32":
        return data.view(torch.float32).double().numpy()
    if shape.row_format == "bf16_1152":
        return data.view(torch.bfloat16).double().numpy()
    latent, end = shape.latent_dim, shape.latent_dim + 4 * (shape.latent_dim // 128)
    codes = data[:, :latent].contiguous().view(torch.float8_e4m3fn).double()
    scales = data[:, latent:end].contiguous().view(torch.float32).double().repeat_interleave(128, 1)
    rope = data[:, end:].contiguous().view(torch.bfloat16).double()
    return torch.cat([codes * scales, rope], 1).numpy()


def index_values(vectors: torch.Tensor, shape: echo.ModelShape) -> np.ndarray:
    """float64 values of index keys or queries [..., index_dim] as they enter a score."""
    if shape.index_key_format == "fp32":
        return vectors.double().numpy()
    codes, scales = to_fp8(vectors)
    return (codes.double() * scales.double()).numpy()


def encode_index_keys(keys: torch.Tensor, shape: echo.ModelShape) -> tuple[np.ndarray, np.ndarray]:
    """uint8 [tokens, key bytes] and uint8 [tokens, scale bytes] (4 or 0)."""
    if shape.index_key_format == "fp32":
        return as_bytes(keys.float()), np.empty((len(keys), 0), np.uint8)
    codes, scales = to_fp8(keys)
    return as_bytes(codes), as_bytes(scales)


def split_index_blocks(blocks: np.ndarray, shape: echo.ModelShape) -> tuple[np.ndarray, np.ndarray]:
    """The same two arrays, from blocks of 64 tokens: 64 keys, then (fp8) 64 scales."""
    key_bytes = shape.index_dim * (1 if shape.index_key_format == "fp8" else 4)
    keys = blocks[:, : 64 * key_bytes].reshape(-1, key_bytes)
    return keys, blocks[:, 64 * key_bytes :].reshape(len(keys), -1)


def join_index_blocks(keys: torch.Tensor, shape: echo.ModelShape) -> np.ndarray:
    """uint8 [blocks, index_block_bytes] of index keys [tokens, index_dim], the last block filled with 0xFF."""
    codes, scales = encode_index_keys(keys, shape)
    missing = -len(codes) % 64

    def blocks(part: np.ndarray) -> np.ndarray:
        filled = np.concatenate([part, np.full((missing, part.shape[1]), 0xFF, np.uint8)])
        return filled.reshape(len(filled) // 64, -1)

    return np.concatenate([blocks(codes), blocks(scales)], axis=1)
