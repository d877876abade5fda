"""The product's rule of sifting once more, in numpy: cpp/kernels/prediction.hpp and cpp/reference/sift.cpp."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# As in prediction.hpp and planner.cpp.
_DEVIATION_ALPHA, _MARGIN = np.float32(0.875), np.float32(2.5)


def capacity_of(top_k: int) -> int:
    """Candidates that are listed for a row, at most."""
    return -(-max(1024, 3 * top_k) // 64) * 64


def predicted_bounds(kth_score: NDArray[np.float32], alpha: float) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Bounds of candidates and of prefetch, float32 [steps] each; NaN where there are none.

    What scores at or above a bound is listed, or fetched.

    Args:
        kth_score: float32 [steps], NaN where there is none.
        alpha: weight of the past in the moving average.
    """
    bounds = np.full((2, len(kth_score)), np.nan, np.float32)
    average, deviation = np.float32(np.nan), np.float32(np.nan)
    old, new = np.float32(alpha), np.float32(1) - np.float32(alpha)
    for t, score in enumerate(kth_score.astype(np.float32)):
        low = average - _MARGIN * deviation
        if np.isfinite(low):
            bounds[:, t] = low, average
        if not np.isfinite(score):
            continue
        if np.isnan(average):
            average = score
            continue
        error = np.abs(score - average)
        kept = _DEVIATION_ALPHA * deviation + (np.float32(1) - _DEVIATION_ALPHA) * error
        deviation = error if np.isnan(deviation) else kept
        average = old * average + new * score
    return bounds[0], bounds[1]
