"""From boxes to memory: the contiguous runs a route copies, as columns of byte offsets.

A route moves a box between two strided memories. What a transport can write is rows of (source, destination, length):
the longest runs of bytes that lie next to each other on both sides. `route_runs` gives them for many routes at once,
relative to the start of the sender's shard and of the engine's tensor; adding base addresses makes a batch.

    runs = route_runs(plan, rows)                       # rows: numbers of COPY routes
    src = shard_address[runs.shard] + runs.src_offset   # and likewise for the destination
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.core.boxes import Ints, split_contiguous
from weft.core.plan import Plan
from weft.core.recipe import to_destination_dims


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Contiguous runs, in the order of their routes."""

    row: NDArray[np.int64]
    """Position of the route in the rows that were asked for."""
    shard: NDArray[np.int64]
    """Trainer shard row the bytes come from."""
    dst: NDArray[np.int64]
    """Engine row the bytes go to."""
    src_offset: NDArray[np.int64]
    dst_offset: NDArray[np.int64]
    num_bytes: NDArray[np.int64]


def route_runs(plan: Plan, rows: Ints) -> Runs:
    """The runs of routes that copy without converting."""
    shard, dst = plan.shard[rows], plan.dst[rows]
    axes = plan.recipe.axes[plan.piece[rows]]
    trainer, engine = plan.trainer, plan.recipe.engine
    itemsize = engine.itemsize[dst]
    src_strides, dst_strides = trainer.strides[shard], engine.strides[dst]
    src_base = ((plan.src_lo[rows] - trainer.lo[shard]) * src_strides).sum(axis=1)
    dst_base = (plan.dst_lo[rows] * dst_strides).sum(axis=1)
    walked = to_destination_dims(src_strides, axes, 0)
    row, src_offset, dst_offset, count = expand_runs(plan.extent[rows], walked, dst_strides)
    return Runs(
        row=row,
        shard=shard[row].astype(np.int64),
        dst=dst[row].astype(np.int64),
        src_offset=(src_base[row] + src_offset) * itemsize[row],
        dst_offset=(dst_base[row] + dst_offset) * itemsize[row],
        num_bytes=count * itemsize[row],
    )


def expand_runs(
    extent: Ints, strides_a: Ints, strides_b: Ints
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Boxes cut into runs that are contiguous in both memories.

    Returns, for every run: the number of its box, its element offset in either memory, and its length in elements.
    """
    length, outer = split_contiguous(extent, strides_a, strides_b)
    count = np.prod(outer, axis=1)
    row = np.repeat(np.arange(len(extent)), count)
    rest = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    offset_a, offset_b = np.zeros_like(rest), np.zeros_like(rest)
    for dim in range(extent.shape[1] - 1, -1, -1):
        rest, coordinate = np.divmod(rest, outer[row, dim])
        offset_a += coordinate * strides_a[row, dim]
        offset_b += coordinate * strides_b[row, dim]
    return row, offset_a, offset_b, length[row]
