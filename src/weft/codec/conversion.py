"""What a trainer does to its weights before they travel: rows are copied, boxes cast or quantised, scales written.

The weights one trainer sends as FP8 lie on grids of blocks that share a scale. It finds the largest magnitude of the
blocks it holds, agrees with the other holders on those that are cut, and then fills chunks of an image: bytes as the
engine wants them, in the order in which they are sent.

    converter.find_amax(0)                                   # a group of grids
    found = converter.amax(converter.cut[0])                 # to be exchanged: the maximum over all holders
    converter.agree(0, agreed)
    converter.fill(chunk, image)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from weft import native
from weft.codec import fp8
from weft.codec.cast import cast
from weft.codec.fp8 import Box, Grid
from weft.codec.memory import Floats, matrix_view
from weft.core.layout import DTYPE_BYTES
from weft.core.planes import Planes
from weft.core.recipe import Op
from weft.devices import CPU

DTYPES = ("fp32", "bf16", "fp16", "fp8_e4m3")
"""Numbers of dtypes in tables."""


class Conversion(NamedTuple):
    """A box of a shard that is not copied as it is."""

    op: int
    grid: int
    """Number of the trainer's grid; of no meaning for casts."""
    src: int
    """Address of its first element; 0 for scales."""
    stride: int
    """Bytes from row to row."""
    src_dtype: int
    dst_dtype: int
    first_row: int
    """In elements of the matrix; in blocks for scales."""
    first_column: int
    rows: int
    columns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldGrid:
    """A matrix that is quantised, and which parts of it a trainer holds."""

    name: str
    grid: Grid
    group: int
    """Grids of one group are exchanged together; groups are numbered in the order they are needed."""
    first_key: int
    """The first of its blocks among those of all quantised matrices, however many trainers hold them."""
    boxes: tuple[Box, ...]

    def cut_blocks(self) -> NDArray[np.int64]:
        """Numbers of the blocks of which other holders may have a part too."""
        found: list[NDArray[np.int64]] = []
        for box in self.boxes:
            mine = [
                _touched_and_whole(box.first[dim], extent, size, side)
                for dim, (extent, size, side) in enumerate(
                    zip((box.rows, box.columns), (self.grid.rows, self.grid.columns), self.grid.block, strict=True)
                )
            ]
            (rows, whole_rows), (columns, whole_columns) = mine
            cut = ~(whole_rows[:, None] & whole_columns[None, :])
            found.append((rows[:, None] * self.grid.shape[1] + columns[None, :])[cut])
        return np.unique(_joined(found))


def _touched_and_whole(first: int, extent: int, size: int, side: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Blocks along one dimension that a box touches, and which of them it covers."""
    last = first + extent
    number = np.arange(first // side, -(-last // side))
    return number, (number * side >= first) & (np.minimum((number + 1) * side, size) <= last)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkFill:
    """How a chunk of an image is filled."""

    planes: Planes
    """What is copied as it is; destinations count from the beginning of the image."""
    boxes: tuple[tuple[Conversion, int], ...]
    """Boxes that are converted, and where they begin in the image; their rows follow each other there."""
    source_end: int
    """Behind the last byte of the weights that is read."""


class Converter(Protocol):
    """Conversions on one device."""

    cut: list[NDArray[np.int64]]
    """For each group: the blocks that must be agreed on, as indexes among all blocks of all grids."""
    keys: list[NDArray[np.int64]]
    """For each group: the same blocks, by numbers that all trainers know."""

    def find_amax(self, group: int) -> None:
        """Find the largest magnitude of every block of a group, as far as they are here."""

    def amax(self, blocks: NDArray[np.int64]) -> Floats:
        """Magnitudes of some blocks."""

    def agree(self, group: int, amax: Floats) -> None:
        """The magnitudes of a group's cut blocks are known: make the scales."""

    def fill(self, chunk: ChunkFill, image: int) -> None:
        """Fill a chunk of an image at some address."""


class CpuConverter:
    """Conversions of CPU memory."""

    def __init__(self, grids: Sequence[HeldGrid], *, allow_nonfinite: bool = False) -> None:
        """Grids sorted by group."""
        self._grids, self._allow_nonfinite = grids, allow_nonfinite
        self.spread = BlockSpread(grids)
        self.cut, self.keys = self.spread.cut, self.spread.keys
        self._amax, self._scale = (np.zeros(self.spread.num_blocks, dtype=np.float32) for _ in range(2))

    def find_amax(self, group: int) -> None:
        """Raises CodecError, naming the tensor, for numbers that are not finite."""
        self._amax[self.spread.blocks_of(group)] = 0
        for number in self.spread.grids_of(group):
            held = self._grids[number]
            for box in held.boxes:
                amax = self.spread.view(self._amax, number)
                fp8.add_amax(box, held.grid, amax, tensor=held.name, allow_nonfinite=self._allow_nonfinite)

    def amax(self, blocks: NDArray[np.int64]) -> Floats:
        """Magnitudes of some blocks."""
        return self._amax[blocks]

    def agree(self, group: int, amax: Floats) -> None:
        """Make the scales of a group."""
        self._amax[self.cut[group]] = amax
        mine = self.spread.blocks_of(group)
        self._scale[mine] = fp8.scales(self._amax[mine])

    def fill(self, chunk: ChunkFill, image: int) -> None:
        """Copy rows and convert boxes."""
        if len(chunk.planes):
            native.copy_planes(chunk.planes.moved(dst=image))
        for box, at in chunk.boxes:
            self._convert(box, image + at)

    def _convert(self, box: Conversion, to: int) -> None:
        src_dtype, dst_dtype = DTYPES[box.src_dtype], DTYPES[box.dst_dtype]
        row_bytes = box.columns * DTYPE_BYTES[dst_dtype]
        match box.op:
            case Op.CAST:
                cast(box.src, box.stride, src_dtype, to, row_bytes, dst_dtype, rows=box.rows, columns=box.columns)
            case Op.QUANTIZE:
                part = Box(
                    address=box.src,
                    stride=box.stride,
                    width=DTYPE_BYTES[src_dtype],
                    first=(box.first_row, box.first_column),
                    rows=box.rows,
                    columns=box.columns,
                )
                grid = self._grids[box.grid].grid
                scale = self.spread.view(self._scale, box.grid)
                fp8.quantize(part, grid, scale, to, row_bytes, is_bounded=not self._allow_nonfinite)
            case Op.SCALE:
                scale = self.spread.view(self._scale, box.grid)
                rows = slice(box.first_row, box.first_row + box.rows)
                columns = slice(box.first_column, box.first_column + box.columns)
                matrix_view(to, row_bytes, box.rows, box.columns, "<f4")[...] = scale[rows, columns]


class BlockSpread:
    """All blocks of all grids in one vector, group after group."""

    def __init__(self, grids: Sequence[HeldGrid]) -> None:
        self._grids = grids
        sizes = [held.grid.shape[0] * held.grid.shape[1] for held in grids]
        self._starts = [0, *itertools.accumulate(sizes)]
        self.num_blocks = self._starts[-1]
        self.num_groups = 1 + max((held.group for held in grids), default=-1)
        groups = [held.group for held in grids]
        self._first_grid = np.searchsorted(groups, range(self.num_groups + 1)).tolist()
        cut = [held.cut_blocks() for held in grids]
        self.cut = [
            _joined([cut[number] + self._starts[number] for number in self.grids_of(group)])
            for group in range(self.num_groups)
        ]
        self.keys = [
            _joined([cut[number] + grids[number].first_key for number in self.grids_of(group)])
            for group in range(self.num_groups)
        ]

    def grids_of(self, group: int) -> range:
        """Numbers of a group's grids."""
        return range(self._first_grid[group], self._first_grid[group + 1])

    def blocks_of(self, group: int) -> slice:
        """A group's blocks."""
        return slice(self._starts[self._first_grid[group]], self._starts[self._first_grid[group + 1]])

    def start(self, number: int) -> int:
        """First block of a grid."""
        return self._starts[number]

    def view(self, per_block: Floats, number: int) -> Floats:
        """A grid's part of a vector over all blocks."""
        return per_block[self._starts[number] : self._starts[number + 1]].reshape(self._grids[number].grid.shape)


def _joined(parts: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def converter_for(device: str, grids: Sequence[HeldGrid], *, allow_nonfinite: bool) -> Converter:
    """Who converts a device's memory."""
    if device == CPU:
        return CpuConverter(grids, allow_nonfinite=allow_nonfinite)
    from weft.codec.conversion_gpu import GpuConverter  # noqa: PLC0415 - torch and Triton only where there is a GPU
    from weft.gpu import GpuWork  # noqa: PLC0415 - the same

    return GpuConverter(GpuWork(int(device.partition(":")[2])), grids, allow_nonfinite=allow_nonfinite)
