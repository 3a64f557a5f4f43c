"""Where versions land on an engine rank: in staging memory (`shadow`) or in the live weights (`in_place`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from weft.codec import delta
from weft.core.boxes import row_major_strides
from weft.core.layout import DTYPE_BYTES
from weft.core.runs import expand_runs
from weft.errors import LayoutError
from weft.runtime.weights import Allocate, Held, Weights
from weft.transport.base import Column, Memory

ALIGN = 256

Rows = tuple[Column, Column, Column]
"""Destination, source and length of what is copied."""


@dataclass(frozen=True, kw_only=True)
class Landing:
    """Destinations of one engine rank's shards."""

    addresses: tuple[int, ...]
    """One for each shard; every shard is contiguous there."""
    ranges: tuple[tuple[int, int], ...]
    """Memory writers may reach: address and bytes."""
    copy: Rows | None
    """What makes a staged version visible; None: it is where it belongs."""
    keep: Any


def in_staging(weights: Weights, allocate: Allocate) -> tuple[Landing, Memory]:
    """Staging memory for all weights; nothing of the engine is touched before commit."""
    contiguous = [replace(held, strides=_row_major(held.extent)) for held in weights.held]
    sizes = [-(-held.span_bytes // ALIGN) * ALIGN for held in contiguous]
    memory = allocate(max(sum(sizes), ALIGN))
    starts = (memory.address + np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)).tolist()
    staged = [replace(held, address=start) for held, start in zip(contiguous, starts, strict=True)]
    landing = Landing(
        addresses=tuple(starts),
        ranges=((memory.address, memory.num_bytes),),
        copy=_copy_rows(staged, weights.held),
        keep=memory,
    )
    return landing, memory


def in_live(weights: Weights) -> Landing:
    """The live weights themselves; they must be contiguous."""
    strided = tuple(
        f"{held.tensor.name}: extent {list(held.extent)}, strides {list(held.strides)}"
        for held in weights.held
        if held.strides != _row_major(held.extent)
    )
    if strided:
        raise LayoutError("weights that are not contiguous cannot be written in place", problems=strided, hint="shadow")
    return Landing(
        addresses=tuple(held.address for held in weights.held),
        ranges=weights.ranges,
        copy=None,
        keep=weights,
    )


def patch_bytes(weights: Weights, num_trainers: int, chunk_bytes: int) -> int:
    """Memory for the patches of all trainers, however their shares are cut: each byte has one sender."""
    total = sum(int(np.prod(held.extent)) * DTYPE_BYTES[held.tensor.dtype] for held in weights.held)
    num_sections = len(delta.WIDTHS) * (total // chunk_bytes + num_trainers)
    whole = total + (total // delta.BLOCK + num_sections) * delta.BLOCK_OVERHEAD
    return whole + whole // 128 + num_sections * 2048 + num_trainers * ALIGN


def _row_major(extent: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(stride) for stride in row_major_strides(np.array([extent]))[0])


def _copy_rows(staged: Sequence[Held], live: Sequence[Held]) -> Rows:
    """Rows that copy staging into the live weights, whatever their strides."""
    columns: list[list[np.ndarray]] = [[], [], []]
    for source, target in zip(staged, live, strict=True):
        extent = np.array([target.extent])
        _, src, dst, length = expand_runs(extent, np.array([source.strides]), np.array([target.strides]))
        size = DTYPE_BYTES[target.tensor.dtype]
        rows = (target.address + dst * size, source.address + src * size, length * size)
        for column, values in zip(columns, rows, strict=True):
            column.append(values.astype(np.uint64))
    dst_column, src_column, length_column = (np.concatenate(column) for column in columns)
    return dst_column, src_column, length_column
