"""Patches on a GPU: Triton kernels that give what the C module gives, bit for bit (record order aside)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from weft.codec import delta
from weft.codec.delta import BLOCK, DENSE, GROUPS, HEADER_BYTES, ImageRows
from weft.errors import CodecError

WORDS = BLOCK // 32
ENCODE_TILE, ENCODE_WARPS = 256, 4
APPLY_WARPS = 4
_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@triton.jit
def _encode_kernel(  # type: ignore[no-untyped-def]
    now,
    old,
    num_elements,
    patch,
    table,
    cursor,
    scratch,
    WIDTH: tl.constexpr,
    WORDS: tl.constexpr,
    TILE: tl.constexpr,
    DENSE: tl.constexpr,
):
    """One block: a bit for every element that differs, then the record, at a place of its own in the patch."""
    block = tl.program_id(0).to(tl.int64)
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
    count = libdevice.popc(bits)
    changes = tl.sum(count, 0)
    group_counts = tl.sum(tl.reshape(count, (WORDS // 8, 8)), axis=1)
    wide_count = _count_wide(now, old, bits, count, WORDS) if WIDTH == 2 else tl.zeros((WORDS,), tl.int32)
    escapes = tl.sum(wide_count, 0)

    VALUE: tl.constexpr = 4 if WIDTH == 4 else 1
    sparse = (WORDS // 8 + changes * (1 + VALUE) + 2 * escapes + 3) // 4 * 4
    whole = (elements * WIDTH + 3) // 4 * 4
    dense = (changes > 0) & ((tl.max(group_counts, 0) == 256) | (sparse >= whole))
    size = tl.where(changes == 0, 0, tl.where(dense, whole, sparse))
    offset = tl.atomic_add(cursor, size.to(tl.int64))
    shown = tl.where(dense, DENSE, changes).to(tl.int64)
    tl.store(table + block, (offset // 4) | (shown << 32) | (tl.where(dense, 0, escapes).to(tl.int64) << 48))

    record = patch + offset
    if size > 0:
        tl.store(record + size - 4 + tl.arange(0, 4), tl.zeros((4,), tl.uint8))  # what pads it
    tl.debug_barrier()
    if dense:
        _write_dense(now, elements, record, WORDS, TILE)
    elif changes > 0:
        tl.store(record + tl.arange(0, WORDS // 8), group_counts.to(tl.uint8))
        _write_changes(now, old, bits, count, wide_count, changes, record + WORDS // 8, WIDTH, WORDS)


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
        at = word * 32 + libdevice.popc((bits & -bits) - 1)
        step = tl.load(now + at, mask=there, other=0) - tl.load(old + at, mask=there, other=0)
        found += ((step < -127) | (step > 127)).to(tl.int32)
        bits = bits & (bits - 1)
    return found


@triton.jit
def _write_dense(now, elements, record, WORDS: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The elements of a block as they are."""
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
        at = word * 32 + libdevice.popc((bits & -bits) - 1)
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


@triton.jit
def _check_kernel(  # type: ignore[no-untyped-def]
    patch, num_bytes, first_record, num_elements, num_blocks, table, wrong, WIDTH: tl.constexpr, GROUPS: tl.constexpr
):
    """Whether the records of some blocks lie inside the patch and their counts add up."""
    block = tl.program_id(0).to(tl.int64)
    elements = tl.minimum(num_elements - block * GROUPS * 256, GROUPS * 256)
    entry = tl.load(table + block)
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
        tl.store(wrong, 1)


@triton.jit
def _apply_kernel(  # type: ignore[no-untyped-def]
    patch,
    table,
    num_elements,
    first_row,
    num_rows,
    row_begin,
    row_address,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    SLOTS: tl.constexpr,
    ELEMENT: tl.constexpr,
):
    """One block of a checked patch; whatever it says, only elements of the block are written."""
    block = tl.program_id(0).to(tl.int64)
    entry = tl.load(table + block)
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


def encode(now: torch.Tensor, old: torch.Tensor, *, width: int, base: int, version: int, out: torch.Tensor) -> int:
    """The patch between two images in device memory, into `out`; returns its bytes."""
    num_elements = now.numel() * now.element_size() // width
    if len(out) < delta.max_bytes(num_elements, width):
        raise CodecError(f"a patch of {num_elements} elements may not fit into {len(out)} bytes")
    kind = _TYPES[width]
    num_blocks = -(-num_elements // BLOCK)
    begin = delta.first_record(num_elements)
    cursor = torch.full((1,), begin, dtype=torch.int64, device=now.device)
    scratch = torch.empty(WORDS * num_blocks, dtype=torch.int32, device=now.device)
    table = out[HEADER_BYTES:begin].view(torch.int64)
    if num_blocks:
        _encode_kernel[(num_blocks,)](
            now.view(kind),
            old.view(kind),
            num_elements,
            out,
            table,
            cursor,
            scratch,
            WIDTH=width,
            WORDS=WORDS,
            TILE=ENCODE_TILE,
            DENSE=DENSE,
            num_warps=ENCODE_WARPS,
        )
    num_bytes = int(cursor.item())
    header = delta.header_bytes(width, num_elements, num_bytes, base, version)
    out[:HEADER_BYTES] = torch.from_numpy(header).to(now.device)
    return num_bytes


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


def check(patch: torch.Tensor, *, width: int, num_elements: int) -> None:
    """Raise CodecError if applying the patch could read outside of it; places are kept inside blocks in any case."""
    begin = delta.first_record(num_elements)
    if len(patch) < begin:
        raise CodecError(f"{len(patch)} bytes are no patch of {num_elements} elements")
    header = patch[:HEADER_BYTES].cpu().numpy()
    found = delta.read_header(int(header.ctypes.data), HEADER_BYTES)
    if (found.width, found.num_elements, found.num_bytes) != (width, num_elements, len(patch)):
        raise CodecError(f"a patch of {found.num_elements} elements of {found.width} bytes")
    wrong = torch.zeros(1, dtype=torch.int32, device=patch.device)
    num_blocks = -(-num_elements // BLOCK)
    if num_blocks:
        _check_kernel[(num_blocks,)](
            patch,
            len(patch),
            begin,
            num_elements,
            num_blocks,
            patch[HEADER_BYTES:begin].view(torch.int64),
            wrong,
            WIDTH=width,
            GROUPS=GROUPS,
            num_warps=1,
        )
    if int(wrong.item()):
        raise CodecError("a damaged patch: a record lies outside of it, or its counts do not add up")


def apply(patch: torch.Tensor, *, width: int, num_elements: int, rows: DeviceRows) -> None:
    """Apply a checked patch to rows of device memory; queued on the current stream."""
    begin = delta.first_record(num_elements)
    num_blocks = -(-num_elements // BLOCK)
    if num_blocks:
        _apply_kernel[(num_blocks,)](
            patch,
            patch[HEADER_BYTES:begin].view(torch.int64),
            num_elements,
            rows.first,
            rows.count,
            rows.begin,
            rows.address,
            WIDTH=width,
            GROUPS=GROUPS,
            SLOTS=8,
            ELEMENT={1: tl.uint8, 2: tl.int16, 4: tl.int32}[width],
            num_warps=APPLY_WARPS,
        )
