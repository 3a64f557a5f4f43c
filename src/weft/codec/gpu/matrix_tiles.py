"""Boxes of matrices as tiles, one for each program of a kernel: at most 128×128 elements, or a row. Pure NumPy.

Every tile lies inside one block of its grid, so that all its elements share a scale. Where every row has a scale of
its own, tiles are rows of any length. Tables are made once for a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]
SIDE = 128
KNOWN, FULL = 1, 2
"""Flags: the magnitude is known beforehand; all 128×128 elements (a multiple of 16, of a row) are present, and vectors
may be read."""
_VECTOR_BYTES = 16


def fits_tile(block: tuple[int, int]) -> bool:
    """Whether a block of so many rows and columns can be a single tile."""
    return block[0] == 1 or max(block) <= SIDE


class MatrixBox(NamedTuple):
    """Part of a matrix: where it is, and which blocks it touches."""

    src: int
    """Address of its first element."""
    stride: int
    """Bytes from row to row."""
    width: int
    """Bytes of an element."""
    to: int
    """Where its first element goes, in bytes from the beginning of the image; rows are contiguous there."""
    to_width: int
    """Bytes of an element there."""
    first_row: int
    first_column: int
    rows: int
    columns: int
    grid: int
    first_block: int
    """First block of its grid, among the blocks of all grids."""
    grid_rows: int
    grid_columns: int
    block_rows: int
    block_columns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixTiles:
    """Tiles, in columns."""

    src: Int64s
    to: Int64s
    stride: Int64s
    """In elements."""
    to_stride: Int64s
    rows: Int64s
    columns: Int64s
    block: Int64s
    grid: Int64s
    is_whole: NDArray[np.bool_]
    """Whether the tile covers its whole block."""
    is_full: NDArray[np.bool_]
    """Whether it has 128×128 elements, or is a row of a multiple of 16, aligned in both memories."""
    is_row: NDArray[np.bool_]
    """Whether it is a row that has a scale of its own."""

    @classmethod
    def of(cls, boxes: Sequence[MatrixBox]) -> MatrixTiles:
        """Tiles of boxes."""
        columns: Int64s = np.array(boxes, dtype=np.int64).reshape(-1, len(MatrixBox._fields)).T
        of: dict[str, Int64s] = dict(zip(MatrixBox._fields, columns, strict=True))
        is_row = of["block_rows"] == 1
        height = np.minimum(of["block_rows"], SIDE)
        width = np.where(is_row, of["block_columns"], np.minimum(of["block_columns"], SIDE))
        across = _num_tiles(of["first_column"], of["columns"], width)
        count = _num_tiles(of["first_row"], of["rows"], height) * across
        box = np.repeat(np.arange(len(count)), count)
        number = np.arange(len(box)) - np.repeat(np.cumsum(count) - count, count)
        of = {name: column[box] for name, column in of.items()}
        top, bottom = _extent(of["first_row"], of["rows"], height[box], number // across[box])
        left, right = _extent(of["first_column"], of["columns"], width[box], number % across[box])
        row, column = top - of["first_row"], left - of["first_column"]
        src = of["src"] + row * of["stride"] + column * of["width"]
        element: Int64s = row * of["columns"] + column
        to = of["to"] + element * of["to_width"]
        is_row = is_row[box]
        in_bytes = src | to | np.where(is_row, right - left, of["stride"] | (of["columns"] * of["to_width"]))
        is_square = (bottom - top == SIDE) & (right - left == SIDE)
        down, blocks_across = top // of["block_rows"], -(-of["grid_columns"] // of["block_columns"])
        return cls(
            src=src,
            to=to,
            stride=of["stride"] // of["width"],
            to_stride=of["columns"],
            rows=bottom - top,
            columns=right - left,
            block=of["first_block"] + down * blocks_across + left // of["block_columns"],
            grid=of["grid"],
            is_whole=_is_whole(top, bottom, of["block_rows"], of["grid_rows"])
            & _is_whole(left, right, of["block_columns"], of["grid_columns"]),
            is_full=(is_row | is_square) & (in_bytes % _VECTOR_BYTES == 0),
            is_row=is_row,
        )

    def table(self, *, is_known: NDArray[np.bool_] | bool = False) -> Int64s:
        """A row for each tile, as kernels read it."""
        flags = np.where(is_known, KNOWN, 0) + np.where(self.is_full, FULL, 0)
        columns = (
            self.src,
            self.to,
            self.stride | (self.to_stride << 32),
            self.rows | (flags << 16) | (self.columns << 32),
            self.block,
            self.grid,
        )
        return np.stack(columns, axis=1)

    def source_spans(self, width: int) -> tuple[Int64s, Int64s]:
        """What each tile of elements of `width` bytes reads, gaps between rows included: address and bytes."""
        return self.src, ((self.rows - 1) * self.stride + self.columns) * width

    def take(self, which: NDArray[np.bool_]) -> MatrixTiles:
        """A selection of the tiles."""
        return MatrixTiles(**{name: getattr(self, name)[which] for name in self.__slots__})


def _num_tiles(first: Int64s, extent: Int64s, side: Int64s) -> Int64s:
    """Tiles along one dimension."""
    return np.where(extent > 0, (first + extent - 1) // side - first // side + 1, 0)


def _extent(first: Int64s, extent: Int64s, side: Int64s, number: Int64s) -> tuple[Int64s, Int64s]:
    """Where tiles begin and end along one dimension, in elements of the matrix."""
    begin = (first // side + number) * side
    return np.maximum(begin, first), np.minimum(begin + side, first + extent)


def _is_whole(begin: Int64s, end: Int64s, side: Int64s, size: Int64s) -> NDArray[np.bool_]:
    """Whether tiles reach from one border of their block to the other, along one dimension."""
    return (begin % side == 0) & (end == np.minimum((begin // side + 1) * side, size))
