"""What the demonstration reads: a line to be asked for later, then the Python sources of the installed package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import echo

_STATEMENT = '\nKEY_7f3a = "3fa90c17"\n'  # of the kind that the model was trained to look up
_ANSWER = '3fa90c17"'

# What each session reads after the text, so that they part ways. Each ends where a token of the usual division of
# code ends, so what follows is divided as usual, too. The first asks for what the statement says.
_OPENINGS = (
    '\n\n\nassert KEY_7f3a == "',
    "\n\n\ndef load(path: str | Path) ->",
    "\n\n\nclass Recorder:",
    "\n\n\ndef read_lines(path: Path) -> list[str]:",
    "\n\n\nclass Cache:",
    "\n\n\ndef test_a_trace",
    "\n\n\ndef main(",
    "\n\n\nclass Policy(Protocol):",
)


def read_text(tokenizer: Any, tokens: int) -> list[int]:
    """The statement, then the last tokens of the sources: files in order of their paths, each after an end of text.

    The last ones, so that the text does not break off in the middle of a file.

    Args:
        tokenizer: of the model.
        tokens: how many, the statement's included.

    Raises:
        InvalidArgument: naming `tokens`, if they are too few for the statement, or the sources have fewer.
    """
    end: int = tokenizer.eos_token_id
    statement: list[int] = [end, *tokenizer(_STATEMENT)["input_ids"]]
    package = Path(echo.__file__).parent
    files = sorted(package.rglob("*.py"), key=lambda path: path.relative_to(package).as_posix())
    sources: list[int] = []
    for path in files:
        sources += [end, *tokenizer(path.read_text(encoding="utf-8").rstrip("\n"))["input_ids"]]
    least, most = len(statement) + 1, len(statement) + len(sources)
    if not least <= tokens <= most:
        raise echo.InvalidArgument(f"tokens: {tokens} given, expected {least} to {most}, which the sources have")
    return statement + sources[len(statement) - tokens :]


def opening(session: int) -> str:
    """How a session goes on."""
    return _OPENINGS[session % len(_OPENINGS)]


def answers(continuation: str) -> bool:
    """Whether the first session's continuation is what the statement says, as far as it goes."""
    return continuation.startswith(_ANSWER) or _ANSWER.startswith(continuation)
