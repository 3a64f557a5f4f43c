"""Patches are made on a GPU: Triton kernels with the same results as the C module, bit for bit (record order aside).

One launch works on the sections of many images that have elements of one size: a table on the device has a row for each
section, another one the section of every block. Sizes of patches stay on the device: a kernel finds in `state` where
its patch begins, because the patches of an image's sections are contiguous. The host waits once, for the last of them.

Numbers that differ from version to version are not specialised on: Triton would compile a kernel anew for every one
that is 1, or a multiple of 16, in the middle of a version.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from weft.codec import delta
from weft.codec.delta import BLOCK, DENSE, HEADER_BYTES
from weft.codec.gpu.blocks import ELEMENTS, Blocks
from weft.codec.gpu.kept_kernels import (
    GATHER_WORDS,
    claim_undo,
    find_gathered_bits,
    new_values,
    source_of,
    update_changed,
)

WORDS = BLOCK // 32
ENCODE_TILE, ENCODE_WARPS = 256, 4
UPDATE_TILE = 128


@triton.jit
def _encode_kernel(  # type: ignore[no-untyped-def]
    sections,
    section_of,
    state,
    scratch,
    ELEMENT: tl.constexpr,
    WIDTH: tl.constexpr,
    WORDS: tl.constexpr,
    TILE: tl.constexpr,
    DENSE: tl.constexpr,
    HEADER: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
):
    """One block: a bit for every element that differs, then the record, at its own place in the patch."""
    program = tl.program_id(0)
    section = sections + tl.load(section_of + program) * 6
    block = program - tl.load(section)
    now = tl.load(section + 2).to(tl.pointer_type(ELEMENT)) + block * (WORDS * 32)
    old = tl.load(section + 3).to(tl.pointer_type(ELEMENT)) + block * (WORDS * 32)
    elements = _num_elements(section, block, WORDS)
    scratch += program.to(tl.int64) * WORDS
    if elements == WORDS * 32:
        _find_bits(now, old, scratch, WIDTH, WORDS, TILE, IS_ALIGNED)
    else:
        _find_bits_at_end(now, old, elements, scratch, WORDS, TILE)
    _write_block(
        section,
        block,
        now,
        sections,
        1,
        old,
        elements,
        state,
        scratch,
        sections,
        sections,
        sections,
        0,
        WIDTH,
        WORDS,
        TILE,
        DENSE,
        HEADER,
        IS_GATHERED=False,
        IS_KEPT=False,
    )


@triton.jit(do_not_specialize=["undo_bytes"])
def _update_kernel(  # type: ignore[no-untyped-def]
    sections,
    blocks,
    sources,
    pieces,
    state,
    scratch,
    entries,
    undo,
    undo_used,
    undo_bytes,
    ELEMENT: tl.constexpr,
    WIDTH: tl.constexpr,
    WORDS: tl.constexpr,
    TILE: tl.constexpr,
    DENSE: tl.constexpr,
    HEADER: tl.constexpr,
    IS_GATHERED: tl.constexpr,
):
    """The same for a block of the weights themselves and the image that is kept, which is brought up to date."""
    program = tl.program_id(0)
    which = tl.load(blocks + program)
    section = sections + (which & 0xFFFFFFFF) * 6
    block = which >> 32
    source = tl.load(sources + program)
    old = tl.load(section + 3).to(tl.pointer_type(ELEMENT)) + block * (WORDS * 32)
    elements = _num_elements(section, block, WORDS)
    scratch += program.to(tl.int64) * WORDS
    now = old
    num_pieces = 1
    if IS_GATHERED:
        pieces += (source & 0xFFFFFFFF) * 4
        num_pieces = (source >> 32).to(tl.int32)
        find_gathered_bits(pieces, num_pieces, old, elements, scratch, WIDTH, WORDS, GATHER_WORDS)
    else:
        now = source.to(tl.pointer_type(ELEMENT))
        if elements == WORDS * 32:
            _find_bits(now, old, scratch, WIDTH, WORDS, TILE, True)
        else:
            _find_bits_at_end(now, old, elements, scratch, WORDS, TILE)
    _write_block(
        section,
        block,
        now,
        pieces,
        num_pieces,
        old,
        elements,
        state,
        scratch,
        entries,
        undo,
        undo_used,
        undo_bytes,
        WIDTH,
        WORDS,
        TILE,
        DENSE,
        HEADER,
        IS_GATHERED,
        IS_KEPT=True,
    )


@triton.jit
def _num_elements(section, block, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Elements of a block."""
    return tl.minimum(tl.load(section + 1) - block * (WORDS * 32), WORDS * 32).to(tl.int32)


@triton.jit
def _write_block(  # type: ignore[no-untyped-def]
    section,
    block,
    now,
    pieces,
    num_pieces,
    old,
    elements,
    state,
    scratch,
    entries,
    undo,
    undo_used,
    undo_bytes,
    WIDTH: tl.constexpr,
    WORDS: tl.constexpr,
    TILE: tl.constexpr,
    DENSE: tl.constexpr,
    HEADER: tl.constexpr,
    IS_GATHERED: tl.constexpr,
    IS_KEPT: tl.constexpr,
):
    """The record of a block whose bits are known; of a kept image, what undoes it, and then the new elements."""
    state += 2 * tl.load(section + 5)
    patch = tl.load(section + 4).to(tl.pointer_type(tl.uint8)) + tl.load(state)
    table = (patch + HEADER).to(tl.pointer_type(tl.int64))
    first_record = HEADER + (tl.load(section + 1) + WORDS * 32 - 1) // (WORDS * 32) * 8
    tl.debug_barrier()
    word = tl.arange(0, WORDS)
    bits = tl.load(scratch + word)
    count = _popcount(bits)
    changes = tl.sum(count, 0)
    group_counts = tl.sum(tl.reshape(count, (WORDS // 8, 8)), axis=1)
    wide_count = tl.zeros((WORDS,), tl.int32)
    if WIDTH == 2:
        wide_count = _count_wide(now, pieces, num_pieces, old, bits, count, WORDS, IS_GATHERED)
    escapes = tl.sum(wide_count, 0)

    VALUE: tl.constexpr = 4 if WIDTH == 4 else 1
    sparse = (WORDS // 8 + changes * (1 + VALUE) + 2 * escapes + 3) // 4 * 4
    whole = (elements * WIDTH + 3) // 4 * 4
    dense = (changes > 0) & ((tl.max(group_counts, 0) == 256) | (sparse >= whole))
    size = tl.where(changes == 0, 0, tl.where(dense, whole, sparse))
    offset = first_record + tl.atomic_add(state + 1, size.to(tl.int64))
    shown = tl.where(dense, DENSE, changes).to(tl.int64)
    tl.store(table + block, (offset // 4) | (shown << 32) | (tl.where(dense, 0, escapes).to(tl.int64) << 48))

    record = patch + offset
    if size > 0:
        tl.store(record + size - 4 + tl.arange(0, 4), tl.zeros((4,), tl.uint8))  # padding
    num_undone = 0
    if IS_KEPT:
        entries += tl.load(section + 2) + block
        undo, num_undone = claim_undo(entries, undo, undo_used, undo_bytes, changes, elements, dense, WIDTH)
    tl.debug_barrier()
    if dense:
        _write_dense(
            now, pieces, num_pieces, old, elements, record, undo, num_undone, WORDS, TILE, IS_GATHERED, IS_KEPT
        )
    elif changes > 0:
        tl.store(record + tl.arange(0, WORDS // 8), group_counts.to(tl.uint8))
        _write_changes(
            now,
            pieces,
            num_pieces,
            old,
            bits,
            count,
            wide_count,
            changes,
            record + WORDS // 8,
            undo,
            num_undone,
            WIDTH,
            WORDS,
            IS_GATHERED,
            IS_KEPT,
        )


@triton.jit
def _popcount(bits):  # type: ignore[no-untyped-def]
    """Bits set in 32-bit words; with arithmetic, because Triton's interpreter has no instruction for it."""
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    return (((bits + (bits >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24


@triton.jit
def _find_bits(  # type: ignore[no-untyped-def]
    now, old, scratch, WIDTH: tl.constexpr, WORDS: tl.constexpr, TILE: tl.constexpr, IS_ALIGNED: tl.constexpr
):
    """A bit for every element of a whole block that differs; four bytes at a time, tile by tile: few registers."""
    PER: tl.constexpr = 4 // WIDTH
    MASK: tl.constexpr = (1 << (8 * WIDTH)) - 1
    lane = tl.arange(0, 32 // PER)[None, :]
    now = now.to(tl.pointer_type(tl.int32))
    old = old.to(tl.pointer_type(tl.int32))
    for part in tl.static_range(0, WORDS, TILE):
        word = part + tl.arange(0, TILE)
        index = word[:, None] * (32 // PER) + lane
        if IS_ALIGNED:
            differs = tl.load(tl.multiple_of(now + index, [16, 16])) ^ tl.load(tl.multiple_of(old + index, [16, 16]))
        else:
            differs = tl.load(now + index) ^ tl.load(old + index)
        flags = (differs & MASK != 0).to(tl.int32) if PER > 1 else (differs != 0).to(tl.int32)
        for number in tl.static_range(1, PER):
            flags |= ((differs >> (8 * WIDTH * number)) & MASK != 0).to(tl.int32) << number
        tl.store(scratch + word, tl.sum(flags << (lane * PER), axis=1))


@triton.jit
def _find_bits_at_end(  # type: ignore[no-untyped-def]
    now, old, elements, scratch, WORDS: tl.constexpr, TILE: tl.constexpr
):
    """The same for a block that is not whole."""
    lane = tl.arange(0, 32)[None, :]
    for part in range(0, WORDS, TILE):
        word = part + tl.arange(0, TILE)
        index = word[:, None] * 32 + lane
        a = tl.load(now + index, mask=index < elements, other=0)
        b = tl.load(old + index, mask=index < elements, other=0)
        tl.store(scratch + word, tl.sum((a != b).to(tl.int32) << lane, axis=1))


@triton.jit
def _count_wide(  # type: ignore[no-untyped-def]
    now, pieces, num_pieces, old, bits, count, WORDS: tl.constexpr, IS_GATHERED: tl.constexpr
):
    """How many changes of each word of 16-bit elements are too large for a byte."""
    found = tl.zeros((WORDS,), tl.int32)
    word = tl.arange(0, WORDS)
    for _ in range(0, tl.max(count, 0)):
        there = bits != 0
        at = word * 32 + _popcount((bits & -bits) - 1)
        new = tl.load(source_of(now, pieces, num_pieces, at, IS_GATHERED), mask=there, other=0)
        step = new - tl.load(old + at, mask=there, other=0)
        found += ((step < -127) | (step > 127)).to(tl.int32)
        bits = bits & (bits - 1)
    return found


@triton.jit
def _write_dense(  # type: ignore[no-untyped-def]
    now,
    pieces,
    num_pieces,
    old,
    elements,
    record,
    undo,
    num_undone,
    WORDS: tl.constexpr,
    TILE: tl.constexpr,
    IS_GATHERED: tl.constexpr,
    IS_KEPT: tl.constexpr,
):
    """The elements of a block, verbatim; in gaps of the weights, those of the image."""
    raw = record.to(tl.pointer_type(old.dtype.element_ty))
    lane = tl.arange(0, TILE * 32)
    for begin in range(0, elements, TILE * 32):
        at = begin + lane
        inside = at < elements
        value = tl.load(old + at, mask=inside, other=0) if IS_KEPT else tl.load(now + at, mask=inside, other=0)
        if IS_KEPT:
            kept = undo.to(tl.pointer_type(old.dtype.element_ty))
            tl.store(kept + at, value, mask=inside & (at < num_undone))
            value = new_values(now, pieces, num_pieces, at, inside, value, IS_GATHERED)
            tl.store(old + at, value, mask=inside)
        tl.store(raw + at, value, mask=inside)


@triton.jit
def _write_changes(  # type: ignore[no-untyped-def]
    now,
    pieces,
    num_pieces,
    old,
    bits,
    count,
    wide_count,
    changes,
    places,
    undo,
    num_undone,
    WIDTH: tl.constexpr,
    WORDS: tl.constexpr,
    IS_GATHERED: tl.constexpr,
    IS_KEPT: tl.constexpr,
):
    """Places and values: the first change of every word, then the second, and so on."""
    VALUE: tl.constexpr = 4 if WIDTH == 4 else 1
    values = places + changes
    wide = (values + changes * VALUE).to(tl.pointer_type(tl.int16))
    rank = tl.cumsum(count, 0) - count
    wide_rank = tl.cumsum(wide_count, 0) - wide_count
    word = tl.arange(0, WORDS)
    for _ in range(0, tl.max(count, 0)):
        there = bits != 0
        at = word * 32 + _popcount((bits & -bits) - 1)
        tl.store(places + rank, (at % 256).to(tl.uint8), mask=there)
        value = tl.load(source_of(now, pieces, num_pieces, at, IS_GATHERED), mask=there, other=0)
        if WIDTH == 1:
            tl.store(values + rank, value, mask=there)
        elif WIDTH == 4:
            for byte in tl.static_range(4):
                tl.store(values + 4 * rank + byte, (value >> (8 * byte)).to(tl.uint8), mask=there)
        else:
            step = value - tl.load(old + at, mask=there, other=0)
            escape = there & ((step < -127) | (step > 127))
            tl.store(values + rank, tl.where(escape, 128, step & 0xFF).to(tl.uint8), mask=there)
            tl.store(wide + wide_rank, value, mask=escape)
            wide_rank += escape.to(tl.int32)
        if IS_KEPT:
            update_changed(old, at, value, there, undo, rank, changes, num_undone)
        rank += there.to(tl.int32)
        bits = bits & (bits - 1)


@triton.jit(do_not_specialize=["width_and_magic", "base", "version"])
def _finish_kernel(  # type: ignore[no-untyped-def]
    sections, state, width_and_magic, base, version, BLOCK: tl.constexpr, HEADER: tl.constexpr
):
    """The header of a patch whose records are written; the next one begins after it, at a multiple of eight bytes."""
    section = sections + tl.program_id(0) * 6
    state += 2 * tl.load(section + 5)
    begin = tl.load(state)
    num_elements = tl.load(section + 1)
    size = HEADER + (num_elements + BLOCK - 1) // BLOCK * 8 + tl.load(state + 1)
    header = (tl.load(section + 4) + begin).to(tl.pointer_type(tl.int64))
    tl.store(header, width_and_magic)
    tl.store(header + 1, num_elements)
    tl.store(header + 2, size)
    tl.store(header + 3, base)
    tl.store(header + 4, version)
    tl.store(state, begin + (size + 7) // 8 * 8)
    tl.store(state + 1, 0)


def encode(
    blocks: Blocks, table: torch.Tensor, state: torch.Tensor, *, base: int, version: int, is_aligned: bool
) -> None:
    """Queue the patches between two images each.

    `table` has a row for each section: its first block, its elements, the addresses of the new and the old one, where
    the patches of its image begin, and the number of the image. A patch begins `state[image, 0]` bytes after that,
    which is where the next one begins afterwards; `state[image, 1]` counts bytes of records meanwhile, from 0.
    `is_aligned`: whether all images begin at multiples of 16 bytes.
    """
    if blocks.grid[0]:
        scratch = torch.empty(WORDS * blocks.grid[0], dtype=torch.int32, device=state.device)
        _encode_kernel[blocks.grid](
            table,
            blocks.section_of,
            state,
            scratch,
            ELEMENT=ELEMENTS[blocks.width],
            WIDTH=blocks.width,
            WORDS=WORDS,
            TILE=ENCODE_TILE,
            DENSE=DENSE,
            HEADER=HEADER_BYTES,
            IS_ALIGNED=is_aligned,
            num_warps=ENCODE_WARPS,
        )
    finish(blocks.width, table, state, base=base, version=version)


@dataclass(frozen=True, slots=True)
class KeptBlocks:
    """Blocks of a kept image, of elements of one size, and where their elements are in the weights; on the device."""

    width: int
    blocks: torch.Tensor
    """A section's row, and which of its blocks (upper half)."""
    sources: torch.Tensor
    """Where each block begins in the weights; or its first piece, and how many it has (upper half)."""
    pieces: torch.Tensor | None
    """See `kept_pieces`; None: every block lies in one piece."""


def update(
    blocks: KeptBlocks,
    table: torch.Tensor,
    state: torch.Tensor,
    entries: torch.Tensor,
    undo: torch.Tensor,
    undo_used: torch.Tensor,
) -> None:
    """Queue the records of patches from a kept image to the weights, and bring it up to date.

    `table` as for `encode`, with the number of a section's first block in `entries` instead of a new image's address.
    Patches are complete after `finish`.
    """
    count = len(blocks.blocks)
    scratch = torch.empty(WORDS * count, dtype=torch.int32, device=state.device)
    _update_kernel[(count,)](
        table,
        blocks.blocks,
        blocks.sources,
        blocks.sources if blocks.pieces is None else blocks.pieces,
        state,
        scratch,
        entries,
        undo,
        undo_used,
        len(undo),
        ELEMENT=ELEMENTS[blocks.width],
        WIDTH=blocks.width,
        WORDS=WORDS,
        TILE=UPDATE_TILE,
        DENSE=DENSE,
        HEADER=HEADER_BYTES,
        IS_GATHERED=blocks.pieces is not None,
        num_warps=ENCODE_WARPS,
    )


def finish(width: int, table: torch.Tensor, state: torch.Tensor, *, base: int, version: int) -> None:
    """Queue the headers of patches whose records are written."""
    words = delta.header_bytes(width, 0, 0, base, version).view(np.int64).tolist()
    _finish_kernel[(len(table),)](table, state, words[0], words[3], words[4], BLOCK=BLOCK, HEADER=HEADER_BYTES)
