"""The kernel that walks planes: copies them, digests them, or both in one read. See `tiles` for what a tile is.

The digest is that of weft/native.py, bit for bit: word `n` of its space, in column n % 8 and row n // 8 % 256 of block
n // 2048, contributes (alpha + beta × (256 − row)) × word + gamma × (word >> 32), times the weight of its block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.gpu.tiles import TILE_UNITS

STEP_UNITS = 1024
"""Units a program has in flight."""
WARPS = 16
FEW_PROGRAMS = 16
"""Enough to keep a bus busy, and few enough to leave most of the device to others."""


@triton.jit
def _walk_kernel(  # type: ignore[no-untyped-def]
    planes,
    tiles,
    keys,
    sums,
    IS_COPIED: tl.constexpr,
    IS_DIGESTED: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
):
    """One tile; its digest goes to `sums`."""
    _walk_tile(planes, tiles, keys, sums, tl.program_id(0), IS_COPIED, IS_DIGESTED, TILE, STEP)


@triton.jit(do_not_specialize=["num_tiles"])
def _copy_with_few_kernel(planes, tiles, num_tiles, PROGRAMS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Every program copies tile after tile."""
    for tile in range(tl.program_id(0), num_tiles, PROGRAMS):
        _walk_tile(planes, tiles, planes, planes, tile, True, False, TILE, STEP)


@triton.jit
def _walk_tile(  # type: ignore[no-untyped-def]
    planes,
    tiles,
    keys,
    sums,
    tile,
    IS_COPIED: tl.constexpr,
    IS_DIGESTED: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
):
    entry = tl.load(tiles + tile)
    plane = planes + (entry & 0xFFFFFFFF) * 9
    number = entry >> 32
    kind = tl.load(plane + 8)
    total = tl.zeros((), tl.int64)
    if kind == 16:
        total = _walk_units(plane, number, keys, tl.int64, 8, 2, IS_COPIED, IS_DIGESTED, TILE, STEP)
    elif kind == 4:
        total = _walk_units(plane, number, keys, tl.int32, 4, 1, IS_COPIED, IS_DIGESTED, TILE, STEP)
    elif kind == 2:
        total = _walk_units(plane, number, keys, tl.int16, 2, 1, IS_COPIED, IS_DIGESTED, TILE, STEP)
    elif kind == 1:
        total = _walk_units(plane, number, keys, tl.int8, 1, 1, IS_COPIED, IS_DIGESTED, TILE, STEP)
    elif IS_DIGESTED:
        total = _walk_blocks(plane, number, keys, IS_COPIED, TILE)
    if IS_DIGESTED:
        tl.store(sums + tile, total)


@triton.jit
def _walk_units(  # type: ignore[no-untyped-def]
    plane,
    number,
    keys,
    ELEMENT: tl.constexpr,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    IS_COPIED: tl.constexpr,
    IS_DIGESTED: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
):
    """Units of LANES elements of SIZE bytes."""
    rows, run = tl.load(plane + 6), tl.load(plane + 7)
    tiles_in_row = tl.cdiv(run, TILE)
    rows_in_tile = tl.maximum(TILE // run, 1)
    width = tl.cdiv(run, tiles_in_row)
    first_row = number // tiles_in_row * rows_in_tile
    first = number % tiles_in_row * width
    width = tl.minimum(run - first, width)
    count = (tl.minimum(rows - first_row, rows_in_tile) * width).to(tl.int32)
    width = width.to(tl.int32)
    inverse = 1.0 / width.to(tl.float32)
    first *= LANES
    src, src_stride = _start(plane, first_row, first, ELEMENT, SIZE)
    dst, dst_stride = _start(plane + 1, first_row, first, ELEMENT, SIZE)
    lane = tl.arange(0, LANES)[None, :]
    position_stride = tl.load(plane + 5)
    position = tl.load(plane + 2) + first_row * position_stride + first * SIZE
    total = tl.zeros((STEP,), tl.int64)
    for start in range(0, count, STEP):
        unit = start + tl.arange(0, STEP)
        inside = unit < count
        row = ((unit.to(tl.float32) + 0.5) * inverse).to(tl.int32)  # exact: a tile has few units
        column = (unit - row * width) * LANES
        value = tl.load(_lanes(src, src_stride, row, column, lane, LANES), mask=inside[:, None], other=0)
        if IS_COPIED:
            tl.store(_lanes(dst, dst_stride, row, column, lane, LANES), value, mask=inside[:, None])
        if IS_DIGESTED:
            place = (position + row * position_stride + column * SIZE)[:, None] + lane * SIZE
            total += _weighed(value, place, keys, SIZE)
    return tl.sum(total, axis=0)


@triton.jit
def _start(pair, first_row, first, ELEMENT: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """First element of a tile in one of the memories, and the elements from row to row."""
    stride = tl.load(pair + 3)
    address = tl.load(pair) + first_row * stride + first * SIZE
    return address.to(tl.pointer_type(ELEMENT)), stride // SIZE


@triton.jit
def _lanes(base, stride, row, column, lane, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the elements of units lie; those of one unit are read and written together."""
    there = base + (row * stride + column)[:, None] + lane
    return tl.multiple_of(there, [8 * LANES, 8 * LANES]) if LANES > 1 else there


@triton.jit
def _weighed(value, place, keys, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Contribution of elements at given positions of the digest's space; summed over the lanes of a unit."""
    MASK: tl.constexpr = (1 << (8 * SIZE)) - 1
    word = value.to(tl.int64)
    if SIZE < 8:
        word = (word & MASK) << (place % 8 * 8)
    number = place // 8
    column, row = number % 8, number // 8 % 256
    factor = tl.load(keys + column) + tl.load(keys + 8 + column) * (256 - row)
    upper = (word >> 32) & 0xFFFFFFFF
    counted = factor * word + tl.load(keys + 16 + column) * upper
    return tl.sum(counted * _block_weight(number // 2048), axis=1)


@triton.jit
def _walk_blocks(plane, number, keys, IS_COPIED: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whole blocks: every word has the same factor in each of them."""
    BLOCKS: tl.constexpr = TILE // 1024
    first = number * BLOCKS
    count = tl.minimum(tl.load(plane + 6) - first, BLOCKS).to(tl.int32)
    src = (tl.load(plane) + first * 16384).to(tl.pointer_type(tl.int64))
    dst = (tl.load(plane + 1) + first * 16384).to(tl.pointer_type(tl.int64))
    block = tl.load(plane + 2) // 16384 + first
    row, column = tl.arange(0, 256), tl.arange(0, 8)
    factor = tl.load(keys + column)[None, :] + tl.load(keys + 8 + column)[None, :] * (256 - row)[:, None]
    gamma = tl.load(keys + 16 + column)[None, :]
    total = tl.zeros((256, 8), tl.int64)
    for nth in range(0, count):
        at = nth * 2048 + row[:, None] * 8 + column[None, :]
        word = tl.load(tl.multiple_of(src + at, [16, 16]))
        if IS_COPIED:
            tl.store(tl.multiple_of(dst + at, [16, 16]), word)
        total += (factor * word + gamma * ((word >> 32) & 0xFFFFFFFF)) * _block_weight(block + nth)
    return tl.sum(tl.sum(total, axis=1), axis=0)


@triton.jit
def _block_weight(block):  # type: ignore[no-untyped-def]
    """SplitMix64 of a block's number, made odd."""
    x = block.to(tl.uint64) + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return ((x ^ (x >> 31)) | 1).to(tl.int64)


def copy_with_few(planes: torch.Tensor, tiles: torch.Tensor) -> None:
    """Copy a WalkTable's planes on the current stream, with a few of the device's processors."""
    _copy_with_few_kernel[(min(len(tiles), FEW_PROGRAMS),)](
        planes, tiles, len(tiles), PROGRAMS=FEW_PROGRAMS, TILE=TILE_UNITS, STEP=STEP_UNITS, num_warps=WARPS
    )


def walk(
    planes: torch.Tensor, tiles: torch.Tensor, keys: torch.Tensor, sums: torch.Tensor | None, *, is_copied: bool
) -> None:
    """Walk a WalkTable's planes on the current stream; digests them if `sums`, one for each tile, are given."""
    _walk_kernel[(len(tiles),)](
        planes,
        tiles,
        keys,
        sums,
        IS_COPIED=is_copied,
        IS_DIGESTED=sums is not None,
        TILE=TILE_UNITS,
        STEP=STEP_UNITS,
        num_warps=WARPS,
    )
