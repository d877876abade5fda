"""`echo-kv` as tests call it."""

from __future__ import annotations

import pytest

from echo import cli


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Status, output and errors of a command."""
    status = cli.main(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def lines_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """What a command prints that succeeds."""
    status, out, err = run(capsys, *arguments)
    assert status == 0, err
    return out.splitlines()
