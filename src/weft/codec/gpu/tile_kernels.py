"""How Triton kernels read and write tiles of matrices; see `matrix_tiles` for their table."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def source_of(tile, ELEMENT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Address, stride, rows and columns of a tile."""
    shape = tl.load(tile + 3)
    src = tl.load(tile).to(tl.pointer_type(ELEMENT))
    stride = (tl.load(tile + 2) & 0xFFFFFFFF).to(tl.int32)
    return src, stride, (shape & 0xFFFF).to(tl.int32), (shape >> 32).to(tl.int32)


@triton.jit
def flags_of(tile):  # type: ignore[no-untyped-def]
    """What is known of a tile."""
    return (tl.load(tile + 3) >> 16) & 0xFFFF


@triton.jit
def destination_of(tile, image, ELEMENT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Address and stride of a tile in an image."""
    dst = (image + tl.load(tile + 1)).to(tl.pointer_type(ELEMENT))
    return dst, (tl.load(tile + 2) >> 32).to(tl.int32)


@triton.jit
def load_rows(src, stride, begin, rows, columns, ROWS: tl.constexpr, IS_FULL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Some rows of a tile as FP32; zeros outside it."""
    row = begin + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, 128)[None, :]
    there = src + row * stride + column
    if IS_FULL:
        values = tl.load(tl.multiple_of(there, [16, 16]))
    else:
        values = tl.load(there, mask=(row < rows) & (column < columns), other=0.0)
    return values.to(tl.float32)


@triton.jit
def store_rows(dst, stride, values, begin, rows, columns, ROWS: tl.constexpr, IS_FULL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store some rows of a tile in the form they have in the image."""
    row = begin + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, 128)[None, :]
    there = dst + row * stride + column
    if IS_FULL:
        tl.store(tl.multiple_of(there, [16, 16]), values)
    else:
        tl.store(there, values, mask=(row < rows) & (column < columns))
