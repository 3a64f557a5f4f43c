"""A batch is divided over network cards by their shares: every byte once, each where it belongs."""

from __future__ import annotations

import numpy as np
import pytest

from weft.transport.base import Batch
from weft.transport.nixl_agents import SHORTEST_SHARE_BYTES, CardAgent, divide, divided_cards


def batch(*lengths: int) -> Batch:
    """Rows with gaps between them, on both sides."""
    length = np.array(lengths, dtype=np.uint64)
    src = np.cumsum(length + np.uint64(8)) - length + np.uint64(1 << 20)
    return Batch(peer="engine 0", src=src, dst=2 * src, length=length)


def agents(*shares: float) -> list[CardAgent]:
    return [CardAgent(name=str(number), agent=None, share=share) for number, share in enumerate(shares)]


def bytes_of(rows: Batch) -> list[tuple[int, int]]:
    """The source of every byte, and how far its destination lies from it."""
    return [
        (src + i, dst - src)
        for src, dst, length in zip(rows.src.tolist(), rows.dst.tolist(), rows.length.tolist(), strict=True)
        for i in range(length)
    ]


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.8, 0.2), (0.2, 0.3, 0.5), (0.25, 0.25)])
@pytest.mark.parametrize("lengths", [(300_000,), (1, 99_999, 70_001, 130_000), (4096,) * 60])
def test_every_byte_is_written_by_one_card(shares, lengths):
    rows = batch(*lengths)
    parts = divide(rows, agents(*shares), first=0)
    assert [own.name for own, _ in parts] == [str(number) for number in range(len(shares))]
    assert sorted(byte for _, part in parts for byte in bytes_of(part)) == bytes_of(rows)
    for own, part in parts:
        assert abs(part.num_bytes - own.share / sum(shares) * rows.num_bytes) <= 128
        assert part.length.min() > 0


def test_small_batches_take_turns():
    rows = batch(SHORTEST_SHARE_BYTES, SHORTEST_SHARE_BYTES - 1)
    found = [divide(rows, agents(0.5, 0.5), first=number) for number in range(3)]
    assert [[own.name for own, _ in parts] for parts in found] == [["0"], ["1"], ["0"]]
    assert all(parts[0][1] is rows for parts in found)


def test_only_several_ethernet_cards_are_divided():
    assert divided_cards("") == divided_cards("lo") == divided_cards("mlx5_0:1,mlx5_1:1") == []
    assert divided_cards("lo, mlx5_0:1") == []
    assert divided_cards("lo, lo") == [("lo", 0.5), ("lo", 0.5)]
