"""Rows of several peers as one sequence."""

from __future__ import annotations

import numpy as np

from weft.transport.base import Batch
from weft.transport.together import ROW_BYTES, together


def batch(peer: str, *rows: tuple[int, int, int, int]) -> Batch:
    src, dst, length, position = (np.array(column, dtype=np.uint64) for column in zip(*rows, strict=True))
    return Batch(peer=peer, src=src, dst=dst, length=length, position=position)


def order(found) -> list[tuple[int, int]]:
    return [(int(g), int(d)) for chunk in found.chunks for g, d in zip(chunk.group, chunk.dst, strict=True)]


def test_rows_follow_their_sources_across_peers():
    one = batch("a", (0, 1000, 10, 0), (20, 1010, 10, 10))
    two = batch("b", (10, 2000, 10, 0), (30, 2010, 10, 10))
    assert order(together([one, two], 1 << 20)) == [(0, 1000), (1, 2000), (0, 1010), (1, 2010)]


def test_rows_of_one_peer_keep_their_order_where_they_share_a_source():
    """Tied weights: two tensors of an engine from the same bytes. The receiver counts one after the other."""
    size = 2 * ROW_BYTES
    tied = batch("a", (0, 10_000_000, size, 0), (0, 20_000_000, size, size))
    other = batch("b", (size, 30_000_000, 64, 0))
    mine = [dst for group, dst in order(together([tied, other], 1 << 20)) if group == 0]
    assert mine == sorted(mine)


def test_replicas_are_digested_once():
    rows = (0, 1000, 10, 0), (20, 1010, 10, 10)
    found = together([batch("a", *rows), batch("b", *((s, d + 5000, n, p) for s, d, n, p in rows))], 1 << 20)
    assert found.twin == (0, 0)
    assert {group for group, _ in order(found)} == {0, 2}, "the second copy is digested for nobody"
    assert found.chunks[0].num_bytes == (20, 20)
