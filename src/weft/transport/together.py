"""Rows for several peers as one sequence, in the order of their sources.

A trainer's tensor is usually cut between the ranks of an engine: every row of memory has a part for each. Writing to
one rank after the other walks the source as often as there are ranks, in strides that the memory is slow at; writing in
the order of the source reads everything once, in order. Measured with rows of 5 KB for two ranks: 15 instead of 8 GB/s.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft.transport.base import Batch, Column, cut_rows


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Some rows, of any of the peers."""

    dst: Column
    src: Column
    position: Column | None
    group: Column
    """Which of the batches a row belongs to."""
    length: Column
    num_bytes: tuple[int, ...]
    """Of each batch."""


def together(batches: Sequence[Batch], chunk_bytes: int) -> list[Chunk]:
    """All rows of all batches in the order of their sources, in chunks of about that size.

    Rows of one batch keep their order as long as it is that of their sources; receivers count on it.
    """
    rows = [cut_rows(batch, chunk_bytes) for batch in batches]
    columns = {name: np.concatenate([getattr(part, name) for part in rows]) for name in ("src", "dst", "length")}
    group = np.repeat(np.arange(len(rows), dtype=np.uint64), [part.num_rows for part in rows])
    order = np.argsort(columns["src"], kind="stable")
    position = None
    if all(part.position is not None for part in rows):
        position = np.concatenate([part.position for part in rows if part.position is not None])[order]
    src, dst, length, group = (column[order] for column in (*columns.values(), group))
    number = (np.cumsum(length) - np.uint64(1)) // np.uint64(chunk_bytes)
    borders = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(length)]
    chunks = []
    for a, b in itertools.pairwise(borders):
        counts = np.bincount(group[a:b].astype(np.int64), weights=length[a:b], minlength=len(rows))
        chunks.append(
            Chunk(
                dst=dst[a:b],
                src=src[a:b],
                position=None if position is None else position[a:b],
                group=group[a:b],
                length=length[a:b],
                num_bytes=tuple(int(count) for count in counts),
            )
        )
    return chunks
