"""Patches for slow links: their parts sorted by kind, each compressed with Zstandard.

Places are nearly random, values nearly constant: mixed, as in a patch, they compress badly. A compressed patch is
`WPZ1`, four zero bytes, the patch's header, then seven streams (u64 length, Zstandard frame): changes and escapes of
each block, then counts, places, values, wide and dense of all blocks. The length of every stream follows from the
first two, so nothing unpacks to more bytes than its patch may have.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft import native
from weft.codec import delta
from weft.codec.delta import BLOCK, DENSE, GROUPS
from weft.codec.memory import Bytes
from weft.errors import CodecError

LEVEL = 1
_MAGIC = b"WPZ1\0\0\0\0"
_Rows = tuple[NDArray[np.int64], NDArray[np.int64]]


def _zstd() -> ModuleType:
    try:
        import zstandard  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise CodecError("compression needs zstandard", hint="pip install 'weft[zstd]'") from error
    return zstandard


def compress(patch: Bytes) -> Bytes:
    """A compressed copy of a valid patch."""
    header = delta.read_header(int(patch.ctypes.data), len(patch))
    table = delta.table_of(patch, header.num_elements)
    changes, escapes = (np.ascontiguousarray(table[name]) for name in ("changes", "escapes"))
    streams = [changes.view(np.uint8), escapes.view(np.uint8)]
    for offset, length in _pieces(header, changes, escapes, table["offset"].astype(np.int64) * 4):
        stream = np.empty(int(length.sum()), dtype=np.uint8)
        _copy(stream, np.cumsum(length) - length, patch, offset, length)
        streams.append(stream)
    packer = _zstd().ZstdCompressor(level=LEVEL)
    parts = [_MAGIC, patch[: delta.HEADER_BYTES].tobytes()]
    for stream in streams:
        frame = packer.compress(stream.data)
        parts += [len(frame).to_bytes(8, "little"), frame]
    return np.frombuffer(b"".join(parts), dtype=np.uint8)


def decompress(data: Bytes, *, width: int, num_elements: int) -> Bytes:
    """The original patch, records in block order; raises CodecError for anything that is not a compressed patch."""
    if data[: len(_MAGIC)].tobytes() != _MAGIC or len(data) < len(_MAGIC) + delta.HEADER_BYTES:
        raise CodecError("data is not a compressed patch")
    header = delta.read_header(int(data[len(_MAGIC) :].ctypes.data), delta.HEADER_BYTES)
    if (header.width, header.num_elements) != (width, num_elements):
        raise CodecError(
            f"compressed patch has {header.num_elements} elements of {header.width} bytes, "
            f"expected {num_elements} of {width}"
        )
    if header.num_bytes > delta.max_bytes(num_elements, width):
        raise CodecError(f"compressed patch would unpack to {header.num_bytes} bytes, more than a patch may have")
    reader = _Reader(data, len(_MAGIC) + delta.HEADER_BYTES)
    num_blocks = -(-num_elements // BLOCK)
    changes, escapes = (reader.stream(2 * num_blocks).view("<u2") for _ in range(2))
    sizes = delta.record_sizes(width, num_elements, changes, escapes)
    offset = delta.first_record(num_elements) + np.cumsum(sizes) - sizes
    if int(sizes.sum()) + delta.first_record(num_elements) != header.num_bytes:
        raise CodecError("blocks of a compressed patch do not add up to its size")
    patch = np.zeros(header.num_bytes, dtype=np.uint8)
    patch[: delta.HEADER_BYTES] = data[len(_MAGIC) : len(_MAGIC) + delta.HEADER_BYTES]
    table = delta.table_of(patch, num_elements)
    table["offset"], table["changes"], table["escapes"] = offset // 4, changes, escapes
    for begin, length in _pieces(header, changes, escapes, offset):
        stream = reader.stream(int(length.sum()))
        _copy(patch, begin, stream, np.cumsum(length) - length, length)
    return patch


class _Reader:
    """Takes streams out of a compressed patch."""

    def __init__(self, data: Bytes, at: int) -> None:
        self._data, self._at = data, at
        self._unpacker = _zstd().ZstdDecompressor()

    def stream(self, num_bytes: int) -> Bytes:
        """The next stream, which must have this many bytes."""
        size = int.from_bytes(self._data[self._at : self._at + 8].tobytes(), "little")
        frame = self._data[self._at + 8 : self._at + 8 + size]
        if len(frame) != size:
            raise CodecError("compressed patch ends early")
        self._at += 8 + size
        zstandard = _zstd()
        try:
            known = zstandard.frame_content_size(frame.data)
            if known not in (num_bytes, 0):
                raise CodecError(f"stream of a compressed patch has {known} bytes, expected {num_bytes}")
            found = self._unpacker.decompress(frame.data, max_output_size=max(num_bytes, 1))
        except zstandard.ZstdError as error:
            raise CodecError(f"compressed patch is damaged: {error}") from error
        if len(found) != num_bytes:
            raise CodecError(f"stream of a compressed patch has {len(found)} bytes, expected {num_bytes}")
        return np.frombuffer(bytearray(found), dtype=np.uint8)


def _pieces(header: Any, changes: NDArray[Any], escapes: NDArray[Any], offset: NDArray[np.int64]) -> list[_Rows]:
    """Where counts, places, values, wide and dense of all blocks lie in a patch: offsets and lengths."""
    dense = changes == DENSE
    sparse = ~dense & (changes > 0)
    number = np.where(sparse, changes, 0).astype(np.int64)
    value_bytes = number * (4 if header.width == 4 else 1)
    wide_bytes = np.where(sparse, 2 * escapes.astype(np.int64), 0)
    elements = np.minimum(header.num_elements - np.arange(len(changes)) * BLOCK, BLOCK)
    places = offset + GROUPS
    return [
        (offset, np.where(sparse, GROUPS, 0)),
        (places, number),
        (places + number, value_bytes),
        (places + number + value_bytes, wide_bytes),
        (offset, np.where(dense, elements * header.width, 0)),
    ]


def _copy(
    into: Bytes, at: NDArray[np.int64], source: Bytes, begin: NDArray[np.int64], length: NDArray[np.int64]
) -> None:
    """Rows from one buffer to another."""
    some = length > 0
    at, begin, length = at[some], begin[some], length[some]
    if (begin + length > len(source)).any() or (at + length > len(into)).any():
        raise CodecError("a record lies outside the patch")
    dst, src = (np.uint64(b.ctypes.data) + where.astype(np.uint64) for b, where in ((into, at), (source, begin)))
    native.copy(dst, src, length.astype(np.uint64))
