"""Files are written as a whole, or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from echo import files
from echo.traces import synthetic


def test_what_is_there_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    for expected, text in ((None, "old"), ("old", "new")):
        with pytest.raises(KeyboardInterrupt), files.whole(path) as file:
            file.write(b"half of")
            raise KeyboardInterrupt
        assert (path.read_text() if path.exists() else None) == expected
        files.write_text(path, text)
        assert path.read_text() == text
    assert os.listdir(tmp_path) == ["figures.json"]


def test_a_trace_that_is_there_survives_a_save_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.npz"
    trace = synthetic.generate("glm", steps=4, top_k=8)
    trace.save(path)
    before = path.read_bytes()

    def full(file: object, **arrays: object) -> None:
        file.write(b"PK")  # type: ignore[attr-defined]
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(OSError, match="No space left"):
        trace.save(path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["trace.npz"]


def test_links_lead_where_they_led(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "there" / "file")
    for text in ("first", "second"):
        files.write_text(link, text)
        assert link.is_symlink() and (tmp_path / "there" / "file").read_text() == text


def test_who_may_read_and_write_a_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "file"
    files.write_text(path, "old")
    path.chmod(0o600)
    files.write_text(path, "new")
    assert path.stat().st_mode & 0o777 == 0o600 and path.read_text() == "new"
    path.chmod(0o400)
    if not os.access(path, os.W_OK):  # root may write to it
        with pytest.raises(PermissionError):
            files.write_text(path, "newer")
        assert path.read_text() == "new"


def test_what_is_no_file_is_written_to() -> None:
    files.write_text("/dev/null", "text")
    assert Path("/dev/null").is_char_device()
    program = "from echo import files; files.write_text('/dev/stdout', chr(0x2588))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout == chr(0x2588).encode()


def test_a_file_in_a_folder_that_may_not_be_changed_is_written_to(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old, and longer")
    tmp_path.chmod(0o555)
    try:
        files.write_text(path, "new")
    finally:
        tmp_path.chmod(0o755)
    assert path.read_text() == "new"
    with pytest.raises(FileNotFoundError, match="no-such-folder/file'"):
        files.write_text(tmp_path / "no-such-folder" / "file", "text")
