"""Boxes as planes: what a copy between two strided memories walks, without a row of its own for every run of bytes.

A plane is `rows` runs of `run` elements that lie next to each other in both memories; each memory has a stride from
one run to the next. A box with two dimensions is one plane, however its columns are cut; boxes with more dimensions
become several. C and GPU code works through tables of planes.

    extent (4, 1024), strides (8192, 1) and (1024, 1)     ->  rows 4, run 1024, strides 8192 and 1024
    the same, contiguous in both memories                 ->  rows 1, run 4096
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.core.geometry.boxes import Ints, split_contiguous

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneColumns:
    """Planes in the order of their boxes; everything in elements."""

    box: Int64s
    """Number of the box each plane is part of."""
    offset: tuple[Int64s, ...]
    """From the first element of the box, in each of the memories."""
    stride: tuple[Int64s, ...]
    """From row to row, in each of them."""
    rows: Int64s
    run: Int64s


def planes_of(extent: Ints, *strides: Ints) -> PlaneColumns:
    """The planes of boxes that lie in several memories with these strides."""
    run, outer = split_contiguous(extent, *strides)
    inner = _innermost(outer)
    number = np.arange(len(extent))
    rows = outer[number, inner]
    outer[number, inner] = 1
    box, coordinates = coordinates_of(outer)
    return PlaneColumns(
        box=box,
        offset=tuple((coordinates * of[box]).sum(axis=1) for of in strides),
        stride=tuple(np.where(rows > 1, of[number, inner], 0)[box].astype(np.int64) for of in strides),
        rows=rows[box],
        run=run[box],
    )


def num_runs(extent: Ints, *strides: Ints) -> Int64s:
    """Runs of bytes each box consists of: what a transport that takes descriptors would write one by one."""
    _, outer = split_contiguous(extent, *strides)
    return np.asarray(np.prod(outer, axis=1), dtype=np.int64)


def coordinates_of(extent: Ints) -> tuple[Int64s, Int64s]:
    """All coordinates of boxes, row-major: the number of the box each belongs to, and the coordinates."""
    count = np.prod(extent, axis=1, dtype=np.int64)
    box = np.repeat(np.arange(len(extent)), count)
    rest = np.arange(len(box)) - np.repeat(np.cumsum(count) - count, count)
    found = np.zeros((len(box), extent.shape[1]), dtype=np.int64)
    for dim in range(extent.shape[1] - 1, -1, -1):
        rest, found[:, dim] = np.divmod(rest, extent[box, dim])
    return box, found


def _innermost(outer: Ints) -> Int64s:
    """The last dimension of each box that is left to walk; the last one where none is."""
    reversed_first = np.argmax(outer[:, ::-1] > 1, axis=1)
    return np.asarray(outer.shape[1] - 1 - reversed_first, dtype=np.int64)


Column = NDArray[np.uint64]
LONG_ROW = 32 << 10
"""Longest row where several planes are walked together: what goes to several places is read from memory once, then from
the cache."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Planes:
    """Planes at addresses: what one pass copies or digests. Columns of bytes and addresses."""

    dst: Column
    src: Column
    rows: Column
    length: Column
    dst_stride: Column
    src_stride: Column
    position: Column | None = None
    """Where the first row lies in the digest's space; None: not digested."""
    position_stride: Column | None = None
    bundle: Column | None = None
    """Neighbours with the same number are walked together, row by row; None: each on its own."""
    group: Column | None = None
    """Which digest a plane adds to; None: the first."""
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_bytes", int((self.rows * self.length).sum()))

    def __len__(self) -> int:
        return len(self.src)

    @property
    def digested(self) -> tuple[Column | None, ...]:
        """What a digest of these planes depends on, besides the bytes they read."""
        return self.src, self.rows, self.length, self.src_stride, self.position, self.position_stride

    @classmethod
    def of(
        cls,
        planes: PlaneColumns,
        *,
        src: Ints,
        dst: Ints,
        width: Ints,
        position: Ints | None = None,
        memories: tuple[int, int, int] = (0, 1, 1),
    ) -> Planes:
        """Planes of boxes at these addresses, with elements of `width` bytes.

        `memories`: which of the planes' memories are the source, the destination and the digest's space.
        """
        size = width[planes.box]
        a, b, c = memories
        return cls(
            dst=_column(dst[planes.box] + planes.offset[b] * size),
            src=_column(src[planes.box] + planes.offset[a] * size),
            rows=_column(planes.rows),
            length=_column(planes.run * size),
            dst_stride=_column(planes.stride[b] * size),
            src_stride=_column(planes.stride[a] * size),
            position=None if position is None else _column(position[planes.box] + planes.offset[c] * size),
            position_stride=None if position is None else _column(planes.stride[c] * size),
        )

    @cached_property
    def runs(self) -> tuple[Column, Column, Column, Column | None]:
        """Destination, source, length and position of every run, for callers that need them one by one."""
        plane = np.repeat(np.arange(len(self)), self.rows.astype(np.int64))
        begins: Column = np.cumsum(self.rows, dtype=np.uint64) - self.rows
        row: Column = np.arange(len(plane), dtype=np.uint64) - begins[plane]
        position = None
        if self.position is not None and self.position_stride is not None:
            position = self.position[plane] + row * self.position_stride[plane]
        dst = self.dst[plane] + row * self.dst_stride[plane]
        return dst, self.src[plane] + row * self.src_stride[plane], self.length[plane], position

    @cached_property
    def back(self) -> Planes:
        """The same planes in the other direction; not digested."""
        return Planes(
            dst=self.src,
            src=self.dst,
            rows=self.rows,
            length=self.length,
            dst_stride=self.src_stride,
            src_stride=self.dst_stride,
        )

    def moved(self, *, dst: int = 0, src: int = 0) -> Planes:
        """The same planes, so many bytes further on."""
        return replace(self, dst=self.dst + np.uint64(dst), src=self.src + np.uint64(src))

    def take(self, which: Ints | slice) -> Planes:
        """A selection of the planes."""
        columns: dict[str, Any] = {name: getattr(self, name) for name in _COLUMNS}
        taken: dict[str, Any] = {name: None if column is None else column[which] for name, column in columns.items()}
        return Planes(**taken)

    @property
    def src_spans(self) -> tuple[Column, Column]:
        """Address and bytes of the memory each plane reads, gaps included."""
        return self.src, _span(self.rows, self.src_stride, self.length)

    @property
    def dst_spans(self) -> tuple[Column, Column]:
        """Address and bytes of the memory each plane writes, gaps included."""
        return self.dst, _span(self.rows, self.dst_stride, self.length)


def rows_as_planes(*, dst: Column, src: Column, length: Column, position: Column | None = None) -> Planes:
    """Single rows as planes, in columns of their own."""
    none = np.zeros(len(length), dtype=np.uint64)
    return Planes(
        dst=dst.copy(),
        src=src.copy(),
        rows=none + np.uint64(1),
        length=length.copy(),
        dst_stride=none,
        src_stride=none,
        position=None if position is None else position.copy(),
        position_stride=None if position is None else none,
    )


def bundled(tables: Sequence[Planes], digests: Sequence[int]) -> Planes:
    """Planes of several receivers as one table, in the order of their sources; `digests[i]` is the digest of table i.

    Planes that read parts of the same source rows are bundled. Long rows are cut, so that replicas are served from the
    cache.
    """
    cut = [cut_long_rows(table) for table in tables]
    columns = {
        name: np.concatenate([getattr(table, name) for table in cut])
        for name in _COLUMNS
        if all(getattr(table, name) is not None for table in cut)
    }
    sizes = [len(table) for table in cut]
    columns["group"] = np.repeat(np.array(digests, dtype=np.uint64), sizes)
    order = np.lexsort((columns["src"], columns["rows"], columns["src_stride"]))
    columns = {name: column[order] for name, column in columns.items()}
    bundle = _bundles(columns["src"], columns["rows"], columns["src_stride"])
    starts = np.flatnonzero(np.diff(bundle, prepend=bundle[:1] - 1)) if len(bundle) else bundle
    order = np.lexsort((columns["src"], columns["src"][starts][bundle] if len(bundle) else bundle))
    table = {name: column[order] for name, column in columns.items()}
    return Planes(**table, bundle=bundle[order].astype(np.uint64))


_COLUMNS = ("dst", "src", "rows", "length", "dst_stride", "src_stride", "position", "position_stride")


def _bundles(src: Column, rows: Column, stride: Column) -> Int64s:
    """Numbers of bundles, of planes sorted by stride, rows and source."""
    joins = np.zeros(len(src), dtype=bool)
    near = (rows[1:] > 1) & (stride[1:] == stride[:-1]) & (src[1:] - src[:-1] < stride[1:])
    joins[1:] = (rows[1:] == rows[:-1]) & (near | (src[1:] == src[:-1]))
    return np.asarray(np.cumsum(~joins) - 1, dtype=np.int64)


def cut_long_rows(table: Planes) -> Planes:
    """Single long rows as planes of shorter ones, and what is left of them: rows are what threads share."""
    long = (table.rows == 1) & (table.length > LONG_ROW)
    if not long.any():
        return table
    piece = np.uint64(LONG_ROW)
    whole, rest = table.take(long), table.take(long)
    count = whole.length // piece
    step = np.full(len(whole), piece, dtype=np.uint64)
    strides = None if whole.position is None else step
    whole = replace(whole, rows=count, length=step, dst_stride=step, src_stride=step, position_stride=strides)
    skipped = count * piece
    rest = replace(rest, dst=rest.dst + skipped, src=rest.src + skipped, length=rest.length - skipped)
    if rest.position is not None:
        rest = replace(rest, position=rest.position + skipped)
    return joined([table.take(~long), whole, rest.take(rest.length > 0)])


def joined(tables: Sequence[Planes]) -> Planes:
    """Planes of several tables, one after the other; without bundles."""
    found: dict[str, list[Any]] = {name: [getattr(table, name) for table in tables] for name in _COLUMNS}
    columns: dict[str, Any] = {
        name: None if any(column is None for column in parts) else np.concatenate(parts)
        for name, parts in found.items()
    }
    return Planes(**columns)


def _span(rows: Column, stride: Column, length: Column) -> Column:
    return (rows - np.minimum(rows, np.uint64(1))) * stride + length


def _column(values: Ints) -> Column:
    return np.ascontiguousarray(values).astype(np.uint64)
