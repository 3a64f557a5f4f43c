"""FP8 with a scale for each row, on a GPU: a program reads a whole row, of any length, and gives it one scale.

The same results as `fp8_kernels`, whose tiles would have a single row and mostly empty lanes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.codec.gpu.fp8_arithmetic import magnitude, scale, to_e4m3
from weft.codec.gpu.fp8_launch import Fp8Kernels
from weft.codec.gpu.tile_kernels import destination_of, flags_of, source_of

STEP, WARPS = 1024, 4
"""Elements of a row at a time."""


@triton.jit
def _quantize_row_kernel(  # type: ignore[no-untyped-def]
    table,
    image,
    amax,
    wild,
    ELEMENT: tl.constexpr,
    STEP: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    HAS_CAST: tl.constexpr,
    IS_WILD: tl.constexpr,
):
    """One row as FP8."""
    tile = table + tl.program_id(0).to(tl.int64) * 6
    flags = flags_of(tile)
    if IS_ALIGNED and (flags & 2) != 0:
        _quantize_row(tile, flags, image, amax, wild, ELEMENT, STEP, True, HAS_CAST, IS_WILD)
    else:
        _quantize_row(tile, flags, image, amax, wild, ELEMENT, STEP, False, HAS_CAST, IS_WILD)


@triton.jit
def _quantize_row(  # type: ignore[no-untyped-def]
    tile,
    flags,
    image,
    amax,
    wild,
    ELEMENT: tl.constexpr,
    STEP: tl.constexpr,
    IS_FULL: tl.constexpr,
    HAS_CAST: tl.constexpr,
    IS_WILD: tl.constexpr,
):
    src, _, _, columns = source_of(tile, ELEMENT)
    dst, _ = destination_of(tile, image, tl.uint8)
    block = tl.load(tile + 4)
    if (flags & 1) != 0:
        largest = tl.load(amax + block)
    else:
        largest = _largest_of_row(tile, src, columns, wild, STEP, IS_FULL, IS_WILD)
        tl.store(amax + block, largest)
    factor = tl.div_rn(1.0, scale(largest))
    for begin in range(0, columns, STEP):  # read again, from the cache
        codes = to_e4m3(_load(src, begin, columns, STEP, IS_FULL) * factor, HAS_CAST)
        _store(dst, codes, begin, columns, STEP, IS_FULL)


@triton.jit
def _largest_of_row(  # type: ignore[no-untyped-def]
    tile, src, columns, wild, STEP: tl.constexpr, IS_FULL: tl.constexpr, IS_WILD: tl.constexpr
):
    """The largest finite magnitude. Numbers that are not finite are counted with IS_WILD, otherwise only noted."""
    most = tl.zeros((STEP,), tl.int32)
    others = tl.zeros((STEP,), tl.int32)
    for begin in range(0, columns, STEP):
        found = magnitude(_load(src, begin, columns, STEP, IS_FULL))
        is_finite = found < 0x7F800000
        most = tl.maximum(most, tl.where(is_finite, found, 0))
        others += tl.where(is_finite, 0, 1)
    count = tl.sum(others)
    if count > 0:
        if IS_WILD:
            tl.atomic_add(wild, count)
            tl.atomic_add(wild + 1 + tl.load(tile + 5), count)
        else:
            tl.store(wild, 1)
    return tl.max(most).to(tl.float32, bitcast=True)


@triton.jit
def _load(src, begin, columns, STEP: tl.constexpr, IS_FULL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Some elements of a row as FP32; zeros beyond its end."""
    column = begin + tl.arange(0, STEP)
    there = src + column
    if IS_FULL:  # its length is a multiple of 16: the mask shows that to the compiler, which then reads vectors
        values = tl.load(tl.multiple_of(there, 16), mask=column < columns // 16 * 16, other=0.0)
    else:
        values = tl.load(there, mask=column < columns, other=0.0)
    return values.to(tl.float32)


@triton.jit
def _store(dst, codes, begin, columns, STEP: tl.constexpr, IS_FULL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store some codes of a row."""
    column = begin + tl.arange(0, STEP)
    there = dst + column
    if IS_FULL:  # as above
        tl.store(tl.multiple_of(there, 16), codes, mask=column < columns // 16 * 16)
    else:
        tl.store(there, codes, mask=column < columns)


@triton.jit
def _row_amax_kernel(table, amax, wild, ELEMENT: tl.constexpr, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Raise the magnitude of a row to that of the part that is held."""
    tile = table + tl.program_id(0).to(tl.int64) * 6
    src, _, _, columns = source_of(tile, ELEMENT)
    largest = _largest_of_row(tile, src, columns, wild, STEP, False, True)
    tl.atomic_max(amax + tl.load(tile + 4), largest.to(tl.int32, bitcast=True))


KERNELS = Fp8Kernels(
    quantize_kernel=_quantize_row_kernel,
    quantize_steps={"STEP": STEP},
    amax_kernel=_row_amax_kernel,
    amax_steps={"STEP": STEP},
    num_warps=WARPS,
)
