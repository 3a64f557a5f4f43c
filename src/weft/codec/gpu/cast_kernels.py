"""Casts on a GPU: the same results as weft.codec.cast, for all boxes of a chunk at once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.codec.gpu.tile_kernels import destination_of, flags_of, load_rows, source_of, store_rows

_TYPES = {"fp32": tl.float32, "bf16": tl.bfloat16, "fp16": tl.float16}
ROWS, WARPS = 16, 8


@triton.jit
def _cast_kernel(  # type: ignore[no-untyped-def]
    table, image, FROM: tl.constexpr, TO: tl.constexpr, ROWS: tl.constexpr, IS_ALIGNED: tl.constexpr
):
    """One tile of at most 128×128 elements."""
    tile = table + tl.program_id(0).to(tl.int64) * 6
    flags = flags_of(tile)
    if IS_ALIGNED and (flags & 2) != 0:
        _cast_tile(tile, image, FROM, TO, ROWS, True)
    else:
        _cast_tile(tile, image, FROM, TO, ROWS, False)


@triton.jit
def _cast_tile(  # type: ignore[no-untyped-def]
    tile, image, FROM: tl.constexpr, TO: tl.constexpr, ROWS: tl.constexpr, IS_FULL: tl.constexpr
):
    src, stride, rows, columns = source_of(tile, FROM)
    dst, dst_stride = destination_of(tile, image, TO)
    for begin in range(0, rows, ROWS):
        values = load_rows(src, stride, begin, rows, columns, ROWS, IS_FULL)
        converted = _to_bf16(values) if tl.bfloat16 == TO else values.to(TO)
        store_rows(dst, dst_stride, converted, begin, rows, columns, ROWS, IS_FULL)


@triton.jit
def _to_bf16(values):  # type: ignore[no-untyped-def]
    """Round to nearest, ties to even; a NaN keeps its upper bits, which a GPU's own cast does not preserve."""
    bits = values.to(tl.int32, bitcast=True)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return tl.where(is_nan, (bits >> 16) | 0x40, nearest).to(tl.int16).to(tl.bfloat16, bitcast=True)


def cast(table: torch.Tensor, image: int, src_dtype: str, dst_dtype: str) -> None:
    """Cast tiles into an image; queued on the current stream."""
    if len(table):
        _cast_kernel[(len(table),)](
            table,
            image,
            FROM=_TYPES[src_dtype],
            TO=_TYPES[dst_dtype],
            ROWS=ROWS,
            IS_ALIGNED=image % 16 == 0,
            num_warps=WARPS,
        )
