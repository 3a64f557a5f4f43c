"""Bulk work on one GPU's memory: copies and the digest over columns of device addresses, as Triton kernels.

Rows are cut into tiles, one program each; the tables of tiles stay on the device and are used again for every version
(they are found by the identity of the columns, which transports and receivers keep). The digest is the one of
weft/native.py, bit for bit.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from weft import native
from weft.core.planes import Planes
from weft.native import Column

LARGE_BYTES = 1 << 20
"""Rows from here on are left to the driver's own copy, which reaches the limit of the memory…"""
MAX_LARGE_ROWS = 32
"""… unless there are more than this: a call for each would take longer than the copies."""
COPY_TILE_BYTES = 32 << 10
BLOCK_BYTES = 16 << 10
"""A block of the digest's space; a tile of the digest lies inside one."""
WORDS = BLOCK_BYTES // 8
MAX_TABLES = 4096
WHOLE = BLOCK_BYTES
"""Variant of the digest for whole blocks."""
DIGEST_WARPS = 4
_UNITS = {16: torch.int32, 4: torch.int32, 2: torch.int16, 1: torch.int8}
"""Alignment of a tile → the type its elements are copied as; 16-byte aligned ones are copied in vectors."""


@triton.jit
def _copy_kernel(  # type: ignore[no-untyped-def]
    src_table, dst_table, count_table, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    tile = tl.program_id(0)
    src = tl.load(src_table + tile)
    dst = tl.load(dst_table + tile)
    count = tl.load(count_table + tile)
    if ALIGNED:
        src = tl.multiple_of(src, 16)
        dst = tl.multiple_of(dst, 16)
        count = tl.multiple_of(count, 4)
    src = src.to(tl.pointer_type(ELEMENT))
    dst = dst.to(tl.pointer_type(ELEMENT))
    lane = tl.arange(0, BLOCK)
    for start in range(0, count, BLOCK):
        inside = start + lane < count
        tl.store(dst + start + lane, tl.load(src + start + lane, mask=inside), mask=inside)


@triton.jit
def _digest_words_kernel(  # type: ignore[no-untyped-def]
    address_table, first_table, count_table, weight_table, keys, sums, NUM_WORDS: tl.constexpr
):
    """Whole words inside one block: tile → their weighted sum."""
    tile = tl.program_id(0)
    address = tl.multiple_of(tl.load(address_table + tile), 8).to(tl.pointer_type(tl.int64))
    first = tl.load(first_table + tile)
    count = tl.load(count_table + tile)
    lane = tl.arange(0, NUM_WORDS)
    word = tl.load(address + lane, mask=lane < count, other=0)
    number = first + lane
    column, row = number % 8, (number // 8) % 256
    alpha = tl.load(keys + column)
    beta = tl.load(keys + 8 + column)
    gamma = tl.load(keys + 16 + column)
    upper = (word >> 32) & 0xFFFFFFFF
    total = tl.sum((alpha + beta * (256 - row)) * word + gamma * upper, axis=0)
    tl.store(sums + tile, total * tl.load(weight_table + tile))


@triton.jit
def _digest_blocks_kernel(  # type: ignore[no-untyped-def]
    address_table, weight_table, keys, sums, ROWS: tl.constexpr
):
    """Whole blocks: tile → its weighted sum. Sums over rows first, so that each word costs one multiplication."""
    tile = tl.program_id(0)
    address = tl.multiple_of(tl.load(address_table + tile), 16).to(tl.pointer_type(tl.int64))
    row = tl.arange(0, ROWS)
    column = tl.arange(0, 8)
    word = tl.load(address + row[:, None] * 8 + column[None, :])
    total = tl.sum(word, axis=0)
    rising = tl.sum(word * (ROWS - row)[:, None].to(tl.int64), axis=0)
    upper = tl.sum((word >> 32) & 0xFFFFFFFF, axis=0)
    alpha, beta, gamma = tl.load(keys + column), tl.load(keys + 8 + column), tl.load(keys + 16 + column)
    weighed = tl.sum(alpha * total + beta * rising + gamma * upper, axis=0)
    tl.store(sums + tile, weighed * tl.load(weight_table + tile))


@triton.jit
def _digest_bytes_kernel(  # type: ignore[no-untyped-def]
    address_table, first_table, count_table, weight_table, keys, sums, NUM_BYTES: tl.constexpr
):
    """The same byte by byte, for what is not aligned; `first` is a byte's place in its block."""
    tile = tl.program_id(0)
    address = tl.load(address_table + tile).to(tl.pointer_type(tl.uint8))
    first = tl.load(first_table + tile)
    count = tl.load(count_table + tile)
    lane = tl.arange(0, NUM_BYTES)
    value = tl.load(address + lane, mask=lane < count, other=0).to(tl.int64)
    place = first + lane
    number = place // 8
    shift = (place % 8) * 8
    column, row = number % 8, (number // 8) % 256
    word = value << shift
    upper = tl.where(shift >= 32, value << tl.maximum(shift - 32, 0), 0)
    weight = tl.load(keys + column) + tl.load(keys + 8 + column) * (256 - row)
    total = tl.sum(weight * word + tl.load(keys + 16 + column) * upper, axis=0)
    tl.store(sums + tile, total * tl.load(weight_table + tile))


_TRITON_TYPES = {torch.int32: tl.int32, torch.int16: tl.int16, torch.int8: tl.int8}


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Tables of one kernel launch."""

    tables: tuple[torch.Tensor, ...]
    variant: int
    """Copies: the alignment. Digests: 8 for words, 1 for bytes."""

    @property
    def count(self) -> int:
        return len(self.tables[0])


class _DeviceBytes:
    """Device memory in the form other libraries accept."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class Pointer:
    """An address of bytes, or of FP8 codes, for kernels."""

    def __init__(self, address: int, dtype: torch.dtype = torch.uint8) -> None:
        self._address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        """The address."""
        return self._address

    def view(self, dtype: torch.dtype) -> Pointer:
        """The same address of something else."""
        return Pointer(self._address, dtype)


_pinned: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
"""Pinned host memory, by its address."""


def pinned_memory(num_bytes: int) -> torch.Tensor:
    """Host memory that GPUs read and write directly."""
    made = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
    _pinned[made.data_ptr()] = made
    return made


def pinned_view(address: int, num_bytes: int) -> torch.Tensor | None:
    """A part of pinned memory; None for other memory."""
    for start, memory in list(_pinned.items()):
        if start <= address and address + num_bytes <= start + len(memory):
            return memory[address - start : address - start + num_bytes]
    return None


class GpuWork:
    """Work on one GPU's memory, on a stream of its own. Calls return when the work is done."""

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self._device)
        keys = np.concatenate([native.ALPHA, native.BETA, native.GAMMA]).view(np.int64)
        self._keys = torch.from_numpy(keys.copy()).to(self._device)
        self._cache: dict[tuple[int, ...], list[_Tiles]] = {}
        """Tables, as long as the columns they were made from."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Device memory, as bytes."""
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """Work inside goes to this object's stream, and is done at the end."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield
            self._stream.synchronize()

    def synchronize(self) -> None:
        """Wait for everything queued on the device, on any stream of this process."""
        torch.cuda.synchronize(self._device)

    def copy(self, dst: Column, src: Column, length: Column, *, num_threads: int = 1) -> int:
        """Copy rows between device addresses."""
        del num_threads
        with self.stream():
            self._launch_copy(dst, src, length)
        return int(length.sum())

    def digest(self, address: Column, position: Column, length: Column, *, num_threads: int = 1) -> int:
        """Digest of rows in device memory."""
        del num_threads
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            return self._sum(self._launch_digest(address, position, length))

    def copy_digest(self, dst: Column, src: Column, position: Column, length: Column, *, num_threads: int = 1) -> int:
        """Copy and digest; the digest is of the source."""
        del num_threads
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._launch_copy(dst, src, length)
            return self._sum(self._launch_digest(src, position, length))

    def copy_planes(self, planes: Planes, *, num_threads: int = 1) -> int:
        """Copy planes between device addresses."""
        dst, src, length, _ = planes.runs
        return self.copy(dst, src, length, num_threads=num_threads)

    def digest_planes(self, planes: Planes, *, num_threads: int = 1) -> int:
        """Digest of what planes read."""
        _, src, length, position = planes.runs
        assert position is not None
        return self.digest(src, position, length, num_threads=num_threads)

    def copy_digest_planes(self, planes: Planes, *, num_groups: int = 1, num_threads: int = 1) -> list[int]:
        """Copy and digest planes of one group."""
        assert num_groups == 1
        dst, src, length, position = planes.runs
        assert position is not None
        return [self.copy_digest(dst, src, position, length, num_threads=num_threads)]

    def _launch_copy(self, dst: Column, src: Column, length: Column) -> None:
        for row in np.flatnonzero(_is_large(length)).tolist():
            size = int(length[row])
            self.view(int(dst[row]), size).copy_(self.view(int(src[row]), size), non_blocking=True)
        for tiles in self._tables((dst, src, length), _copy_tiles):
            element = _UNITS[tiles.variant]
            block = min(COPY_TILE_BYTES // element.itemsize, 4096)
            _copy_kernel[(tiles.count,)](
                *tiles.tables, ELEMENT=_TRITON_TYPES[element], ALIGNED=tiles.variant == 16, BLOCK=block, num_warps=8
            )

    def copy_from_host(self, dst: int, src: int, num_bytes: int) -> None:
        """Copy host memory to the device."""
        host = torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(src), dtype=torch.uint8)
        with self.stream():
            self.view(dst, num_bytes).copy_(host, non_blocking=True)

    def view(self, address: int, num_bytes: int) -> torch.Tensor:
        """Device memory, or pinned host memory, as bytes."""
        pinned = pinned_view(address, num_bytes)
        return pinned if pinned is not None else torch.as_tensor(_DeviceBytes(address, num_bytes), device=self._device)

    def pointer(self, address: int) -> Pointer:
        """An address in the form kernels take, also of pinned host memory, which they reach too."""
        return Pointer(address)

    def _launch_digest(self, address: Column, position: Column, length: Column) -> list[torch.Tensor]:
        sums = []
        for tiles in self._tables((address, position, length), _digest_tiles):
            found = torch.empty(tiles.count, dtype=torch.int64, device=self._device)
            if tiles.variant == WHOLE:
                _digest_blocks_kernel[(tiles.count,)](
                    *tiles.tables, self._keys, found, ROWS=256, num_warps=DIGEST_WARPS
                )
            elif tiles.variant == 8:
                _digest_words_kernel[(tiles.count,)](*tiles.tables, self._keys, found, NUM_WORDS=WORDS, num_warps=8)
            else:
                _digest_bytes_kernel[(tiles.count,)](*tiles.tables, self._keys, found, NUM_BYTES=1024, num_warps=4)
            sums.append(found)
        return sums

    def _sum(self, sums: list[torch.Tensor]) -> int:
        total = sum(int(found.sum().item()) for found in sums)  # waits for the stream
        return total & ((1 << 64) - 1)

    def _tables(self, columns: tuple[Column, ...], cut: Any) -> list[_Tiles]:
        key = (id(cut), *(id(column) for column in columns))
        if key not in self._cache:
            while len(self._cache) >= MAX_TABLES:
                self._cache.pop(next(iter(self._cache)))
            tiles = [
                _Tiles(tuple(torch.from_numpy(table).to(self._device) for table in tables), variant)
                for tables, variant in cut(*columns)
            ]
            self._cache[key] = tiles
            for column in columns:  # an address of a column that is gone may be that of another one tomorrow
                weakref.finalize(column, self._cache.pop, key, None)
        return self._cache[key]


Tables = tuple[NDArray[np.int64], ...]


def _is_large(length: Column) -> NDArray[np.bool_]:
    """Rows that are copied by calls of their own."""
    large = length >= LARGE_BYTES
    return large & bool(large.sum() <= MAX_LARGE_ROWS)


def _copy_tiles(dst: Column, src: Column, length: Column) -> list[tuple[Tables, int]]:
    """Small rows as tiles, sorted by how well they are aligned; counts in elements."""
    small = ~_is_large(length)
    dst, src, length = dst[small], src[small], length[small]
    row, offset, size = _cut(length, np.zeros(len(length), dtype=np.int64), COPY_TILE_BYTES)
    src_tile, dst_tile = src.astype(np.int64)[row] + offset, dst.astype(np.int64)[row] + offset
    aligned = src_tile | dst_tile | size
    unit = np.select([aligned % 16 == 0, aligned % 4 == 0, aligned % 2 == 0], [16, 4, 2], 1)
    tiles: list[tuple[Tables, int]] = []
    for variant, element in _UNITS.items():
        mine = unit == variant
        if mine.any():
            tiles.append(((src_tile[mine], dst_tile[mine], size[mine] // element.itemsize), variant))
    return tiles


def _digest_tiles(address: Column, position: Column, length: Column) -> list[tuple[Tables, int]]:
    """Rows as tiles inside blocks of the digest's space: whole words where everything is aligned, else bytes."""
    where = position.astype(np.int64)
    row, offset, size = _cut(length, where, BLOCK_BYTES)
    start, place = address.astype(np.int64)[row] + offset, where[row] + offset
    in_words = (start | place | size) % 8 == 0
    is_whole = (size == BLOCK_BYTES) & (start % 16 == 0)
    in_words &= ~is_whole
    tiles: list[tuple[Tables, int]] = []
    if is_whole.any():
        begin, _, _, weight = _weighed(start[is_whole], place[is_whole], size[is_whole], 8)
        tiles.append(((begin, weight), WHOLE))
    if in_words.any():
        tiles.append((_weighed(start[in_words], place[in_words], size[in_words], 8), 8))
    rest = ~(in_words | is_whole)
    if rest.any():
        again, inner, small = _cut(size[rest].astype(np.uint64), place[rest], 1024)
        tiles.append((_weighed(start[rest][again] + inner, place[rest][again] + inner, small, 1), 1))
    return tiles


def _weighed(start: NDArray[np.int64], place: NDArray[np.int64], size: NDArray[np.int64], unit: int) -> Tables:
    weight = (native.mix((place // BLOCK_BYTES).astype(np.uint64)) | np.uint64(1)).view(np.int64)
    return start, place % BLOCK_BYTES // unit, size // unit, weight


def _cut(
    length: Column, place: NDArray[np.int64], tile_bytes: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Rows cut wherever their place crosses a multiple of `tile_bytes`: row number, offset in it, size."""
    assert math.log2(tile_bytes).is_integer()
    size = length.astype(np.int64)
    first, last = place // tile_bytes, (place + np.maximum(size, 1) - 1) // tile_bytes
    count = np.where(size > 0, last - first + 1, 0)
    row = np.repeat(np.arange(len(size)), count)
    nth = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    begin = np.maximum((first[row] + nth) * tile_bytes, place[row])
    end = np.minimum((first[row] + nth + 1) * tile_bytes, place[row] + size[row])
    return row, begin - place[row], end - begin
