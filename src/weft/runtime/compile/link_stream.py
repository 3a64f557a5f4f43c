"""A link's stream, compiled from its boxes: the tables both ends work through, version after version.

Both ends cut the same boxes into the same units and Chunks (`weft.core.streams.stream`); each adds its own addresses.
Nothing here is done tensor by tensor: columns go in, tables of planes come out.

    stream = LinkStream(LinkBoxes.decode(data), carriage)
    stream.straight(source, to)           # trainer: what is written straight from the weights, Chunk by Chunk
    stream.fills(source)                  # trainer: how packed Chunks are filled
    stream.landed(base, live, place)      # engine: where the bytes of each Chunk lie, and where they belong
"""

from __future__ import annotations

import itertools
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from weft.codec.conversion import ChunkFill, Conversion, Conversions
from weft.codec.delta import ImageRows
from weft.codec.image import ImageLayout, Section
from weft.core.geometry.alignment import aligned
from weft.core.geometry.boxes import contiguous_run, row_major_strides
from weft.core.geometry.planes import PlaneColumns, Planes, planes_of
from weft.core.recipe import Op
from weft.core.streams.carriage import Carriage
from weft.core.streams.send_order import Floats, due_of
from weft.core.streams.stream import UNIT_ALIGN, Path, StreamBoxes, cut_streams, paths_of, written_whole
from weft.runtime.compile.link_boxes import LinkBoxes

Int64s = NDArray[np.int64]


class LinkStream:
    """Units and Chunks of one link. Chunks that go straight from the weights come first."""

    def __init__(self, boxes: LinkBoxes, carriage: Carriage) -> None:
        self.boxes, self.carriage = boxes, carriage
        landed = boxes.compact if carriage.lands_in_stream else boxes.dst_strides
        run = contiguous_run(boxes.extent, boxes.src_strides, landed)[boxes.kind] * boxes.width
        path = paths_of(
            is_copy=(boxes.op == Op.COPY) & (not carriage.is_kept),
            run_bytes=run,
            is_mapped=carriage.is_mapped,
            min_run_bytes=carriage.min_run_bytes,
        )
        cut = StreamBoxes(
            stream=np.zeros(len(boxes), dtype=np.int64),
            extent=boxes.extent[boxes.kind],
            width=boxes.width,
            path=path,
            group=boxes.group,
            place=boxes.place,
        )
        self.units, self.chunks = cut_streams(cut, chunk_bytes=carriage.chunk_bytes)
        self._kind = boxes.kind[self.units.box]
        self._op = boxes.op[self.units.box]
        self._width = boxes.width[self.units.box]
        self._compact = row_major_strides(self.units.extent)
        self.num_straight = int((self.chunks.path != Path.PACKED).sum())
        """Chunks that go straight from the weights."""

    @property
    def num_chunks(self) -> int:
        """All Chunks."""
        return len(self.chunks)

    @property
    def num_packed(self) -> int:
        """Chunks that are filled first."""
        return self.num_chunks - self.num_straight

    @property
    def num_bytes(self) -> int:
        """Bytes of the stream, with its gaps."""
        return int(self.chunks.num_bytes.sum())

    @cached_property
    def is_written_whole(self) -> NDArray[np.bool_]:
        """For each Chunk: whether it is one write, in stream order."""
        carriage = self.carriage
        return written_whole(
            self.chunks.path,
            is_mapped=carriage.is_mapped,
            num_slots=carriage.num_slots,
            lands_in_stream=carriage.lands_in_stream,
        )

    @property
    def chunk_wire_bytes(self) -> Int64s:
        """Bytes on the wire for each Chunk of a version that is sent whole."""
        return np.where(self.is_written_whole, self.chunks.num_bytes, self.chunks.payload)

    @property
    def slot_bytes(self) -> int:
        """Room for the largest packed Chunk."""
        return aligned(int(self.chunks.num_bytes[self.num_straight :].max(initial=0)))

    @property
    def credits_needed(self) -> list[int]:
        """Bytes the engine must have drained before each packed Chunk may be written; empty without a window."""
        if not self.carriage.num_slots:
            return []
        drained = np.cumsum(self.chunks.num_bytes[self.num_straight :])
        before = np.zeros(min(self.carriage.num_slots, self.num_packed), dtype=np.int64)
        return np.concatenate([before, drained])[: self.num_packed].tolist()

    def packed_due(self, turn: float) -> Floats:
        """When packed Chunks are due (`weft.core.streams.send_order`), for a link with this turn."""
        packed = slice(self.num_straight, None)
        begin, num_bytes = self.chunks.begin[packed], self.chunks.num_bytes[packed]
        return due_of(begin=begin, num_bytes=num_bytes, stream_bytes=self.num_bytes, turn=turn)

    def slot(self, chunk: int) -> int:
        """Where a packed Chunk lies in the link's part of the window."""
        return chunk % self.carriage.num_slots * self.slot_bytes

    # Strides and addresses of units

    @property
    def _src_strides(self) -> Int64s:
        return self.boxes.src_strides[self._kind]

    @property
    def _dst_strides(self) -> Int64s:
        return self.boxes.dst_strides[self._kind]

    def _source(self, address: Int64s) -> Int64s:
        """Where each unit is read, from the addresses of the trainer's shards."""
        boxes, box = self.boxes, self.units.box
        offset = boxes.src_offset[box] + (self.units.first * self._src_strides).sum(axis=1)
        return address[boxes.src[box]] + offset * boxes.src_width[box]

    def _destination(self, of_tensor: Int64s) -> Int64s:
        """Where each unit belongs, from addresses, or digest positions, of the engine's tensors."""
        boxes, box = self.boxes, self.units.box
        offset = boxes.dst_offset[box] + (self.units.first * self._dst_strides).sum(axis=1)
        return of_tensor[boxes.dst[box]] + offset * self._width

    def _by_chunk(self, planes: PlaneColumns, units: Int64s, table: Planes, first: int, last: int) -> list[Planes]:
        """A table over some units, cut at the borders of Chunks `first` to `last`."""
        chunk = self.units.chunk[units[planes.box]]
        borders = np.searchsorted(chunk, np.arange(first, last + 1)).tolist()
        return [table.take(slice(a, b)) for a, b in itertools.pairwise(borders)]

    # A trainer's tables

    def straight(self, source: Int64s, to: Int64s | int, place: Int64s | None) -> list[Planes]:
        """What is written straight from the weights: one table for each such Chunk.

        `source`: addresses of the trainer's shards. `to`: of the engine's tensors, or of the stream. `place`: positions
        of the tensors in the digest's space; None: not digested.
        """
        units = np.flatnonzero(self.units.chunk < self.num_straight)
        tables = self._written(units, self._source(source)[units], self._src_strides[units], to, place)
        return tables[: self.num_straight]

    def _written(
        self, units: Int64s, src: Int64s, src_strides: Int64s, to: Int64s | int, place: Int64s | None
    ) -> list[Planes]:
        """What is written of some units, by Chunk: `src` and `src_strides` say where they are read."""
        extent, dst_strides = self.units.extent[units], self._dst_strides[units]
        if isinstance(to, int):
            planes = planes_of(extent, src_strides, self._compact[units], dst_strides)
            landed = self.units.offset[units] + to
        else:
            planes = planes_of(extent, src_strides, dst_strides, dst_strides)
            landed = self._destination(to)[units]
        table = Planes.of(
            planes,
            src=src,
            dst=landed,
            width=self._width[units],
            position=None if place is None else self._destination(place)[units],
            memories=(0, 1, 2),
        )
        return self._by_chunk(planes, units, table, 0, self.num_chunks)

    def fills(self, source: Int64s) -> list[ChunkFill]:
        """How each packed Chunk is filled; places are relative to its beginning."""
        return self._filled(source, self.units.offset - self.chunks.begin[self.units.chunk])

    def straight_fills(self, source: Int64s, to: Int64s | int) -> list[ChunkFill] | None:
        """How packed Chunks are converted straight into memory that is mapped here; `to` as for `straight`.

        None if that is not possible: units must be contiguous there, and aligned for GPU writes.
        """
        at = self.units.offset + to if isinstance(to, int) else self._destination(to)
        packed = self.units.chunk >= self.num_straight
        is_one_piece = contiguous_run(self.units.extent, self._dst_strides) == self.units.extent.prod(axis=1)
        if not isinstance(to, int) and not is_one_piece[packed].all():
            return None
        return None if (at[packed] % UNIT_ALIGN).any() else self._filled(source, at)

    def _filled(self, source: Int64s, at: Int64s) -> list[ChunkFill]:
        """How packed Chunks are filled, given where their units go."""
        address = self._source(source)
        copied = self._copies(address, at)
        converted = self._conversions(address, at)
        return [ChunkFill(planes=planes, boxes=found) for planes, found in zip(copied, converted, strict=True)]

    def _copies(self, address: Int64s, at: Int64s) -> list[Planes]:
        units = np.flatnonzero((self.units.chunk >= self.num_straight) & (self._op == Op.COPY))
        planes = planes_of(self.units.extent[units], self._src_strides[units], self._compact[units])
        table = Planes.of(planes, src=address[units], dst=at[units], width=self._width[units])
        return self._by_chunk(planes, units, table, self.num_straight, self.num_chunks)

    def _conversions(self, address: Int64s, at: Int64s) -> list[Conversions]:
        """Boxes that are cast or quantised, and scales, with their places: for each packed Chunk."""
        units = np.flatnonzero(self._op != Op.COPY)
        casts, scaled = (units[(self._op[units] == Op.CAST) == is_cast] for is_cast in (True, False))
        planes = planes_of(self.units.extent[casts], self._src_strides[casts], self._compact[casts])
        matrices = _matrices(self.units.extent[scaled], self._src_strides[scaled])
        tables = [self._converted(casts[planes.box], planes, address), self._converted(scaled, matrices, address)]
        unit = np.concatenate([casts[planes.box], scaled])
        within = np.concatenate([planes.offset[1], matrices.offset[1]])
        chunk = self.units.chunk[unit] - self.num_straight
        order = np.argsort(chunk, kind="stable")
        found = Conversions(table=np.concatenate(tables)[order], at=(at[unit] + within * self._width[unit])[order])
        borders = np.searchsorted(chunk[order], np.arange(self.num_packed + 1)).tolist()
        return [found[a:b] for a, b in itertools.pairwise(borders)]

    def _converted(self, unit: Int64s, planes: PlaneColumns, address: Int64s) -> Int64s:
        """Converted planes, as rows of `Conversions`; `unit[i]` is the unit plane i belongs to."""
        boxes, box = self.boxes, self.units.box[unit]
        first = boxes.first[box] + self.units.first[unit][:, -2:]
        src_width = boxes.src_width[box]
        columns = {
            "op": boxes.op[box],
            "grid": np.maximum(boxes.grid[box], 0),
            "src": np.where(boxes.op[box] == Op.SCALE, 0, address[unit] + planes.offset[0] * src_width),
            "stride": planes.stride[0] * src_width,
            "src_dtype": boxes.what[boxes.kind[box], 1],
            "dst_dtype": boxes.what[boxes.kind[box], 2],
            "first_row": first[:, 0],
            "first_column": first[:, 1],
            "rows": planes.rows,
            "columns": planes.run,
        }
        return np.stack([columns[name] for name in Conversion._fields], axis=1)

    def parcels(self, to: Int64s | int, place: Int64s | None) -> list[Planes]:
        """What each packed Chunk writes: sources are relative to its beginning; `to` and `place` as for `straight`."""
        units = np.flatnonzero(self.units.chunk >= self.num_straight)
        at = self.units.offset - self.chunks.begin[self.units.chunk]
        return self._written(units, at[units], self._compact[units], to, place)[self.num_straight :]

    # An engine's tables

    def landed(self, at: Int64s | int, live: Int64s, place: Int64s) -> list[Planes]:
        """For each Chunk: where its bytes land (`src`), where they belong (`dst`), and their position in the digest's
        space. `at`: the address of the stream, or of the engine's tensors if they land there."""
        if isinstance(at, int):
            planes = planes_of(self.units.extent, self._compact, self._dst_strides)
            src = self.units.offset + at
        else:
            planes = planes_of(self.units.extent, self._dst_strides, self._dst_strides)
            src = self._destination(at)
        table = Planes.of(
            planes,
            src=src,
            dst=self._destination(live),
            width=self._width,
            position=self._destination(place),
        )
        units = np.arange(len(self.units.box))
        return self._by_chunk(planes, units, table, 0, self.num_chunks)

    def drained(self, window: int, live: Int64s, place: Int64s) -> list[Planes]:
        """For each packed Chunk: from its slot in the window to where it belongs."""
        tables = self.parcels(live, place)
        return [table.moved(src=window + self.slot(number)) for number, table in enumerate(tables)]

    # Patches

    def images(self) -> list[ImageLayout]:
        """The image of each packed Chunk: sections of elements of one size."""
        firsts = self.chunks.first_unit
        return [self._image(int(a), int(b)) for a, b in itertools.pairwise(firsts[self.num_straight :])]

    def _image(self, first: int, last: int) -> ImageLayout:
        width, offset = self._width[first:last], self.units.offset[first:last]
        ends = offset + aligned(self.units.num_bytes[first:last], UNIT_ALIGN)
        starts = np.flatnonzero(np.diff(width, prepend=-1))
        stops = np.append(starts[1:], len(width)) - 1
        sections = tuple(
            Section(
                width=int(width[a]),
                begin=int(offset[a] - offset[0]),
                num_elements=int(ends[b] - offset[a]) // int(width[a]),
            )
            for a, b in zip(starts.tolist(), stops.tolist(), strict=True)
        )
        number = self.units.chunk[first]
        return ImageLayout(sections=sections, num_bytes=int(self.chunks.num_bytes[number]))

    def image_rows(self, live: Int64s, scratch: int) -> list[tuple[ImageRows, ...]]:
        """For each packed Chunk and section: where its bytes belong; gaps go to `scratch`, which is never read."""
        tables = self.landed(0, live, np.zeros(len(self.boxes.tensors), dtype=np.int64))[self.num_straight :]
        begins = self.chunks.begin[self.num_straight :].tolist()
        return [
            tuple(_section_rows(table, begin, section, scratch) for section in image.sections)
            for table, begin, image in zip(tables, begins, self.images(), strict=True)
        ]


def _matrices(extent: Int64s, src_strides: Int64s) -> PlaneColumns:
    """Boxes of matrices as planes, even where contiguous: rows and columns matter for scales."""
    zero = np.zeros(len(extent), dtype=np.int64)
    return PlaneColumns(
        box=np.arange(len(extent)),
        offset=(zero, zero),
        stride=(src_strides[:, -2], extent[:, -1]),
        rows=extent[:, -2],
        run=extent[:, -1],
    )


def _section_rows(table: Planes, chunk_begin: int, section: Section, scratch: int) -> ImageRows:
    """Rows of one section, sorted by their position in it, with gaps filled in."""
    live, stream, length, _ = table.runs
    begin = stream.astype(np.int64) - chunk_begin - section.begin
    mine = (begin >= 0) & (begin < section.num_bytes)
    order = np.argsort(begin[mine], kind="stable")
    begin, address, size = begin[mine][order], live[mine][order], length[mine][order].astype(np.int64)
    ends = begin + size
    after = np.append(begin[1:], section.num_bytes)
    gaps = np.flatnonzero(after > ends)
    begin = np.insert(begin, gaps + 1, ends[gaps])
    address = np.insert(address, gaps + 1, np.uint64(scratch))
    size = np.insert(size, gaps + 1, (after - ends)[gaps])
    return ImageRows(begin=begin.astype(np.uint64), address=address, length=size.astype(np.uint64))
