"""Planes as tiles of equal work, for one launch of a kernel. Pure NumPy.

A tile is at most `TILE_UNITS` units of one plane: several short rows, or a part of a long one. A unit is what one lane
moves at a time, 16 bytes where everything is aligned.

    rows 512, run 128 bytes, aligned     ->  1 tile of 512 rows × 8 units
    rows 1, run 1 MiB, aligned           ->  16 tiles of 4096 units

Planes that are aligned except at their ends are cut into a head, a body and a tail. Where planes are digested, long
runs are cut at the borders of the digest's blocks: a whole block needs its weight only once.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pieces:
    """Parts of planes; addresses, strides and lengths in bytes."""

    src: Int64s
    dst: Int64s
    position: Int64s
    src_stride: Int64s
    dst_stride: Int64s
    position_stride: Int64s
    rows: Int64s
    length: Int64s

    @classmethod
    def of(cls, planes: Planes, *, is_copied: bool, is_digested: bool) -> _Pieces:
        """Unused memories get the source's addresses, so that they add no constraint."""
        src, src_stride, rows = (column.astype(np.int64) for column in (planes.src, planes.src_stride, planes.rows))
        src_stride = np.where(rows > 1, src_stride, 0)
        dst, dst_stride = src, src_stride
        if is_copied:
            dst, dst_stride = planes.dst.astype(np.int64), planes.dst_stride.astype(np.int64)
        position, position_stride = src, src_stride
        if is_digested:
            assert planes.position is not None
            assert planes.position_stride is not None
            position, position_stride = planes.position.astype(np.int64), planes.position_stride.astype(np.int64)
        made = cls(
            src=src,
            dst=dst,
            position=position,
            src_stride=src_stride,
            dst_stride=np.where(rows > 1, dst_stride, 0),
            position_stride=np.where(rows > 1, position_stride, 0),
            rows=rows,
            length=planes.length.astype(np.int64),
        )
        return made.take(made.rows * made.length > 0)

    def take(self, which: Int64s | NDArray[np.bool_]) -> _Pieces:
        """A selection of the pieces."""
        return _Pieces(**{field.name: getattr(self, field.name)[which] for field in fields(self)})

    def part(self, skipped: Int64s, length: Int64s) -> _Pieces:
        """`length` bytes of every row, after those skipped at its beginning; empty pieces are left out."""
        made = replace(
            self,
            src=self.src + skipped,
            dst=self.dst + skipped,
            position=self.position + skipped,
            length=length,
        )
        return made.take(length > 0)

    @property
    def alignment(self) -> Int64s:
        """A number with as many trailing zero bits as all addresses and strides have in common."""
        return (
            self.src | self.dst | self.position | self.src_stride | self.dst_stride | self.position_stride | self.length
        )


def _joined(parts: list[_Pieces]) -> _Pieces:
    names = [field.name for field in fields(_Pieces)]
    return _Pieces(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


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
    apart = (pieces.src - pieces.dst) | (pieces.src - pieces.position)
    strides = pieces.src_stride | pieces.dst_stride | pieces.position_stride
    is_odd = (pieces.alignment % VECTOR_BYTES != 0) & (pieces.length >= 4 * VECTOR_BYTES)
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
    step = np.full(len(blocks.src), BLOCK_BYTES, dtype=np.int64)
    blocks = replace(blocks, rows=count[count > 0], src_stride=step, dst_stride=step, position_stride=step)
    ends = [runs.part(np.zeros_like(head), head), runs.part(head + body, runs.length - head - body)]
    return blocks, _joined([pieces.take(~long), *ends])


def _single_rows(pieces: _Pieces) -> _Pieces:
    """Every row as a plane of its own."""
    plane = np.repeat(np.arange(len(pieces.rows)), pieces.rows)
    row = np.arange(len(plane)) - np.repeat(np.cumsum(pieces.rows) - pieces.rows, pieces.rows)
    of = pieces.take(plane)
    none = np.zeros_like(row)
    return replace(
        of,
        src=of.src + row * of.src_stride,
        dst=of.dst + row * of.dst_stride,
        position=of.position + row * of.position_stride,
        src_stride=none,
        dst_stride=none,
        position_stride=none,
        rows=none + 1,
    )


def _table(pieces: _Pieces, kind: Int64s) -> WalkTable:
    run = pieces.length // np.where(kind == WHOLE_BLOCKS, VECTOR_BYTES, kind)
    tiles_in_row = -(-run // TILE_UNITS)
    rows_in_tile = np.maximum(TILE_UNITS // run, 1)
    count = -(-pieces.rows // rows_in_tile) * tiles_in_row
    plane = np.repeat(np.arange(len(count)), count)
    number = np.arange(len(plane)) - np.repeat(np.cumsum(count) - count, count)
    columns = (
        pieces.src,
        pieces.dst,
        pieces.position,
        pieces.src_stride,
        pieces.dst_stride,
        pieces.position_stride,
        pieces.rows,
        run,
        kind,
    )
    return WalkTable(planes=np.stack(columns, axis=1), tiles=plane | (number << 32))
