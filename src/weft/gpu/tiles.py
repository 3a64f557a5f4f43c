"""Planes as tiles of equal work, for one launch of a kernel. Pure NumPy.

A tile is at most `TILE_UNITS` units of one plane: several short rows, or a part of a long one. A unit is what one lane
moves at a time, 16 bytes where everything is aligned.

    rows 512, run 128 bytes, aligned     ->  1 tile of 512 rows × 8 units
    rows 1, run 1 MiB, aligned           ->  16 tiles of 4096 units

Planes that are aligned except at their ends are cut into a head, a body and a tail. Where planes are digested, long
runs are cut at the borders of the digest's blocks: a whole block needs its weight only once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.core.geometry.planes import Planes

Int64s = NDArray[np.int64]
VECTOR_BYTES = 16
TILE_UNITS = 4096
BLOCK_BYTES = 16 << 10
"""A block of the digest's space."""
WHOLE_BLOCKS = 0
"""Kind of planes whose rows are whole blocks of the digest; other kinds are the bytes of a unit."""
_UNIT_BYTES = (16, 4, 2, 1)
_LONG_RUN = 4 * BLOCK_BYTES
"""From this size on, every run of a digested plane is cut separately."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WalkTable:
    """What a launch works through."""

    planes: Int64s
    """A row for each plane: source, destination, position, their strides, rows, units in a run, kind."""
    tiles: Int64s
    """Plane, and which of its tiles (upper half)."""


_SRC, _ENDS, _STRIDES, _ROWS, _LENGTH = 0, slice(0, 3), slice(3, 6), 6, 7
"""Columns of pieces. Ends: source, destination, position."""


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Parts of planes: a column for each of three ends, their strides, the rows, and the length of a row, in bytes."""

    columns: Int64s

    @property
    def src(self) -> Int64s:
        """Where each piece is read."""
        return self.columns[_SRC]

    @property
    def position(self) -> Int64s:
        """Where each is in the digest's space."""
        return self.columns[2]

    @property
    def rows(self) -> Int64s:
        """Rows of each."""
        return self.columns[_ROWS]

    @property
    def length(self) -> Int64s:
        """Bytes of a row of each."""
        return self.columns[_LENGTH]

    @classmethod
    def of(cls, planes: Planes, *, is_copied: bool, is_digested: bool) -> _Pieces:
        """Unused memories get the source's addresses, so that they add no constraint."""
        src, src_stride, rows = (column.astype(np.int64) for column in (planes.src, planes.src_stride, planes.rows))
        dst, dst_stride = src, src_stride
        if is_copied:
            dst, dst_stride = planes.dst.astype(np.int64), planes.dst_stride.astype(np.int64)
        position, position_stride = src, src_stride
        if is_digested:
            assert planes.position is not None
            assert planes.position_stride is not None
            position, position_stride = planes.position.astype(np.int64), planes.position_stride.astype(np.int64)
        length = planes.length.astype(np.int64)
        made = cls(np.stack([src, dst, position, src_stride, dst_stride, position_stride, rows, length]))
        made.columns[_STRIDES] *= rows > 1
        return made.take(rows * length > 0)

    def take(self, which: Int64s | NDArray[np.bool_]) -> _Pieces:
        """A selection of the pieces."""
        return _Pieces(self.columns[:, which])

    def part(self, skipped: Int64s, length: Int64s) -> _Pieces:
        """`length` bytes of every row, after those skipped at its beginning; empty pieces are left out."""
        columns = self.columns.copy()
        columns[_ENDS] += skipped
        columns[_LENGTH] = length
        return _Pieces(columns[:, length > 0])

    @property
    def alignment(self) -> Int64s:
        """A number with as many trailing zero bits as all addresses and strides have in common."""
        return np.asarray(np.bitwise_or.reduce(self.columns[:_ROWS]) | self.length)


def _joined(parts: list[_Pieces]) -> _Pieces:
    return _Pieces(np.concatenate([part.columns for part in parts], axis=1))


def walk_table(planes: Planes, *, is_copied: bool, is_digested: bool) -> WalkTable:
    """The table of a launch that copies or digests planes, or does both."""
    pieces = _Pieces.of(planes, is_copied=is_copied, is_digested=is_digested)
    pieces = _cut_ends(pieces)
    if not is_digested:
        return _table(pieces, _units(pieces))
    blocks, others = _cut_blocks(pieces)
    kinds = np.concatenate([np.full(len(blocks.src), WHOLE_BLOCKS), _units(others)])
    return _table(_joined([blocks, others]), kinds)


def _units(pieces: _Pieces) -> Int64s:
    """Bytes of the largest unit each plane can be moved in."""
    alignment = pieces.alignment
    return np.select([alignment % unit == 0 for unit in _UNIT_BYTES], _UNIT_BYTES).astype(np.int64)


def _cut_ends(pieces: _Pieces) -> _Pieces:
    """Split off heads and tails of rows where that aligns the rest in all memories."""
    is_odd = (pieces.alignment % VECTOR_BYTES != 0) & (pieces.length >= 4 * VECTOR_BYTES)
    if not is_odd.any():
        return pieces
    apart = np.bitwise_or.reduce(pieces.columns[_ENDS] - pieces.src)
    strides = np.bitwise_or.reduce(pieces.columns[_STRIDES])
    cut = is_odd & ((apart | strides) % VECTOR_BYTES == 0)
    if not cut.any():
        return pieces
    odd = pieces.take(cut)
    head = -odd.src % VECTOR_BYTES
    body = (odd.length - head) // VECTOR_BYTES * VECTOR_BYTES
    tail = odd.length - head - body
    return _joined(
        [pieces.take(~cut), odd.part(head, body), odd.part(np.zeros_like(head), head), odd.part(head + body, tail)]
    )


def _cut_blocks(pieces: _Pieces) -> tuple[_Pieces, _Pieces]:
    """Planes whose rows are whole blocks of the digest, and everything else."""
    is_aligned = pieces.alignment % VECTOR_BYTES == 0
    long = is_aligned & (pieces.length >= np.where(pieces.rows == 1, BLOCK_BYTES, _LONG_RUN))
    runs = _single_rows(pieces.take(long))
    head = np.minimum(-runs.position % BLOCK_BYTES, runs.length)
    count = (runs.length - head) // BLOCK_BYTES
    body = count * BLOCK_BYTES
    blocks = runs.part(head, np.where(count > 0, BLOCK_BYTES, 0))
    blocks.columns[_STRIDES] = BLOCK_BYTES
    blocks.columns[_ROWS] = count[count > 0]
    ends = [runs.part(np.zeros_like(head), head), runs.part(head + body, runs.length - head - body)]
    return blocks, _joined([pieces.take(~long), *ends])


def _single_rows(pieces: _Pieces) -> _Pieces:
    """Every row as a plane of its own."""
    plane = np.repeat(np.arange(len(pieces.rows)), pieces.rows)
    row = np.arange(len(plane)) - np.repeat(np.cumsum(pieces.rows) - pieces.rows, pieces.rows)
    columns = pieces.columns[:, plane]
    columns[_ENDS] += row * columns[_STRIDES]
    columns[_STRIDES], columns[_ROWS] = 0, 1
    return _Pieces(columns)


def _table(pieces: _Pieces, kind: Int64s) -> WalkTable:
    run = pieces.length // np.where(kind == WHOLE_BLOCKS, VECTOR_BYTES, kind)
    tiles_in_row = -(-run // TILE_UNITS)
    rows_in_tile = np.maximum(TILE_UNITS // run, 1)
    count = -(-pieces.rows // rows_in_tile) * tiles_in_row
    plane = np.repeat(np.arange(len(count)), count)
    number = np.arange(len(plane)) - np.repeat(np.cumsum(count) - count, count)
    return WalkTable(planes=np.vstack([pieces.columns[:_LENGTH], run, kind]).T, tiles=plane | (number << 32))
