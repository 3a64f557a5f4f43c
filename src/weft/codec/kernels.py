"""Patches and FP8 on a GPU: Triton kernels that give what the C module gives, bit for bit (record order aside)."""

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
_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@triton.jit
def _encode_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0915 - a kernel is one function
    now, old, num_elements, patch, table, cursor, WIDTH: tl.constexpr, WORDS: tl.constexpr, DENSE: tl.constexpr
):
    """One block: a bit for every element that differs, then the record, at a place of its own in the patch."""
    block = tl.program_id(0).to(tl.int64)
    first = block * (WORDS * 32)
    elements = tl.minimum(num_elements - first, WORDS * 32).to(tl.int32)
    now += first
    old += first
    word = tl.arange(0, WORDS)
    lane = tl.arange(0, 32)
    index = word[:, None] * 32 + lane[None, :]
    inside = index < elements
    differs = tl.load(now + index, mask=inside, other=0) != tl.load(old + index, mask=inside, other=0)
    bits = tl.sum(differs.to(tl.int32) << lane[None, :], axis=1)
    count = libdevice.popc(bits)
    before = tl.cumsum(count, 0) - count
    changes = tl.sum(count, 0)
    group_counts = tl.sum(tl.reshape(count, (WORDS // 8, 8)), axis=1)
    most = tl.max(count, 0)

    wide_count = tl.zeros((WORDS,), tl.int32)
    if WIDTH == 2:
        left = bits
        for _ in range(0, most):
            at = word * 32 + libdevice.popc((left & -left) - 1)
            there = left != 0
            step = _step(now, old, at, there)
            wide_count += (there & ((step < -127) | (step > 127))).to(tl.int32)
            left = left & (left - 1)
    wide_before = tl.cumsum(wide_count, 0) - wide_count
    escapes = tl.sum(wide_count, 0)

    VALUE: tl.constexpr = 4 if WIDTH == 4 else 1
    sparse = (WORDS // 8 + changes * (1 + VALUE) + 2 * escapes + 3) // 4 * 4
    whole = (elements * WIDTH + 3) // 4 * 4
    dense = (tl.max(group_counts, 0) == 256) | (sparse >= whole)
    dense = dense & (changes > 0)
    size = tl.where(changes == 0, 0, tl.where(dense, whole, sparse))
    offset = tl.atomic_add(cursor, size.to(tl.int64))
    escapes = tl.where(dense, 0, escapes)
    shown = tl.where(dense, DENSE, changes).to(tl.int64)
    tl.store(table + block, (offset // 4) | (shown << 32) | (escapes.to(tl.int64) << 48))

    record = patch + offset
    if size > 0:
        tail = tl.arange(0, 4)
        tl.store(record + size - 4 + tail, tl.zeros((4,), tl.uint8))
    tl.debug_barrier()
    if dense:
        raw = record.to(tl.pointer_type(now.dtype.element_ty))
        tl.store(raw + index, tl.load(now + index, mask=inside, other=0), mask=inside)
    elif changes > 0:
        group = tl.arange(0, WORDS // 8)
        tl.store(record + group, group_counts.to(tl.uint8))
        places = record + WORDS // 8
        values = places + changes
        wide = (values + changes * VALUE).to(tl.pointer_type(tl.int16))
        left = bits
        rank = before
        wide_rank = wide_before
        for _ in range(0, most):
            there = left != 0
            at = word * 32 + libdevice.popc((left & -left) - 1)
            tl.store(places + rank, (at % 256).to(tl.uint8), mask=there)
            value = tl.load(now + at, mask=there, other=0)
            if WIDTH == 1:
                tl.store(values + rank, value, mask=there)
            elif WIDTH == 4:
                for byte in tl.static_range(4):
                    tl.store(values + 4 * rank + byte, (value >> (8 * byte)).to(tl.uint8), mask=there)
            else:
                step = _step(now, old, at, there)
                escape = (step < -127) | (step > 127)
                tl.store(values + rank, tl.where(escape, 128, step & 0xFF).to(tl.uint8), mask=there)
                tl.store(wide + wide_rank, value, mask=there & escape)
                wide_rank += (there & escape).to(tl.int32)
            rank += there.to(tl.int32)
            left = left & (left - 1)


@triton.jit
def _step(now, old, at, there):  # type: ignore[no-untyped-def]
    """New minus old of 16-bit elements, modulo 2^16, with a sign."""
    difference = tl.load(now + at, mask=there, other=0).to(tl.int32) - tl.load(old + at, mask=there, other=0).to(
        tl.int32
    )
    return (difference << 16) >> 16


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
    STEP: tl.constexpr,
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
        lane = tl.arange(0, STEP)
        if changes == 65535:
            raw = record.to(tl.pointer_type(ELEMENT))
            for begin in range(0, elements, STEP):
                at = begin + lane
                inside = at < elements
                into = _address(first + at, row, rows, row_begin, row_address, WIDTH).to(tl.pointer_type(ELEMENT))
                tl.store(into, tl.load(raw + at, mask=inside, other=0), mask=inside)
        else:
            group = tl.arange(0, GROUPS)
            ends = tl.cumsum(tl.load(record + group).to(tl.int32), 0)
            places = record + GROUPS
            values = places + changes
            wide = (values + changes).to(tl.pointer_type(tl.int16))
            escaped = 0
            for begin in range(0, changes, STEP):
                number = begin + lane
                there = number < changes
                mine = tl.sum((ends[None, :] <= number[:, None]).to(tl.int32), axis=1)
                at = mine * 256 + tl.load(places + number, mask=there, other=0).to(tl.int32)
                there = there & (at < elements)
                into = _address(first + at, row, rows, row_begin, row_address, WIDTH).to(tl.pointer_type(ELEMENT))
                if WIDTH == 1:
                    tl.store(into, tl.load(values + number, mask=there, other=0), mask=there)
                elif WIDTH == 4:
                    value = tl.zeros((STEP,), tl.int32)
                    for byte in tl.static_range(4):
                        part = tl.load(values + 4 * number + byte, mask=there, other=0).to(tl.int32)
                        value = value | (part << (8 * byte))
                    tl.store(into, value, mask=there)
                else:
                    step = (tl.load(values + number, mask=there, other=0).to(tl.int32) << 24) >> 24
                    escape = there & (step == -128)
                    rank = escaped + tl.cumsum(escape.to(tl.int32), 0) - 1
                    known = tl.load(into, mask=there & ~escape, other=0)
                    new = tl.load(wide + rank, mask=escape, other=0)
                    tl.store(into, tl.where(escape, new, (known + step).to(tl.int16)), mask=there)
                    escaped += tl.sum(escape.to(tl.int32), 0)


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
    table = out[HEADER_BYTES:begin].view(torch.int64)
    if num_blocks:
        _encode_kernel[(num_blocks,)](
            now.view(kind),
            old.view(kind),
            num_elements,
            out,
            table,
            cursor,
            WIDTH=width,
            WORDS=WORDS,
            DENSE=DENSE,
            num_warps=8,
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
            STEP=256,
            ELEMENT={1: tl.uint8, 2: tl.int16, 4: tl.int32}[width],
            num_warps=4,
        )


@triton.jit
def _quantize_kernel(  # type: ignore[no-untyped-def]
    src_table,
    dst_table,
    stride_table,
    dst_stride_table,
    extent_table,
    amax_table,
    scale_table,
    SIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    KNOWN: tl.constexpr,
):
    """One block of at most SIDE × SIDE elements: its scale, and its elements as FP8."""
    tile = tl.program_id(0)
    kind = tl.pointer_type(tl.bfloat16) if WIDTH == 2 else tl.pointer_type(tl.float32)
    src = tl.load(src_table + tile).to(kind)
    dst = tl.load(dst_table + tile).to(tl.pointer_type(tl.float8e4nv))
    stride = tl.load(stride_table + tile)
    dst_stride = tl.load(dst_stride_table + tile)
    extent = tl.load(extent_table + tile)
    rows = (extent & 0xFFFF).to(tl.int32)
    columns = (extent >> 16).to(tl.int32)
    row = tl.arange(0, SIDE)[:, None]
    column = tl.arange(0, SIDE)[None, :]
    inside = (row < rows) & (column < columns)
    values = tl.load(src + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    amax = tl.load(amax_table + tile) if KNOWN else tl.max(tl.max(tl.abs(values), axis=1), axis=0)
    scale = tl.div_rn(tl.maximum(amax, 1e-10), 448.0)
    factor = tl.div_rn(1.0, scale)
    scaled = tl.minimum(tl.maximum(values * factor, -448.0), 448.0)
    tl.store(dst + row * dst_stride + column, scaled.to(tl.float8e4nv), mask=inside)
    tl.store(scale_table + tile, scale)


@dataclass(frozen=True, slots=True)
class QuantizeTiles:
    """Blocks to quantise, as tables in device memory; made once for a plan."""

    src: torch.Tensor
    dst: torch.Tensor
    stride: torch.Tensor
    """In elements, of the source."""
    dst_stride: torch.Tensor
    extent: torch.Tensor
    """Rows + columns << 16."""
    amax: torch.Tensor
    """Known largest magnitudes, where `quantize` is told to use them."""
    scale: torch.Tensor
    """Result."""


def quantize(tiles: QuantizeTiles, *, width: int, known_amax: bool = False) -> None:
    """Quantise blocks; queued on the current stream."""
    if len(tiles.src):
        _quantize_kernel[(len(tiles.src),)](
            tiles.src,
            tiles.dst,
            tiles.stride,
            tiles.dst_stride,
            tiles.extent,
            tiles.amax,
            tiles.scale,
            SIDE=128,
            WIDTH=width,
            KNOWN=known_amax,
            num_warps=4,
        )


def tiles_of(src: torch.Tensor, dst: torch.Tensor) -> QuantizeTiles:
    """The 128×128 blocks of a matrix, rows of which may be strided, and where their codes go."""
    side = 128
    rows, columns = src.shape
    row, column = (
        corner.reshape(-1)
        for corner in np.meshgrid(np.arange(0, rows, side), np.arange(0, columns, side), indexing="ij")
    )
    height, width = np.minimum(rows - row, side), np.minimum(columns - column, side)
    number = len(row)
    source = src.data_ptr() + (row * src.stride(0) + column) * src.element_size()
    table = (
        source,
        dst.data_ptr() + row * dst.stride(0) + column,
        np.full(number, src.stride(0)),
        np.full(number, dst.stride(0)),
        height + (width << 16),
    )
    numbers = [torch.from_numpy(part.astype(np.int64)).to(src.device) for part in table]
    amax, scale = (torch.zeros(number, dtype=torch.float32, device=src.device) for _ in range(2))
    source_address, target, stride, target_stride, extent = numbers
    return QuantizeTiles(
        src=source_address,
        dst=target,
        stride=stride,
        dst_stride=target_stride,
        extent=extent,
        amax=amax,
        scale=scale,
    )


def join_tiles(parts: list[QuantizeTiles]) -> QuantizeTiles:
    """Blocks of several matrices, quantised by one launch."""
    names = ("src", "dst", "stride", "dst_stride", "extent", "amax", "scale")
    return QuantizeTiles(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})
