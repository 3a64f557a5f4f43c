"""Patches on a GPU are checked and applied: Triton kernels with the same results as the C module, bit for bit.

A kernel finds where the patch of each section of an image begins, one checks them, and one applies them to rows of
device memory. A launch works on the sections of many images that have elements of one size.
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
from weft.codec.delta import BLOCK, GROUPS, HEADER_BYTES, ImageRows
from weft.codec.gpu.blocks import ELEMENTS, Blocks, num_blocks
from weft.codec.image import Section

APPLY_WARPS = 4


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
            ELEMENT=ELEMENTS[blocks.width],
            HEADER=HEADER_BYTES,
            num_warps=APPLY_WARPS,
        )
