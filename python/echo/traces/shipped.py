"""Traces of the trained model that come with the package; its README.md says what they were taken from."""

from __future__ import annotations

from pathlib import Path

from echo import NotSupported

_FOLDER = Path(__file__).parents[1] / "data" / "traces"

NAMES = ("code", "prose", "topics", "sampled")


def path_of(name: str) -> Path:
    """The file of one of `NAMES`.

    Raises:
        NotSupported: naming `traces`, if this installation lacks it.
    """
    path = _FOLDER / f"{name}.npz"
    if not path.is_file():
        raise NotSupported(f"traces: {path.name} is missing in {_FOLDER}; install echo-kv with its data")
    return path
