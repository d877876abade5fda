"""Files that are written as a whole, or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def whole(path: str | Path) -> Iterator[BinaryIO]:
    """A file to write to, which takes the place of the one at `path` in the end; where that fails, the old one stays.

    Who may read and write it stays, too. What is no plain file (a pipe, a terminal), and what lies in a folder that may
    not be changed, is written to itself.

    Raises:
        OSError: also where a file is there that may not be written to.
    """
    path = Path(path)
    target = path.resolve()  # a link goes on leading there
    there = path.exists()
    plain = not there or (path.is_file() and os.access(path, os.W_OK))
    if not plain or not os.access(target.parent, os.W_OK):
        with path.open("wb") as file:
            yield file
        return
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            if there:
                shutil.copymode(target, part)
            yield file
        part.replace(target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_text(path: str | Path, text: str) -> None:
    """Writes UTF-8."""
    with whole(path) as file:
        file.write(text.encode())
