"""The matrices a trainer quantises, as columns: their blocks, the parts of them it holds, and where these parts lie.

A trainer may hold a hundred thousand of them, so whatever is done to all of them is done on columns. A `HeldGrid` shows
a single one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import overload

import numpy as np
from numpy.typing import NDArray

from weft.codec.fp8 import Box, Grid
from weft.core.geometry.scaling import Scaling, block_sides_of

Int64s = NDArray[np.int64]
SCALINGS = tuple(Scaling)
"""Kinds of scales by their number in tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldGrid:
    """A matrix that is quantised, and which parts of it a trainer holds."""

    name: str
    grid: Grid
    group: int
    """Grids of one group are exchanged together; groups are numbered in the order in which they are needed."""
    first_key: int
    """Its first block among those of all quantised matrices, whichever trainers hold them."""
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GridBoxes:
    """Parts of matrices in memory, in the order of matrices."""

    grid: Int64s
    """Number of the matrix."""
    address: Int64s
    stride: Int64s
    """Bytes from row to row."""
    width: Int64s
    """Bytes of an element: BF16 (2) or FP32 (4)."""
    first: Int64s
    """(n, 2): row and column of the first element in the matrix."""
    extent: Int64s
    """(n, 2): rows and columns."""

    def __len__(self) -> int:
        return len(self.grid)

    @classmethod
    def none(cls) -> GridBoxes:
        """The boxes of a trainer that quantises nothing."""
        empty, pairs = np.zeros(0, dtype=np.int64), np.zeros((0, 2), dtype=np.int64)
        return cls(grid=empty, address=empty, stride=empty, width=empty, first=pairs, extent=pairs)


def _none() -> Int64s:
    return np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldGrids(Sequence[HeldGrid]):
    """All grids of a trainer, sorted by group."""

    names: Sequence[str] = ()
    size: Int64s = field(default_factory=lambda: np.zeros((0, 2), dtype=np.int64))
    """(n, 2): rows and columns of each matrix."""
    scaling: Int64s = field(default_factory=_none)
    """Numbers in `SCALINGS`."""
    group: Int64s = field(default_factory=_none)
    first_key: Int64s = field(default_factory=_none)
    boxes: GridBoxes = field(default_factory=GridBoxes.none)

    def __len__(self) -> int:
        return len(self.group)

    @overload
    def __getitem__(self, number: int) -> HeldGrid: ...

    @overload
    def __getitem__(self, number: slice) -> Sequence[HeldGrid]: ...

    def __getitem__(self, number: int | slice) -> HeldGrid | Sequence[HeldGrid]:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        if not -len(self) <= number < len(self):
            raise IndexError(number)
        rows, columns = self.size[number].tolist()
        first, last = np.searchsorted(self.boxes.grid, [number % len(self), number % len(self) + 1]).tolist()
        return HeldGrid(
            name=self.names[number],
            grid=Grid(rows=rows, columns=columns, scaling=SCALINGS[self.scaling[number]]),
            group=int(self.group[number]),
            first_key=int(self.first_key[number]),
            boxes=tuple(self._box(i) for i in range(first, last)),
        )

    def __iter__(self) -> Iterator[HeldGrid]:
        return (self[number] for number in range(len(self)))

    def _box(self, number: int) -> Box:
        of = self.boxes
        (top, left), (rows, columns) = of.first[number].tolist(), of.extent[number].tolist()
        address, stride, width = (int(column[number]) for column in (of.address, of.stride, of.width))
        return Box(address=address, stride=stride, width=width, first=(top, left), rows=rows, columns=columns)

    @property
    def block(self) -> Int64s:
        """(n, 2): rows and columns of a block of each matrix."""
        sides: Int64s = block_sides_of(self.size, np.full(len(self), 2), self.scaling)
        return sides

    @property
    def shape(self) -> Int64s:
        """(n, 2): blocks along each side."""
        return -(-self.size // self.block)

    @property
    def groups(self) -> list[int]:
        """Groups this trainer holds something of."""
        return np.unique(self.group).tolist()

    def source_spans(self, group: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The weights a group reads: addresses and bytes."""
        mine = self.group[self.boxes.grid] == group
        return self.boxes.address[mine], (self.boxes.extent[:, 0] * self.boxes.stride)[mine]


class BlockSpread:
    """All blocks of all grids in one vector, group after group."""

    def __init__(self, grids: HeldGrids) -> None:
        self._grids = grids
        self.starts = np.concatenate([[0], np.cumsum(grids.shape.prod(axis=1))]).astype(np.int64)
        """First block of each grid."""
        self.num_blocks = int(self.starts[-1])
        self.num_groups = 1 + int(grids.group.max(initial=-1))
        self._first_grid = np.searchsorted(grids.group, np.arange(self.num_groups + 1)).tolist()
        cut = self._cut_blocks()
        grid = np.searchsorted(self.starts, cut, side="right") - 1
        borders = np.searchsorted(cut, self.starts[self._first_grid])[1:-1]
        self.cut = np.split(cut, borders) if self.num_groups else []
        """For each group: the blocks that must be agreed on."""
        keys = cut - self.starts[grid] + grids.first_key[grid]
        self.keys = np.split(keys, borders) if self.num_groups else []
        """For each group: the same blocks, by numbers that all trainers know."""
        self.cut_grids = np.split(grid, borders) if self.num_groups else []
        """For each group: the grids these blocks belong to."""

    def _cut_blocks(self) -> Int64s:
        """Blocks that other trainers may also hold a part of, sorted."""
        boxes, grids = self._grids.boxes, self._grids
        side, size = grids.block[boxes.grid], grids.size[boxes.grid]
        end = boxes.first + boxes.extent
        is_whole = ((boxes.first % side == 0) & ((end % side == 0) | (end == size))).all(axis=1)
        some = np.flatnonzero(~is_whole)
        side, size, first, end = side[some], size[some], boxes.first[some], end[some]
        begin = first // side
        touched = -(-end // side) - begin
        count = touched.prod(axis=1)
        box = np.repeat(np.arange(len(some)), count)
        within = np.arange(len(box)) - np.repeat(np.cumsum(count) - count, count)
        block = begin[box] + np.stack([within // touched[box, 1], within % touched[box, 1]], axis=1)
        covers = (block * side[box] >= first[box]) & (np.minimum((block + 1) * side[box], size[box]) <= end[box])
        is_cut = ~covers.all(axis=1)
        grid = boxes.grid[some][box[is_cut]]
        number = block[is_cut, 0] * grids.shape[grid, 1] + block[is_cut, 1]
        return np.unique(self.starts[grid] + number)

    def grids_of(self, group: int) -> range:
        """Numbers of a group's grids."""
        return range(self._first_grid[group], self._first_grid[group + 1])

    def blocks_of(self, group: int) -> slice:
        """A group's blocks."""
        first, last = self._first_grid[group : group + 2]
        return slice(int(self.starts[first]), int(self.starts[last]))

    def start(self, number: int) -> int:
        """First block of a grid."""
        return int(self.starts[number])
