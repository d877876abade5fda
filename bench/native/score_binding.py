"""The part of libecho_bench that times score, through ctypes; see score_bench.cu."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

from native.binding import library_path, why_not

_BLOCK_TOKENS = 64
BLOCK_BYTES = _BLOCK_TOKENS * 132
_CYCLED_BYTES = 1 << 30  # index keys of all layers together, many times the L2 cache
_FEWEST_LAYERS, _MOST_LAYERS = 16, 512


@dataclass(frozen=True)
class Case:
    """One case: `ragged` lengths fall evenly from `length` to a tenth of it."""

    batch: int
    length: int
    query_rows: int = 1
    ragged: bool = False
    heads: int = 64

    @property
    def blocks(self) -> int:
        """Of a session's table."""
        return -(-self.length // _BLOCK_TOKENS)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each session, the new ones included."""
        if not self.ragged or self.batch == 1:
            return [self.length] * self.batch
        return [int((1.0 - 0.9 * entry / (self.batch - 1)) * self.length) for entry in range(self.batch)]

    @property
    def key_bytes(self) -> int:
        """That a call has to read."""
        return sum(-(-length // _BLOCK_TOKENS) for length in self.lengths) * BLOCK_BYTES

    @property
    def layers(self) -> int:
        """Calls of a graph."""
        return min(max(-(-_CYCLED_BYTES // self.key_bytes), _FEWEST_LAYERS), _MOST_LAYERS)

    def keys(self) -> dict[str, int | bool]:
        """As results name it."""
        keys: dict[str, int | bool] = {"batch": self.batch, "length": self.length}
        keys |= {"query_rows": self.query_rows} if self.query_rows > 1 else {}
        keys |= {"ragged": True} if self.ragged else {}
        return keys | ({"heads": self.heads} if self.heads != 64 else {})

    def __str__(self) -> str:
        return "-".join(f"{name}{'' if value is True else value}" for name, value in self.keys().items())


class _NativeCase(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in ("batch", "query_rows", "length", "ragged", "heads", "layers")]


def load() -> ctypes.CDLL:
    """The library with its signatures. OSError where there is none."""
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")  # no kernel is loaded while a graph is captured or timed
    library = ctypes.CDLL(str(library_path()))
    pointer = ctypes.c_void_p
    for name, result, arguments in (
        ("devices", ctypes.c_int, []),
        ("error", ctypes.c_char_p, []),
        ("create", pointer, [ctypes.POINTER(_NativeCase)]),
        ("destroy", None, [pointer]),
        ("replay", ctypes.c_int, [pointer, ctypes.POINTER(ctypes.c_double)]),
        ("nodes", ctypes.c_int, [pointer]),
        ("verify", ctypes.c_int, [pointer]),
    ):
        function = getattr(library, f"echo_score_bench_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def skip_reason() -> str | None:
    """Why nothing can be measured here, None if it can."""
    return why_not("bench-score", lambda: load().echo_score_bench_devices())


class ScoreBench:
    """A case that can be replayed.

    Args:
        case: what to score.

    Raises:
        RuntimeError: from all methods, with the library's message.
    """

    def __init__(self, case: Case) -> None:
        self._library = load()
        self._layers = case.layers
        native = _NativeCase(case.batch, case.query_rows, case.length, int(case.ragged), case.heads, case.layers)
        self._handle = self._library.echo_score_bench_create(ctypes.byref(native))
        if not self._handle:
            raise RuntimeError(self._error())

    def _error(self) -> str:
        message: bytes = self._library.echo_score_bench_error()
        return message.decode()

    def replay(self) -> float:
        """Runs the graph; microseconds per layer."""
        microseconds = ctypes.c_double()
        if self._library.echo_score_bench_replay(self._handle, ctypes.byref(microseconds)) != 0:
            raise RuntimeError(self._error())
        return microseconds.value / self._layers

    def launches_per_layer(self) -> float:
        """Nodes of the graph per layer."""
        nodes: int = self._library.echo_score_bench_nodes(self._handle)
        return nodes / self._layers

    def verify(self) -> None:
        """Compares scores of the last replay with sums in double."""
        if self._library.echo_score_bench_verify(self._handle) != 0:
            raise RuntimeError(self._error())

    def close(self) -> None:
        """Gives the memory back."""
        self._library.echo_score_bench_destroy(self._handle)
        self._handle = None
