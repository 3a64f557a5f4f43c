"""Patches on a GPU: Triton kernels that give the same results as the C module, bit for bit (record order aside).

One launch works on the sections of many images that have elements of one size: a table on the device has a row for each
section, another one the section of every block. Sizes of patches stay on the device: a kernel finds in `state` where
its patch begins, because the patches of an image's sections are contiguous. The host waits once, for the last of them.

Numbers that differ from version to version are not specialised on: Triton would compile a kernel anew for every one
that is 1, or a multiple of 16, in the middle of a version.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from weft.codec import delta
from weft.codec.delta import BLOCK, DENSE, GROUPS, HEADER_BYTES, ImageRows
from weft.codec.image import Section
from weft.codec.kept_kernels import GATHER_WORDS, claim_undo, find_gathered_bits, new_values, source_of, update_changed

WORDS = BLOCK // 32
ENCODE_TILE, ENCODE_WARPS = 256, 4
UPDATE_TILE = 128
APPLY_WARPS = 4
_ELEMENTS = {1: tl.uint8, 2: tl.int16, 4: tl.int32}


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


@triton.jit
def _open_kernel(images, places, sections, found, ends, HEADER: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the patch of each section of an image begins, −1 if there is none, and its header; then where all end."""
    image = tl.program_id(0)
    first = tl.load(images + 2 * image)
    data = tl.load(places + 2 * image).to(tl.pointer_type(tl.uint8))
    num_bytes = tl.load(places + 2 * image + 1)
    at = tl.zeros((), tl.int64)
    for number in range(first, first + tl.load(images + 2 * image + 1)):
        entry = found + number * 6
        begin = at
        tl.store(entry, -1)
        if (begin >= 0) & (begin + HEADER <= num_bytes):
            header = (data + begin).to(tl.pointer_type(tl.int64))
            for field in tl.static_range(5):
                tl.store(entry + 1 + field, tl.load(header + field))
            size = tl.load(header + 2)
            first_record = tl.load(sections + number * 3 + 2)
            fits = (size >= first_record) & (size <= num_bytes - begin)
            known = (tl.load(header) == tl.load(sections + number * 3)) & (
                tl.load(header + 1) == tl.load(sections + number * 3 + 1)
            )
            if fits & known:
                tl.store(entry, begin)
                at = begin + (size + 7) // 8 * 8
            else:
                at = tl.full((), -1, tl.int64)
        else:
            at = tl.full((), -1, tl.int64)
    tl.store(ends + image, at)


@triton.jit
def _check_kernel(  # type: ignore[no-untyped-def]
    blocks, section_of, places, opened, flags, WIDTH: tl.constexpr, GROUPS: tl.constexpr, HEADER: tl.constexpr
):
    """Whether a block's record lies inside its patch and its counts add up, and whether the block is dense."""
    program = tl.program_id(0)
    section = blocks + tl.load(section_of + program) * 4
    number = tl.load(section + 2)
    opened += 6 * number
    flags += 2 * number
    begin = tl.load(opened)
    if begin >= 0:
        block = program - tl.load(section)
        num_elements = tl.load(section + 1)
        patch = (tl.load(places + 2 * tl.load(section + 3)) + begin).to(tl.pointer_type(tl.uint8))
        num_bytes = tl.load(opened + 3)
        first_record = HEADER + (num_elements + GROUPS * 256 - 1) // (GROUPS * 256) * 8
        elements = tl.minimum(num_elements - block * GROUPS * 256, GROUPS * 256)
        entry = tl.load((patch + HEADER).to(tl.pointer_type(tl.int64)) + block)
        offset = (entry & 0xFFFFFFFF) * 4
        changes = (entry >> 32) & 0xFFFF
        escapes = (entry >> 48) & 0xFFFF
        VALUE: tl.constexpr = 4 if WIDTH == 4 else 1
        dense = changes == 65535
        size = tl.where(dense, elements * WIDTH, GROUPS + changes * (1 + VALUE) + 2 * escapes)
        size = (size + 3) // 4 * 4
        bad = (~dense & (changes > elements)) | (escapes > changes) | ((escapes > 0) & (dense | (WIDTH != 2)))
        bad = bad | ((changes > 0) & ((offset < first_record) | (offset + size > num_bytes)))
        if ~bad & ~dense & (changes > 0):
            counts = tl.load(patch + offset + tl.arange(0, GROUPS)).to(tl.int64)
            bad = bad | (tl.sum(counts, 0) != changes)
        if bad:
            tl.store(flags, 1)
        if ~dense:
            tl.store(flags + 1, 1)


@triton.jit
def _apply_kernel(  # type: ignore[no-untyped-def]
    blocks,
    section_of,
    places,
    opened,
    first_row,
    num_rows,
    row_begin,
    row_address,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    SLOTS: tl.constexpr,
    ELEMENT: tl.constexpr,
    HEADER: tl.constexpr,
):
    """One block of a checked patch; whatever the patch says, only elements of the block are written."""
    program = tl.program_id(0)
    section = blocks + tl.load(section_of + program) * 4
    block = program - tl.load(section)
    begin_of_patch = tl.load(opened + 6 * tl.load(section + 2))
    patch = (tl.load(places + 2 * tl.load(section + 3)) + begin_of_patch).to(tl.pointer_type(tl.uint8))
    changes = tl.zeros((), tl.int32)
    entry = tl.zeros((), tl.int64)
    if begin_of_patch >= 0:
        entry = tl.load((patch + HEADER).to(tl.pointer_type(tl.int64)) + block)
        changes = ((entry >> 32) & 0xFFFF).to(tl.int32)
    if changes > 0:
        record = patch + (entry & 0xFFFFFFFF) * 4
        first = block * GROUPS * 256
        elements = tl.minimum(tl.load(section + 1) - first, GROUPS * 256).to(tl.int32)
        row = tl.load(first_row + program)
        rows = tl.load(num_rows + program)
        if changes == 65535:
            raw = record.to(tl.pointer_type(ELEMENT))
            lane = tl.arange(0, GROUPS * SLOTS)
            for begin in range(0, elements, GROUPS * SLOTS):
                inside = begin + lane < elements
                into = _address(first + begin + lane, row, rows, row_begin, row_address, WIDTH)
                value = tl.load(raw + begin + lane, mask=inside, other=0)
                tl.store(into.to(tl.pointer_type(ELEMENT)), value, mask=inside)
        else:
            escapes = ((entry >> 48) & 0xFFFF).to(tl.int32)
            _apply_changes(
                record,
                changes,
                escapes,
                first,
                elements,
                row,
                rows,
                row_begin,
                row_address,
                WIDTH,
                GROUPS,
                SLOTS,
                ELEMENT,
            )


@triton.jit
def _apply_changes(  # type: ignore[no-untyped-def]
    record,
    changes,
    escapes,
    first,
    elements,
    row,
    rows,
    row_begin,
    row_address,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    SLOTS: tl.constexpr,
    ELEMENT: tl.constexpr,
):
    """Some changes of every group at once, then the next ones."""
    group = tl.arange(0, GROUPS)
    slot = tl.arange(0, SLOTS)[None, :]
    count = tl.load(record + group).to(tl.int32)
    start = tl.cumsum(count, 0) - count
    places = record + GROUPS
    values = places + changes
    wide = (values + changes).to(tl.pointer_type(tl.int16))
    wide_rank = tl.zeros((GROUPS,), tl.int32)
    if escapes > 0:
        wide_rank = _count_escapes(values, count, start, GROUPS, SLOTS)
    for begin in range(0, tl.max(count, 0), SLOTS):
        there = begin + slot < count[:, None]
        number = start[:, None] + begin + slot
        at = group[:, None] * 256 + tl.load(places + number, mask=there, other=0).to(tl.int32)
        there = there & (at < elements)
        into = _address(first + at, row, rows, row_begin, row_address, WIDTH).to(tl.pointer_type(ELEMENT))
        if WIDTH == 1:
            tl.store(into, tl.load(values + number, mask=there, other=0), mask=there)
        elif WIDTH == 4:
            value = tl.zeros((GROUPS, SLOTS), tl.int32)
            for byte in tl.static_range(4):
                part = tl.load(values + 4 * number + byte, mask=there, other=0).to(tl.int32)
                value = value | (part << (8 * byte))
            tl.store(into, value, mask=there)
        else:
            step = tl.load(values + number, mask=there, other=0).to(tl.int8, bitcast=True).to(tl.int16)
            escape = there & (step == -128)
            new = tl.load(into, mask=there, other=0) + step
            if escapes > 0:
                rank = wide_rank[:, None] + tl.cumsum(escape.to(tl.int32), 1) - 1
                new = tl.where(escape, tl.load(wide + rank, mask=escape, other=0), new)
                wide_rank += tl.sum(escape.to(tl.int32), axis=1)
            tl.store(into, new, mask=there)


@triton.jit
def _count_escapes(values, count, start, GROUPS: tl.constexpr, SLOTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Escapes before each group."""
    slot = tl.arange(0, SLOTS)[None, :]
    found = tl.zeros((GROUPS,), tl.int32)
    for begin in range(0, tl.max(count, 0), SLOTS):
        value = tl.load(values + start[:, None] + begin + slot, mask=begin + slot < count[:, None], other=0)
        found += tl.sum((value == 128).to(tl.int32), axis=1)
    return tl.cumsum(found, 0) - found


@triton.jit
def _address(element, row, rows, row_begin, row_address, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where elements of the image lie: in one of a few rows."""
    byte = element * WIDTH
    address = tl.load(row_address + row) + byte - tl.load(row_begin + row)
    for number in range(1, rows):
        begin = tl.load(row_begin + row + number)
        address = tl.where(byte >= begin, tl.load(row_address + row + number) + byte - begin, address)
    return address


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of some sections with elements of one size, in device memory."""

    width: int
    sections: torch.Tensor
    """A row for each section: its first block, its elements, its number, and its image."""
    section_of: torch.Tensor
    """The section of every block, as a row of `sections`."""

    @classmethod
    def of(cls, parts: Sequence[tuple[int, int, Section]], device: torch.device) -> Blocks:
        """Sections with the number of each, and of its image."""
        counts = np.array([num_blocks(part) for _, _, part in parts], dtype=np.int64)
        firsts = np.cumsum(counts) - counts
        rows = [
            (first, part.num_elements, number, image)
            for first, (number, image, part) in zip(firsts.tolist(), parts, strict=True)
        ]
        columns = np.array(rows, dtype=np.int64).reshape(-1, 4), np.repeat(np.arange(len(parts)), counts)
        return cls(parts[0][2].width, *(torch.from_numpy(column).to(device) for column in columns))

    @property
    def grid(self) -> tuple[int]:
        """A program for every block."""
        return (len(self.section_of),)


def num_blocks(part: Section) -> int:
    """Blocks of a section."""
    return -(-part.num_elements // BLOCK)


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
            ELEMENT=_ELEMENTS[blocks.width],
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
        ELEMENT=_ELEMENTS[blocks.width],
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


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """Rows of some sections, and which of them every block touches, in device memory."""

    first: torch.Tensor
    count: torch.Tensor
    begin: torch.Tensor
    address: torch.Tensor

    @classmethod
    def of(cls, sections: Sequence[tuple[Section, ImageRows]], device: torch.device) -> DeviceRows:
        """Computed once for a plan."""
        columns: list[tuple[NDArray[np.int64], ...]] = []
        num_rows = 0
        for part, rows in sections:
            starts = np.arange(num_blocks(part), dtype=np.int64) * BLOCK * part.width
            ends = np.minimum(starts + BLOCK * part.width, part.num_bytes)
            begin = rows.begin.astype(np.int64)
            first = np.searchsorted(begin, starts, side="right") - 1
            last = np.searchsorted(begin, ends - 1, side="right") - 1
            columns.append((first + num_rows, last - first + 1, begin, rows.address.astype(np.int64)))
            num_rows += len(begin)
        return cls(*(torch.from_numpy(np.concatenate(column)).to(device) for column in zip(*columns, strict=True)))


def open_patches(
    images: torch.Tensor, places: torch.Tensor, sections: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queue finding the patches of all sections of images: a row of six numbers for each, and where each image's end.

    A row is where the patch begins, or −1 if there is none of this section, and the words of its header. `images` has
    the first section of each image, and how many there are; `places` the address of its patches, and their bytes;
    `sections` a row of `section_words` for each.
    """
    found = torch.zeros(6 * len(sections), dtype=torch.int64, device=sections.device)
    ends = torch.zeros(len(images), dtype=torch.int64, device=sections.device)
    _open_kernel[(len(images),)](images, places, sections, found, ends, HEADER=HEADER_BYTES, num_warps=1)
    return found, ends


def section_words(width: int, num_elements: int) -> list[int]:
    """A section's row for `open_patches`: the first words of its header, and where records begin."""
    words = delta.header_bytes(width, num_elements, 0, 0, 0).view(np.int64).tolist()
    return [words[0], words[1], delta.first_record(num_elements)]


def check(blocks: Blocks, places: torch.Tensor, opened: torch.Tensor, flags: torch.Tensor) -> None:
    """Queue checking patches.

    Sets the first flag of a section if applying its patch could read outside it, the second if it has a block that is
    not dense. Places are kept inside blocks in any case.
    """
    if blocks.grid[0]:
        _check_kernel[blocks.grid](
            blocks.sections,
            blocks.section_of,
            places,
            opened,
            flags,
            WIDTH=blocks.width,
            GROUPS=GROUPS,
            HEADER=HEADER_BYTES,
            num_warps=1,
        )


def apply(blocks: Blocks, places: torch.Tensor, opened: torch.Tensor, rows: DeviceRows) -> None:
    """Queue applying patches, which have been checked, to rows of device memory."""
    if blocks.grid[0]:
        _apply_kernel[blocks.grid](
            blocks.sections,
            blocks.section_of,
            places,
            opened,
            rows.first,
            rows.count,
            rows.begin,
            rows.address,
            WIDTH=blocks.width,
            GROUPS=GROUPS,
            SLOTS=8,
            ELEMENT=_ELEMENTS[blocks.width],
            HEADER=HEADER_BYTES,
            num_warps=APPLY_WARPS,
        )
