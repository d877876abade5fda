"""libecho_bench through ctypes; see api.cpp. CMake builds it with ECHO_BUILD_BENCH=ON."""

from __future__ import annotations

import ctypes
import enum
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LAYERS = 61
_BLOCK_TOKENS = 64
_ROOT = Path(__file__).resolve().parents[2]


class Kind(enum.IntEnum):
    """What a replay times."""

    RECALL = 0
    WITHOUT_COPY = 1
    GATHER_SORTED = 2
    GATHER_RANDOM = 3
    RELEASED = 4


@dataclass(frozen=True)
class Case:
    """One case; `pool_slots` 0 means 4096 for each session of a call."""

    batch: int
    misses: int
    length: int = 100_000
    row_bytes: int = 656
    pool_slots: int = 0
    new_rows: int = 0
    released: int = 0

    @property
    def slots(self) -> int:
        """Of each layer's pool."""
        return self.pool_slots or 4096 * (self.batch + (self.released > 0))

    @property
    def host_bytes(self) -> int:
        """Of all slabs: sessions take whole blocks."""
        blocks = self.batch * -(-self.length // _BLOCK_TOKENS) + -(-self.released // _BLOCK_TOKENS)
        return LAYERS * self.row_bytes * blocks * _BLOCK_TOKENS

    def keys(self) -> dict[str, int]:
        """As results name it."""
        keys = {name: getattr(self, name) for name in ("batch", "misses", "row_bytes")}
        keys |= {"pool_slots": self.slots, "length": self.length}
        return keys | {name: getattr(self, name) for name in ("new_rows", "released") if getattr(self, name)}

    def __str__(self) -> str:
        parts = [f"b{self.batch}", f"m{self.misses}", f"{self.row_bytes}", f"slots{self.slots}"]
        return "-".join(parts + ["new_rows"] * self.new_rows + ["released"] * (self.released > 0))


class _NativeCase(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int32)
        for name in ("batch", "misses", "row_bytes", "pool_slots", "length", "new_rows", "released")
    ]


def library_path() -> Path:
    """Where the library is looked for: in ECHO_BENCH_LIBRARY, or where tools/gpu_check.sh builds it."""
    return Path(os.environ.get("ECHO_BENCH_LIBRARY", _ROOT / "build/gpu-wheel/libecho_bench.so"))


def load() -> ctypes.CDLL:
    """The library with its signatures. OSError where there is none."""
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")  # no kernel is loaded while a graph is captured or timed
    library = ctypes.CDLL(str(library_path()))
    pointer, integer = ctypes.c_void_p, ctypes.c_int32
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "devices": (ctypes.c_int, []),
        "error": (ctypes.c_char_p, []),
        "open": (pointer, [ctypes.c_int64]),
        "close": (None, [pointer]),
        "create": (ctypes.c_int, [pointer, ctypes.POINTER(_NativeCase)]),
        "destroy": (ctypes.c_int, [pointer]),
        "replay": (ctypes.c_int, [pointer, integer, integer, ctypes.POINTER(ctypes.c_double)]),
        "nodes": (ctypes.c_int, [pointer, integer, ctypes.POINTER(integer)]),
        "verify": (ctypes.c_int, [pointer]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, f"echo_bench_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def why_not(part: str, devices: Callable[[], int]) -> str | None:
    """Why a part of tools/gpu_check.sh can measure nothing here, None if it can; `devices` loads the library."""
    try:
        count = devices()
    except (OSError, AttributeError) as error:
        return f"libecho_bench is not built (tools/gpu_check.sh {part} does it): {error}"
    return None if count > 0 else "no CUDA device can be used"


def skip_reason() -> str | None:
    """Why nothing can be measured here, None if it can."""
    return why_not("bench-recall", lambda: load().echo_bench_devices())


_device_seconds = 0.0


def device_clock() -> float:
    """Seconds that timed graphs have taken so far: a timer for pytest-benchmark that leaves preparations out."""
    return _device_seconds


def count_device_time(microseconds: float) -> None:
    """Adds what a timed graph took."""
    global _device_seconds
    _device_seconds += 1e-6 * microseconds


class OpenBench:
    """The pinned host pool.

    Args:
        library: as `load` gives it.
        host_bytes: pinned, for the largest case.

    Raises:
        RuntimeError: from all methods, with the library's message.
    """

    def __init__(self, library: ctypes.CDLL, host_bytes: int) -> None:
        self._library = library
        self._handle = self._library.echo_bench_open(host_bytes)
        if not self._handle:
            raise RuntimeError(self._error())

    def _error(self) -> str:
        message: bytes = self._library.echo_bench_error()
        return message.decode()

    def _check(self, status: int) -> None:
        if status != 0:
            raise RuntimeError(self._error())

    def close(self) -> None:
        """Gives everything back."""
        self._library.echo_bench_close(self._handle)
        self._handle = None


class Bench(OpenBench):
    """Recall, one case at a time."""

    def __init__(self, host_bytes: int) -> None:
        super().__init__(load(), host_bytes)

    def create(self, case: Case) -> None:
        """Replaces the current case; fills host rows and pools."""
        native = _NativeCase(
            case.batch, case.misses, case.row_bytes, case.slots, case.length, case.new_rows, case.released
        )
        self._check(self._library.echo_bench_create(self._handle, ctypes.byref(native)))

    def replay(self, kind: Kind, blocks: int = 0) -> float:
        """Runs the graph of a kind with fresh misses.

        Args:
            kind: of the graph.
            blocks: grid of a gather.

        Returns:
            Microseconds per layer call.
        """
        microseconds = ctypes.c_double()
        self._check(self._library.echo_bench_replay(self._handle, kind, blocks, ctypes.byref(microseconds)))
        count_device_time(microseconds.value)
        return microseconds.value / LAYERS

    def launches_per_call(self, kind: Kind) -> float:
        """Nodes of the kind's graph per layer call."""
        nodes = ctypes.c_int32()
        self._check(self._library.echo_bench_nodes(self._handle, kind, ctypes.byref(nodes)))
        return nodes.value / LAYERS

    def verify(self) -> None:
        """Checks maps, slots and bytes after a replay that recalls."""
        self._check(self._library.echo_bench_verify(self._handle))

    def destroy(self) -> None:
        """Gives the memory of the case back."""
        self._check(self._library.echo_bench_destroy(self._handle))
