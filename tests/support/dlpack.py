"""An object that offers an array on a device there need not be, to see that it is refused by its device."""

from __future__ import annotations

import ctypes

_CPU, _CUDA = 1, 2


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class ArrayElsewhere:
    """float32 zeros that claim to be on cuda:7."""

    def __init__(self, *shape: int) -> None:
        self._shape = (ctypes.c_int64 * len(shape))(*shape)
        self._data = ctypes.create_string_buffer(4 * max(1, *shape) ** len(shape))
        self._tensor = _Tensor(
            ctypes.addressof(self._data), _CUDA, 7, len(shape), 2, 32, 1, self._shape, None, 0, None, None
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        """Where it says it is."""
        return _CUDA, 7

    def __dlpack__(self, **_: object) -> object:
        """A capsule over host memory; whoever reads it without asking for the device reads zeros."""
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(self._tensor), b"dltensor", None)
