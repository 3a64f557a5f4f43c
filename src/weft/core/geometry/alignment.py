"""Where pieces of memory begin: at multiples of what devices copy fastest from."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

ALIGN = 256
"""Bytes. Landing areas, windows, mirrors and rehomed weights begin and end at multiples of it."""

Bytes = TypeVar("Bytes", int, NDArray[np.int64])


def aligned(num_bytes: Bytes, align: int = ALIGN) -> Bytes:
    """So many bytes, or the next multiple of `align` above."""
    return -(-num_bytes // align) * align
