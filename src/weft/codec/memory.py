"""Memory at an address, as arrays."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


def matrix_view(address: int, stride: int, rows: int, columns: int, dtype: str) -> NDArray[Any]:
    """Rows in memory, `stride` bytes apart, as an array."""
    if not rows or not columns:
        return np.zeros((rows, columns), dtype=dtype)
    width = np.dtype(dtype).itemsize
    memory: Any = (ctypes.c_uint8 * ((rows - 1) * stride + columns * width)).from_address(address)
    return np.ndarray((rows, columns), dtype=dtype, buffer=memory, strides=(stride, width))


def memory_view(address: int, num_bytes: int) -> Bytes:
    """Memory of this process as an array; the caller keeps it alive."""
    buffer: Any = (ctypes.c_uint8 * num_bytes).from_address(address) if num_bytes else bytearray()
    return np.frombuffer(buffer, dtype=np.uint8)
