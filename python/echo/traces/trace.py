"""One session's selections, and the file that keeps them.

The file is a compressed .npz:

    version    int64, 1
    meta       JSON text in UTF-8, uint8 [bytes]: model, text, seed, top_k
    context    int32 [steps]
    kth_score  float32 [steps, layers]
    entered_count, entered, left_count, left
               positions, as in `encoding.py`
"""

from __future__ import annotations

import json
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echo import InvalidArgument
from echo.traces import encoding

_VERSION = 1
_DAMAGE = (zipfile.BadZipFile, zlib.error, NotImplementedError)  # of the archive


@dataclass(frozen=True)
class Trace:
    """The selections of consecutive decode steps of one session.

    Attributes:
        positions: int32 [steps, layers, top_k], selected positions, ascending, then -1.
        context: int32 [steps], tokens the step could select from, its own included; never falls. A step whose context
            is longer than that of the step before appended its last token, and so did the first.
        kth_score: float32 [steps, layers], index score of the last token that was selected; NaN where unknown.
        model: what made the selections.
        text: what was read.
        seed: of the weights, or of the generator.

    Raises:
        InvalidArgument: naming the array that is not as described.
    """

    positions: NDArray[np.int32]
    context: NDArray[np.int32]
    kth_score: NDArray[np.float32]
    model: str = ""
    text: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        """Checks shapes, types and order."""
        if self.positions.ndim != 3 or self.positions.dtype != np.int32 or 0 in self.positions.shape:
            raise InvalidArgument(f"positions: {_kind(self.positions)} given, expected int32 [steps, layers, top_k]")
        steps, layers, _ = self.positions.shape
        if self.context.shape != (steps,) or self.context.dtype != np.int32:
            raise InvalidArgument(f"context: {_kind(self.context)} given, expected int32 [{steps}]")
        if self.kth_score.shape != (steps, layers) or self.kth_score.dtype != np.float32:
            raise InvalidArgument(f"kth_score: {_kind(self.kth_score)} given, expected float32 [{steps}, {layers}]")
        if self.context[0] < 1 or np.any(self.context[1:] < self.context[:-1]):
            raise InvalidArgument("context: expected at least 1 token, and never fewer than in the step before")
        before, after = self.positions[..., :-1], self.positions[..., 1:]
        ordered = np.where(after == -1, True, (before >= 0) & (after > before))
        if not ordered.all() or np.any(self.positions < -1):
            raise InvalidArgument("positions: expected ascending positions, then -1")
        if np.any(self.positions >= self.context[:, None, None]):
            raise InvalidArgument("positions: a step selects a token that its context does not have")

    @property
    def steps(self) -> int:
        """Decode steps."""
        return len(self.positions)

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return int(self.positions.shape[1])

    @property
    def top_k(self) -> int:
        """Most positions that a step selects in a layer."""
        return int(self.positions.shape[2])

    def save(self, path: str | Path) -> None:
        """Writes the trace to `path`, under exactly that name."""
        arrays: dict[str, Any] = encoding.encode(self.positions)
        meta = {"model": self.model, "text": self.text, "seed": self.seed, "top_k": self.top_k}
        with open(path, "wb") as file:
            np.savez_compressed(
                file,
                version=np.int64(_VERSION),
                meta=np.frombuffer(json.dumps(meta).encode(), np.uint8),
                context=self.context,
                kth_score=self.kth_score,
                **arrays,
            )

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Reads a trace.

        Raises:
            InvalidArgument: naming `path`, if there is no trace there, or one of another version.
        """
        try:
            return cls(**_read(path))
        except FileNotFoundError as error:
            raise InvalidArgument(f"path: there is no file {str(path)!r}") from error
        except (OSError, EOFError, LookupError, MemoryError, TypeError, ValueError, *_DAMAGE) as error:
            raise InvalidArgument(f"path: {str(path)!r} is no trace: {error}") from error


def _read(path: str | Path) -> dict[str, Any]:
    """The fields of a trace; InvalidArgument (a ValueError) or what numpy raises if they are not there."""
    with open(path, "rb") as file:
        if file.read(4) != b"PK\3\4":  # numpy would take it for a pickle, and say so
            raise ValueError("it is no .npz")
        file.seek(0)
        with np.load(file, allow_pickle=False) as held:
            arrays = {name: held[name] for name in ("version", "meta", "context", "kth_score", *encoding.ARRAYS)}
    if arrays["version"].shape != () or arrays["version"] != _VERSION:
        raise ValueError(f"its version is {arrays['version']}, expected {_VERSION}")
    meta = json.loads(arrays["meta"].tobytes().decode())
    return {
        "positions": encoding.decode(arrays, int(meta["top_k"])),
        "context": arrays["context"],
        "kth_score": arrays["kth_score"],
        "model": str(meta["model"]),
        "text": str(meta["text"]),
        "seed": int(meta["seed"]),
    }


def _kind(array: NDArray[Any]) -> str:
    return f"{array.dtype} {list(array.shape)}"
