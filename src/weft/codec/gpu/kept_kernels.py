"""An image of the weights that engines hold, kept up to date by the pass that compares it with the weights.

An undo list holds what that pass overwrote: of every block that has changed, the places of its changes in the block
(u16) and their old elements, or all of its old elements. One launch puts them back.

Most blocks lie in one piece in the weights. The elements of the others are found in a table of pieces: rows of equal
length, one stride apart. What belongs to no piece is a gap of the image, and never changes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.codec.gpu.blocks import ELEMENTS

GATHER_WORDS = tl.constexpr(32)
"""Words of bits that are found at a time in blocks that do not lie in one piece: few registers."""
RESTORE_LANES, RESTORE_WARPS = 512, 4


@triton.jit
def find_source(pieces, num_pieces, at, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Addresses of a block's elements in the weights, and whether they have one."""
    low = at * 0
    left = num_pieces
    while left > 1:
        half = left // 2
        begin = (tl.load(pieces + 4 * (low + half)) & 0xFFFFFFFF).to(tl.int32)
        low = tl.where(begin <= at, low + half, low)
        left -= half
    piece = pieces + 4 * low
    span, shape = tl.load(piece), tl.load(piece + 2)
    begin, end = (span & 0xFFFFFFFF).to(tl.int32), (span >> 32).to(tl.int32)
    run, skipped = (shape & 0xFFFFFFFF).to(tl.int32), (shape >> 32).to(tl.int32)
    element = at - begin + skipped
    row = ((element.to(tl.float32) + 0.5) / run.to(tl.float32)).to(tl.int32)  # exact: a block has few elements
    address = tl.load(piece + 1) + row * tl.load(piece + 3) + (element - row * run) * WIDTH
    return address, (at >= begin) & (at < end)


@triton.jit
def source_of(now, pieces, num_pieces, at, IS_GATHERED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where elements of a block are, all of which are in the weights."""
    if IS_GATHERED:
        WIDTH: tl.constexpr = now.dtype.element_ty.primitive_bitwidth // 8
        address, _ = find_source(pieces, num_pieces, at, WIDTH)
        return address.to(now.dtype)
    else:  # noqa: RET505 - Triton compiles one of the branches
        return now + at


@triton.jit
def new_values(now, pieces, num_pieces, at, inside, old, IS_GATHERED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Elements of a block in the weights; those of its gaps are the old ones."""
    if IS_GATHERED:
        WIDTH: tl.constexpr = now.dtype.element_ty.primitive_bitwidth // 8
        address, is_there = find_source(pieces, num_pieces, at, WIDTH)
        is_there = is_there & inside
        return tl.where(is_there, tl.load(address.to(now.dtype), mask=is_there, other=0), old)
    else:  # noqa: RET505 - Triton compiles one of the branches
        return tl.load(now + at, mask=inside, other=0)


@triton.jit
def find_gathered_bits(  # type: ignore[no-untyped-def]
    pieces, num_pieces, old, elements, scratch, WIDTH: tl.constexpr, WORDS: tl.constexpr, TILE: tl.constexpr
):
    """A bit for every element that differs, of a block that does not lie in one piece."""
    lane = tl.arange(0, 32)[None, :]
    for part in range(0, WORDS, TILE):
        word = part + tl.arange(0, TILE)
        at = word[:, None] * 32 + lane
        address, is_there = find_source(pieces, num_pieces, at, WIDTH)
        is_there = is_there & (at < elements)
        new = tl.load(address.to(old.dtype), mask=is_there, other=0)
        before = tl.load(old + at, mask=is_there, other=0)
        tl.store(scratch + word, tl.sum((new != before).to(tl.int32) << lane, axis=1))


@triton.jit
def claim_undo(  # type: ignore[no-untyped-def]
    entry, undo, used, num_bytes, changes, elements, dense, WIDTH: tl.constexpr
):
    """Room for what undoes the changes of a block, and for how many elements; an entry says where it is."""
    count = tl.where(dense, elements, changes)
    size = tl.where(dense, 0, (2 * count + 3) // 4 * 4) + (count * WIDTH + 3) // 4 * 4
    at = tl.atomic_add(used, size.to(tl.int64))
    count = tl.where(at + size <= num_bytes, count, 0)
    shown = at // 4 | (count.to(tl.int64) << 32) | (dense.to(tl.int64) << 62)
    tl.store(entry, tl.where(count > 0, shown, 0))
    return undo + at, count


@triton.jit
def update_changed(old, at, value, there, undo, rank, changes, num_undone):  # type: ignore[no-untyped-def]
    """New elements of an image, once what they replace is in the undo list."""
    places = undo.to(tl.pointer_type(tl.int16))
    values = (undo + (2 * changes + 3) // 4 * 4).to(old.dtype)
    is_undone = there & (rank < num_undone)
    tl.store(places + rank, at.to(tl.int16), mask=is_undone)
    tl.store(values + rank, tl.load(old + at, mask=is_undone, other=0), mask=is_undone)
    tl.store(old + at, value, mask=there)


@triton.jit
def _restore_kernel(images, entries, undo, ELEMENT: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """One block: the old elements go back."""
    program = tl.program_id(0)
    entry = tl.load(entries + program)
    if entry != 0:
        image = tl.load(images + program).to(tl.pointer_type(ELEMENT))
        record = undo + (entry & 0xFFFFFFFF) * 4
        count = ((entry >> 32) & 0x7FFF).to(tl.int32)
        num_places = tl.where((entry >> 62) != 0, 0, count)  # none: all elements of the block, in order
        places = record.to(tl.pointer_type(tl.int16))
        values = (record + (2 * num_places + 3) // 4 * 4).to(tl.pointer_type(ELEMENT))
        for begin in range(0, count, LANES):
            number = begin + tl.arange(0, LANES)
            there = number < count
            at = tl.load(places + number, mask=number < num_places, other=0).to(tl.int32)
            at = tl.where(number < num_places, at, number)
            tl.store(image + at, tl.load(values + number, mask=there, other=0), mask=there)


def restore(width: int, images: torch.Tensor, entries: torch.Tensor, undo: torch.Tensor) -> None:
    """Queue putting back what was overwritten in blocks, from their entries; `images`: where each begins."""
    if len(images):
        _restore_kernel[(len(images),)](
            images, entries, undo, ELEMENT=ELEMENTS[width], LANES=RESTORE_LANES, num_warps=RESTORE_WARPS
        )
