"""The part of libecho_bench that times select, through ctypes; see select_bench.cu."""

from __future__ import annotations

import ctypes
import os
import statistics
from dataclasses import dataclass
from typing import Any

from native.binding import library_path, why_not

_BLOCK_TOKENS = 64
CAPACITY = 8192
LAYERS = 16


@dataclass(frozen=True)
class Case:
    """One case. `listed`: score has left a list of so many times k tokens; 0: it has left none.

    `scores` names what they look like, see `test_select.make_scores`.
    """

    batch: int
    length: int
    listed: float = 0.0
    k: int = 2048
    scores: str = "normal"

    @property
    def score_stride(self) -> int:
        """Scores of a row: whole blocks."""
        return -(-self.length // _BLOCK_TOKENS) * _BLOCK_TOKENS

    @property
    def path(self) -> str:
        """What the kernel has to work on."""
        return f"list of {self.listed:g} k" if self.listed else "all scores"

    def keys(self) -> dict[str, int | str]:
        """As results name it."""
        keys: dict[str, int | str] = {"batch": self.batch, "length": self.length, "path": self.path, "k": self.k}
        return keys | ({"scores": self.scores} if self.scores != "normal" else {})

    def __str__(self) -> str:
        parts = [f"b{self.batch}", f"l{self.length}", f"list{self.listed:g}" if self.listed else "all"]
        return "-".join(parts + [f"k{self.k}"] * (self.k != 2048) + [self.scores] * (self.scores != "normal"))


class _NativeCase(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("batch", "length", "score_stride", "top_k", "layers", "capacity")),
        ("own_kernels", ctypes.c_int32),
        ("positions", ctypes.c_void_p),
        ("scores", ctypes.POINTER(ctypes.c_void_p)),
        ("bounds", ctypes.c_void_p),
        ("selection", ctypes.POINTER(ctypes.c_void_p)),
        ("kth_score", ctypes.c_void_p),
    ]


def load() -> ctypes.CDLL:
    """The library with its signatures. OSError where there is none."""
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")  # no kernel is loaded while a graph is captured or timed
    library = ctypes.CDLL(str(library_path()))
    pointer, number = ctypes.c_void_p, ctypes.POINTER(ctypes.c_double)
    for name, result, arguments in (
        ("devices", ctypes.c_int, []),
        ("error", ctypes.c_char_p, []),
        ("create", pointer, [ctypes.POINTER(_NativeCase)]),
        ("destroy", None, [pointer]),
        ("replay", ctypes.c_int, [pointer, number, number]),
        ("nodes", ctypes.c_int, [pointer]),
        ("full_selects", ctypes.c_int, [pointer, ctypes.POINTER(ctypes.c_int64)]),
    ):
        function = getattr(library, f"echo_select_bench_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def skip_reason() -> str | None:
    """Why nothing can be measured here, None if it can."""
    return why_not("bench-select", lambda: load().echo_select_bench_devices())


def _pointers(tensors: list[Any]) -> Any:
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


class SelectBench:
    """A case that can be replayed. Arrays are torch tensors on the device and have to outlive it.

    Args:
        case: what to select.
        own_kernels: those made for this GPU, or the general one.
        positions: int32 [batch].
        scores: by layer, float32 [batch, score_stride].
        bounds: float32 [layers, batch], or None where score leaves no lists.
        selection: by layer, int32 [batch, k].
        kth_score: float32 [batch].

    Raises:
        RuntimeError: from all methods, with the library's message.
    """

    def __init__(
        self, case: Case, own_kernels: bool, positions: Any, scores: list[Any], bounds: Any, selection: list[Any],
        kth_score: Any,
    ) -> None:  # fmt: skip
        self._library = load()
        self._layers = len(scores)
        native = _NativeCase(
            case.batch,
            case.length,
            case.score_stride,
            case.k,
            self._layers,
            CAPACITY,
            int(own_kernels),
            positions.data_ptr(),
            _pointers(scores),
            None if bounds is None else bounds.data_ptr(),
            _pointers(selection),
            kth_score.data_ptr(),
        )
        self._handle = self._library.echo_select_bench_create(ctypes.byref(native))
        if not self._handle:
            raise RuntimeError(self._error())

    def _error(self) -> str:
        message: bytes = self._library.echo_select_bench_error()
        return message.decode()

    def replay(self) -> tuple[float, float]:
        """Runs both graphs; microseconds per layer, with select and without."""
        with_select, without = ctypes.c_double(), ctypes.c_double()
        if self._library.echo_select_bench_replay(self._handle, ctypes.byref(with_select), ctypes.byref(without)) != 0:
            raise RuntimeError(self._error())
        return with_select.value / self._layers, without.value / self._layers

    def launches_per_layer(self) -> float:
        """Nodes of select per layer."""
        nodes: int = self._library.echo_select_bench_nodes(self._handle)
        return nodes / self._layers

    def full_selects(self) -> int:
        """Rows since the last call whose lists did not do."""
        rows = ctypes.c_int64()
        if self._library.echo_select_bench_full_selects(self._handle, ctypes.byref(rows)) != 0:
            raise RuntimeError(self._error())
        return rows.value

    def close(self) -> None:
        """Gives the memory back."""
        self._library.echo_select_bench_destroy(self._handle)
        self._handle = None


def difference(times: list[tuple[float, float]]) -> float:
    """Of the medians: what select takes."""
    return statistics.median(pair[0] for pair in times) - statistics.median(pair[1] for pair in times)
