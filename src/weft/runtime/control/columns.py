"""Columns of integers as bytes: differences, compressed. Tables of plans are repetitive and become small."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from weft.errors import ProtocolError

Int64s = NDArray[np.int64]
MAX_NUMBERS = 1 << 28


class _PackedColumns(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    shapes: dict[str, tuple[int, ...]]
    data: bytes


_decoder = msgspec.msgpack.Decoder(_PackedColumns)


def squeeze(columns: Mapping[str, NDArray[np.integer]]) -> bytes:
    """Columns, or tables of coordinates, as bytes."""
    shapes = {name: column.shape for name, column in columns.items()}
    parts = [_differences(column.astype("<i8").reshape(-1, order="F")) for column in columns.values()]
    joined = np.concatenate(parts) if parts else np.zeros(0, dtype="<i8")
    return msgspec.msgpack.encode(_PackedColumns(shapes, zlib.compress(joined.tobytes(), 1)))


def expand(data: bytes, names: Sequence[str], *, max_numbers: int = MAX_NUMBERS) -> dict[str, Int64s]:
    """The original columns; raises ProtocolError for anything else, or more than `max_numbers` in all columns."""
    try:
        table = _decoder.decode(data)
        total = sum(_count(shape) for shape in table.shapes.values())
        if set(table.shapes) != set(names) or total > max_numbers:
            raise ValueError(f"columns {sorted(table.shapes)} of {total} numbers")
        unpacker = zlib.decompressobj()
        raw = unpacker.decompress(table.data, 8 * total + 1)
        if len(raw) != 8 * total or not unpacker.eof:
            raise ValueError(f"{len(raw)} bytes for {total} numbers")
    except (msgspec.DecodeError, ValueError, zlib.error) as error:
        raise ProtocolError(f"table is damaged: {error}") from error
    found, at = {}, 0
    numbers = np.frombuffer(raw, dtype="<i8")
    for name, shape in table.shapes.items():
        size = _count(shape)
        found[name] = np.cumsum(numbers[at : at + size]).reshape(shape, order="F").astype(np.int64)
        at += size
    return found


def _count(shape: tuple[int, ...]) -> int:
    if not all(0 <= n <= MAX_NUMBERS for n in shape) or not 1 <= len(shape) <= 2:
        raise ValueError(f"a column of shape {list(shape)}")
    return int(np.prod(shape, dtype=object))


def _differences(numbers: Int64s) -> Int64s:
    return np.diff(numbers, prepend=np.zeros(1, dtype=numbers.dtype))
