"""Which quantised matrices a trainer holds parts of, where it looks for the largest magnitudes, and in which groups
holders exchange them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from weft.codec.grids import SCALINGS, GridBoxes, HeldGrids
from weft.core.geometry.boxes import Ints
from weft.core.geometry.fingerprint import distinct, distinct_rows
from weft.core.plans.plan import Plan
from weft.core.recipe import Op
from weft.core.streams.exchange import ScaleGroups
from weft.errors import ProtocolError
from weft.runtime.compile.holding import RowNumbers
from weft.runtime.control.columns import expand, squeeze
from weft.runtime.weights import Weights

Int64s = NDArray[np.int64]


def trainer_grids(plan: Plan, groups: ScaleGroups, trainer: int, shard_number: RowNumbers) -> TrainerGrids:
    """The matrices one trainer quantises parts of, with the boxes it must search.

    `shard_number`: the rows of the trainer layout that it holds, and the number of its shard behind each.
    """
    layout = plan.trainer
    shards = shard_number.rows[groups.group[layout.tensor_of[shard_number.rows]] >= 0]
    tensor = layout.tensor_of[shards]
    tensors = distinct(tensor, len(layout.tensors))
    tensors = tensors[np.lexsort((tensors, groups.group[tensors]))]
    number = np.full(len(layout.tensors), -1, dtype=np.int64)
    number[tensors] = np.arange(len(tensors))
    is_sole = layout.groups.sizes[layout.group_of[shards]] == 1
    mine = shards[is_sole]
    names = number[layout.tensor_of[mine]], shard_number[mine]
    whole = np.concatenate([np.stack(names, axis=1), layout.lo[mine, :2], layout.extent[mine, :2]], axis=1)
    shared = _shared_boxes(plan, trainer, shards[~is_sole], number, shard_number)
    boxes = np.concatenate([whole, shared]) if len(shared) else whole
    return TrainerGrids(plan, groups, tensors, boxes[np.argsort(boxes[:, 0], kind="stable")])


def _shared_boxes(plan: Plan, trainer: int, shards: Ints, number: Int64s, shard_number: RowNumbers) -> Int64s:
    """Boxes of shards that others hold too."""
    if not len(shards):
        return np.zeros((0, 6), dtype=np.int64)
    layout, tensor = plan.trainer, plan.trainer.tensor_of[shards]
    sides = plan.recipe.block_sides(layout)[:, :2]
    of, sent = _sent_boxes(plan, trainer, sides)
    shard, taken = _pairs(tensor, of)
    mine = _rects(layout.lo[shards, :2], layout.extent[shards, :2])
    row, needed = needed_boxes(mine, layout.shapes[tensor, :2], sides[tensor], shard, sent[taken])
    names = np.stack([number[tensor[row]], shard_number[shards[row]]], axis=1)
    return np.concatenate([names, needed[:, :2], needed[:, 2:] - needed[:, :2]], axis=1)


class TrainerGrids:
    """The quantised matrices of one trainer."""

    def __init__(self, plan: Plan, groups: ScaleGroups, tensors: Ints, boxes: Int64s) -> None:
        self.tensors = tensors
        """Numbers of trainer tensors, sorted by group."""
        self._plan, self._all, self._boxes = plan, groups, boxes

    def encode(self) -> bytes:
        """Encoded for the wire; empty if there are none."""
        if not len(self.tensors):
            return b""
        trainer, tensors = self._plan.trainer, self.tensors
        scaling = self._plan.recipe.scaling_numbers(trainer)[tensors]
        numbers = (scaling, self._all.group[tensors], self._all.first_key[tensors])
        grids = np.concatenate([trainer.shapes[tensors, :2], np.stack(numbers, axis=1)], axis=1)
        return squeeze({"grids": grids, "boxes": self._boxes})


def held_grids(data: bytes, weights: Weights) -> HeldGrids:
    """The matrices a trainer quantises, in the memory it holds. Raises ProtocolError."""
    if not data:
        return HeldGrids()
    tables = expand(data, ("grids", "boxes"))
    grids, boxes, held = tables["grids"], tables["boxes"], weights.table
    fits = grids.ndim == 2 and boxes.ndim == 2 and grids.shape[1:] == (5,) and boxes.shape[1:] == (6,)
    limits = ((boxes[:, 0], len(grids)), (boxes[:, 1], len(held)), (grids[:, 2], len(SCALINGS))) if fits else ()
    if not fits or not all(((column >= 0) & (column < most)).all() for column, most in limits):
        raise ProtocolError("table of quantised matrices is inconsistent")
    grid, shard, first, extent = boxes[:, 0], boxes[:, 1], boxes[:, 2:4], boxes[:, 4:]
    lo, strides, width = held.lo[shard], held.strides[shard], held.itemsize[shard]
    inside = (held.num_dims[shard] == 2) & (np.diff(grid, prepend=0) >= 0) & (extent > 0).all(axis=1)
    inside &= ((first >= lo[:, :2]) & (first + extent <= lo[:, :2] + held.extent[shard, :2])).all(axis=1)
    if not inside.all():
        raise ProtocolError(f"`{held.names[shard[np.argmin(inside)]]}` is quantised outside the part that is held")
    names = np.zeros(len(grids), dtype=np.int64)
    names[grid] = shard
    return HeldGrids(
        names=[held.names[number] for number in names.tolist()],
        size=grids[:, :2],
        scaling=grids[:, 2],
        group=grids[:, 3],
        first_key=grids[:, 4],
        boxes=GridBoxes(
            grid=grid,
            address=weights.addresses[shard] + ((first - lo[:, :2]) * strides[:, :2]).sum(axis=1) * width,
            stride=strides[:, 0] * width,
            width=width,
            first=first,
            extent=extent,
        ),
    )


def _sent_boxes(plan: Plan, trainer: int, sides: Ints) -> tuple[Int64s, Int64s]:
    """What a trainer sends of quantised matrices, in whole blocks: tensors in ascending order, and rectangles.

    Scales count as the blocks they belong to. `sides`: of the blocks of each trainer tensor.
    """
    routes = np.flatnonzero(plan.sender == trainer)
    rows = distinct(np.searchsorted(plan.first, routes, side="right") - 1, plan.num_rows)
    op = plan.recipe.op[plan.piece[rows]]
    rows, op = (column[(op == Op.QUANTIZE) | (op == Op.SCALE)] for column in (rows, op))
    tensor = plan.row_boxes.weight[rows]
    unit = np.where((op == Op.SCALE)[:, None], sides[tensor], 1)
    rects = _rects(plan.src_lo[rows, :2] * unit, plan.src_extent[rows, :2] * unit)
    side = np.tile(sides[tensor], 2)
    rects = np.where(np.arange(4) < 2, rects // side, -(-rects // side)) * side
    found, _ = distinct_rows(np.concatenate([tensor[:, None], rects], axis=1))
    found = found[np.argsort(found[:, 0])]
    return found[:, 0], found[:, 1:]


def needed_boxes(mine: Int64s, size: Int64s, side: Int64s, shard: Int64s, sent: Int64s) -> tuple[Int64s, Int64s]:
    """For shards that others hold too: the blocks of what is sent, and those at their borders, which others may need.

    `mine`, `size` and `side` of each shard: its rectangle, the matrix and its blocks. `shard` and `sent`: rectangles
    of whole blocks, and the shard each is sent of. Returns the number of a shard, and a rectangle of it; no rectangle
    lies inside another one.
    """
    rows, rects = [shard], [sent]
    for dim in (0, 1):
        first, last = mine[:, dim], mine[:, dim + 2]
        starts_inside = np.flatnonzero(first % side[:, dim])
        ends_inside = np.flatnonzero((last % side[:, dim] > 0) & (last < size[:, dim]))
        head, tail = mine[starts_inside], mine[ends_inside]
        head[:, dim + 2] = -(-head[:, dim] // side[starts_inside, dim]) * side[starts_inside, dim]
        tail[:, dim] = tail[:, dim + 2] // side[ends_inside, dim] * side[ends_inside, dim]
        rows += [starts_inside, ends_inside]
        rects += [head, tail]
    row, rect = np.concatenate(rows), np.concatenate(rects)
    rect = np.concatenate([np.maximum(rect[:, :2], mine[row, :2]), np.minimum(rect[:, 2:], mine[row, 2:])], axis=1)
    is_there = (rect[:, :2] < rect[:, 2:]).all(axis=1)
    return _largest(row[is_there], rect[is_there])


def _largest(row: Int64s, rect: Int64s) -> tuple[Int64s, Int64s]:
    """Rectangles that do not lie inside another one of the same row; rows in ascending order."""
    area = (rect[:, 2:] - rect[:, :2]).prod(axis=1)
    order = np.lexsort((*rect.T, -area, row))
    row, rect = row[order], rect[order]
    place = np.arange(len(row)) - np.searchsorted(row, row)
    inside = np.zeros(len(row), dtype=bool)
    for distance in range(1, 1 + int(place.max(initial=0))):  # only larger ones, which come before it, can contain it
        after = np.flatnonzero(place >= distance)
        before = rect[after - distance]
        inside[after] |= ((before[:, :2] <= rect[after, :2]) & (before[:, 2:] >= rect[after, 2:])).all(axis=1)
    return row[~inside], rect[~inside]


def _pairs(wanted: Ints, numbers: Int64s) -> tuple[Int64s, Int64s]:
    """Places of equal numbers in both columns, the second of which is in ascending order."""
    first, last = (np.searchsorted(numbers, wanted, side=side) for side in ("left", "right"))
    count = last - first
    place = np.repeat(np.arange(len(wanted)), count)
    return place, np.arange(len(place)) + np.repeat(first - (np.cumsum(count) - count), count)


def _rects(lo: Ints, extent: Ints) -> Int64s:
    """First row and column, and those just past the last."""
    return np.concatenate([lo, lo + extent], axis=1).astype(np.int64)
