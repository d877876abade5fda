"""Bounds from a sample of a step's own scores: one block of keys in eight is scored first.

The k best should leave as much of themselves in the sample as it has of all tokens. Where its counts, in bins of a 64th
of a power of two around a prediction, reach that number with a margin, there are two bounds. A trace knows the scores
of its ranks. Where the sample would have to be counted further down, there are no bounds here; ranks for four times
top-k reach as far as that, as a rule.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from echo.traces.layer_steps import LayerSteps
from echo.traces.sifting import capacity_of

_BLOCK = 64
_SAMPLE_EVERY = 8
_BINS = 256
_SHIFT = 17
_CANDIDATE_MARGIN, _PREFETCH_MARGIN = 4.0, 0.5  # standard deviations of a count
_SIGN = np.uint32(1 << 31)


def sampled_bounds(
    steps: LayerSteps, context: NDArray[np.int32], predicted: NDArray[np.floating]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Bounds of candidates and of prefetch, float64 [steps] each; NaN where there are none.

    What scores at or above a bound is listed, or fetched. A bound of inf is above all.

    Args:
        steps: of a layer.
        context: int32 [steps], tokens of each step.
        predicted: float [steps], of the k-th score; NaN for none.
    """
    bounds = np.full((2, steps.steps), np.nan)
    for t in np.flatnonzero(steps.scored & ~np.isnan(predicted)):
        length = int(context[t])
        if length <= steps.top_k:
            continue
        known = steps.ranked[t] >= 0
        blocks = steps.positions[steps.ranked[t][known]] // _BLOCK
        first = _first_sampled(length)
        sampled = sum(min(_BLOCK, length - start) for start in range(first * _BLOCK, length, _SAMPLE_EVERY * _BLOCK))
        keys = ordered_keys(steps.scores[t][known][blocks % _SAMPLE_EVERY == first])
        bounds[:, t] = _bounds(keys, np.float32(predicted[t]), sampled, length, steps.top_k)
    return bounds[0], bounds[1]


def ordered_keys(scores: NDArray[np.float32]) -> NDArray[np.uint32]:
    """uint32, in the order of the scores; 0 of NaN, and of -0 what 0 has."""
    bits = (scores + np.float32(0)).view(np.uint32)
    keys = np.where(bits & _SIGN, ~bits, bits | _SIGN)
    return np.where(np.isnan(scores), np.uint32(0), keys).astype(np.uint32)


def _first_sampled(length: int) -> int:
    newest = (length - 1) // _BLOCK
    return (newest - newest // 2 if newest < _SAMPLE_EVERY else newest - _SAMPLE_EVERY // 2) % _SAMPLE_EVERY


def _bounds(
    keys: NDArray[np.uint32], predicted: np.float32, sampled: int, length: int, top_k: int
) -> tuple[float, float]:
    share = np.float32(sampled) / np.float32(length)
    wanted = np.float32(top_k) * share
    candidates = int(wanted + np.float32(_CANDIDATE_MARGIN) * np.sqrt(wanted) + np.float32(2))
    prefetch = int(wanted + np.float32(_PREFETCH_MARGIN) * np.sqrt(wanted) + np.float32(1))
    most = int(np.float32(0.9) * np.float32(capacity_of(top_k)) * share)
    first = int(ordered_keys(np.array([predicted]))[0] >> _SHIFT) - _BINS // 2
    bins = np.clip((keys >> _SHIFT).astype(np.int64) - first, 0, _BINS - 1)
    counts = np.bincount(bins, minlength=_BINS)[:0:-1].cumsum()  # from each bin on, the last bin first
    if counts[-1] < candidates:
        return np.nan, np.nan
    low, high = (int(np.searchsorted(counts, wanted)) for wanted in (candidates, prefetch))
    key = _key_of(_BINS - 1 - low, first)
    if key == 0 or counts[low] > most:
        return np.nan, np.nan
    return _value_of(key), np.inf if high == 0 else _value_of(_key_of(_BINS - 1 - high, first))


def _key_of(place: int, first: int) -> int:
    top = place + first
    return top << _SHIFT if 0 < top < 1 << (32 - _SHIFT) else 0


def _value_of(key: int) -> float:
    """Of a key; -inf of what is below the key of -inf."""
    bits = np.array([key ^ (1 << 31) if key >> 31 else ~key & 0xFFFFFFFF], np.uint32)
    value = float(bits.view(np.float32)[0])
    return -np.inf if np.isnan(value) and not key >> 31 else value
