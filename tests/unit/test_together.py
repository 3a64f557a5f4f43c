"""Planes of several peers as one sequence."""

from __future__ import annotations

import numpy as np

from weft.core.geometry.planes import LONG_ROW, Planes
from weft.transport.mapped import DirectBatch
from weft.transport.together import Together


def batch(peer: str, *chunks: list[tuple[int, int, int, int]]) -> DirectBatch:
    """Chunks of rows: source, destination, length, position."""
    return DirectBatch(peer=peer, chunks=tuple(planes(rows) for rows in chunks))


def planes(rows: list[tuple[int, int, int, int]]) -> Planes:
    src, dst, length, position = (np.array(column, dtype=np.uint64) for column in zip(*rows, strict=True))
    none, one = np.zeros_like(src), np.ones_like(src)
    return Planes(
        src=src,
        dst=dst,
        rows=one,
        length=length,
        src_stride=none,
        dst_stride=none,
        position=position,
        position_stride=none,
    )


def order(found: Together) -> list[tuple[int, int]]:
    return [(int(g), int(d)) for chunk in found.chunks for g, d in zip(chunk.group, chunk.dst, strict=True)]


def test_planes_follow_their_sources_across_peers():
    one = batch("a", [(0, 1000, 10, 0), (20, 1010, 10, 10)])
    two = batch("b", [(10, 2000, 10, 0), (30, 2010, 10, 10)])
    assert order(Together.of([one, two])) == [(0, 1000), (1, 2000), (0, 1010), (1, 2010)]


def test_chunks_keep_their_order_whatever_their_sources():
    """Receivers count Chunks one after the other."""
    one = batch("a", [(90, 1000, 10, 0)], [(0, 1010, 10, 10)])
    two = batch("b", [(50, 2000, 10, 0)])
    assert order(Together.of([one, two])) == [(1, 2000), (0, 1000), (0, 1010)]


def test_replicas_are_digested_once_and_read_together():
    rows = [(0, 1000, 3 * LONG_ROW + 5, 0)]
    found = Together.of([batch("a", rows), batch("b", [(s, d + 5_000_000, n, p) for s, d, n, p in rows])])
    assert found.twin == (0, 0)
    assert {group for group, _ in order(found)} == {0, 2}, "the second copy is digested for nobody"
    (chunk,) = found.chunks
    assert len(set(chunk.bundle.tolist())) == 2, "whole rows of both, and what is left of both"
