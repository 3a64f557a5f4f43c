"""What one trainer sends to one engine rank, as boxes: the controller cuts them out of the plan, members compile them.

Boxes of one kind differ only in where they begin, such as those of a layer's experts. A table of kinds and a few
numbers per box travel; addresses do not, because every member knows its own.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from weft.codec.conversion import DTYPE_WIDTHS, DTYPES
from weft.core.geometry.boxes import row_major_strides
from weft.core.geometry.fingerprint import distinct_rows
from weft.core.plans.plan import Plan
from weft.core.recipe import Op
from weft.core.streams.row_boxes import RowBoxes
from weft.errors import ProtocolError
from weft.runtime.compile.holding import RowNumbers
from weft.runtime.control.columns import expand, squeeze

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkBoxes:
    """Boxes of one link, as columns; extents and strides have one row for each kind."""

    extent: Int64s
    src_strides: Int64s
    dst_strides: Int64s
    what: Int64s
    """(kinds, 3): operation, dtype of the source, dtype of the destination."""
    tensors: Int64s
    """Numbers of the engine rank's tensors that are written."""
    kind: Int64s
    src: Int64s
    """Number of the shard among those the trainer holds."""
    src_offset: Int64s
    """In elements, like `dst_offset`."""
    dst: Int64s
    """Position in `tensors`."""
    dst_offset: Int64s
    first: Int64s
    """(n, 2): row and column in the matrix; in blocks for scales."""
    grid: Int64s
    """Number of the trainer's grid; -1: none."""
    group: Int64s
    place: Int64s
    """In destination order."""

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def op(self) -> Int64s:
        """Operation of each box."""
        return self.what[self.kind, 0]

    @property
    def src_width(self) -> Int64s:
        """Bytes of an element of each box, on the trainer."""
        return DTYPE_WIDTHS[self.what[self.kind, 1]]

    @property
    def width(self) -> Int64s:
        """Bytes of an element of each box, on the engine."""
        return DTYPE_WIDTHS[self.what[self.kind, 2]]

    @property
    def compact(self) -> Int64s:
        """Strides of kinds in a stream."""
        return row_major_strides(self.extent)

    def encode(self) -> bytes:
        """Encoded for the wire."""
        return squeeze({field.name: getattr(self, field.name) for field in fields(self)})

    @classmethod
    def decode(cls, data: bytes) -> LinkBoxes:
        """Decoded from the wire; raises ProtocolError unless all numbers are consistent."""
        boxes = cls(**expand(data, [field.name for field in fields(cls)]))
        boxes._check()
        return boxes

    def _check(self) -> None:
        kinds, count = self.extent.shape, len(self.kind)
        tables = (self.src_strides.shape == kinds, self.dst_strides.shape == kinds, self.what.shape == (kinds[0], 3))
        columns = [self.src, self.src_offset, self.dst, self.dst_offset, self.grid, self.group, self.place]
        fits = all(tables) and all(column.shape == (count,) for column in columns) and self.first.shape == (count, 2)
        limits = ((self.kind, len(self.extent)), (self.dst, len(self.tensors)), (self.what[:, 1:], len(DTYPES)))
        fits = fits and all(((column >= 0) & (column < most)).all() for column, most in limits)
        if not fits or not (self.extent > 0).all():
            raise ProtocolError("table of a plan is inconsistent")


class PlanBoxes:
    """The boxes of all links of a plan."""

    def __init__(self, plan: Plan, rows: RowBoxes) -> None:
        self._plan, self.rows = plan, rows
        src_dtype = plan.trainer.dtype_of[plan.trainer.tensor_of[plan.shard]]
        dst_dtype = plan.recipe.engine.dtype_of[plan.recipe.engine.tensor_of[plan.dst]]
        what = np.stack([rows.op, src_dtype, dst_dtype], axis=1)
        table = np.concatenate([rows.extent, rows.src_strides, rows.dst_strides, what], axis=1)
        self._kinds, self._kind = distinct_rows(table)
        order = np.argsort(plan.pair, kind="stable")
        self._route_row = np.repeat(np.arange(plan.num_rows), plan.fan_out)[order]
        self._pairs = plan.pair[order]

    def rows_of(self, trainer: int, engine: int) -> Int64s:
        """Rows of the plan that one link carries."""
        pair = trainer * self._plan.topology.num_engines + engine
        first, last = np.searchsorted(self._pairs, [pair, pair + 1])
        return self._route_row[first:last]

    def link(self, trainer: int, engine: int, *, shard: RowNumbers, tensor: RowNumbers, grid: Int64s) -> LinkBoxes:
        """One link. `shard`, `tensor`: numbers of layout rows among what its two members hold; `grid`: of matrices."""
        mine = self.rows_of(trainer, engine)
        plan, rows, dims = self._plan, self.rows, self.rows.extent.shape[1]
        used, kind = np.unique(self._kind[mine], return_inverse=True)
        kinds = self._kinds[used]
        tensors, dst = np.unique(tensor[plan.dst[mine]], return_inverse=True)
        return LinkBoxes(
            extent=kinds[:, :dims],
            src_strides=kinds[:, dims : 2 * dims],
            dst_strides=kinds[:, 2 * dims : 3 * dims],
            what=kinds[:, 3 * dims :],
            tensors=tensors,
            kind=kind,
            src=np.where(rows.op[mine] == Op.SCALE, 0, shard[plan.shard[mine]]),
            src_offset=rows.src_offset[mine],
            dst=dst,
            dst_offset=rows.dst_offset[mine],
            first=rows.first[mine],
            grid=np.where(rows.group[mine] >= 0, grid[rows.weight[mine]], -1),
            group=rows.group[mine],
            place=np.argsort(np.argsort(rows.place[mine])),
        )
