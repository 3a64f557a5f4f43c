"""Which quantised matrices a trainer holds parts of, where it looks for the largest magnitudes, and in which groups
holders exchange them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from weft.codec.fp8 import Grid
from weft.codec.grids import SCALINGS, GridBoxes, HeldGrids
from weft.core.geometry.boxes import Ints
from weft.core.geometry.fingerprint import distinct
from weft.core.plans.plan import Plan
from weft.core.recipe import Op
from weft.core.streams.exchange import ScaleGroups
from weft.errors import ProtocolError
from weft.runtime.compile.holding import RowNumbers
from weft.runtime.control.columns import expand, squeeze
from weft.runtime.weights import Weights

Int64s = NDArray[np.int64]
_Rect = tuple[tuple[int, int], tuple[int, int]]
"""First row and column, and those just past the last."""


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
    """Boxes of shards that others hold too. What is needed of identical shards is computed once."""
    layout, needed = plan.trainer, cache(_needed)
    tensor = layout.tensor_of[shards]
    sent = _sent_boxes(plan, trainer) if len(shards) else {}
    scaling = plan.recipe.scaling_numbers(layout)[tensor]
    columns = (tensor, shard_number[shards], number[tensor], scaling, layout.shapes[tensor, :2])
    boxes = (layout.lo[shards, :2], layout.extent[shards, :2])
    found: list[tuple[int, ...]] = []
    for of, shard, mine, kind, size, lo, extent in zip(*(c.tolist() for c in (*columns, *boxes)), strict=True):
        for first, last in needed((*size, kind), _rect(lo, extent), tuple(sent.get(of, ()))):
            found.append((mine, shard, *first, last[0] - first[0], last[1] - first[1]))
    return np.array(found, dtype=np.int64).reshape(-1, 6)


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


def _sent_boxes(plan: Plan, trainer: int) -> dict[int, list[_Rect]]:
    """What a trainer sends of each quantised matrix, in elements; scales count as the blocks they belong to."""
    rows = np.unique(np.searchsorted(plan.first, np.flatnonzero(plan.sender == trainer), side="right") - 1)
    op = plan.recipe.op[plan.piece[rows]]
    rows = rows[(op == Op.QUANTIZE) | (op == Op.SCALE)]
    tensor = plan.row_boxes.weight[rows]
    is_scale = (plan.recipe.op[plan.piece[rows]] == Op.SCALE)[:, None]
    side = np.where(is_scale, plan.recipe.block_sides(plan.trainer)[tensor, :2], 1)
    first, extent = plan.src_lo[rows, :2] * side, plan.src_extent[rows, :2] * side
    found: dict[int, list[_Rect]] = {}
    for number, lo, size in zip(tensor.tolist(), first.tolist(), extent.tolist(), strict=True):
        found.setdefault(number, []).append(_rect(lo, size))
    return found


def _needed(matrix: tuple[int, int, int], mine: _Rect, sent: tuple[_Rect, ...]) -> list[_Rect]:
    """For a shard that others hold too: the blocks of what is sent, and those at its borders, which others may need.

    `matrix`: its rows and columns, and which of its elements share a scale.
    """
    grid = Grid(rows=matrix[0], columns=matrix[1], scaling=SCALINGS[matrix[2]])
    (top, left), (bottom, right) = mine
    height, width = grid.block
    edges = [
        ((top, left), (min(-(-top // height) * height, bottom), right)) if top % height else None,
        ((max(bottom // height * height, top), left), mine[1]) if bottom % height and bottom < grid.rows else None,
        ((top, left), (bottom, min(-(-left // width) * width, right))) if left % width else None,
        ((top, max(right // width * width, left)), mine[1]) if right % width and right < grid.columns else None,
    ]
    wanted = [_intersect(rect, mine) for rect in (*edges, *(_hull(grid, box) for box in sent)) if rect is not None]
    kept: list[_Rect] = []
    for rect in sorted({rect for rect in wanted if rect is not None}, key=_area, reverse=True):
        if not any(_intersect(rect, larger) == rect for larger in kept):
            kept.append(rect)
    return kept


def _area(rect: _Rect) -> int:
    return (rect[1][0] - rect[0][0]) * (rect[1][1] - rect[0][1])


def _hull(grid: Grid, rect: _Rect) -> _Rect:
    """The blocks a rectangle touches."""
    sides = grid.block
    first = (rect[0][0] // sides[0] * sides[0], rect[0][1] // sides[1] * sides[1])
    return first, (-(-rect[1][0] // sides[0]) * sides[0], -(-rect[1][1] // sides[1]) * sides[1])


def _intersect(a: _Rect, b: _Rect) -> _Rect | None:
    first = (max(a[0][0], b[0][0]), max(a[0][1], b[0][1]))
    last = (min(a[1][0], b[1][0]), min(a[1][1], b[1][1]))
    return (first, last) if first[0] < last[0] and first[1] < last[1] else None


def _rect(lo: Sequence[int], extent: Sequence[int]) -> _Rect:
    first = (lo[0], lo[1])
    return first, (first[0] + extent[0], first[1] + extent[1])
