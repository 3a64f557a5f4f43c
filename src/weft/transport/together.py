"""Rows for several peers as one sequence, in the order of their sources.

A trainer's tensor is usually cut between the ranks of an engine: every row of memory has a part for each. Writing to
one rank after the other walks the source as often as there are ranks, in strides that the memory is slow at; writing in
the order of the source reads everything once, in order. Measured with rows of 5 KB for two ranks: 15 instead of 8 GB/s.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.transport.base import Batch, Column, cut_rows, joined_rows

ROW_BYTES = 32 << 10
"""Longest row: what goes to several replicas is read from memory once and from the cache for the others."""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Some rows, of any of the peers."""

    dst: Column
    src: Column
    position: Column | None
    group: Column
    """Which of the batches a row is digested for; the number of batches: for none."""
    length: Column
    num_bytes: tuple[int, ...]
    """Of each batch."""


@dataclass(frozen=True, kw_only=True)
class Together:
    """Batches as one sequence of rows."""

    batches: tuple[Batch, ...]
    chunks: tuple[Chunk, ...]
    twin: tuple[int, ...]
    """For each batch one with the same bytes at the same positions, which is digested for both: replicas."""


def together(batches: Sequence[Batch], chunk_bytes: int) -> Together:
    """All rows of all batches in the order of their sources, in chunks of about that size."""
    twin = [next(i for i in range(number + 1) if _same(batches[i], batches[number])) for number in range(len(batches))]
    chunks = _chunks(batches, np.array(twin), chunk_bytes)
    return Together(batches=tuple(batches), chunks=tuple(chunks), twin=tuple(twin))


def _same(a: Batch, b: Batch) -> bool:
    """Whether two batches read the same bytes for the same positions."""
    pairs = ((a.src, b.src), (a.length, b.length), (a.position, b.position))
    return all(x is y or (x is not None and y is not None and np.array_equal(x, y)) for x, y in pairs)


def _chunks(batches: Sequence[Batch], twin: NDArray[np.int64], chunk_bytes: int) -> Iterator[Chunk]:
    """Rows of one batch keep their order as long as it is that of their sources; receivers count on it."""
    rows = [cut_rows(batch, ROW_BYTES) for batch in batches]
    columns = {name: np.concatenate([getattr(part, name) for part in rows]) for name in ("src", "dst", "length")}
    group = np.repeat(np.arange(len(rows), dtype=np.uint64), [part.num_rows for part in rows])
    reached = np.concatenate([np.maximum.accumulate(part.src) for part in rows])  # no row before one of its own batch
    order = np.argsort(reached, kind="stable")
    position = None
    if all(part.position is not None for part in rows):
        position = np.concatenate([part.position for part in rows if part.position is not None])[order]
    src, dst, length, group = (column[order] for column in (*columns.values(), group))
    number = (np.cumsum(length) - np.uint64(1)) // np.uint64(chunk_bytes)
    borders = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(length)]
    is_twin = twin != np.arange(len(twin))
    for a, b in itertools.pairwise(borders):
        moving = [column[a:b] for column in (dst, src, position) if column is not None]
        first, joined = joined_rows(length[a:b], moving=moving, same=[group[a:b]])
        whose = group[a:b][first].astype(np.int64)
        yield Chunk(
            dst=dst[a:b][first],
            src=src[a:b][first],
            position=None if position is None else position[a:b][first],
            group=np.where(is_twin[whose], len(twin), whose).astype(np.uint64),
            length=joined,
            num_bytes=tuple(int(n) for n in np.bincount(whose, weights=joined, minlength=len(rows))),
        )
