"""One session's selections, and the file that keeps them.

The file is a compressed .npz:

    version    int64, 2
    meta       JSON text in UTF-8, uint8 [bytes]: model, text, notes, seed, top_k, ranks
    context    int32 [steps]
    kth_score  float32 [steps, layers]
    entered_count, entered, left_count, left
               sets of positions, as in `encoding.py`: the selected ones where `ranks` is 0, else the ranked ones
    grid       int8 [steps, layers], level int8 [sum of members]: their scores, as in `score_grid.py`; if `ranks` > 0

Scores are kept on a grid around the k-th score of their step and layer, 16 to 31 levels from there to the last rank: a
ranked token takes about a byte. Selections and k-th scores are kept as they are.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echo import InvalidArgument, files
from echo.settings import counted
from echo.traces import encoding, score_grid
from echo.traces.ranking import check_ranked, kind_of

_VERSION = 2


@dataclass(frozen=True)
class Trace:
    """The selections of consecutive decode steps of one session, and the scores around their boundary.

    Attributes:
        positions: int32 [steps, layers, top_k], selected positions, ascending, then -1.
        context: int32 [steps], tokens the step could select from, its own included; never falls. A step whose context
            is longer than that of the step before appended its last token, and so did the first.
        kth_score: float32 [steps, layers], index score of the last token that was selected; NaN where unknown, and
            where there are fewer than top_k tokens.
        ranked: int32 [steps, layers, ranks], positions by index score, best first, of equal scores the smaller
            position, then -1. The first top_k are the selected ones. All -1 where the k-th score is NaN. None if no
            scores were kept; both, or neither.
        scores: float32 [steps, layers, ranks], of `ranked`; falling, then NaN, also of a token whose score is NaN.
        model: what made the selections.
        text: what was read.
        notes: what else there is to say, such as the steps at which a turn or another session began.
        seed: of the weights, or of the generator.

    Raises:
        InvalidArgument: naming the array that is not as described.
    """

    positions: NDArray[np.int32]
    context: NDArray[np.int32]
    kth_score: NDArray[np.float32]
    ranked: NDArray[np.int32] | None = None
    scores: NDArray[np.float32] | None = None
    model: str = ""
    text: str = ""
    notes: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        """Checks shapes, types and order."""
        if self.positions.ndim != 3 or self.positions.dtype != np.int32 or 0 in self.positions.shape:
            raise InvalidArgument(f"positions: {kind_of(self.positions)} given, expected int32 [steps, layers, top_k]")
        steps, layers, _ = self.positions.shape
        if self.context.shape != (steps,) or self.context.dtype != np.int32:
            raise InvalidArgument(f"context: {kind_of(self.context)} given, expected int32 [{steps}]")
        if self.kth_score.shape != (steps, layers) or self.kth_score.dtype != np.float32:
            raise InvalidArgument(f"kth_score: {kind_of(self.kth_score)} given, expected float32 [{steps}, {layers}]")
        if self.context[0] < 1 or np.any(self.context[1:] < self.context[:-1]):
            raise InvalidArgument("context: expected at least 1 token, and never fewer than in the step before")
        before, after = self.positions[..., :-1], self.positions[..., 1:]
        ordered = np.where(after == -1, True, (before >= 0) & (after > before))
        if not ordered.all() or np.any(self.positions < -1):
            raise InvalidArgument("positions: expected ascending positions, then -1")
        if np.any(self.positions >= self.context[:, None, None]):
            raise InvalidArgument("positions: a step selects a token that its context does not have")
        if self.ranked is not None and self.scores is not None:
            check_ranked(self.positions, self.context, self.kth_score, self.ranked, self.scores)
        elif self.ranked is not None or self.scores is not None:
            raise InvalidArgument("ranked: expected `ranked` and `scores`, or neither")

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

    @property
    def ranks(self) -> int:
        """Most positions that a step ranks in a layer, 0 without scores."""
        return 0 if self.ranked is None else int(self.ranked.shape[2])

    def summary(self) -> str:
        """Its sizes, in words."""
        lengths = sorted({int(self.context[0]), int(self.context[-1])})
        tokens = " to ".join(f"{length:,}" for length in lengths)
        return f"{counted(self.steps, 'step')}, {counted(self.layers, 'layer')}, top-{self.top_k} of {tokens} tokens"

    def save(self, path: str | Path) -> None:
        """Writes the trace to `path`, under exactly that name; a trace that is there stays until this one is whole.

        Scores are brought onto their grid.
        """
        members = self.positions
        arrays: dict[str, Any] = {}
        if self.ranked is not None and self.scores is not None:
            members, arrays = score_grid.encode(self.positions, self.kth_score, self.ranked, self.scores)
        arrays.update(encoding.encode(members))
        meta = {
            "model": self.model,
            "text": self.text,
            "notes": self.notes,
            "seed": self.seed,
            "top_k": self.top_k,
            "ranks": self.ranks,
        }
        with files.whole(path) as file:
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
        except IsADirectoryError as error:
            raise InvalidArgument(f"path: {str(path)!r} is a folder, expected a file of `echo-kv record`") from error
        except Exception as error:  # archives and JSON have more ways to be damaged than a list would name
            raise InvalidArgument(f"path: {str(path)!r} is no trace: {error}") from error


def _read(path: str | Path) -> dict[str, Any]:
    """The fields of a trace; InvalidArgument (a ValueError) or what numpy raises if they are not there."""
    with open(path, "rb") as file:
        if file.read(4) != b"PK\3\4":  # numpy would take it for a pickle, and say so
            raise ValueError("it is no .npz")
        file.seek(0)
        with np.load(file, allow_pickle=False) as held:
            arrays = {name: held[name] for name in held.files}
    version = arrays["version"]
    if version.shape != () or version != _VERSION:
        raise ValueError(f"its version is {version}, expected {_VERSION}")
    meta = json.loads(arrays["meta"].tobytes().decode())
    top_k, ranks = int(meta["top_k"]), int(meta["ranks"])
    fields = {
        "context": arrays["context"],
        "kth_score": arrays["kth_score"],
        "model": str(meta["model"]),
        "text": str(meta["text"]),
        "notes": str(meta["notes"]),
        "seed": int(meta["seed"]),
    }
    members = encoding.decode(arrays, ranks or top_k)
    return {**fields, **(score_grid.decode(arrays, members, top_k) if ranks else {"positions": members})}
