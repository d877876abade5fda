"""Scores of ranked tokens in a byte each, and of which tokens they are.

The grid of a step and layer has the k-th score as its origin and a power of two as its spacing, chosen such that the
lowest ranked score lies 16 to 31 levels below. What is selected lies at or above the origin, up to 127 levels: what is
higher is cut, since how far a token is from being evicted says nothing more there. All else lies at or below. Tokens of
equal level are in order of position. Everything finer than a level is lost: replacement compares rows in 64 classes.

    grid   int8 [steps, layers], exponent of the spacing
    level  int8 [sum of members], steps, layers, then ascending positions: n >= 0 for a selected token n levels above
           the k-th score, -1 - n for another one n levels below, -128 for a score that is NaN

Where there is no k-th score, members are the selected tokens, and levels are 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_BELOW = 31
_ROUNDED = 0.25  # of a level: what float32 may add to the distance of a score that lies on the grid
_ABOVE = 127
_NAN = -128
_BITS = 22  # of a float32's mantissa; a spacing that is less than two of its units would be lost in the sums


def encode(
    positions: NDArray[np.int32],
    kth_score: NDArray[np.float32],
    ranked: NDArray[np.int32],
    scores: NDArray[np.float32],
) -> tuple[NDArray[np.int32], dict[str, NDArray[Any]]]:
    """Arrays of a trace as members, int32 [steps, layers, ranks], ascending, then -1, and their levels."""
    top_k = positions.shape[2]
    known = ~np.isnan(kth_score)
    grid = _exponents(kth_score, scores)
    origin = kth_score[..., None].astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        levels = np.rint((scores - origin) / np.exp2(grid[..., None].astype(np.float64)))
    levels[..., :top_k] = np.clip(levels[..., :top_k], 0, _ABOVE)
    below = levels[..., top_k:]
    levels[..., top_k:] = np.where(np.isnan(below), _NAN, np.clip(below, -_BELOW, 0) - 1)
    levels[~known] = 0
    members = ranked.copy()
    members[~known] = -1
    members[~known, :top_k] = positions[~known]
    order = np.argsort(np.where(members >= 0, members, np.iinfo(np.int32).max), axis=2, kind="stable")
    members = np.take_along_axis(members, order, 2)
    level = np.take_along_axis(levels, order, 2)[members >= 0]
    return members, {"grid": grid, "level": level.astype(np.int8)}


def decode(arrays: dict[str, NDArray[Any]], members: NDArray[np.int32], top_k: int) -> dict[str, NDArray[Any]]:
    """`positions`, `ranked` and `scores` of a trace; ValueError or LookupError where the arrays do not fit together."""
    kth_score, grid, level = arrays["kth_score"], arrays["grid"], arrays["level"]
    some = members >= 0
    if grid.dtype != np.int8 or grid.shape != members.shape[:2] or kth_score.shape != grid.shape:
        raise ValueError("its grid is not int8 [steps, layers]")
    if level.dtype != np.int8 or level.shape != (int(some.sum()),) or not 1 <= top_k <= members.shape[2]:
        raise ValueError("its levels are not int8 [sum of members], or top_k is not among its ranks")
    levels = np.full(members.shape, _NAN - 1, np.int16)
    levels[some] = level
    if np.any(np.sum(levels >= 0, axis=2) > top_k):
        raise ValueError("a step selects more than top_k tokens")
    order = np.argsort(-levels, axis=2, kind="stable")  # positions ascend, so the smaller one is first of equal ones
    ranked = np.take_along_axis(members, order, 2)
    levels = np.take_along_axis(levels, order, 2)
    positions = np.where(levels >= 0, ranked, np.iinfo(np.int32).max)[..., :top_k]
    positions.sort(axis=2)
    positions[positions == np.iinfo(np.int32).max] = -1
    away = np.where(levels >= 0, levels, levels + 1) * np.exp2(grid[..., None].astype(np.float64))
    scores = (kth_score[..., None] + away).astype(np.float32)
    unknown = np.isnan(kth_score)
    ranked[unknown] = -1
    scores[(levels <= _NAN) | (ranked < 0)] = np.nan
    return {"positions": positions, "ranked": ranked, "scores": scores}


def _exponents(kth_score: NDArray[np.float32], scores: NDArray[np.float32]) -> NDArray[np.int8]:
    lowest = np.where(np.isfinite(scores), scores, np.inf).min(axis=2).astype(np.float64)
    spread = np.where(np.isfinite(lowest), kth_score - lowest, 0)
    least = np.abs(kth_score.astype(np.float64)) * 2.0**-_BITS + 2.0**-126
    with np.errstate(invalid="ignore"):
        exponents = np.nan_to_num(np.ceil(np.log2(np.maximum(spread / (_BELOW + _ROUNDED), least))))
    grid: NDArray[np.int8] = np.clip(exponents, -126, 127).astype(np.int8)
    return grid
