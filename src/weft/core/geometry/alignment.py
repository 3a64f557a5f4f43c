"""Alignment of memory: devices copy fastest from multiples of it."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

ALIGN = 256
"""Bytes. Landing areas, windows, mirrors and rehomed weights begin and end at multiples of it."""

Bytes = TypeVar("Bytes", int, NDArray[np.int64])


def aligned(num_bytes: Bytes, align: int = ALIGN) -> Bytes:
    """Bytes rounded up to a multiple of `align`."""
    return -(-num_bytes // align) * align
