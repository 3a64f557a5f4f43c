"""Which quantised matrices a trainer holds parts of, where it looks for the largest magnitudes, and in which groups
holders exchange them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from weft.codec.conversion import DTYPES, HeldGrid
from weft.codec.fp8 import Box, Grid
from weft.core.boxes import Ints
from weft.core.layout import DTYPE_BYTES
from weft.core.plan import Plan
from weft.core.recipe import Op
from weft.core.scaling import Scaling
from weft.runtime.control.messages import QuantGrid, pack, unpack

GROUP_BYTES = 64 << 20
"""Weights of one trainer whose magnitudes are exchanged at once, at least."""
MAX_GROUPS = 64
_Rect = tuple[tuple[int, int], tuple[int, int]]
"""First row and column, and those behind the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """All matrices of a plan that are quantised, in the order they are exchanged."""

    tensors: NDArray[np.int64]
    """Numbers of trainer tensors."""
    group: NDArray[np.int64]
    """Of every trainer tensor; -1 where it is not quantised."""
    first_key: dict[int, int]
    """Trainer tensor → the first of its blocks."""

    @classmethod
    def of(cls, plan: Plan) -> Groups:
        """Groups of about equal size, so few that messages do not matter and so small that work overlaps."""
        tensors = np.unique(plan.trainer.tensor_of[plan.quantized_shards]).astype(np.int64)
        size = [plan.trainer.tensors[number].num_bytes for number in tensors]
        group_bytes = max(GROUP_BYTES * plan.topology.num_trainers, sum(size) // MAX_GROUPS, 1)
        before = np.array([0, *accumulate(size)][:-1], dtype=np.int64)
        group = np.full(len(plan.trainer.tensors), -1, dtype=np.int64)
        group[tensors] = np.unique(before // group_bytes, return_inverse=True)[1]
        blocks = [grid_of(plan, int(number)).shape for number in tensors]
        first = [0, *accumulate(rows * columns for rows, columns in blocks)]
        return cls(tensors=tensors, group=group, first_key=dict(zip(tensors.tolist(), first, strict=False)))


def grid_of(plan: Plan, tensor: int) -> Grid:
    """The blocks of a matrix."""
    described = plan.trainer.tensors[tensor]
    rows, columns = described.shape
    return Grid(rows=rows, columns=columns, scaling=plan.recipe.scaling.get(described.name, Scaling.BLOCK))


def trainer_grids(plan: Plan, groups: Groups, trainer: int, shard_address: NDArray[np.int64]) -> dict[int, QuantGrid]:
    """The matrices one trainer quantises parts of, by tensor number, with the boxes it must look at."""
    layout = plan.trainer
    held = layout.groups.contain(layout.group_of, np.full(len(layout.lo), trainer))
    shards = np.flatnonzero(held & (groups.group[layout.tensor_of] >= 0))
    sent = _sent_boxes(plan, trainer)
    found: dict[int, list[list[int]]] = {}
    for shard in shards[np.argsort(layout.tensor_of[shards], kind="stable")].tolist():
        tensor = int(layout.tensor_of[shard])
        grid = grid_of(plan, tensor)
        mine = _rect(layout.lo[shard], layout.extent[shard])
        is_sole = layout.groups.sizes[layout.group_of[shard]] == 1
        rects = [mine] if is_sole else _needed(grid, mine, sent.get(tensor, []))
        for rect in rects:
            found.setdefault(tensor, []).append(_box(plan, shard, shard_address[shard], mine, rect))
    return {tensor: _grid_message(plan, groups, tensor, boxes) for tensor, boxes in found.items()}


def held_grid(message: QuantGrid) -> HeldGrid:
    """A matrix as the trainer works on it."""
    names = ("address", "stride", "dtype", "row", "column", "rows", "columns")
    table = unpack(message.boxes).reshape(-1, len(names)).tolist()
    return HeldGrid(
        name=message.name,
        grid=Grid(rows=message.rows, columns=message.columns, scaling=Scaling(message.scaling)),
        group=message.group,
        first_key=message.first_key,
        boxes=tuple(
            Box(
                address=address,
                stride=stride,
                width=DTYPE_BYTES[DTYPES[dtype]],
                first=(row, column),
                rows=rows,
                columns=columns,
            )
            for address, stride, dtype, row, column, rows, columns in table
        ),
    )


def _grid_message(plan: Plan, groups: Groups, tensor: int, boxes: list[list[int]]) -> QuantGrid:
    grid = grid_of(plan, tensor)
    return QuantGrid(
        name=plan.trainer.tensors[tensor].name,
        rows=grid.rows,
        columns=grid.columns,
        scaling=grid.scaling.value,
        group=int(groups.group[tensor]),
        first_key=groups.first_key[tensor],
        boxes=pack(np.array(boxes, dtype=np.uint64).reshape(-1)),
    )


def _box(plan: Plan, shard: int, address: int, mine: _Rect, rect: _Rect) -> list[int]:
    """A rectangle of a shard, as it lies in memory."""
    layout = plan.trainer
    stride = [int(s) for s in layout.strides[shard][:2]]
    size = int(layout.itemsize[layout.tensor_of[shard]])
    offset = (rect[0][0] - mine[0][0]) * stride[0] + (rect[0][1] - mine[0][1]) * stride[1]
    dtype = DTYPES.index(layout.tensors[layout.tensor_of[shard]].dtype)
    rows, columns = rect[1][0] - rect[0][0], rect[1][1] - rect[0][1]
    return [int(address) + offset * size, stride[0] * size, dtype, *rect[0], rows, columns]


def _sent_boxes(plan: Plan, trainer: int) -> dict[int, list[_Rect]]:
    """What a trainer sends of each quantised matrix, in elements; scales count as the blocks they belong to."""
    rows = np.unique(np.searchsorted(plan.first, np.flatnonzero(plan.sender == trainer), side="right") - 1)
    op = plan.recipe.op[plan.piece[rows]]
    found: dict[int, list[_Rect]] = {}
    number = {tensor.name: i for i, tensor in enumerate(plan.trainer.tensors)}
    for row in rows[(op == Op.QUANTIZE) | (op == Op.SCALE)].tolist():
        piece = plan.piece[row]
        tensor = number[plan.recipe.sources[plan.recipe.src[piece]]]
        rect = _rect(plan.src_lo[row], plan.src_extent[row])
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


def _rect(lo: Ints, extent: Ints) -> _Rect:
    first = (int(lo[0]), int(lo[1]))
    return first, (first[0] + int(extent[0]), first[1] + int(extent[1]))
