"""Patches: the exact changes between two images of the same weights.

An image is weights as bytes, elements of 1, 2 or 4 bytes one after the other. A patch turns the image of one version
into that of the next. Little-endian; N elements in blocks of 16384, split into groups of 256.

1. header   u32 `WPT1`, u32 width, u64 N, u64 bytes of the patch, u64 base version, u64 version
2. table    for every block: u32 offset of its record from the start of the patch / 4, u16 changes, u16 escapes
3. record   of a block with changes: u8 counts[64], u8 places[changes], values, u16 wide[escapes]; zeros up to 4
4. counts   how many elements of each group changed; never all 256
5. places   of the changed elements in their group, ascending
6. values   width 1: the new byte. Width 4: the new u32. Width 2: i8 new − old modulo 2^16, or −128 for an escape,
            whose new u16 is the next of `wide`
7. dense    changes 65535: the record is the block's new elements; taken where that is not longer, or a group is full
8. A block without changes has no record. Records lie after the table, inside the patch, in any order.
9. A patch is applied once, to the base it names; applying it to anything else is refused before anything is written.
10. Equal inputs give equal patches, on every machine and device (the order of records aside).

At 1% changed BF16 elements this is 2.4 bytes for each: 1 for the place, 1 for the value, 0.4 for counts and table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.codec.memory import Bytes, memory_view
from weft.core.geometry.planes import Column
from weft.errors import CodecError
from weft.native import compiled

_codec = compiled("weft._codec")

BLOCK, GROUP = 16384, 256
GROUPS = BLOCK // GROUP
DENSE = 0xFFFF
WIDTHS = (1, 2, 4)
MAX_BYTES = 4 * 0xFFFFFFFF
"""Longest patch: offsets in the table are 32-bit multiples of four bytes."""
_ESCAPE = -128
_MAGIC = 0x31545057
_HEADER = np.dtype(
    [
        ("magic", "<u4"),
        ("width", "<u4"),
        ("num_elements", "<u8"),
        ("num_bytes", "<u8"),
        ("base", "<u8"),
        ("version", "<u8"),
    ]
)
_ENTRY = np.dtype([("offset", "<u4"), ("changes", "<u2"), ("escapes", "<u2")])
HEADER_BYTES = _HEADER.itemsize
BLOCK_OVERHEAD = _ENTRY.itemsize + 4
"""Largest overhead of a block beyond its elements."""
NO_BASE = (1 << 64) - 1
"""Base of a patch that needs none: every block is dense."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchHeader:
    """The header of a patch."""

    width: int
    num_elements: int
    num_bytes: int
    base: int
    version: int

    def check_versions(self, *, base: int | None, version: int) -> None:
        """Raise CodecError unless it turns version `base` into `version`."""
        if self.version != version:
            raise CodecError(f"patch is for version {self.version}, expected {version}")
        if self.base not in (NO_BASE, base):
            raise CodecError(f"patch applies to version {self.base}, but the base is {base}", hint="send an anchor")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRows:
    """Where the bytes of an image lie in memory: rows that are consecutive in the image."""

    begin: Column
    """First byte of each row in the image."""
    address: Column
    length: Column

    @classmethod
    def contiguous(cls, address: int, num_bytes: int) -> ImageRows:
        """An image in one piece."""
        begin, where, length = (np.array([n], dtype=np.uint64) for n in (0, address, num_bytes))
        return cls(begin=begin, address=where, length=length)


def max_bytes(num_elements: int, width: int) -> int:
    """The largest size of a patch of this many elements."""
    num_blocks = -(-num_elements // BLOCK)
    return HEADER_BYTES + num_blocks * BLOCK_OVERHEAD + num_elements * width


def encode(
    now: int, old: int | None, *, width: int, num_elements: int, out: int, capacity: int, base: int, version: int
) -> int:
    """Write the patch from the image at `old` (version `base`) to the one at `now` to `out`; returns its bytes.

    Without `old` it is an anchor, which needs no base. Raises CodecError if it does not fit. Addresses are of this
    process's memory.
    """
    _check_width(width)
    capacity = min(capacity, MAX_BYTES)
    if _codec is not None:
        size = int(_codec.encode(now, old or 0, width, num_elements, out, capacity))
    else:
        before = None if old is None else memory_view(old, num_elements * width)
        size = _encode_slowly(memory_view(now, num_elements * width), before, width, memory_view(out, capacity))
    if size == 0:
        raise CodecError(
            f"a patch of {num_elements} elements does not fit into {capacity} bytes",
            hint=f"{max_bytes(num_elements, width)} bytes always suffice; no patch is longer than {MAX_BYTES}",
        )
    header = memory_view(out, HEADER_BYTES).view(_HEADER)
    header["base"], header["version"] = NO_BASE if old is None else base, version
    return size


def header_bytes(width: int, num_elements: int, num_bytes: int, base: int, version: int) -> Bytes:
    """The header of a patch."""
    return np.array([(_MAGIC, width, num_elements, num_bytes, base, version)], dtype=_HEADER).view(np.uint8)


def read_header(patch: int, num_bytes: int) -> PatchHeader:
    """The header of a patch in memory; raises CodecError if there is none."""
    if num_bytes < HEADER_BYTES:
        raise CodecError(f"patch of {num_bytes} bytes is shorter than its header")
    header = memory_view(patch, HEADER_BYTES).view(_HEADER)[0]
    if header["magic"] != _MAGIC:
        raise CodecError(f"data that begins with {int(header['magic']):#x} is not a patch")
    names = ("width", "num_elements", "num_bytes", "base", "version")
    return PatchHeader(**{name: int(header[name]) for name in names})


def check(patch: int, num_bytes: int, *, width: int, num_elements: int, base: int | None, version: int) -> None:
    """Raise CodecError unless the patch is valid and turns version `base` of this image into `version`."""
    _check_width(width)
    header = read_header(patch, num_bytes)
    header.check_versions(base=base, version=version)
    if _codec is not None:
        wrong = _codec.check(patch, num_bytes, width, num_elements)
    else:
        wrong = _check_slowly(memory_view(patch, num_bytes), width, num_elements)
    if wrong is None and header.base == NO_BASE:
        changes = table_of(memory_view(patch, num_bytes), num_elements)["changes"]
        wrong = None if (changes == DENSE).all() else "it needs a base but names none"
    if wrong is not None:
        raise CodecError(f"patch is damaged: {wrong}")


def apply(patch: int, num_bytes: int, *, width: int, num_elements: int, rows: ImageRows) -> None:
    """Apply a patch that has been checked. Rows must hold the whole image."""
    if int(rows.length.sum()) != num_elements * width or (rows.length % np.uint64(width)).any():
        raise CodecError(f"rows of {int(rows.length.sum())} bytes do not hold {num_elements} elements of {width}")
    if _codec is not None:
        done = _codec.apply(patch, num_bytes, width, num_elements, rows.begin, rows.address, rows.length)
    else:
        done = _apply_slowly(memory_view(patch, num_bytes), width, num_elements, rows)
    if not done:
        raise CodecError("patch was changed after it was checked, or the rows of its image are not consecutive")


def _check_width(width: int) -> None:
    if width not in WIDTHS:
        raise CodecError(f"unsupported elements of {width} bytes", hint="1, 2 or 4")


def dense_table(num_elements: int, width: int) -> Bytes:
    """The table of a patch in which every block is whole, one after the other."""
    table = np.zeros(-(-num_elements // BLOCK), dtype=_ENTRY)
    table["offset"] = (first_record(num_elements) + np.arange(len(table)) * BLOCK * width) // 4
    table["changes"] = DENSE
    return table.view(np.uint8)


def table_of(patch: Bytes, num_elements: int) -> NDArray[Any]:
    """The table of a patch: offset / 4, changes, escapes of every block."""
    return patch[HEADER_BYTES : first_record(num_elements)].view(_ENTRY)


def first_record(num_elements: int) -> int:
    """Where records begin."""
    return HEADER_BYTES + -(-num_elements // BLOCK) * _ENTRY.itemsize


def record_sizes(width: int, num_elements: int, changes: NDArray[Any], escapes: NDArray[Any]) -> NDArray[np.int64]:
    """Bytes of each block's record."""
    elements = np.minimum(num_elements - np.arange(len(changes), dtype=np.int64) * BLOCK, BLOCK)
    sparse = GROUPS + changes.astype(np.int64) * (1 + (4 if width == 4 else 1)) + 2 * escapes.astype(np.int64)
    size = np.where(changes == DENSE, elements * width, sparse)
    return np.where(changes == 0, 0, -(-size // 4) * 4)


# The same in NumPy


def _encode_slowly(now: Bytes, old: Bytes | None, width: int, out: Bytes) -> int:
    new = now.view(f"<u{width}")
    base = None if old is None else old.view(f"<u{width}")
    num_blocks = -(-len(new) // BLOCK)
    at = first_record(len(new))
    if len(out) < at:
        return 0
    table = np.zeros(num_blocks, dtype=_ENTRY)
    for block in range(num_blocks):
        piece = slice(block * BLOCK, (block + 1) * BLOCK)
        changes, escapes, record = _record(new[piece], None if base is None else base[piece], width)
        if len(record) > len(out) - at:
            return 0
        table[block] = at // 4, changes, escapes
        out[at : at + len(record)] = record
        at += len(record)
    out[:HEADER_BYTES] = header_bytes(width, len(new), at, 0, 0)
    out[HEADER_BYTES : HEADER_BYTES + table.nbytes] = table.view(np.uint8)
    return at


def _record(new: NDArray[Any], base: NDArray[Any] | None, width: int) -> tuple[int, int, Bytes]:
    """Changes, escapes and record of one block."""
    dense = _pad(np.ascontiguousarray(new).view(np.uint8))
    if base is None:
        return DENSE, 0, dense
    where = np.flatnonzero(new != base)
    if len(where) == 0:
        return 0, 0, np.zeros(0, dtype=np.uint8)
    counts = np.bincount(where // GROUP, minlength=GROUPS)
    values, wide = new[where], new[:0]
    if width == 2:
        step = (new[where] - base[where]).view("<i2")
        escapes = (step < -127) | (step > 127)
        wide, values = new[where][escapes], np.where(escapes, _ESCAPE, step).astype("<i1")
    streams = (counts.astype(np.uint8), (where % GROUP).astype(np.uint8), values, wide)
    record = _pad(np.concatenate([np.ascontiguousarray(stream).view(np.uint8) for stream in streams]))
    if counts.max() == GROUP or len(record) >= len(dense):
        return DENSE, 0, dense
    return len(where), len(wide), record


def _pad(data: Bytes) -> Bytes:
    return np.concatenate([data, np.zeros(-len(data) % 4, dtype=np.uint8)])


def _check_slowly(patch: Bytes, width: int, num_elements: int) -> str | None:
    header = patch[:HEADER_BYTES].view(_HEADER)[0]
    begin = first_record(num_elements)
    expected = ((header["width"], width), (header["num_elements"], num_elements), (header["num_bytes"], len(patch)))
    if any(int(found) != wanted for found, wanted in expected):
        return "another width or number of elements or bytes"
    if len(patch) < begin:
        return "shorter than its table of blocks"
    entries = enumerate(table_of(patch, num_elements).tolist())
    found = (_check_block(patch, width, min(num_elements - n * BLOCK, BLOCK), begin, *entry) for n, entry in entries)
    return next((wrong for wrong in found if wrong is not None), None)


def _check_block(
    patch: Bytes, width: int, elements: int, begin: int, offset: int, changes: int, escapes: int
) -> str | None:
    if changes != DENSE and changes > elements:
        return "more changes than elements"
    if escapes > changes or (escapes and (width != 2 or changes == DENSE)):
        return "escapes where there can be none"
    size = int(record_sizes(width, elements, np.array([changes]), np.array([escapes]))[0])
    if size and (offset * 4 < begin or offset * 4 + size > len(patch)):
        return "a record lies outside the patch"
    if size and changes != DENSE:
        return _check_record(patch[offset * 4 : offset * 4 + size], width, elements, changes, escapes)
    return None


def _check_record(record: Bytes, width: int, elements: int, changes: int, escapes: int) -> str | None:
    counts, places = record[:GROUPS].astype(np.int64), record[GROUPS : GROUPS + changes].astype(np.int64)
    if counts.sum() != changes:
        return "counts do not add up to the changes of a block"
    where = np.repeat(np.arange(GROUPS), counts) * GROUP + places
    if (where >= elements).any() or (np.diff(where) <= 0).any():
        return "places are not ascending inside their block"
    values = record[GROUPS + changes : GROUPS + 2 * changes].view("<i1")
    if width == 2 and (values == _ESCAPE).sum() != escapes:
        return "escapes do not add up"
    return None


def _apply_slowly(patch: Bytes, width: int, num_elements: int, rows: ImageRows) -> bool:
    image = _gather(rows)
    elements = image.view(f"<u{width}")
    for block, (offset, changes, escapes) in enumerate(table_of(patch, num_elements).tolist()):
        mine = elements[block * BLOCK : (block + 1) * BLOCK]
        record = patch[offset * 4 :]
        if changes == DENSE:
            mine[:] = record[: mine.nbytes].view(mine.dtype)
        elif changes:
            _apply_record(mine, record, width, changes, escapes)
    _scatter(image, rows)
    return True


def _apply_record(mine: NDArray[Any], record: Bytes, width: int, changes: int, escapes: int) -> None:
    where = np.repeat(np.arange(GROUPS), record[:GROUPS]) * GROUP + record[GROUPS : GROUPS + changes]
    rest = record[GROUPS + changes :]
    if width != 2:
        mine[where] = rest[: changes * width].view(mine.dtype)
        return
    step = rest[:changes].view("<i1")
    wide = rest[changes : changes + 2 * escapes].copy().view("<u2")
    mine[where] += step.astype("<i2").view("<u2")
    mine[where[step == _ESCAPE]] = wide


def _gather(rows: ImageRows) -> Bytes:
    columns = zip(rows.address.tolist(), rows.length.tolist(), strict=True)
    return np.concatenate(
        [memory_view(address, length) for address, length in columns] or [np.zeros(0, dtype=np.uint8)]
    )


def _scatter(image: Bytes, rows: ImageRows) -> None:
    columns = zip(rows.begin.tolist(), rows.address.tolist(), rows.length.tolist(), strict=True)
    for begin, address, length in columns:
        memory_view(address, length)[:] = image[begin : begin + length]
