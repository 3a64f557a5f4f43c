from __future__ import annotations

import pytest

from weft.core.layout import Layout, Shard, Tensor
from weft.errors import LayoutError

W = Tensor(name="w", dtype="bf16", shape=(8, 4))


def shard(rank: int, row: int, rows: int, **more) -> Shard:
    return Shard(tensor="w", rank=rank, lo=(row, 0), extent=(rows, 4), **more)


def test_identical_boxes_become_replicas():
    layout = Layout.from_shards([W], [shard(0, 0, 8), shard(3, 0, 8)])
    assert len(layout.lo) == 1
    assert layout.groups.of(0).tolist() == [0, 3]
    assert layout.num_ranks == 4
    assert layout.rank_bytes().tolist() == [64, 0, 0, 64]


def test_missing_shards_are_named():
    with pytest.raises(LayoutError) as caught:
        Layout.from_shards([W], [shard(0, 0, 4)])
    assert "w: 16 elements are missing" in str(caught.value)


def test_overlapping_shards_are_named():
    with pytest.raises(LayoutError) as caught:
        Layout.from_shards([W], [shard(0, 0, 5), shard(1, 4, 4)])
    assert "overlap" in str(caught.value)


def test_every_problem_is_listed_at_once():
    bad = [
        Shard(tensor="nope", rank=0, lo=(0,), extent=(1,)),
        shard(0, 6, 4),
        Shard(tensor="w", rank=1, lo=(0,), extent=(8,)),
        shard(-1, 0, 8),
        shard(0, 0, 8, strides=(1,)),
    ]
    with pytest.raises(LayoutError) as caught:
        Layout.from_shards([W], bad)
    assert len(caught.value.problems) == 5


def test_replicas_must_share_a_memory_layout():
    with pytest.raises(LayoutError, match="different memory strides"):
        Layout.from_shards([W], [shard(0, 0, 8), shard(1, 0, 8, strides=(8, 1))])


@pytest.mark.parametrize("shape", [(), (0, 4), (2**40,), (2**31 - 1, 2**31 - 1), (1,) * 40])
def test_absurd_shapes_are_refused(shape):
    with pytest.raises(LayoutError, match="impossible shape"):
        Layout.from_shards([Tensor(name="w", dtype="bf16", shape=shape)], [])


def test_a_long_list_of_problems_is_cut_but_kept():
    tensors = [Tensor(name=f"t{i}", dtype="bf16", shape=(2,)) for i in range(30)]
    with pytest.raises(LayoutError) as caught:
        Layout.from_shards(tensors, [])
    assert len(caught.value.problems) == 30
    assert "… and 10 more" in str(caught.value)
