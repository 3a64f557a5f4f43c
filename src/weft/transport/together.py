"""Planes for several peers as one sequence, in source order.

A trainer's tensor is usually split between the ranks of an engine: every row of memory has a part for each. Writing to
one rank after the other walks the source once per rank, in strides that memory is slow at; writing in source order
reads everything once, sequentially. Measured with rows of 5 KB for two ranks: 15 instead of 8 GB/s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from weft.core.geometry.planes import Planes, bundled
from weft.transport.mapped import DirectBatch


@dataclass(frozen=True, kw_only=True)
class Together:
    """Batches as one sequence of planes."""

    batches: tuple[DirectBatch, ...]
    chunks: tuple[Planes, ...]
    """The first Chunks of all batches as one table, then the second ones, and so on."""
    twin: tuple[int, ...]
    """For each batch, one with the same bytes at the same digest positions, which is digested for both: replicas."""

    @classmethod
    def of(cls, batches: Sequence[DirectBatch]) -> Self:
        """Batches that are posted together."""
        count = len(batches)
        twin = [next(i for i in range(number + 1) if _same(batches[i], batches[number])) for number in range(count)]
        digests = [number if twin[number] == number else count for number in range(count)]
        chunks = []
        for number in range(max(len(batch.chunks) for batch in batches)):
            mine = [i for i, batch in enumerate(batches) if number < len(batch.chunks)]
            chunks.append(bundled([batches[i].chunks[number] for i in mine], [digests[i] for i in mine]))
        return cls(batches=tuple(batches), chunks=tuple(chunks), twin=tuple(twin))


def _same(a: DirectBatch, b: DirectBatch) -> bool:
    """Whether two batches read the same bytes for the same digest positions."""
    if a is b:
        return True
    if len(a.chunks) != len(b.chunks):
        return False
    planes = zip(a.chunks, b.chunks, strict=True)
    columns = (pair for x, y in planes for pair in zip(x.digested, y.digested, strict=True))
    return all(x is y or (x is not None and y is not None and np.array_equal(x, y)) for x, y in columns)
