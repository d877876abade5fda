"""Programs of this repository that are no part of the package: bench, tools, models."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]


@contextmanager
def importable(folder: str) -> Iterator[None]:
    """Modules of a folder of the repository can be imported meanwhile; their names are such as others may want."""
    path = str(ROOT / folder)
    sys.path.insert(0, path)
    yield
    sys.path.remove(path)
