"""Conversions of GPU memory: the largest magnitudes, FP8, casts. Same results as weft.codec.conversion, bit for bit.

Blocks that fit into one tile of a chunk, rows among them, are quantised in one pass, when the chunk is filled. Only
blocks that other trainers hold parts of, those larger than a tile (tensors), and rows that a chunk has only a part of
are searched beforehand (`find_amax`). Other blocks that a chunk's border cuts, and those whose scales travel apart from
their codes, are searched by the chunk that needs them, which then reads more than its codes (`searched_spans`).
Each chunk is compiled once into tables on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from weft.codec.cast import KINDS
from weft.codec.conversion import DTYPES, ChunkFill, Conversion, Spans, Wait, all_spans
from weft.codec.fp8 import Box, Grid
from weft.codec.gpu import cast_kernels, fp8_kernels, row_kernels
from weft.codec.gpu.fp8_arithmetic import WIDTHS
from weft.codec.gpu.fp8_launch import Fp8Kernels
from weft.codec.gpu.matrix_tiles import SIDE, MatrixBox, MatrixTiles, fits_tile
from weft.codec.grids import BlockSpread, HeldGrids
from weft.codec.memory import Floats
from weft.core.geometry.planes import Planes, joined
from weft.core.layout import DTYPE_BYTES
from weft.core.recipe import Op
from weft.errors import CodecError
from weft.gpu import GpuWork

Int64s = NDArray[np.int64]
_DIVERGED = "the policy may have diverged; set allow_nonfinite to send it anyway"


class _Tiles(NamedTuple):
    """Tiles of one kind: one launch."""

    kernels: Fp8Kernels
    """Those of rows, or of squares."""
    width: int
    """Bytes of an element."""
    table: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    """Where to look for the magnitudes of some blocks."""

    blocks: torch.Tensor
    tiles: tuple[_Tiles, ...]
    spans: Spans
    """The weights that are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _GroupProgram:
    """A search before chunks are filled, and where its results go for the host."""

    search: _Search
    found: torch.Tensor
    """Magnitudes of the cut blocks, on the device."""
    fetched: torch.Tensor
    """The same in host memory."""
    num_wild: torch.Tensor
    """How many numbers are not finite, in host memory."""
    to_host: Planes
    """Copies of both."""
    agreed: torch.Tensor
    """Magnitudes all holders agree on, in host memory."""
    from_host: Planes
    """Their copy to `found`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChunkProgram:
    """A chunk's tables on the device."""

    chunk: ChunkFill
    """Kept alive, because programs are looked up by its identity."""
    grids: Sequence[int]
    """Grids it has codes or scales of."""
    search: _Search
    """Blocks that no tile of this chunk covers completely, and that `find_amax` does not search."""
    quantized: tuple[_Tiles, ...]
    casts: tuple[tuple[str, str, torch.Tensor], ...]
    scales: torch.Tensor
    num_wild: torch.Tensor
    """How many numbers are not finite, in host memory."""
    to_host: Planes
    """Its copy."""


class GpuConverter:
    """Conversions of one GPU's memory, on a stream of their own."""

    def __init__(self, work: GpuWork, grids: HeldGrids, *, allow_nonfinite: bool = False) -> None:
        self._grids, self._allow_nonfinite, self._work = grids, allow_nonfinite, work
        self.spread = BlockSpread(grids)
        self.cut, self.keys, self.cut_grids = self.spread.cut, self.spread.keys, self.spread.cut_grids
        self._amax = torch.zeros(max(self.spread.num_blocks, 1), dtype=torch.float32, device=work.device)
        self._wild = torch.zeros(1 + len(grids), dtype=torch.int32, device=work.device)
        """Non-finite elements of the chunks that are filled: in total, and of each grid."""
        self._wild_before = torch.zeros_like(self._wild)
        """The same for what `find_amax` searches, on another thread."""
        self._cut = [work.upload(blocks) for blocks in self.cut]
        self._is_sought = self._sought_before()
        self._searching = work.beside()
        """Searches before chunks are filled, on another thread."""
        self._groups: dict[int, _GroupProgram] = {}
        self._programs: dict[int, _ChunkProgram] = {}
        self._copies: dict[tuple[tuple[int, ...], tuple[int, ...]], Planes] = {}
        """What chunks that are filled together copy unchanged, by their identities and their images' addresses."""

    def expect(self, chunks: Sequence[ChunkFill]) -> None:
        """Rows that a chunk has only a part of are searched once, before any chunk is filled."""
        sides, borders = self._grids.block, np.zeros(self.spread.num_blocks + 1, dtype=np.int64)
        for chunk in chunks:
            boxes = chunk.boxes.of(Op.QUANTIZE)
            grid = boxes.column("grid")
            is_part = (sides[grid, 0] == 1) & (boxes.column("columns") < sides[grid, 1])
            first = (self.spread.starts[grid] + boxes.column("first_row"))[is_part]
            np.add.at(borders, first, 1)
            np.add.at(borders, first + boxes.column("rows")[is_part], -1)
        self._is_sought |= np.cumsum(borders)[:-1] > 0

    def looks_before(self, group: int) -> bool:
        """Whether some blocks are cut, larger than a tile, or rows of which a chunk has only a part."""
        return bool(self._is_sought[self.spread.blocks_of(group)].any())

    def searched_spans(self, chunk: ChunkFill) -> Spans:
        """Where the blocks lie that the chunk searches itself."""
        with self._work.queue():
            return self._program(chunk).search.spans

    def find_amax(self, group: int) -> Floats:
        """Find magnitudes that are needed before chunks are filled; if there are none, returns at once.

        Raises CodecError, naming the tensor, for non-finite numbers.
        """
        program = self._group(group)
        if len(program.search.blocks):
            with self._searching.queue():
                self._find(program.search, self._wild_before)
                torch.index_select(self._amax, 0, self._cut[group], out=program.found)
                self._searching.queue_copy(program.to_host)
                done = self._searching.marker()
            done.synchronize()
            if not self._allow_nonfinite and int(program.num_wild):
                self._raise_if_wild(self.spread.grids_of(group), self._wild_before)
                raise CodecError("weights have elements that are not finite", hint=_DIVERGED)
        magnitudes: Floats = program.fetched.numpy().copy()
        return magnitudes

    def _group(self, group: int) -> _GroupProgram:
        """The program of a group, made at its first use: before any of its Chunks can be filled."""
        if group not in self._groups:
            self._groups[group] = self._compile_group(group)
        return self._groups[group]

    def _compile_group(self, group: int) -> _GroupProgram:
        mine, work = self.spread.blocks_of(group), self._searching
        with work.stream():
            search = self._search(mine.start + np.flatnonzero(self._is_sought[mine]), self.spread.grids_of(group))
            found = torch.empty(len(self._cut[group]), dtype=torch.float32, device=work.device)
        fetched, num_wild = work.host_copy(found), work.host_copy(self._wild_before[:1])
        agreed = work.host_copy(found)
        return _GroupProgram(
            search=search,
            found=found,
            fetched=fetched,
            num_wild=num_wild,
            to_host=work.between([(fetched, found), (num_wild, self._wild_before[:1])]),
            agreed=agreed,
            from_host=work.between([(found, agreed)]),
        )

    def agree(self, group: int, amax: Floats) -> None:
        """Take over the magnitudes of a group's cut blocks; queued before the chunks that need them."""
        if len(self.cut[group]):
            program = self._group(group)
            program.agreed.numpy()[:] = amax
            with self._work.queue():
                self._work.queue_copy(program.from_host)
                self._amax.index_copy_(0, self._cut[group], program.found)

    def fill(self, chunks: Sequence[ChunkFill], images: Sequence[int]) -> Wait:
        """Queue copies, conversions and scales. The wait raises CodecError for non-finite numbers."""
        with self._work.queue():
            copies = self._copies_of(chunks, images)
            if len(copies):
                self._work.queue_copy(copies)
            programs = [self._program(chunk) for chunk in chunks]
            for program, image in zip(programs, images, strict=True):
                self._queue_conversions(program, image)
            done = self._work.marker()

        def wait() -> None:
            done.synchronize()
            for program in programs:
                if self._is_checked(program) and int(program.num_wild):
                    self._raise_if_wild(program.grids, self._wild)

        return wait

    def _copies_of(self, chunks: Sequence[ChunkFill], images: Sequence[int]) -> Planes:
        """What is copied unchanged, in one launch."""
        key = tuple(map(id, chunks)), tuple(images)
        if key not in self._copies:
            parts = [chunk.planes.moved(dst=image) for chunk, image in zip(chunks, images, strict=True)]
            self._copies[key] = parts[0] if len(parts) == 1 else joined(parts)
        return self._copies[key]

    def _queue_conversions(self, program: _ChunkProgram, image: int) -> None:
        if not program.grids and not program.casts:
            return
        self._find(program.search, self._wild)
        for tiles in program.quantized:
            tiles.kernels.quantize(
                tiles.table, image, self._amax, self._wild, width=tiles.width, allow_nonfinite=self._allow_nonfinite
            )
        for src_dtype, dst_dtype, table in program.casts:
            cast_kernels.cast(table, image, src_dtype, dst_dtype)
        fp8_kernels.write_scales(program.scales, image, self._amax)
        if self._is_checked(program):
            self._work.queue_copy(program.to_host)

    def _is_checked(self, program: _ChunkProgram) -> bool:
        """Whether non-finite numbers of a chunk are counted."""
        return bool(program.grids) and not self._allow_nonfinite

    def _find(self, search: _Search, wild: torch.Tensor) -> None:
        if len(search.blocks):
            self._amax.index_fill_(0, search.blocks, 0.0)
            for tiles in search.tiles:
                tiles.kernels.add_amax(tiles.table, self._amax, wild, width=tiles.width)

    def _raise_if_wild(self, grids: Sequence[int], counts: torch.Tensor) -> None:
        """Raise, naming the tensor, if a number of these grids is not finite. It may belong to an earlier chunk, whose
        own wait has raised. Either way the count starts again, and the version has failed.

        They are counted once more by themselves: another thread may have begun the next chunk, which counts them, too.
        """
        with self._work.queue():
            found = torch.zeros_like(counts)
            for tiles in self._search(np.arange(self.spread.num_blocks), grids).tiles:
                tiles.kernels.add_amax(tiles.table, self._amax, found, width=tiles.width)
            wild = found[1:].tolist()
            counts.zero_()
        for number in np.flatnonzero(wild)[:1].tolist():
            raise CodecError(
                f"`{self._grids[number].name}` has {wild[number]} elements that are not finite",
                hint=_DIVERGED,
            )

    def _sought_before(self) -> NDArray[np.bool_]:
        """Which blocks `find_amax` searches, whatever chunks there are: those that are cut or larger than a tile."""
        is_sought = np.zeros(self.spread.num_blocks, dtype=bool)
        for number, held in enumerate(self._grids):
            if not fits_tile(held.grid.block):
                is_sought[self.spread.start(number) : self.spread.start(number + 1)] = True
        for blocks in self.cut:
            is_sought[blocks] = True
        return is_sought

    def _search(self, blocks: Int64s, grids: Sequence[int]) -> _Search:
        """Tiles of all that is held of some blocks of some grids."""
        if not len(blocks):
            return _Search(blocks=self._work.upload(blocks), tiles=(), spans=all_spans([]))
        is_wanted = np.zeros(self.spread.num_blocks, dtype=bool)
        is_wanted[blocks] = True
        found = []
        for width in WIDTHS:
            boxes = [
                self._held_box(number, box)
                for number in grids
                for box in self._grids[number].boxes
                if box.width == width
            ]
            tiles = MatrixTiles.of(boxes)
            found.append((width, tiles.take(is_wanted[tiles.block])))
        spans = all_spans([tiles.source_spans(width) for width, tiles in found])
        return _Search(blocks=self._work.upload(blocks), tiles=self._uploaded(found), spans=spans)

    def _uploaded(self, found: Sequence[tuple[int, MatrixTiles]]) -> tuple[_Tiles, ...]:
        """Tables of tiles, for each width those of squares and those of rows.

        A program that quantises a whole block finds its magnitude; one that has a part takes it as known.
        """
        return tuple(
            _Tiles(kernels, width, self._work.upload(table[chosen]))
            for width, tiles in found
            for table in (tiles.table(is_known=~tiles.is_whole),)
            for kernels, chosen in ((fp8_kernels.KERNELS, ~tiles.is_row), (row_kernels.KERNELS, tiles.is_row))
            if chosen.any()
        )

    def _program(self, chunk: ChunkFill) -> _ChunkProgram:
        if id(chunk) not in self._programs:
            self._programs[id(chunk)] = self._compile(chunk)
        return self._programs[id(chunk)]

    def _compile(self, chunk: ChunkFill) -> _ChunkProgram:
        by_width: dict[int, list[MatrixBox]] = {}
        by_cast: dict[tuple[str, str], list[MatrixBox]] = {}
        for box, at in chunk.boxes:
            src_dtype, dst_dtype = DTYPES[box.src_dtype], DTYPES[box.dst_dtype]
            if box.op == Op.QUANTIZE:
                by_width.setdefault(DTYPE_BYTES[src_dtype], []).append(self._quantized_box(box, at))
            elif box.op == Op.CAST:
                if src_dtype not in KINDS or dst_dtype not in KINDS:
                    raise CodecError(f"{src_dtype} cannot be cast to {dst_dtype}", hint=f"{', '.join(KINDS)}")
                by_cast.setdefault((src_dtype, dst_dtype), []).append(_cast_box(box, at))
        tiles = {width: MatrixTiles.of(boxes) for width, boxes in by_width.items()}
        grids = sorted({box.grid for box, _ in chunk.boxes if box.op != Op.CAST})
        scales = self._scales(chunk)
        num_wild = self._work.host_copy(self._wild[:1])
        casts = ((*dtypes, self._work.upload(MatrixTiles.of(boxes).table())) for dtypes, boxes in by_cast.items())
        return _ChunkProgram(
            chunk=chunk,
            grids=grids,
            search=self._search(self._missing(list(tiles.values()), scales[:, 1]), grids),
            quantized=self._uploaded(list(tiles.items())),
            casts=tuple(casts),
            scales=self._work.upload(scales),
            num_wild=num_wild,
            to_host=self._work.between([(num_wild, self._wild[:1])]),
        )

    def _missing(self, tiles: Sequence[MatrixTiles], scaled: Int64s) -> Int64s:
        """Blocks whose magnitudes a chunk needs and neither one of its tiles nor `find_amax` provides."""
        is_needed = np.zeros(self.spread.num_blocks, dtype=bool)
        is_needed[scaled] = True
        for found in tiles:
            is_needed[found.block] = True
        is_needed &= ~self._is_sought
        for found in tiles:
            is_needed[found.block[found.is_whole]] = False
        return np.flatnonzero(is_needed)

    def _scales(self, chunk: ChunkFill) -> Int64s:
        """Which byte of the image has the scale of which block."""
        found = [np.zeros((0, 2), dtype=np.int64)]
        for box, at in chunk.boxes:
            if box.op == Op.SCALE:
                number = np.arange(box.rows * box.columns)
                row, column = np.divmod(number, box.columns)
                width = self._grids[box.grid].grid.shape[1]
                block = self.spread.start(box.grid) + (box.first_row + row) * width + box.first_column + column
                found.append(np.stack([at + 4 * number, block], axis=1))
        return np.concatenate(found)

    def _quantized_box(self, box: Conversion, at: int) -> MatrixBox:
        width = DTYPE_BYTES[DTYPES[box.src_dtype]]
        where = (box.first_row, box.first_column, box.rows, box.columns)
        return MatrixBox(box.src, box.stride, width, at, 1, *where, box.grid, *self._blocks(box.grid))

    def _held_box(self, number: int, box: Box) -> MatrixBox:
        where = (*box.first, box.rows, box.columns)
        return MatrixBox(box.address, box.stride, box.width, 0, 1, *where, number, *self._blocks(number))

    def _blocks(self, number: int) -> tuple[int, ...]:
        """Where the blocks of a grid begin, and their shapes."""
        grid: Grid = self._grids[number].grid
        return self.spread.start(number), grid.rows, grid.columns, *grid.block


def _cast_box(box: Conversion, at: int) -> MatrixBox:
    """Casts have no scales."""
    widths = (DTYPE_BYTES[DTYPES[dtype]] for dtype in (box.src_dtype, box.dst_dtype))
    src_width, dst_width = widths
    extent = (box.rows, box.columns)
    return MatrixBox(box.src, box.stride, src_width, at, dst_width, 0, 0, *extent, 0, 0, *extent, SIDE, SIDE)
