"""Conversions of GPU memory: the largest magnitudes, FP8, casts. Gives what weft.codec.conversion gives, bit for bit.

Blocks are cut into tiles of at most 128×128, one program each; their tables stay on the device for all versions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from weft.codec.conversion import DTYPES, ChunkFill, Conversion
from weft.codec.fp8 import Grid
from weft.codec.fp8_kernels import QuantizeTiles, load_rows, quantize
from weft.codec.grids import BlockSpread, HeldGrids
from weft.codec.memory import Floats
from weft.core.layout import DTYPE_BYTES
from weft.core.planes import Planes
from weft.core.recipe import Op
from weft.errors import CodecError
from weft.gpu import GpuWork

SIDE = 128
AMAX_ROWS, AMAX_WARPS = 64, 8
_TORCH = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
}


@triton.jit
def _amax_kernel(  # type: ignore[no-untyped-def]
    src_base,
    src_table,
    stride_table,
    extent_table,
    block_table,
    grid_table,
    amax,
    wild,
    SIDE: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Raise a block's magnitude to the largest finite one of a tile; count what is not finite."""
    tile = tl.program_id(0)
    element = tl.load(src_table + tile)
    stride = tl.load(stride_table + tile).to(tl.int32)
    if ALIGNED:
        element, stride = tl.multiple_of(element, 16), tl.multiple_of(stride, 16)
    src = src_base + element
    extent = tl.load(extent_table + tile)
    rows = (extent & 0xFFFF).to(tl.int32)
    columns = (extent >> 16).to(tl.int32)
    most = tl.zeros((ROWS, SIDE), tl.float32)
    others = tl.zeros((ROWS, SIDE), tl.int32)
    for begin in tl.static_range(0, SIDE, ROWS):
        values = tl.abs(load_rows(src, stride, begin, rows, columns, SIDE, ROWS, WHOLE))
        finite = values < float("inf")
        most = tl.maximum(most, tl.where(finite, values, 0.0))
        others += tl.where(finite, 0, 1)
    tl.atomic_max(amax + tl.load(block_table + tile), tl.max(most).to(tl.int32, bitcast=True))
    count = tl.sum(others)
    if count > 0:
        tl.atomic_add(wild + tl.load(grid_table + tile), count)


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Parts of matrices, cut so that each lies in one block; columns of equal length."""

    src: NDArray[np.int64]
    """Address of the first element."""
    stride: NDArray[np.int64]
    """In bytes."""
    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    block: NDArray[np.int64]
    offset: NDArray[np.int64]
    """Of the first element in the part, row after row."""
    width: NDArray[np.int64]
    """Columns of the part."""

    @classmethod
    def of(
        cls, src: int, stride: int, itemsize: int, first: tuple[int, int], extent: tuple[int, int], grid: Grid
    ) -> _Tiles:
        """One part of a matrix."""
        (top, height), (left, width) = (
            _cuts(start, size, min(side, SIDE)) for start, size, side in zip(first, extent, grid.block, strict=True)
        )
        row, column = (corner.reshape(-1) for corner in np.meshgrid(top, left, indexing="ij"))
        rows, columns = (size.reshape(-1) for size in np.meshgrid(height, width, indexing="ij"))
        down, across = (first[0] + row) // grid.block[0], (first[1] + column) // grid.block[1]
        return cls(
            src=src + row * stride + column * itemsize,
            stride=np.full_like(row, stride),
            rows=rows,
            columns=columns,
            block=down * grid.shape[1] + across,
            offset=row * extent[1] + column,
            width=np.full_like(row, extent[1]),
        )

    @classmethod
    def joined(cls, parts: Iterable[_Tiles]) -> tuple[_Tiles, int]:
        """All of them, whole ones first, and how many those are."""
        found = list(parts)
        columns = {name: np.concatenate([getattr(part, name) for part in found]) for name in cls.__slots__}
        is_part = (columns["rows"] < SIDE) | (columns["columns"] < SIDE)
        order = np.argsort(is_part, kind="stable")
        return cls(**{name: column[order] for name, column in columns.items()}), int((~is_part).sum())

    def moved(self, block: int, offset: int) -> _Tiles:
        """With other origins of blocks and of the part."""
        return _Tiles(
            self.src, self.stride, self.rows, self.columns, self.block + block, self.offset + offset, self.width
        )


def _cuts(first: int, size: int, side: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where tiles of a part begin along one dimension, and how long they are."""
    begins = np.unique(np.concatenate([[0], np.arange(-first % side, size, side)])).astype(np.int64)
    return begins, np.diff(np.append(begins, size))


@dataclass(frozen=True, slots=True)
class _AmaxTables:
    """Where to look for the magnitudes of one group; one launch for each precision and kind of tile."""

    base: torch.Tensor
    columns: tuple[torch.Tensor, ...]
    aligned: bool
    num_whole: int


@dataclass(frozen=True, slots=True)
class _ScaleTable:
    """The scales a chunk carries."""

    begin: int
    """Byte of the image at which the first one lies."""
    num_floats: int
    """From the first to the last one."""
    to: torch.Tensor
    block: torch.Tensor


class GpuConverter:
    """Conversions of one GPU's memory, on a stream of their own."""

    def __init__(self, device: str, grids: HeldGrids, *, allow_nonfinite: bool = False) -> None:
        self._grids, self._allow_nonfinite = grids, allow_nonfinite
        self._device = torch.device(device)
        self._work = GpuWork(self._device.index or 0)
        self.spread = BlockSpread(grids)
        self.cut, self.keys = self.spread.cut, self.spread.keys
        size = max(self.spread.num_blocks, 1)
        self._amax = torch.zeros(size, dtype=torch.float32, device=self._device)
        self._scale = torch.zeros_like(self._amax)
        self._wild = torch.zeros(max(len(grids), 1), dtype=torch.int32, device=self._device)
        self._cut = [torch.from_numpy(cut).to(self._device) for cut in self.cut]
        self._where: dict[int, list[_AmaxTables]] = {}
        self._quantized: dict[tuple[int, int], list[tuple[QuantizeTiles, int]]] = {}
        self._planes: dict[tuple[int, int], Planes] = {}
        self._scales: dict[int, _ScaleTable | None] = {}

    def find_amax(self, group: int) -> None:
        """Raises CodecError, naming the tensor, for numbers that are not finite."""
        with self._work.stream():
            self._amax[self.spread.blocks_of(group)] = 0.0
            self._wild.zero_()
            for tables in self._amax_tables(group):
                self._launch_amax(tables)
            wild = self._wild.cpu()
        if wild.any() and not self._allow_nonfinite:
            number = int(wild.nonzero()[0])
            raise CodecError(
                f"`{self._grids[number].name}` has {int(wild[number])} elements that are not finite",
                hint="the policy has diverged, or allow_nonfinite",
            )

    def _launch_amax(self, tables: _AmaxTables) -> None:
        for begin, end, whole in ((0, tables.num_whole, True), (tables.num_whole, len(tables.columns[0]), False)):
            if end > begin:
                _amax_kernel[(end - begin,)](
                    tables.base,
                    *(column[begin:end] for column in tables.columns),
                    self._amax.view(torch.int32),
                    self._wild,
                    SIDE=SIDE,
                    ROWS=AMAX_ROWS,
                    ALIGNED=tables.aligned,
                    WHOLE=whole,
                    num_warps=AMAX_WARPS,
                )

    def _amax_tables(self, group: int) -> list[_AmaxTables]:
        if group not in self._where:
            by_width: dict[int, list[tuple[_Tiles, int]]] = {}
            for number in self.spread.grids_of(group):
                held = self._grids[number]
                for box in held.boxes:
                    tiles = _Tiles.of(box.address, box.stride, box.width, box.first, (box.rows, box.columns), held.grid)
                    by_width.setdefault(box.width, []).append((tiles.moved(self.spread.start(number), 0), number))
            self._where[group] = [self._tables_of(width, found) for width, found in by_width.items()]
        return self._where[group]

    def _tables_of(self, width: int, found: list[tuple[_Tiles, int]]) -> _AmaxTables:
        """`offset` is not needed here and carries the number of the grid."""
        marked = (
            _Tiles(t.src, t.stride, t.rows, t.columns, t.block, np.full_like(t.block, number), t.width)
            for t, number in found
        )
        tiles, num_whole = _Tiles.joined(marked)
        base = int(tiles.src.min())
        element, stride = (tiles.src - base) // width, tiles.stride // width
        aligned = base % 16 == 0 and not (element % 16).any() and not (stride % 16).any()
        columns = (element, stride, tiles.rows + (tiles.columns << 16), tiles.block, tiles.offset)
        kind = torch.bfloat16 if width == 2 else torch.float32
        return _AmaxTables(
            self._work.view(base, width).view(kind),
            tuple(torch.from_numpy(np.ascontiguousarray(c)).to(self._device) for c in columns),
            aligned,
            num_whole,
        )

    def amax(self, blocks: NDArray[np.int64]) -> Floats:
        """Magnitudes of some blocks."""
        with self._work.stream():
            found: Floats = self._amax[torch.from_numpy(blocks).to(self._device)].cpu().numpy()
        return found

    def agree(self, group: int, amax: Floats) -> None:
        """Make the scales of a group."""
        with self._work.stream():
            self._amax[self._cut[group]] = torch.from_numpy(amax.copy()).to(self._device)
            mine = self.spread.blocks_of(group)
            largest = torch.tensor(448.0, device=self._device)  # dividing by a plain number is rounded differently
            self._scale[mine] = self._amax[mine].clamp(min=1e-10) / largest

    def fill(self, chunk: ChunkFill, image: int) -> None:
        """Copy rows and convert boxes."""
        if len(chunk.planes):
            self._work.copy_planes(self._moved(chunk, image))
        with self._work.stream():
            for tiles, width in self._quantize_tiles(chunk, image):
                tiles.amax.copy_(self._amax[tiles.number])
                quantize(tiles, width=width, known_amax=True, careful=self._allow_nonfinite)
            self._write_scales(chunk, image)
            for box, at in chunk.boxes:
                if box.op == Op.CAST:
                    self._cast(box, image + at)

    def _moved(self, chunk: ChunkFill, image: int) -> Planes:
        """What is copied, at its place; kept, because tables of copies are found by it."""
        key = id(chunk), image
        if key not in self._planes:
            self._planes[key] = chunk.planes.moved(dst=image)
        return self._planes[key]

    def _cast(self, box: Conversion, to: int) -> None:
        """A copy that torch converts."""
        dtype = _TORCH[DTYPES[box.dst_dtype]]
        target = self._matrix(to, box.columns * dtype.itemsize, box.rows, box.columns, dtype)
        source_dtype = _TORCH[DTYPES[box.src_dtype]]
        target.copy_(self._matrix(box.src, box.stride, box.rows, box.columns, source_dtype))

    def _write_scales(self, chunk: ChunkFill, image: int) -> None:
        """The scales of all matrices of a chunk, by one pass over a table of them."""
        key = id(chunk)
        if key not in self._scales:
            self._scales[key] = self._scale_table(chunk)
        table = self._scales[key]
        if table is not None:
            target = self._work.view(image + table.begin, 4 * table.num_floats).view(torch.float32)
            scales = self._scale[table.block]
            if target.device.type == "cpu":  # pinned memory of the host
                target[table.to.cpu()] = scales.cpu()
            else:
                target[table.to] = scales

    def _scale_table(self, chunk: ChunkFill) -> _ScaleTable | None:
        """Which block's scale goes where, counted in floats from the first one on."""
        to, block = [], []
        for box, at in chunk.boxes:
            if box.op == Op.SCALE:
                row, column = np.divmod(np.arange(box.rows * box.columns), box.columns)
                width = self._grids[box.grid].grid.shape[1]
                to.append(at // 4 + np.arange(box.rows * box.columns))
                block.append(self.spread.start(box.grid) + (box.first_row + row) * width + box.first_column + column)
        if not to:
            return None
        places, blocks = np.concatenate(to), np.concatenate(block)
        first = int(places.min())
        return _ScaleTable(
            begin=4 * first,
            num_floats=int(places.max()) - first + 1,
            to=torch.from_numpy(places - first).to(self._device),
            block=torch.from_numpy(blocks).to(self._device),
        )

    def _matrix(self, address: int, stride: int, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory as a matrix with rows `stride` bytes apart."""
        size = (rows - 1) * stride + columns * dtype.itemsize
        flat = self._work.view(address, size).view(dtype)
        return flat.as_strided((rows, columns), (stride // dtype.itemsize, 1))

    def _quantize_tiles(self, chunk: ChunkFill, image: int) -> list[tuple[QuantizeTiles, int]]:
        """Tiles of a chunk's boxes, by the width of their elements."""
        key = id(chunk), image
        if key not in self._quantized:
            by_width: dict[int, list[_Tiles]] = {}
            for box, at in chunk.boxes:
                if box.op == Op.QUANTIZE:
                    width = DTYPE_BYTES[DTYPES[box.src_dtype]]
                    grid, first = self._grids[box.grid].grid, (box.first_row, box.first_column)
                    tiles = _Tiles.of(box.src, box.stride, width, first, (box.rows, box.columns), grid)
                    by_width.setdefault(width, []).append(tiles.moved(self.spread.start(box.grid), at))
            self._quantized[key] = [
                (self._tables_to_quantize(width, parts, image), width) for width, parts in by_width.items()
            ]
        return self._quantized[key]

    def _tables_to_quantize(self, width: int, parts: list[_Tiles], image: int) -> QuantizeTiles:
        tiles, num_whole = _Tiles.joined(parts)
        base = int(tiles.src.min())
        element, stride = (tiles.src - base) // width, tiles.stride // width
        aligned = base % 16 == 0 and image % 16 == 0
        aligned = aligned and not any((column % 16).any() for column in (element, stride, tiles.offset, tiles.width))
        columns = (element, tiles.offset, stride, tiles.width, tiles.rows + (tiles.columns << 16), tiles.block)
        src, dst, src_stride, dst_stride, extent, block = (
            torch.from_numpy(np.ascontiguousarray(column)).to(self._device) for column in columns
        )
        amax, scale = (torch.zeros(len(src), dtype=torch.float32, device=self._device) for _ in range(2))
        return QuantizeTiles(
            src_base=self._work.view(base, width).view(torch.bfloat16 if width == 2 else torch.float32),
            dst_base=self._work.pointer(image),
            src=src,
            dst=dst,
            stride=src_stride,
            dst_stride=dst_stride,
            extent=extent,
            amax=amax,
            scale=scale,
            number=block,
            num_whole=num_whole,
            aligned=aligned,
        )
