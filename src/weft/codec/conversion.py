"""What a trainer does to its weights before they travel: rows are copied, boxes cast or quantised, scales written.

The weights a trainer sends as FP8 lie on grids of blocks that share a scale. It finds the largest magnitude of the
blocks it holds, agrees with the other holders on the blocks that are cut, and then fills chunks of an image: bytes as
the engine wants them, in the order in which they are sent.

    found = converter.find_amax(0)                           # a group of grids; the maximum over all holders is taken
    converter.agree(0, agreed)
    wait = converter.fill([chunk], [image])                  # None where they are filled already
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from weft import native
from weft.codec import fp8
from weft.codec.cast import cast_all
from weft.codec.grids import BlockSpread, HeldGrids
from weft.codec.memory import Floats
from weft.core.geometry.planes import Planes, joined
from weft.core.layout import DTYPE_BYTES
from weft.core.recipe import Op
from weft.devices import CPU
from weft.errors import CodecError

Int64s = NDArray[np.int64]
Spans = tuple[Int64s, Int64s]
"""Addresses and bytes."""
Wait = Callable[[], None]
"""Returns when work that was started is done, or raises its error."""
DTYPES = tuple(DTYPE_BYTES)
"""Numbers of dtypes in tables."""
DTYPE_WIDTHS = np.array([DTYPE_BYTES[dtype] for dtype in DTYPES], dtype=np.int64)
"""Bytes of an element, by number of its dtype."""


class Conversion(NamedTuple):
    """A box of a shard that is not copied unchanged."""

    op: int
    grid: int
    """Number of the trainer's grid; meaningless for casts."""
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Conversions(Sequence[tuple[Conversion, int]]):
    """Boxes that are converted, as columns, and where they begin in an image; their rows are contiguous there."""

    table: Int64s
    """(n, 10): the numbers of a `Conversion`."""
    at: Int64s

    def __len__(self) -> int:
        return len(self.at)

    @overload
    def __getitem__(self, which: int) -> tuple[Conversion, int]: ...

    @overload
    def __getitem__(self, which: slice) -> Conversions: ...

    def __getitem__(self, which: int | slice) -> tuple[Conversion, int] | Conversions:
        if isinstance(which, slice):
            return Conversions(table=self.table[which], at=self.at[which])
        return Conversion._make(self.table[which].tolist()), int(self.at[which])

    def column(self, name: str) -> Int64s:
        """One field of every box."""
        return self.table[:, Conversion._fields.index(name)]

    def of(self, op: Op) -> Conversions:
        """Those of one operation."""
        mine = self.column("op") == op
        return Conversions(table=self.table[mine], at=self.at[mine])

    @property
    def source_spans(self) -> Spans:
        """The weights each box reads; scales read none (but see `Converter.searched_spans`)."""
        reading = self.table[self.column("op") != Op.SCALE]
        src, stride, src_dtype, rows, columns = (
            reading[:, Conversion._fields.index(name)] for name in ("src", "stride", "src_dtype", "rows", "columns")
        )
        return src, (rows - 1) * stride + columns * DTYPE_WIDTHS[src_dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkFill:
    """How a chunk of an image is filled."""

    planes: Planes
    """What is copied unchanged; destinations are relative to the beginning of the image."""
    boxes: Conversions
    """What is converted."""

    @property
    def source_spans(self) -> Spans:
        """The weights it reads, gaps between rows included."""
        address, num_bytes = (column.astype(np.int64) for column in self.planes.src_spans)
        return all_spans([(address, num_bytes), self.boxes.source_spans])


def all_spans(parts: Sequence[Spans]) -> Spans:
    """Those of all parts."""
    none = np.zeros(0, dtype=np.int64)
    address, num_bytes = (np.concatenate(columns) for columns in zip((none, none), *parts, strict=True))
    return address, num_bytes


class Converter(Protocol):
    """Conversions on one device."""

    cut: list[NDArray[np.int64]]
    """For each group: the blocks that must be agreed on, as indices among all blocks of all grids."""
    keys: list[NDArray[np.int64]]
    """For each group: the same blocks, by numbers that all trainers know."""
    cut_grids: list[NDArray[np.int64]]
    """For each group: the grids these blocks belong to."""

    def expect(self, chunks: Sequence[ChunkFill]) -> None:
        """All chunks that may be filled: what they cut need not be searched by each of them."""

    def looks_before(self, group: int) -> bool:
        """Whether `find_amax` has anything to find, now that all chunks are known."""

    def searched_spans(self, chunk: ChunkFill) -> Spans:
        """The weights that filling a chunk searches for magnitudes, besides those it reads."""

    def find_amax(self, group: int) -> Floats:
        """Find the largest magnitudes of a group's blocks, in the parts held here; returns those of its cut blocks."""

    def agree(self, group: int, amax: Floats) -> None:
        """The magnitudes of a group's cut blocks are known: make the scales."""

    def fill(self, chunks: Sequence[ChunkFill], images: Sequence[int]) -> Wait | None:
        """Fill chunks, each with the address of its image, or start to: the returned function waits until they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _FillProgram:
    """How a Chunk is filled on a CPU: tables that the C module works through."""

    chunk: ChunkFill
    planes: Planes
    """Copies, and scales, which are copied from where they are computed."""
    quantized: Int64s
    """A table for `fp8.quantize_boxes`."""
    casts: tuple[tuple[str, str, Int64s], ...]
    """For each pair of dtypes a table for `cast_all`."""


class CpuConverter:
    """Conversions of CPU memory."""

    def __init__(self, grids: HeldGrids, *, allow_nonfinite: bool = False) -> None:
        """Grids sorted by group."""
        self._grids, self._allow_nonfinite = grids, allow_nonfinite
        self.spread = BlockSpread(grids)
        self.cut, self.keys, self.cut_grids = self.spread.cut, self.spread.keys, self.spread.cut_grids
        self._amax, self._scale, self._factor = (np.zeros(self.spread.num_blocks, dtype=np.float32) for _ in range(3))
        boxes = grids.boxes
        memory = np.stack([boxes.address, boxes.stride, *boxes.extent.T, boxes.width, *boxes.first.T], axis=1)
        self._boxes = np.concatenate([memory, self._blocks(boxes.grid, self._amax)], axis=1)
        """A table for `fp8.amax_boxes`."""
        self._programs: dict[int, _FillProgram] = {}

    def _blocks(self, grid: Int64s, numbers: Floats) -> Int64s:
        """(n, 4): rows and columns of a block, blocks in a row, and where the numbers of all blocks of a grid are."""
        across, address = self._grids.shape[grid, 1], numbers.ctypes.data + 4 * self.spread.starts[grid]
        return np.stack([*self._grids.block[grid].T, across, address], axis=1)

    def expect(self, chunks: Sequence[ChunkFill]) -> None:
        """Everything is searched before chunks are filled."""

    def looks_before(self, group: int) -> bool:
        """Chunks are filled with the magnitudes that were found."""
        return len(self.spread.grids_of(group)) > 0

    def searched_spans(self, chunk: ChunkFill) -> Spans:
        """None: everything is searched before."""
        return all_spans([])

    def find_amax(self, group: int) -> Floats:
        """Raises CodecError, naming the tensor, for non-finite numbers."""
        self._amax[self.spread.blocks_of(group)] = 0
        grids = self.spread.grids_of(group)
        first, last = np.searchsorted(self._grids.boxes.grid, [grids.start, grids.stop]).tolist()
        wild = fp8.amax_boxes(self._boxes[first:last])
        if wild.any() and not self._allow_nonfinite:
            grid = self._grids.boxes.grid[first:last]
            number = grid[np.flatnonzero(wild)[0]]
            raise fp8.not_finite(self._grids.names[number], int(wild[grid == number].sum()))
        return self._amax[self.cut[group]]

    def agree(self, group: int, amax: Floats) -> None:
        """Make the scales of a group."""
        self._amax[self.cut[group]] = amax
        mine = self.spread.blocks_of(group)
        self._scale[mine] = fp8.scales(self._amax[mine])
        self._factor[mine] = fp8.factors(self._scale[mine])

    def fill(self, chunks: Sequence[ChunkFill], images: Sequence[int]) -> None:
        """Copy rows and convert boxes."""
        for chunk, image in zip(chunks, images, strict=True):
            self._fill(chunk, image)

    def _fill(self, chunk: ChunkFill, image: int) -> None:
        program = self._programs.get(id(chunk))
        if program is None:
            program = self._programs[id(chunk)] = self._compiled(chunk)
        if len(program.planes):
            native.copy_planes(program.planes.moved(dst=image))
        if len(program.quantized):
            fp8.quantize_boxes(program.quantized, image, is_bounded=not self._allow_nonfinite)
        for src_dtype, dst_dtype, table in program.casts:
            cast_all(table, image, src_dtype, dst_dtype)

    def _compiled(self, chunk: ChunkFill) -> _FillProgram:
        boxes = chunk.boxes
        return _FillProgram(
            chunk=chunk,
            planes=joined([chunk.planes, self._scale_planes(boxes.of(Op.SCALE))]),
            quantized=self._quantized(boxes.of(Op.QUANTIZE)),
            casts=tuple(_casts(boxes.of(Op.CAST))),
        )

    def _scale_planes(self, boxes: Conversions) -> Planes:
        """Scales, as copies."""
        grid, rows, columns = (boxes.column(name) for name in ("grid", "rows", "columns"))
        across = self._grids.shape[grid, 1]
        self._check_inside(boxes, self._grids.shape[grid])
        block = self.spread.starts[grid] + boxes.column("first_row") * across + boxes.column("first_column")
        table = {
            "dst": boxes.at,
            "src": self._scale.ctypes.data + 4 * block,
            "rows": rows,
            "length": 4 * columns,
            "dst_stride": 4 * columns,
            "src_stride": 4 * across,
        }
        return Planes(**{name: column.astype(np.uint64) for name, column in table.items()})

    def _quantized(self, boxes: Conversions) -> Int64s:
        """A table for `fp8.quantize_boxes`."""
        names = ("src", "stride", "rows", "columns", "src_dtype", "first_row", "first_column")
        memory = np.stack([boxes.column(name) for name in names], axis=1)
        memory[:, 4] = DTYPE_WIDTHS[memory[:, 4]]
        self._check_inside(boxes, self._grids.size[boxes.column("grid")])
        to = np.stack([boxes.at, boxes.column("columns")], axis=1)
        return np.concatenate([memory, self._blocks(boxes.column("grid"), self._factor), to], axis=1)

    def _check_inside(self, boxes: Conversions, size: Int64s) -> None:
        """Raise unless boxes lie inside their matrices, or scales inside theirs."""
        first = np.stack([boxes.column("first_row"), boxes.column("first_column")], axis=1)
        extent = np.stack([boxes.column("rows"), boxes.column("columns")], axis=1)
        for at in np.flatnonzero(((first < 0) | (first + extent > size)).any(axis=1))[:1].tolist():
            name = self._grids.names[boxes.column("grid")[at]]
            what = f"{extent[at].tolist()} at {first[at].tolist()} lies outside its matrix of {size[at].tolist()}"
            raise CodecError(f"`{name}`: box of {what}")


def _casts(boxes: Conversions) -> list[tuple[str, str, Int64s]]:
    """Tables for `cast_all`, by dtypes."""
    kinds = boxes.column("src_dtype") * len(DTYPES) + boxes.column("dst_dtype")
    row_bytes = boxes.column("columns") * DTYPE_WIDTHS[boxes.column("dst_dtype")]
    columns = (boxes.column("src"), boxes.column("stride"), boxes.at, row_bytes, boxes.column("rows"))
    table = np.stack([*columns, boxes.column("columns")], axis=1)
    return [
        (DTYPES[kind // len(DTYPES)], DTYPES[kind % len(DTYPES)], table[kinds == kind])
        for kind in np.unique(kinds).tolist()
    ]


def converter_for(device: str, grids: HeldGrids, *, allow_nonfinite: bool) -> Converter:
    """The converter of a device's memory."""
    if device == CPU:
        return CpuConverter(grids, allow_nonfinite=allow_nonfinite)
    from weft.codec.gpu.converter import GpuConverter  # noqa: PLC0415 - torch and Triton only where there is a GPU
    from weft.gpu import GpuWork  # noqa: PLC0415 - the same

    return GpuConverter(GpuWork(int(device.partition(":")[2])), grids, allow_nonfinite=allow_nonfinite)
