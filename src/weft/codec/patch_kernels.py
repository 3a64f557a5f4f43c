"""Patches on a GPU: Triton kernels that give the same results as the C module, bit for bit (record order aside).

Sizes of patches stay on the device: a kernel finds in `state` where its patch begins, because the patches of an image's
sections are contiguous. The host waits once, for the last of them.

Numbers that differ from version to version or from Chunk to Chunk are not specialised on: Triton would compile a kernel
anew for every one that is 1, or a multiple of 16, in the middle of a version.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from weft.codec import delta
from weft.codec.delta import BLOCK, DENSE, GROUPS, HEADER_BYTES, ImageRows

WORDS = BLOCK // 32
ENCODE_TILE, ENCODE_WARPS = 256, 4
APPLY_WARPS = 4
_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@triton.jit(do_not_specialize=["num_elements"])
def _encode_kernel(  # type: ignore[no-untyped-def]
    now,
    old,
    num_elements,
    out,
    state,
    scratch,
    WIDTH: tl.constexpr,
    WORDS: tl.constexpr,
    TILE: tl.constexpr,
    DENSE: tl.constexpr,
    HEADER: tl.constexpr,
):
    """One block: a bit for every element that differs, then the record, at its own place in the patch."""
    block = tl.program_id(0).to(tl.int64)
    patch = out + tl.load(state)
    table = (patch + HEADER).to(tl.pointer_type(tl.int64))
    first_record = HEADER + tl.num_programs(0).to(tl.int64) * 8
    first = block * (WORDS * 32)
    elements = tl.minimum(num_elements - first, WORDS * 32).to(tl.int32)
    now += first
    old += first
    scratch += block * WORDS
    if elements == WORDS * 32:
        _find_bits(now, old, scratch, WIDTH, WORDS, TILE)
    else:
        _find_bits_at_end(now, old, elements, scratch, WORDS, TILE)
    tl.debug_barrier()
    word = tl.arange(0, WORDS)
    bits = tl.load(scratch + word)
    count = _popcount(bits)
    changes = tl.sum(count, 0)
    group_counts = tl.sum(tl.reshape(count, (WORDS // 8, 8)), axis=1)
    wide_count = _count_wide(now, old, bits, count, WORDS) if WIDTH == 2 else tl.zeros((WORDS,), tl.int32)
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
    tl.debug_barrier()
    if dense:
        _write_dense(now, elements, record, WORDS, TILE)
    elif changes > 0:
        tl.store(record + tl.arange(0, WORDS // 8), group_counts.to(tl.uint8))
        _write_changes(now, old, bits, count, wide_count, changes, record + WORDS // 8, WIDTH, WORDS)


@triton.jit
def _popcount(bits):  # type: ignore[no-untyped-def]
    """Bits set in 32-bit words; with arithmetic, because Triton's interpreter has no instruction for it."""
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    return (((bits + (bits >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24


@triton.jit
def _find_bits(  # type: ignore[no-untyped-def]
    now, old, scratch, WIDTH: tl.constexpr, WORDS: tl.constexpr, TILE: tl.constexpr
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
def _count_wide(now, old, bits, count, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many changes of each word of 16-bit elements are too large for a byte."""
    found = tl.zeros((WORDS,), tl.int32)
    word = tl.arange(0, WORDS)
    for _ in range(0, tl.max(count, 0)):
        there = bits != 0
        at = word * 32 + _popcount((bits & -bits) - 1)
        step = tl.load(now + at, mask=there, other=0) - tl.load(old + at, mask=there, other=0)
        found += ((step < -127) | (step > 127)).to(tl.int32)
        bits = bits & (bits - 1)
    return found


@triton.jit
def _write_dense(now, elements, record, WORDS: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The elements of a block, verbatim."""
    raw = record.to(tl.pointer_type(now.dtype.element_ty))
    lane = tl.arange(0, TILE * 32)
    for begin in range(0, elements, TILE * 32):
        inside = begin + lane < elements
        tl.store(raw + begin + lane, tl.load(now + begin + lane, mask=inside, other=0), mask=inside)


@triton.jit
def _write_changes(  # type: ignore[no-untyped-def]
    now, old, bits, count, wide_count, changes, places, WIDTH: tl.constexpr, WORDS: tl.constexpr
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
        value = tl.load(now + at, mask=there, other=0)
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
        rank += there.to(tl.int32)
        bits = bits & (bits - 1)


@triton.jit(do_not_specialize=["first_record", "width_and_magic", "num_elements", "base", "version"])
def _finish_kernel(out, state, first_record, width_and_magic, num_elements, base, version):  # type: ignore[no-untyped-def]
    """The header of a patch whose records are written; the next one begins after it, at a multiple of eight bytes."""
    begin = tl.load(state)
    size = first_record + tl.load(state + 1)
    header = (out + begin).to(tl.pointer_type(tl.int64))
    tl.store(header, width_and_magic)
    tl.store(header + 1, num_elements)
    tl.store(header + 2, size)
    tl.store(header + 3, base)
    tl.store(header + 4, version)
    tl.store(state, begin + (size + 7) // 8 * 8)
    tl.store(state + 1, 0)


@triton.jit(do_not_specialize=["num_bytes"])
def _open_kernel(  # type: ignore[no-untyped-def]
    data, num_bytes, sections, found, NUM_SECTIONS: tl.constexpr, HEADER: tl.constexpr
):
    """Where the patch of each section begins, −1 if there is none, and its header; then where the last one ends."""
    at = tl.zeros((), tl.int64)
    for number in range(0, NUM_SECTIONS):
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
    tl.store(found + NUM_SECTIONS * 6, at)


@triton.jit(do_not_specialize=["num_elements"])
def _check_kernel(  # type: ignore[no-untyped-def]
    data, opened, num_elements, flags, WIDTH: tl.constexpr, GROUPS: tl.constexpr, HEADER: tl.constexpr
):
    """Whether a block's record lies inside its patch and its counts add up, and whether the block is dense."""
    begin = tl.load(opened)
    if begin >= 0:
        block = tl.program_id(0).to(tl.int64)
        patch = data + begin
        num_bytes = tl.load(opened + 3)
        first_record = HEADER + tl.num_programs(0).to(tl.int64) * 8
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


@triton.jit(do_not_specialize=["num_elements"])
def _apply_kernel(  # type: ignore[no-untyped-def]
    data,
    opened,
    num_elements,
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
    block = tl.program_id(0).to(tl.int64)
    begin_of_patch = tl.load(opened)
    patch = data + begin_of_patch
    changes = tl.zeros((), tl.int32)
    entry = tl.zeros((), tl.int64)
    if begin_of_patch >= 0:
        entry = tl.load((patch + HEADER).to(tl.pointer_type(tl.int64)) + block)
        changes = ((entry >> 32) & 0xFFFF).to(tl.int32)
    if changes > 0:
        record = patch + (entry & 0xFFFFFFFF) * 4
        first = block * GROUPS * 256
        elements = tl.minimum(num_elements - first, GROUPS * 256).to(tl.int32)
        row = tl.load(first_row + block)
        rows = tl.load(num_rows + block)
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


def encode(
    now: torch.Tensor, old: torch.Tensor, *, width: int, base: int, version: int, out: torch.Tensor, state: torch.Tensor
) -> None:
    """Queue the patch between two images in device memory.

    It begins at byte `state[0]` of `out`, which is where the next one begins afterwards. `state[1]` counts bytes of
    records meanwhile; it is 0 before and after.
    """
    num_elements = now.numel() * now.element_size() // width
    num_blocks = -(-num_elements // BLOCK)
    if num_blocks:
        scratch = torch.empty(WORDS * num_blocks, dtype=torch.int32, device=now.device)
        _encode_kernel[(num_blocks,)](
            now.view(_TYPES[width]),
            old.view(_TYPES[width]),
            num_elements,
            out,
            state,
            scratch,
            WIDTH=width,
            WORDS=WORDS,
            TILE=ENCODE_TILE,
            DENSE=DENSE,
            HEADER=HEADER_BYTES,
            num_warps=ENCODE_WARPS,
        )
    words = delta.header_bytes(width, num_elements, 0, base, version).view(np.int64).tolist()
    _finish_kernel[(1,)](out, state, delta.first_record(num_elements), words[0], words[1], words[3], words[4])


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """An image's rows, and which of them every block touches, in device memory."""

    first: torch.Tensor
    count: torch.Tensor
    begin: torch.Tensor
    address: torch.Tensor

    @classmethod
    def of(cls, rows: ImageRows, width: int, num_elements: int, device: torch.device) -> DeviceRows:
        """Computed once for a plan."""
        starts = np.arange(0, max(num_elements, 1), BLOCK) * width
        ends = np.minimum(starts + BLOCK * width, num_elements * width)
        begin = rows.begin.astype(np.int64)
        first = np.searchsorted(begin, starts, side="right") - 1
        last = np.searchsorted(begin, ends - 1, side="right") - 1
        columns = (first, last - first + 1, begin, rows.address.astype(np.int64))
        return cls(*(torch.from_numpy(np.ascontiguousarray(column)).to(device) for column in columns))


def open_patches(data: torch.Tensor, sections: torch.Tensor) -> torch.Tensor:
    """Queue finding the patches of all sections: a row of six numbers for each, and where the last one ends.

    A row is where the patch begins, or −1 if there is none of this section, and the words of its header. `sections`
    has a row for each as well: the first two words of its header, and where records begin.
    """
    found = torch.zeros(6 * len(sections) + 1, dtype=torch.int64, device=sections.device)
    _open_kernel[(1,)](data, len(data), sections, found, NUM_SECTIONS=len(sections), HEADER=HEADER_BYTES, num_warps=1)
    return found


def section_words(width: int, num_elements: int) -> list[int]:
    """A section's row for `open_patches`."""
    words = delta.header_bytes(width, num_elements, 0, 0, 0).view(np.int64).tolist()
    return [words[0], words[1], delta.first_record(num_elements)]


def check(data: torch.Tensor, opened: torch.Tensor, flags: torch.Tensor, *, width: int, num_elements: int) -> None:
    """Queue checking one of the patches.

    Sets `flags[0]` if applying it could read outside the patch, `flags[1]` if it has a block that is not dense. Places
    are kept inside blocks in any case.
    """
    num_blocks = -(-num_elements // BLOCK)
    if num_blocks:
        _check_kernel[(num_blocks,)](
            data, opened, num_elements, flags, WIDTH=width, GROUPS=GROUPS, HEADER=HEADER_BYTES, num_warps=1
        )


def apply(data: torch.Tensor, opened: torch.Tensor, *, width: int, num_elements: int, rows: DeviceRows) -> None:
    """Queue applying one of the patches, which has been checked, to rows of device memory."""
    num_blocks = -(-num_elements // BLOCK)
    if num_blocks:
        _apply_kernel[(num_blocks,)](
            data,
            opened,
            num_elements,
            rows.first,
            rows.count,
            rows.begin,
            rows.address,
            WIDTH=width,
            GROUPS=GROUPS,
            SLOTS=8,
            ELEMENT={1: tl.uint8, 2: tl.int16, 4: tl.int32}[width],
            HEADER=HEADER_BYTES,
            num_warps=APPLY_WARPS,
        )
