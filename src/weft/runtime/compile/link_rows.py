"""What one trainer writes to one engine rank, as rows of memory; cut into chunks where bytes change on their way.

Rows that are copied as they are go straight from the weights. Everything else, and everything where a version is kept
in memory of its own (patches, staging), is laid out as an image: chunk after chunk, in the order in which they are
filled and sent. A box that is converted fills consecutive rows of one chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.codec.conversion import DTYPES, Conversion
from weft.core.boxes import Ints
from weft.core.layout import Layout
from weft.core.plan import SCALE_SUFFIX, Plan
from weft.core.recipe import Op, to_source_dims
from weft.core.runs import expand_runs, route_runs
from weft.errors import PlanError
from weft.transport.base import Column

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTables:
    """What links look up in a plan, computed once."""

    num_dims: Int64s
    """Of every trainer tensor."""
    weight: Int64s
    """Its own number; of scales, that of the weight they belong to."""
    trainer_dtype: Int64s
    engine_dtype: Int64s

    @classmethod
    def of(cls, plan: Plan) -> PlanTables:
        """For all links of a plan."""
        tensors = plan.trainer.tensors
        number = {tensor.name: i for i, tensor in enumerate(tensors)}
        return cls(
            num_dims=np.array([len(tensor.shape) for tensor in tensors], dtype=np.int64),
            weight=np.array([number[t.name.removesuffix(SCALE_SUFFIX)] for t in tensors], dtype=np.int64),
            trainer_dtype=_dtype_numbers(plan.trainer),
            engine_dtype=_dtype_numbers(plan.recipe.engine),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where shards and engine tensors lie, by row of their layouts."""

    tables: PlanTables

    shard: Int64s
    """Address of each trainer shard; 0 where the trainer does not hold it."""
    dst: Int64s
    """Address of each engine tensor."""
    position: Int64s
    """Its place in the engine rank's digest space."""
    grid: Int64s
    """The trainer's number of the grid of each trainer tensor; -1 where it is not quantised."""
    group: Int64s
    """The group of each trainer tensor's grid; -1 where it is not quantised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRows:
    """Rows of one link, as columns."""

    src: Column
    """0 where a row is filled by a conversion."""
    dst: Column
    length: Column
    position: Column
    width: Column
    """Bytes of each row's elements, in the destination."""
    num_direct: int
    """The first rows go straight from the weights, the others are laid out in chunks."""
    chunk_ends: Column
    """One past the last row of each chunk."""
    boxes: NDArray[np.uint64]
    """Conversions, one in each row of this table."""


def link_rows(plan: Plan, rows: Ints, places: Places, *, is_imaged: bool, chunk_bytes: int) -> LinkRows:
    """The rows of one link, from the route rows it carries. `is_imaged`: nothing goes straight from the weights."""
    op = plan.recipe.op[plan.piece[rows]]
    copies = _copies(plan, rows[op == Op.COPY], places)
    if (op == Op.COPY).all() and not is_imaged:
        return _link([copies], num_direct=len(copies.length), chunk_bytes=chunk_bytes)
    copies = _cut_copies(copies, chunk_bytes)
    boxes = _cut_boxes(_boxes(plan, rows[op != Op.COPY], places), chunk_bytes)
    num_direct = 0 if is_imaged else len(copies.length)
    return _link([copies, boxes], num_direct=num_direct, chunk_bytes=chunk_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Units:
    """Rows and the units they belong to; a unit is never divided among chunks."""

    src: Int64s
    dst: Int64s
    length: Int64s
    position: Int64s
    width: Int64s
    unit: Int64s
    """Number of the unit each row belongs to, ascending from 0."""
    boxes: NDArray[np.int64]
    """A Conversion for each unit, its `row` counted from the first of these rows; none for copies."""


def _link(parts: list[_Units], *, num_direct: int, chunk_bytes: int) -> LinkRows:
    """Parts one after the other, with chunks of about equal size behind the direct rows."""
    src, dst, length, position, width = (
        np.concatenate([getattr(part, name) for part in parts]).astype(np.uint64)
        for name in ("src", "dst", "length", "position", "width")
    )
    boxes, unit, num_rows, num_units = [], [], 0, 0
    for part in parts:
        moved = part.boxes.copy()
        moved[:, Conversion._fields.index("row")] += num_rows
        boxes.append(moved)
        unit.append(part.unit + num_units)
        num_rows += len(part.length)
        num_units += int(part.unit[-1]) + 1 if len(part.unit) else 0
    ends = _chunk_ends(length[num_direct:], np.concatenate(unit)[num_direct:], chunk_bytes) + num_direct
    return LinkRows(
        src=src,
        dst=dst,
        length=length,
        position=position,
        width=width,
        num_direct=num_direct,
        chunk_ends=ends.astype(np.uint64),
        boxes=np.concatenate(boxes).astype(np.uint64),
    )


def _chunk_ends(length: Column, unit: Int64s, chunk_bytes: int) -> Int64s:
    """Where chunks end: a unit belongs to the chunk in which it begins."""
    if not len(length):
        return np.zeros(0, dtype=np.int64)
    begins = np.flatnonzero(np.concatenate([[True], unit[1:] != unit[:-1]]))
    before = np.cumsum(length).astype(np.int64) - length.astype(np.int64)
    number = before[begins] // chunk_bytes
    firsts = begins[np.concatenate([[False], number[1:] != number[:-1]])]
    return np.concatenate([firsts, [len(length)]])


def _copies(plan: Plan, rows: Ints, places: Places) -> _Units:
    """Runs that are copied as they are, in the order of their sources."""
    runs = route_runs(plan, rows)
    src = places.shard[runs.shard] + runs.src_offset
    order = np.argsort(src, kind="stable")
    return _Units(
        src=src[order],
        dst=(places.dst[runs.dst] + runs.dst_offset)[order],
        length=runs.num_bytes[order],
        position=(places.position[runs.dst] + runs.dst_offset)[order],
        width=plan.recipe.engine.itemsize[runs.dst][order].astype(np.int64),
        unit=np.arange(len(src)),
        boxes=np.zeros((0, len(Conversion._fields)), dtype=np.int64),
    )


def _cut_copies(copies: _Units, chunk_bytes: int) -> _Units:
    """No row longer than a chunk; cut between elements."""
    count = np.maximum(-(-copies.length // chunk_bytes), 1)
    row = np.repeat(np.arange(len(count)), count)
    offset = (np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)) * chunk_bytes
    return _Units(
        src=copies.src[row] + offset,
        dst=copies.dst[row] + offset,
        length=np.minimum(copies.length[row] - offset, chunk_bytes),
        position=copies.position[row] + offset,
        width=copies.width[row],
        unit=np.arange(len(row)),
        boxes=copies.boxes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Boxes:
    """Boxes of matrices that are converted, as columns."""

    op: Int64s
    group: Int64s
    grid: Int64s
    src: Int64s
    stride: Int64s
    """Bytes from row to row."""
    src_dtype: Int64s
    dst_dtype: Int64s
    first_row: Int64s
    first_column: Int64s
    rows: Int64s
    columns: Int64s
    dst: Int64s
    position: Int64s
    row_stride: Int64s
    """In the destination, in elements, like `column_stride`."""
    column_stride: Int64s
    itemsize: Int64s
    """Of the destination."""

    def take(self, numbers: Int64s) -> _Boxes:
        """Some of them."""
        return _Boxes(**{name: getattr(self, name)[numbers] for name in self.__slots__})


def _boxes(plan: Plan, rows: Ints, places: Places) -> _Boxes:
    """Converted routes as boxes with two dimensions, in the order in which their scales become known."""
    tables = places.tables
    _check_straight(plan, rows, tables)
    trainer, engine = plan.trainer, plan.recipe.engine
    shard, dst, axes = plan.shard[rows], plan.dst[rows], plan.recipe.axes[plan.piece[rows]]
    tensor = trainer.tensor_of[shard]
    num_dims = tables.num_dims[tensor]
    op = plan.recipe.op[plan.piece[rows]].astype(np.int64)
    lo, extent = plan.src_lo[rows].astype(np.int64), plan.src_extent[rows].astype(np.int64)
    strides = trainer.strides[shard].astype(np.int64)
    dst_strides = to_source_dims(engine.strides[dst].astype(np.int64), axes)
    offset = ((lo - trainer.lo[shard]) * strides).sum(axis=1)
    dst_offset = (plan.dst_lo[rows].astype(np.int64) * engine.strides[dst]).sum(axis=1)
    extent, strides, dst_strides, lo = (
        _right_aligned(column, num_dims, fill)
        for column, fill in ((extent, 1), (strides, 0), (dst_strides, 0), (lo, 0))
    )
    number, outer = _outer_coordinates(extent[:, :-2])
    offset = offset[number] + (outer * strides[number, :-2]).sum(axis=1)
    dst_offset = dst_offset[number] + (outer * dst_strides[number, :-2]).sum(axis=1)
    src_item, dst_item = trainer.itemsize[tensor].astype(np.int64), engine.itemsize[dst].astype(np.int64)
    weight = tables.weight[tensor]
    is_scale = op == Op.SCALE
    boxes = _Boxes(
        op=op[number],
        group=np.where(op == Op.CAST, -1, places.group[weight])[number],
        grid=places.grid[weight][number],
        src=np.where(is_scale[number], 0, places.shard[shard][number] + offset * src_item[number]),
        stride=(strides[:, -2] * src_item)[number],
        src_dtype=tables.trainer_dtype[tensor][number],
        dst_dtype=tables.engine_dtype[engine.tensor_of[dst]][number],
        first_row=lo[number, -2],
        first_column=lo[number, -1],
        rows=extent[number, -2],
        columns=extent[number, -1],
        dst=places.dst[dst][number] + dst_offset * dst_item[number],
        position=places.position[dst][number] + dst_offset * dst_item[number],
        row_stride=dst_strides[number, -2],
        column_stride=dst_strides[number, -1],
        itemsize=dst_item[number],
    )
    if ((boxes.grid < 0) & (boxes.op != Op.CAST)).any():
        raise PlanError("a trainer sends FP8 of a matrix it does not look at", hint="this is a defect of weft")
    return boxes.take(np.lexsort((boxes.src, boxes.op, boxes.group)))


def _check_straight(plan: Plan, rows: Ints, tables: PlanTables) -> None:
    """Conversions keep the order of dimensions, and read elements that lie next to each other."""
    axes = plan.recipe.axes[plan.piece[rows]]
    mapped = np.where(axes >= 0, axes, -1)
    turned = (np.maximum.accumulate(mapped, axis=1) > mapped) & (axes >= 0)
    shard = plan.shard[rows]
    num_dims = tables.num_dims[plan.trainer.tensor_of[shard]]
    last = _right_aligned(plan.trainer.strides[shard].astype(np.int64), num_dims, 1)[:, -1]
    wide = _right_aligned(plan.src_extent[rows].astype(np.int64), num_dims, 1)[:, -1] > 1
    wrong = (turned & (plan.extent[rows] > 1)).any(axis=1) | ((last != 1) & wide)
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        name = plan.recipe.engine.tensors[plan.recipe.engine.tensor_of[plan.dst[rows][row]]].name
        raise PlanError(
            f"`{name}` is transposed and has another precision than its source",
            hint="let the engine hold it in the order of the checkpoint, or in the trainer's precision",
        )


def _right_aligned(values: Int64s, num_dims: Int64s, fill: int) -> Int64s:
    """Columns of coordinates moved so that the last dimension of every tensor comes last; two columns at least."""
    width = max(values.shape[1], 2)
    padded = np.pad(values, ((0, 0), (0, width - values.shape[1])), constant_values=fill)
    index = np.arange(width)[None, :] - (width - num_dims[:, None])
    return np.where(index >= 0, np.take_along_axis(padded, np.maximum(index, 0), axis=1), fill)


def _outer_coordinates(extent: Int64s) -> tuple[Int64s, Int64s]:
    """All coordinates of the outer dimensions: the number of the box, and its coordinates."""
    count = extent.prod(axis=1)
    number = np.repeat(np.arange(len(extent)), count)
    rest = np.arange(len(number)) - np.repeat(np.cumsum(count) - count, count)
    found = np.zeros((len(number), extent.shape[1]), dtype=np.int64)
    for dim in range(extent.shape[1] - 1, -1, -1):
        rest, found[:, dim] = np.divmod(rest, extent[number, dim])
    return number, found


def _dtype_numbers(layout: Layout) -> Int64s:
    return np.array([DTYPES.index(tensor.dtype) for tensor in layout.tensors], dtype=np.int64)


def _cut_boxes(boxes: _Boxes, chunk_bytes: int) -> _Units:
    """Boxes no larger than a chunk, where a row is not, and the rows of the destination they fill."""
    most = np.maximum(chunk_bytes // np.maximum(boxes.columns * boxes.itemsize, 1), 1)
    count = -(-boxes.rows // most)
    number = np.repeat(np.arange(len(count)), count)
    skipped = (np.arange(len(number)) - np.repeat(np.cumsum(count) - count, count)) * most[number]
    boxes = boxes.take(number)
    rows = np.minimum(most[number], boxes.rows - skipped)
    src = np.where(boxes.src > 0, boxes.src + skipped * boxes.stride, 0)
    shift = skipped * boxes.row_stride * boxes.itemsize
    extent = np.stack([rows, boxes.columns], axis=1)
    compact = np.stack([boxes.columns, np.ones_like(rows)], axis=1)
    unit, _, dst_offset, length = expand_runs(
        extent, compact, np.stack([boxes.row_stride, boxes.column_stride], axis=1)
    )
    first_row = np.searchsorted(unit, np.arange(len(rows)))
    table = {
        "row": first_row,
        "op": boxes.op,
        "grid": np.maximum(boxes.grid, 0),
        "src": src,
        "stride": boxes.stride,
        "src_dtype": boxes.src_dtype,
        "dst_dtype": boxes.dst_dtype,
        "first_row": boxes.first_row + skipped,
        "first_column": boxes.first_column,
        "rows": rows,
        "columns": boxes.columns,
    }
    itemsize = boxes.itemsize[unit]
    return _Units(
        src=np.zeros_like(unit),
        dst=(boxes.dst + shift)[unit] + dst_offset * itemsize,
        length=length * itemsize,
        position=(boxes.position + shift)[unit] + dst_offset * itemsize,
        width=itemsize,
        unit=unit,
        boxes=np.stack([table[name] for name in Conversion._fields], axis=1),
    )
