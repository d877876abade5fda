"""KV offloading for models with DeepSeek sparse attention.

All KV rows live in host memory; a small pool of rows per layer lives on the GPU. Selections and outputs have the
same bits as with everything on the GPU. Start with :class:`echo.Runtime`; `echo.hf` runs Hugging Face models.
"""

from __future__ import annotations

from pathlib import Path

from echo._core import (
    CapacityError,
    ConfigField,
    CudaError,
    DeviceReport,
    Error,
    ForwardPass,
    InvalidArgument,
    KvRuns,
    LayerStats,
    MachineLimits,
    MemoryItem,
    ModelShape,
    NotSupported,
    Plan,
    RuntimeConfig,
    RuntimeStats,
    Session,
    StateError,
    build_info,
    config_fields,
    device_report,
    keep_host_memory,
    machine_limits,
    make_plan,
)
from echo.batch import Batch
from echo.runtime import Forward, Runtime

__version__ = build_info().split()[1].rstrip(",")

__all__ = [
    "Batch",
    "CapacityError",
    "ConfigField",
    "CudaError",
    "DeviceReport",
    "Error",
    "Forward",
    "ForwardPass",
    "InvalidArgument",
    "KvRuns",
    "LayerStats",
    "MachineLimits",
    "MemoryItem",
    "ModelShape",
    "NotSupported",
    "Plan",
    "Runtime",
    "RuntimeConfig",
    "RuntimeStats",
    "Session",
    "StateError",
    "build_info",
    "cmake_dir",
    "config_fields",
    "device_report",
    "keep_host_memory",
    "machine_limits",
    "make_plan",
]


def cmake_dir() -> str:
    """Folder to put on CMAKE_PREFIX_PATH so that `find_package(echo)` finds this installation."""
    return str(Path(__file__).parent)
