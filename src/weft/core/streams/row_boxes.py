"""The rows of a plan as boxes of memory: extents and strides on both sides, ready to be cut, counted and compiled.

Dimensions are those of the source, the last one last; where a tensor has fewer, leading dimensions of one element are
added. A box of scales is counted in blocks and has no source memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from weft.core.geometry.boxes import Ints, contiguous_run, row_major_strides
from weft.core.geometry.scaling import SCALE_SUFFIX
from weft.core.recipe import Op, to_source_dims
from weft.core.streams.exchange import ScaleGroups

if TYPE_CHECKING:
    from weft.core.plans.plan import Plan

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBoxes:
    """One box for each row of a plan, as columns."""

    extent: Int64s
    src_strides: Int64s
    """In elements, like `dst_strides`; both (n, D)."""
    dst_strides: Int64s
    first: Int64s
    """(n, 2): row and column of the box in its matrix; in blocks for scales."""
    src_offset: Int64s
    """Elements from the start of the shard to the first one of the box."""
    dst_offset: Int64s
    width: Int64s
    """Bytes of an element in the destination."""
    op: Int64s
    group: Int64s
    """When its scales become known; -1: it needs none."""
    weight: Int64s
    """The trainer tensor it is made of; scales belong to their weight."""
    place: Int64s
    """Destination order."""

    @classmethod
    def of(cls, plan: Plan, groups: ScaleGroups) -> RowBoxes:
        """The boxes of all rows of a plan."""
        trainer, engine = plan.trainer, plan.recipe.engine
        shard, dst, axes = plan.shard, plan.dst, plan.recipe.axes[plan.piece]
        tensor = trainer.tensor_of[shard]
        num_dims = trainer.tensor_dims[tensor]
        op = plan.recipe.op[plan.piece].astype(np.int64)
        lo, strides = plan.src_lo.astype(np.int64), trainer.strides[shard].astype(np.int64)
        dst_lo, walked = plan.dst_lo.astype(np.int64), engine.strides[dst].astype(np.int64)
        weight = _weights(plan)[tensor]
        dst_offset = (dst_lo * walked).sum(axis=1)
        return cls(
            extent=right_aligned(plan.src_extent.astype(np.int64), num_dims, 1),
            src_strides=right_aligned(strides, num_dims, 0),
            dst_strides=right_aligned(to_source_dims(walked, axes), num_dims, 0),
            first=right_aligned(lo, num_dims, 0)[:, -2:],
            src_offset=((lo - trainer.lo[shard]) * strides).sum(axis=1),
            dst_offset=dst_offset,
            width=engine.itemsize[dst].astype(np.int64),
            op=op,
            group=np.where((op == Op.QUANTIZE) | (op == Op.SCALE), groups.group[weight], -1),
            weight=weight,
            place=_ranked(dst, dst_offset),
        )

    @property
    def compact(self) -> Int64s:
        """Strides of the boxes in a stream."""
        return row_major_strides(self.extent)

    def run_bytes(self, *, lands_in_stream: bool) -> Int64s:
        """Bytes next to each other, from the first one on, in the source and where they land."""
        landed = self.compact if lands_in_stream else self.dst_strides
        return contiguous_run(self.extent, self.src_strides, landed) * self.width


def right_aligned(values: Int64s, num_dims: Int64s, fill: int) -> Int64s:
    """Columns of coordinates moved so that the last dimension of every tensor comes last; two columns at least."""
    width = max(values.shape[1], 2)
    padded = np.pad(values, ((0, 0), (0, width - values.shape[1])), constant_values=fill)
    index = np.arange(width)[None, :] - (width - num_dims[:, None])
    return np.where(index >= 0, np.take_along_axis(padded, np.maximum(index, 0), axis=1), fill)


def _weights(plan: Plan) -> Int64s:
    """Number of every trainer tensor; for scales that of their weight."""
    number = plan.trainer.numbers
    names = (tensor.name.removesuffix(SCALE_SUFFIX) for tensor in plan.trainer.tensors)
    return np.fromiter(map(number.__getitem__, names), dtype=np.int64, count=len(plan.trainer.tensors))


def _ranked(dst: Ints, dst_offset: Int64s) -> Int64s:
    """Position of every row in destination order."""
    rank = np.empty(len(dst), dtype=np.int64)
    rank[np.lexsort((dst_offset, dst))] = np.arange(len(dst))
    return rank
