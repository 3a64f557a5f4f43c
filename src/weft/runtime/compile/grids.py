"""Which quantised matrices a trainer holds parts of, where it looks for the largest magnitudes, and in which groups
holders exchange them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from weft.codec.conversion import HeldGrid
from weft.codec.fp8 import Box, Grid
from weft.core.boxes import Ints
from weft.core.exchange import ScaleGroups
from weft.core.layout import DTYPE_BYTES
from weft.core.plan import Plan
from weft.core.recipe import Op
from weft.core.scaling import Scaling
from weft.runtime.compile.columns import expand, squeeze
from weft.runtime.weights import Held

Int64s = NDArray[np.int64]
SCALINGS = tuple(Scaling)
"""Kinds of scales by their number in tables."""
_Rect = tuple[tuple[int, int], tuple[int, int]]
"""First row and column, and those behind the last."""


def grid_of(plan: Plan, tensor: int) -> Grid:
    """The blocks of a matrix."""
    described = plan.trainer.tensors[tensor]
    rows, columns = described.shape
    return Grid(rows=rows, columns=columns, scaling=plan.recipe.scaling.get(described.name, Scaling.BLOCK))


def trainer_grids(plan: Plan, groups: ScaleGroups, trainer: int, shard_number: Int64s) -> TrainerGrids:
    """The matrices one trainer quantises parts of, with the boxes it must look at.

    `shard_number`: see `held_numbers`.
    """
    layout = plan.trainer
    shards = np.flatnonzero((shard_number >= 0) & (groups.group[layout.tensor_of] >= 0))
    shards = shards[np.lexsort((layout.tensor_of[shards], groups.group[layout.tensor_of[shards]]))]
    is_sole = layout.groups.sizes[layout.group_of[shards]] == 1
    sent = {} if is_sole.all() else _sent_boxes(plan, trainer)
    tensors = np.unique(layout.tensor_of[shards])
    tensors = tensors[np.lexsort((tensors, groups.group[tensors]))]
    number = {int(tensor): i for i, tensor in enumerate(tensors)}
    boxes: list[tuple[int, ...]] = []
    columns = (shards, layout.tensor_of[shards], layout.lo[shards], layout.extent[shards], is_sole)
    for shard, tensor, lo, extent, alone in zip(*(column.tolist() for column in columns), strict=True):
        mine = _rect(lo, extent)
        rects = [mine] if alone else _needed(grid_of(plan, tensor), mine, sent.get(tensor, []))
        for first, last in rects:
            rows, columns_ = last[0] - first[0], last[1] - first[1]
            boxes.append((number[tensor], int(shard_number[shard]), *first, rows, columns_))
    return TrainerGrids(plan, groups, tensors, boxes)


class TrainerGrids:
    """The quantised matrices of one trainer."""

    def __init__(self, plan: Plan, groups: ScaleGroups, tensors: Ints, boxes: list[tuple[int, ...]]) -> None:
        self.tensors = tensors
        """Numbers of trainer tensors, sorted by group."""
        self.groups = frozenset(groups.group[tensors].tolist())
        """Groups of which this trainer holds something."""
        self._plan, self._all, self._boxes = plan, groups, boxes

    def encode(self) -> bytes:
        """As they travel; empty where there are none."""
        if not len(self.tensors):
            return b""
        grids = [grid_of(self._plan, tensor) for tensor in self.tensors.tolist()]
        return squeeze(
            {
                "grids": np.array(
                    [
                        (grid.rows, grid.columns, SCALINGS.index(grid.scaling), group, self._all.first_key[tensor])
                        for grid, group, tensor in zip(
                            grids, self._all.group[self.tensors].tolist(), self.tensors.tolist(), strict=True
                        )
                    ],
                    dtype=np.int64,
                ),
                "boxes": np.array(self._boxes, dtype=np.int64).reshape(-1, 6),
            }
        )


def held_grids(data: bytes, held: Sequence[Held]) -> list[HeldGrid]:
    """The matrices a trainer quantises, as it works on them: in the memory it holds."""
    if not data:
        return []
    tables = expand(data, ("grids", "boxes"))
    boxes: list[list[Box]] = [[] for _ in range(len(tables["grids"]))]
    names = [""] * len(boxes)
    for number, shard, row, column, rows, columns in tables["boxes"].tolist():
        mine = held[shard]
        size = DTYPE_BYTES[mine.tensor.dtype]
        offset = (row - mine.lo[0]) * mine.strides[0] + (column - mine.lo[1]) * mine.strides[1]
        names[number] = mine.tensor.name
        boxes[number].append(
            Box(
                address=mine.address + offset * size,
                stride=mine.strides[0] * size,
                width=size,
                first=(row, column),
                rows=rows,
                columns=columns,
            )
        )
    return [
        HeldGrid(
            name=name,
            grid=Grid(rows=rows, columns=columns, scaling=SCALINGS[scaling]),
            group=group,
            first_key=first_key,
            boxes=tuple(found),
        )
        for (rows, columns, scaling, group, first_key), found, name in zip(
            tables["grids"].tolist(), boxes, names, strict=True
        )
    ]


def _sent_boxes(plan: Plan, trainer: int) -> dict[int, list[_Rect]]:
    """What a trainer sends of each quantised matrix, in elements; scales count as the blocks they belong to."""
    rows = np.unique(np.searchsorted(plan.first, np.flatnonzero(plan.sender == trainer), side="right") - 1)
    op = plan.recipe.op[plan.piece[rows]]
    found: dict[int, list[_Rect]] = {}
    number = {tensor.name: i for i, tensor in enumerate(plan.trainer.tensors)}
    for row in rows[(op == Op.QUANTIZE) | (op == Op.SCALE)].tolist():
        piece = plan.piece[row]
        tensor = number[plan.recipe.sources[plan.recipe.src[piece]]]
        rect = _rect(plan.src_lo[row].tolist(), plan.src_extent[row].tolist())
        if plan.recipe.op[piece] == Op.SCALE:
            height, width = grid_of(plan, tensor).block
            rect = (
                (rect[0][0] * height, rect[0][1] * width),
                (rect[1][0] * height, rect[1][1] * width),
            )
        found.setdefault(tensor, []).append(rect)
    return found


def _needed(grid: Grid, mine: _Rect, sent: list[_Rect]) -> list[_Rect]:
    """Of a shard that others hold too: the blocks of what is sent, and those at its borders, which others may need."""
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
