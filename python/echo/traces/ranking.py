"""The order of tokens by index score, which is the product's, for traces that are recorded or generated."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from echo import InvalidArgument


def rank(scores: NDArray[np.float32], count: int) -> NDArray[np.int32]:
    """The tokens of largest score, best first; of equal scores the smaller position, NaN below all numbers.

    Args:
        scores: float32 [tokens].
        count: how many are wanted, at least 1.

    Returns:
        int32 [min(count, tokens)] positions.
    """
    falling = -scores  # numpy sorts NaN behind everything
    some = np.arange(len(scores))
    if count < len(scores):
        limit = np.partition(falling, count - 1)[count - 1]
        if not np.isnan(limit):  # sorting is for those that matter
            some = np.flatnonzero(falling <= limit)
    best: NDArray[np.int32] = some[np.argsort(falling[some], kind="stable")][:count].astype(np.int32)
    return best


def check_ranked(
    positions: NDArray[np.int32],
    context: NDArray[np.int32],
    kth_score: NDArray[np.float32],
    ranked: NDArray[np.int32],
    scores: NDArray[np.float32],
) -> None:
    """Checks what a `Trace` says of `ranked` and `scores`; the others are checked already.

    Raises:
        InvalidArgument: naming one of the two.
    """
    steps, layers, top_k = positions.shape
    for name, array, kind in (("ranked", ranked, np.int32), ("scores", scores, np.float32)):
        if array.dtype != kind or array.ndim != 3 or array.shape[:2] != (steps, layers) or array.shape[2] < top_k:
            expected = f"{np.dtype(kind)} [{steps}, {layers}, {top_k} or more]"
            raise InvalidArgument(f"{name}: {kind_of(array)} given, expected {expected}")
    if ranked.shape != scores.shape:
        raise InvalidArgument(f"scores: {kind_of(scores)} given, expected as many as ranked has")
    known, some = ~np.isnan(kth_score), ranked >= 0
    if np.any(ranked < -1) or np.any(some[..., 1:] & ~some[..., :-1]) or np.any(some[..., top_k - 1] != known):
        raise InvalidArgument("ranked: expected at least top_k positions, then -1; none where there is no k-th score")
    ascending = np.sort(ranked, axis=2)
    if np.any((ascending[..., 1:] == ascending[..., :-1]) & (ascending[..., 1:] >= 0)):
        raise InvalidArgument("ranked: a step ranks a token twice")
    if np.any(ascending[..., -1] >= context[:, None]):
        raise InvalidArgument("ranked: a step ranks a token that its context does not have")
    if np.any(np.sort(ranked[..., :top_k], axis=2)[known] != positions[known]):
        raise InvalidArgument("ranked: expected the selected positions as the first top_k")
    if np.any(~(scores[..., 1:] <= scores[..., :-1]) & ~np.isnan(scores[..., 1:])) or not np.isnan(scores[~some]).all():
        raise InvalidArgument("scores: expected falling scores, then NaN, and none without a position")
    if np.any(scores[..., top_k - 1][known] != kth_score[known]):
        raise InvalidArgument("scores: expected the k-th score at rank top_k")


def kind_of(array: NDArray[Any]) -> str:
    """Type and shape, for messages."""
    return f"{array.dtype} {list(array.shape)}"
