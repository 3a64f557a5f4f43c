"""Streams: all bytes one trainer rank sends one engine rank, in the order in which they travel, cut into Chunks.

One set of functions gives every byte its place in a stream and the Chunk that carries it. The planner counts writes
with it, the simulator schedules its Chunks, and both ends of a link compile their programs from it, so that what
`weft plan` prints is what runs.

A box is cut into *units* no longer than a Chunk. Units that go straight from the weights come first, then those that
are packed; inside, in the order in which scales become known (`group`), then in destination order. Chunks are filled
with units until they are full. Inside a packed Chunk units of equal element size lie together, in sections, because
patches compare elements of one size; every unit begins at a multiple of 16 bytes.

    units, chunks = cut_streams(boxes, chunk_bytes=64 << 20)
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.core.geometry.alignment import aligned
from weft.core.geometry.boxes import Ints
from weft.core.geometry.planes import coordinates_of

Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]
UNIT_ALIGN = 16
SECTION_ALIGN = 64
_SECTIONS = 4
"""Maximum sections of a Chunk (elements of 1, 2, 4 bytes), and one to spare."""


class Path(enum.IntEnum):
    """How the bytes of a box leave the sender."""

    DIRECT = 0
    """By the sender's own instructions, straight to where they belong: the link maps the engine's memory."""
    ZERO_COPY = 1
    """By the transport, straight from the parameter's memory, run by run."""
    PACKED = 2
    """Gathered or converted into a Chunk first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamBoxes:
    """Boxes of one or of many streams, as columns."""

    stream: Ints
    """Number of the stream each box belongs to."""
    extent: Ints
    """(n, D), row-major in the stream."""
    width: Ints
    """Bytes of an element in the destination."""
    path: Ints
    group: Ints
    """Boxes of a later group can be filled later; -1: at once."""
    place: Ints
    """Destination order inside a stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """Parts of boxes that travel in one Chunk, in stream order."""

    box: Int64s
    first: Int64s
    """(n, D): the unit's first coordinate in its box."""
    extent: Int64s
    num_bytes: Int64s
    chunk: Int64s
    """Number of the Chunk among all Chunks of all streams."""
    offset: Int64s
    """First byte in the stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkColumns:
    """Chunks in stream order."""

    stream: Int64s
    path: Int64s
    group: Int64s
    """The last group any of its units waits for."""
    begin: Int64s
    """First byte in the stream."""
    num_bytes: Int64s
    """With the gaps between units."""
    payload: Int64s
    """Without them."""
    first_unit: Int64s
    """Units `first_unit[i]` to `first_unit[i + 1]`."""

    def __len__(self) -> int:
        return len(self.stream)


def paths_of(
    *, is_copy: NDArray[np.bool_], run_bytes: Ints, is_mapped: NDArray[np.bool_] | bool, min_run_bytes: Ints | int
) -> Int64s:
    """How boxes leave: converted boxes are packed; so are boxes of short runs, where each run would be a write of its
    own. `run_bytes`: bytes next to each other in the source and where they land."""
    straight = np.where(is_mapped, Path.DIRECT, np.where(run_bytes >= min_run_bytes, Path.ZERO_COPY, Path.PACKED))
    return np.where(is_copy, straight, Path.PACKED).astype(np.int64)


def written_whole(
    path: Ints, *, is_mapped: Bools | bool, num_slots: Ints | int, lands_in_stream: bool
) -> NDArray[np.bool_]:
    """Whether Chunks are one write each, in stream order and with their gaps."""
    keeps_order = np.logical_and(lands_in_stream, np.logical_not(is_mapped)) | (np.asarray(num_slots) > 0)
    return np.asarray((path == Path.PACKED) & keeps_order)


def cut_streams(boxes: StreamBoxes, *, chunk_bytes: int | Ints) -> tuple[Units, ChunkColumns]:
    """Units and Chunks of all streams. A Chunk is at most `chunk_bytes` long; where that differs from stream to
    stream, it is given for every box."""
    most = np.broadcast_to(np.asarray(chunk_bytes) - _SECTIONS * SECTION_ALIGN, len(boxes.stream))
    order = np.lexsort((boxes.place, boxes.group, boxes.path, boxes.stream))
    box, first, extent = _cut_boxes(boxes.extent[order], most[order] // boxes.width[order])
    box = order[box]
    num_bytes = np.prod(extent, axis=1, dtype=np.int64) * boxes.width[box]
    padded = aligned(num_bytes, UNIT_ALIGN)
    kind = boxes.stream[box].astype(np.int64) * len(Path) + boxes.path[box]
    chunk = _fill_chunks(padded, kind, most[box])
    by_width = np.lexsort((-boxes.width[box], chunk))
    units = _Sorted(box[by_width], first[by_width], extent[by_width], num_bytes[by_width], chunk)
    return _place(boxes, units, padded[by_width])


@dataclass(frozen=True, slots=True)
class _Sorted:
    """Units in stream order, before they have offsets."""

    box: Int64s
    first: Int64s
    extent: Int64s
    num_bytes: Int64s
    chunk: Int64s


def _place(boxes: StreamBoxes, units: _Sorted, padded: Int64s) -> tuple[Units, ChunkColumns]:
    """Offsets of units and Chunks in their streams."""
    chunk, width = units.chunk, boxes.width[units.box]
    num_chunks = int(chunk[-1]) + 1 if len(chunk) else 0
    firsts = np.searchsorted(chunk, np.arange(num_chunks + 1))
    begins = firsts[:-1]
    section = np.ones(len(chunk), dtype=bool)
    section[1:] = (chunk[1:] != chunk[:-1]) | (width[1:] != width[:-1])
    size = _section_sizes(padded, section)
    before = np.cumsum(size) - size
    chunk_bytes = np.add.reduceat(size, begins) if num_chunks else np.zeros(0, dtype=np.int64)
    stream = boxes.stream[units.box][begins].astype(np.int64)
    begin = _restarted(np.cumsum(chunk_bytes) - chunk_bytes, stream)
    group = boxes.group[units.box].astype(np.int64)
    return (
        Units(
            box=units.box,
            first=units.first,
            extent=units.extent,
            num_bytes=units.num_bytes,
            chunk=chunk,
            offset=before - before[begins][chunk] + begin[chunk],
        ),
        ChunkColumns(
            stream=stream,
            path=boxes.path[units.box][begins].astype(np.int64),
            group=np.maximum.reduceat(group, begins) if num_chunks else begins,
            begin=begin,
            num_bytes=chunk_bytes,
            payload=np.add.reduceat(units.num_bytes, begins) if num_chunks else begins,
            first_unit=firsts,
        ),
    )


def _section_sizes(padded: Int64s, section: NDArray[np.bool_]) -> Int64s:
    """Bytes each unit takes: the last one of a section also takes the gap before the next."""
    size = padded.copy()
    starts = np.flatnonzero(section)
    if len(starts):
        ends = np.append(starts[1:], len(padded)) - 1
        total = np.add.reduceat(padded, starts)
        size[ends] += aligned(total, SECTION_ALIGN) - total
    return size


def _restarted(before: Int64s, stream: Int64s) -> Int64s:
    """Running sums that begin at zero in every stream."""
    first = np.searchsorted(stream, stream)
    return before - before[first] if len(before) else before


def _cut_boxes(extent: Ints, most: Ints) -> tuple[Int64s, Int64s, Int64s]:
    """Boxes in parts of at most so many elements: number of the box, first coordinate, extent.

    The innermost dimensions that fit stay whole; the next one is cut; all outer ones are walked.
    """
    extent = extent.astype(np.int64)
    if (np.prod(extent, axis=1) <= most).all():
        return np.arange(len(extent)), np.zeros_like(extent), extent
    inner = np.ones_like(extent)  # elements of one step along a dimension
    for dim in range(extent.shape[1] - 2, -1, -1):
        inner[:, dim] = inner[:, dim + 1] * extent[:, dim + 1]
    step = np.clip(most[:, None] // inner, 0, extent)  # 0: even one step is too long, so an inner one is cut
    step = np.where((step == 0) | _cut_inside(step, extent), 1, step)
    count = -(-extent // step)
    box, number = coordinates_of(count)
    first = number * step[box]
    return box, first, np.minimum(step[box], extent[box] - first)


def _cut_inside(step: Int64s, extent: Int64s) -> NDArray[np.bool_]:
    """Dimensions inside which another one is cut: these are walked one by one."""
    cut = step < extent
    inside = np.zeros_like(cut)
    for dim in range(extent.shape[1] - 2, -1, -1):
        inside[:, dim] = inside[:, dim + 1] | cut[:, dim + 1]
    return inside


def _fill_chunks(padded: Int64s, kind: Int64s, most: Int64s) -> Int64s:
    """The Chunk of every unit: each takes as many as fit, of one kind. All kinds are filled at once, Chunk by Chunk."""
    if not len(padded):
        return np.zeros(0, dtype=np.int64)
    ends = np.cumsum(padded)
    last = np.append(np.flatnonzero(kind[1:] != kind[:-1]) + 1, len(kind))
    at = np.append(0, last[:-1])
    begins = np.zeros(len(padded), dtype=np.int64)
    while len(at):
        begins[at] = 1
        reach = np.searchsorted(ends, ends[at] - padded[at] + most[at], side="right")
        at = np.minimum(np.maximum(reach, at + 1), last)
        open_still = at < last
        at, last = at[open_still], last[open_still]
    return np.cumsum(begins) - 1
