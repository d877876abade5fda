"""Sets of positions of a trace as what changes from step to step, which zip then makes small.

For each step and layer, against the same layer's step before (nothing, before the first): how many positions are new
and which, and how many places of the old list are dropped and which. Both lists ascend and are stored as distances,
the first one from -1. A file of selections is half as large as one of int32 positions; distances within a step alone
would save less than a tenth where much is selected again.

    entered_count, left_count   int32 [steps, layers]
    entered                     distances of positions, steps, then layers: uint8 [1 to 4, sum of entered_count], all
                                their lowest bytes, then all their second ones, and so on; in files of version 1,
                                uint16 or uint32 [sum of entered_count]
    left                        likewise [sum of left_count], distances of places in the list of the step before
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

ARRAYS = ("entered_count", "entered", "left_count", "left")


def encode(positions: NDArray[np.int32]) -> dict[str, NDArray[Any]]:
    """The arrays of int32 [steps, layers, most], ascending, then -1."""
    steps, layers = positions.shape[:2]
    entered: list[NDArray[np.int64]] = []
    left: list[NDArray[np.int64]] = []
    before: list[NDArray[np.int32]] = [positions[0, 0, :0]] * layers
    for t in range(steps):
        for layer in range(layers):
            row = positions[t, layer]
            row = row[row >= 0]
            new = np.setdiff1d(row, before[layer], assume_unique=True)
            dropped = np.flatnonzero(np.isin(before[layer], row, assume_unique=True, invert=True))
            entered.append(np.diff(new, prepend=-1).astype(np.int64))
            left.append(np.diff(dropped, prepend=-1).astype(np.int64))
            before[layer] = row
    return {
        "entered_count": _counts(entered, steps, layers),
        "entered": _joined(entered),
        "left_count": _counts(left, steps, layers),
        "left": _joined(left),
    }


def decode(arrays: dict[str, NDArray[Any]], most: int) -> NDArray[np.int32]:
    """The positions; ValueError or LookupError where the arrays do not fit together."""
    entered = _split(arrays["entered_count"], arrays["entered"])
    left = _split(arrays["left_count"], arrays["left"])
    if arrays["entered_count"].shape != arrays["left_count"].shape:
        raise ValueError("its counts differ in shape")
    steps, layers = arrays["entered_count"].shape
    positions = np.full((steps, layers, most), -1, np.int32)
    before: list[NDArray[np.int64]] = [np.empty(0, np.int64)] * layers
    for i, (new, dropped) in enumerate(zip(entered, left, strict=True)):
        t, layer = divmod(i, layers)
        row = np.sort(np.concatenate([np.delete(before[layer], dropped), new]))
        if len(row) > most or (len(row) and row[-1] >= 1 << 31):
            raise ValueError(f"step {t} has {len(row)} positions, or some beyond 31 bits")
        positions[t, layer, : len(row)] = row
        before[layer] = row
    return positions


def _counts(lists: list[NDArray[np.int64]], steps: int, layers: int) -> NDArray[np.int32]:
    return np.asarray([len(entry) for entry in lists], np.int32).reshape(steps, layers)


def _joined(lists: list[NDArray[np.int64]]) -> NDArray[np.uint8]:
    joined = np.concatenate(lists)
    planes = joined.astype("<u4").view(np.uint8).reshape(-1, 4).T
    width = max(1, -(-int(joined.max(initial=0)).bit_length() // 8))
    return np.ascontiguousarray(planes[:width])  # together, the nearly constant ones vanish


def _split(counts: NDArray[Any], distances: NDArray[Any]) -> list[NDArray[np.int64]]:
    if counts.ndim != 2 or counts.dtype != np.int32 or np.any(counts < 0):
        raise ValueError("its counts are not int32 [steps, layers]")
    if distances.ndim == 2 and distances.dtype == np.uint8 and 1 <= len(distances) <= 4:
        whole = sum(plane.astype(np.int64) << 8 * i for i, plane in enumerate(distances))
    elif distances.ndim == 1 and distances.dtype in (np.uint16, np.uint32):
        whole = distances.astype(np.int64)
    else:
        raise ValueError("its distances are neither bytes nor uint16 or uint32")
    ends = np.cumsum(counts.ravel(), dtype=np.int64)
    if len(ends) == 0 or ends[-1] != len(whole) or not whole.all():
        raise ValueError("its counts and distances do not fit together")
    return [np.cumsum(part) - 1 for part in np.split(whole, ends[:-1])]
