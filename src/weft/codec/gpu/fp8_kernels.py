"""FP8 of tiles on a GPU: Triton kernels that give the same results as the C module, bit for bit.

A block that lies in one tile is quantised in one pass: its magnitude is found and its codes are written by the same
program. Magnitudes of blocks that are cut are found beforehand (`add_amax`), and agreed on with the other holders.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.codec.gpu.fp8_arithmetic import magnitude, scale, to_e4m3
from weft.codec.gpu.fp8_launch import Fp8Kernels
from weft.codec.gpu.tile_kernels import destination_of, flags_of, load_rows, source_of, store_rows

QUANTIZE_ROWS, QUANTIZE_WARPS = 32, 8
PART_ROWS = 16
"""Rows at a time in tiles that are not full: every element has its own address, which takes registers."""
SCALES = 1024
"""Scales a program writes."""


@triton.jit
def _quantize_kernel(  # type: ignore[no-untyped-def]
    table,
    image,
    amax,
    wild,
    ELEMENT: tl.constexpr,
    ROWS: tl.constexpr,
    PART_ROWS: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    HAS_CAST: tl.constexpr,
    IS_WILD: tl.constexpr,
):
    """One tile as FP8."""
    tile = table + tl.program_id(0).to(tl.int64) * 6
    flags = flags_of(tile)
    if IS_ALIGNED and (flags & 2) != 0:
        _quantize_tile(tile, flags, image, amax, wild, ELEMENT, ROWS, True, HAS_CAST, IS_WILD)
    else:
        _quantize_tile(tile, flags, image, amax, wild, ELEMENT, PART_ROWS, False, HAS_CAST, IS_WILD)


@triton.jit
def _quantize_tile(  # type: ignore[no-untyped-def]
    tile,
    flags,
    image,
    amax,
    wild,
    ELEMENT: tl.constexpr,
    ROWS: tl.constexpr,
    IS_FULL: tl.constexpr,
    HAS_CAST: tl.constexpr,
    IS_WILD: tl.constexpr,
):
    src, stride, rows, columns = source_of(tile, ELEMENT)
    block = tl.load(tile + 4)
    if (flags & 1) != 0:
        largest = tl.load(amax + block)
    else:
        largest = _largest(tile, src, stride, rows, columns, wild, ROWS, IS_FULL, IS_WILD)
        tl.store(amax + block, largest)
    factor = tl.div_rn(1.0, scale(largest))
    dst, dst_stride = destination_of(tile, image, tl.uint8)
    for begin in range(0, rows, ROWS):  # read again, from the cache: all at once needs too many registers
        codes = to_e4m3(load_rows(src, stride, begin, rows, columns, ROWS, IS_FULL) * factor, HAS_CAST)
        store_rows(dst, dst_stride, codes, begin, rows, columns, ROWS, IS_FULL)


@triton.jit
def _largest(  # type: ignore[no-untyped-def]
    tile, src, stride, rows, columns, wild, ROWS: tl.constexpr, IS_FULL: tl.constexpr, IS_WILD: tl.constexpr
):
    """The largest finite magnitude of a tile. Unless IS_WILD, non-finite numbers are only noted, to save registers."""
    most = tl.zeros((ROWS, 128), tl.int32)
    for begin in range(0, rows, ROWS):
        most = tl.maximum(most, magnitude(load_rows(src, stride, begin, rows, columns, ROWS, IS_FULL)))
    bits = tl.max(most)
    if bits >= 0x7F800000:
        if IS_WILD:
            bits = _largest_finite(tile, src, stride, rows, columns, wild, ROWS, IS_FULL)
        else:
            tl.store(wild, 1)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _largest_finite(tile, src, stride, rows, columns, wild, ROWS: tl.constexpr, IS_FULL: tl.constexpr):  # type: ignore[no-untyped-def]
    """The same for a tile with non-finite numbers; they are counted, in total and for their grid."""
    most = tl.zeros((ROWS, 128), tl.int32)
    others = tl.zeros((ROWS, 128), tl.int32)
    for begin in range(0, rows, ROWS):
        found = magnitude(load_rows(src, stride, begin, rows, columns, ROWS, IS_FULL))
        is_finite = found < 0x7F800000
        most = tl.maximum(most, tl.where(is_finite, found, 0))
        others += tl.where(is_finite, 0, 1)
    count = tl.sum(others)
    tl.atomic_add(wild, count)
    tl.atomic_add(wild + 1 + tl.load(tile + 5), count)
    return tl.max(most)


@triton.jit
def _amax_kernel(table, amax, wild, ELEMENT: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Raise the magnitude of a tile's block to its own."""
    tile = table + tl.program_id(0).to(tl.int64) * 6
    src, stride, rows, columns = source_of(tile, ELEMENT)
    largest = _largest(tile, src, stride, rows, columns, wild, ROWS, False, True)
    tl.atomic_max(amax + tl.load(tile + 4), largest.to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=["num_scales"])
def _scale_kernel(table, num_scales, image, amax, SCALES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the scales of some blocks, each at its place in the image."""
    number = tl.program_id(0) * SCALES + tl.arange(0, SCALES)
    inside = number < num_scales
    dst = (image + tl.load(table + 2 * number, mask=inside, other=0)).to(tl.pointer_type(tl.float32))
    largest = tl.load(amax + tl.load(table + 2 * number + 1, mask=inside, other=0), mask=inside, other=0.0)
    tl.store(dst, scale(largest), mask=inside)


KERNELS = Fp8Kernels(
    quantize_kernel=_quantize_kernel,
    quantize_steps={"ROWS": QUANTIZE_ROWS, "PART_ROWS": PART_ROWS},
    amax_kernel=_amax_kernel,
    amax_steps={"ROWS": PART_ROWS},
    num_warps=QUANTIZE_WARPS,
)


def write_scales(table: torch.Tensor, image: int, amax: torch.Tensor) -> None:
    """Write scales into an image; `table` has one row per scale: byte of the image, block."""
    if len(table):
        _scale_kernel[(triton.cdiv(len(table), SCALES),)](table, len(table), image, amax, SCALES=SCALES)
