"""The part of libecho_bench that times decode steps, through ctypes; see step_case.hpp."""

from __future__ import annotations

import ctypes
import enum
import math
import os
from dataclasses import dataclass

from native import binding

TOP_K = 2048
PREFETCH_CAP = float(os.environ.get("ECHO_BENCH_PREFETCH_CAP", "0.0012"))
"""Rows that score may fetch, per token that it scores."""
NATURAL = -1
_BLOCK_TOKENS = 64


class Part(enum.IntEnum):
    """What a replay runs, between begin and commit; each part up to ATTEND contains the ones before it."""

    NOTHING = 0
    SCORE = 1
    SELECT = 2
    RECALL = 3
    ATTEND = 4
    WITHOUT_OFFLOAD = 5
    GATHER = 6


@dataclass(frozen=True)
class Case:
    """Sessions of a length; `pool_slots` 0 means 4096 for each."""

    batch: int
    length: int
    layers: int = binding.LAYERS
    row_bytes: int = 656
    pool_slots: int = 0
    new_rows: bool = True
    splits: int = 0
    without_offload: bool = False
    forecast_cap: int = 0

    @property
    def slots(self) -> int:
        """Of each layer's pool."""
        return self.pool_slots or 4096 * self.batch

    @property
    def host_bytes(self) -> int:
        """Of all slabs: sessions take whole blocks."""
        return self.layers * self.row_bytes * self.batch * -(-self.length // _BLOCK_TOKENS) * _BLOCK_TOKENS

    def __str__(self) -> str:
        parts = [f"b{self.batch}", f"l{self.length}", f"{self.row_bytes}"]
        return "-".join(parts + ["whole_pool"] * (self.slots >= self.batch * self.length))

    def misses(self, rate: float) -> int:
        """Per layer, at this share of what is selected."""
        return min(math.ceil(rate * self.batch * TOP_K), self.batch * (TOP_K - self.new_rows))


class _NativeCase(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int32)
        for name in (
            "layers", "batch", "length", "row_bytes", "pool_slots", "new_rows", "splits", "without_offload",
            "forecast_cap",
        )
    ]  # fmt: skip


class _NativeReplay(ctypes.Structure):
    _fields_ = [
        ("part", ctypes.c_int32),
        ("misses", ctypes.c_int32),
        ("sift", ctypes.c_int32),
        ("prefetch_cap", ctypes.c_float),
        ("blocks", ctypes.c_int32),
    ]


class Result(ctypes.Structure):
    """Of one replay; counts are sums over all layers."""

    _fields_ = [
        ("microseconds", ctypes.c_double),
        *(
            (name, ctypes.c_int64)
            for name in (
                "nodes", "hits", "misses", "evictions", "lost_races", "candidates", "full_selects",
                "prefetched", "prefetched_used", "prefetches_capped", "natural_misses", "forecast", "forecast_used",
            )
        ),
    ]  # fmt: skip


def load() -> ctypes.CDLL:
    """The library with its signatures. OSError or AttributeError where there is none, or an older one."""
    library = binding.load()
    pointer = ctypes.c_void_p
    for name, arguments in (
        ("create", [pointer, ctypes.POINTER(_NativeCase)]),
        ("destroy", [pointer]),
        ("replay", [pointer, ctypes.POINTER(_NativeReplay), ctypes.POINTER(Result)]),
        ("verify", [pointer]),
    ):
        function = getattr(library, f"echo_bench_step_{name}")
        function.restype, function.argtypes = ctypes.c_int, arguments
    return library


class StepBench(binding.OpenBench):
    """Steps, one case at a time."""

    def __init__(self, host_bytes: int) -> None:
        super().__init__(load(), host_bytes)
        self._case: Case | None = None

    def create(self, case: Case) -> None:
        """Replaces the current case, unless it is the same; fills host rows, index keys and pools."""
        if case == self._case:
            return
        self.destroy()
        native = _NativeCase(
            case.layers, case.batch, case.length, case.row_bytes, case.slots, case.new_rows, case.splits,
            case.without_offload, case.forecast_cap,
        )  # fmt: skip
        self._check(self._library.echo_bench_step_create(self._handle, ctypes.byref(native)))
        self._case = case

    def replay(
        self, part: Part, misses: int = 0, sift: bool = False, prefetch_cap: float = 0.0, blocks: int = 0
    ) -> Result:
        """Prepares and runs a graph once.

        Args:
            part: of the step.
            misses: per layer; NATURAL: as scores and the replays before have it.
            sift: score lists candidates for select.
            prefetch_cap: rows that score may fetch, per token that it scores.
            blocks: grid of a gather.
        """
        result = Result()
        what = _NativeReplay(part, misses, sift, prefetch_cap, blocks)
        self._check(self._library.echo_bench_step_replay(self._handle, ctypes.byref(what), ctypes.byref(result)))
        binding.count_device_time(result.microseconds)
        return result

    def verify(self) -> None:
        """After a replay that selects: selections, maps, bytes, and outputs against rows of the host."""
        self._check(self._library.echo_bench_step_verify(self._handle))

    def destroy(self) -> None:
        """Gives the memory of the case back."""
        self._case = None
        self._check(self._library.echo_bench_step_destroy(self._handle))


def skip_reason() -> str | None:
    """Why nothing can be measured here, None if it can."""
    return binding.why_not("bench-layer", lambda: load().echo_bench_devices())
