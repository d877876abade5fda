"""What a decode step works on, and the token ids that callers pass."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from echo._core import InvalidArgument, Session


@dataclass
class Batch:
    """What one decode step works on.

    Attributes:
        sessions: distinct open sessions of one runtime, at most `max_batch`.
        tokens: new token ids; one per session, or for each session a sequence of equal length (speculative
            decoding, at most `query_rows`).

    Both are lists, whatever sequences or arrays they are made of.
    """

    sessions: list[Session] = field(default_factory=list)
    tokens: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Raises InvalidArgument naming what `flat` would refuse whatever the tokens are."""
        self._check()
        if not isinstance(self.sessions, list):
            self.sessions = list(self.sessions)
        if not isinstance(self.tokens, list):
            self.tokens = self.tokens.tolist() if hasattr(self.tokens, "tolist") else list(self.tokens)

    def add(self, session: Session, tokens: int | Sequence[int]) -> None:
        """Appends one session and its new token or tokens, which `flat` checks."""
        self.sessions.append(session)
        self.tokens.append(tokens)

    def flat(self) -> tuple[list[int], int]:
        """Token ids row by row, and the number of rows per session.

        Raises:
            InvalidArgument: naming `tokens`, if they are no integers or sessions have different numbers of them, or
                `sessions`, if one is something else.
        """
        self._check()
        rows = [integers(entry) for entry in self.tokens]
        counts = {len(row) for row in rows} or {1}
        if len(counts) > 1:
            raise InvalidArgument(f"tokens: sessions have {sorted(counts)} tokens, expected the same number for each")
        return [token for row in rows for token in row], counts.pop()

    def _check(self) -> None:
        if not isinstance(self.sessions, Sequence):
            raise InvalidArgument(f"sessions: {self.sessions!r} given, expected a list of echo.Session objects")
        for session in self.sessions:
            if not isinstance(session, Session):
                raise InvalidArgument(f"sessions: {session!r} given, expected echo.Session objects")
        try:
            entries = len(self.tokens)
        except TypeError as error:
            raise InvalidArgument(f"tokens: {self.tokens!r} given, expected a list, one entry per session") from error
        if entries != len(self.sessions):
            raise InvalidArgument(
                f"tokens: {entries} entries given, expected one for each of {len(self.sessions)} sessions"
            )


def integers(entry: Any) -> list[int]:
    """Token ids of an integer, a sequence or an array; nothing is rounded or parsed."""
    plain = entry.tolist() if hasattr(entry, "tolist") else entry
    try:
        ids = [operator.index(plain)]
    except TypeError:
        try:
            ids = [operator.index(token) for token in plain]
        except TypeError as error:
            raise InvalidArgument(f"tokens: {entry!r} given, expected an integer or a sequence of integers") from error
    for token in ids:
        if not -(1 << 31) <= token < 1 << 31:
            raise InvalidArgument(f"tokens: {token} given, expected a number of 32 bits")
    return ids
