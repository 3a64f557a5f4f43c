"""Streams: every byte of every box has one place, Chunks are full and never too long, and order is kept."""

from __future__ import annotations

import numpy as np
import pytest

from weft.core.geometry.planes import num_runs, planes_of
from weft.core.streams.stream import SECTION_ALIGN, UNIT_ALIGN, Path, StreamBoxes, cut_streams


def boxes(*rows: tuple[int, tuple[int, ...], int, Path, int]) -> StreamBoxes:
    """Stream, extent, width, path, group of each box; places in the order given."""
    return StreamBoxes(
        stream=np.array([row[0] for row in rows]),
        extent=np.array([row[1] for row in rows]),
        width=np.array([row[2] for row in rows]),
        path=np.array([row[3] for row in rows]),
        group=np.array([row[4] for row in rows]),
        place=np.arange(len(rows)),
    )


def test_small_boxes_share_a_chunk_and_begin_aligned():
    units, chunks = cut_streams(
        boxes((0, (3, 5), 2, Path.PACKED, -1), (0, (1, 7), 2, Path.PACKED, -1)), chunk_bytes=4096
    )
    assert units.offset.tolist() == [0, 32]
    assert chunks.num_bytes.tolist() == [SECTION_ALIGN]
    assert chunks.payload.tolist() == [44]


def test_a_large_box_is_cut_along_its_first_dimensions():
    units, chunks = cut_streams(boxes((0, (10, 1000), 2, Path.PACKED, -1)), chunk_bytes=4096 + 256)
    assert units.extent.tolist() == [[2, 1000]] * 5
    assert units.first[:, 0].tolist() == [0, 2, 4, 6, 8]
    assert (chunks.num_bytes <= 4096 + 256).all()


def test_a_row_longer_than_a_chunk_is_cut_too():
    units, _ = cut_streams(boxes((0, (2, 5000), 2, Path.PACKED, -1)), chunk_bytes=4096 + 256)
    assert units.extent.tolist() == [[1, 2048], [1, 2048], [1, 904]] * 2
    assert units.first.tolist() == [[r, c] for r in (0, 1) for c in (0, 2048, 4096)]


def test_elements_of_one_size_lie_together_inside_a_packed_chunk():
    made = boxes((0, (1, 8), 1, Path.PACKED, 0), (0, (1, 2), 4, Path.PACKED, 0), (0, (1, 8), 1, Path.PACKED, 0))
    units, chunks = cut_streams(made, chunk_bytes=4096)
    assert made.width[units.box].tolist() == [4, 1, 1]
    assert units.offset.tolist() == [0, SECTION_ALIGN, SECTION_ALIGN + UNIT_ALIGN]
    assert len(chunks) == 1


def test_what_goes_straight_comes_first_and_later_groups_later():
    made = boxes(
        (0, (1, 8), 1, Path.PACKED, 2),
        (0, (1, 8), 1, Path.PACKED, 0),
        (0, (1, 8), 2, Path.ZERO_COPY, -1),
        (1, (1, 8), 2, Path.DIRECT, -1),
    )
    units, chunks = cut_streams(made, chunk_bytes=4096)
    assert units.box.tolist() == [2, 1, 0, 3]
    assert chunks.stream.tolist() == [0, 0, 1]
    assert chunks.path.tolist() == [Path.ZERO_COPY, Path.PACKED, Path.DIRECT]
    assert chunks.group.tolist() == [-1, 2, -1]
    assert chunks.begin.tolist() == [0, SECTION_ALIGN, 0]


@pytest.mark.parametrize("seed", range(20))
def test_units_tile_their_boxes_and_do_not_overlap(seed):
    chance = np.random.default_rng(seed)
    count = int(chance.integers(1, 60))
    made = StreamBoxes(
        stream=chance.integers(0, 4, count),
        extent=chance.integers(1, 40, (count, 3)),
        width=chance.choice([1, 2, 4], count),
        path=chance.integers(0, 3, count),
        group=chance.integers(-1, 3, count),
        place=chance.permutation(count),
    )
    units, chunks = cut_streams(made, chunk_bytes=4096)
    volume = np.bincount(units.box, weights=np.prod(units.extent, axis=1), minlength=count)
    assert np.array_equal(volume, np.prod(made.extent, axis=1))
    for box in range(count):
        filled = np.zeros(made.extent[box], dtype=int)
        for unit in np.flatnonzero(units.box == box):
            filled[tuple(slice(a, a + n) for a, n in zip(units.first[unit], units.extent[unit], strict=True))] += 1
        assert (filled == 1).all()
    assert (units.offset % UNIT_ALIGN == 0).all()
    assert (chunks.num_bytes <= 4096).all()
    for stream in range(4):
        mine = made.stream[units.box] == stream
        ends = units.offset[mine] + units.num_bytes[mine]
        assert (units.offset[mine][1:] >= ends[:-1]).all()
        of = chunks.stream == stream
        assert np.array_equal(chunks.begin[of], np.cumsum(chunks.num_bytes[of]) - chunks.num_bytes[of])
    inside = units.offset - chunks.begin[units.chunk]
    assert ((inside >= 0) & (inside + units.num_bytes <= chunks.num_bytes[units.chunk])).all()
    assert np.array_equal(made.path[units.box], chunks.path[units.chunk])


def test_no_boxes_have_no_chunks():
    units, chunks = cut_streams(boxes((0, (1, 1), 1, Path.PACKED, 0)), chunk_bytes=4096)
    assert len(units.box) == len(chunks) == 1
    none = StreamBoxes(
        **{name: np.zeros((0, 2) if name == "extent" else 0, dtype=np.int64) for name in StreamBoxes.__slots__}
    )
    units, chunks = cut_streams(none, chunk_bytes=4096)
    assert len(units.box) == len(chunks) == 0


@pytest.mark.parametrize("seed", range(20))
def test_planes_walk_every_element_once(seed):
    chance = np.random.default_rng(seed)
    extent = chance.integers(1, 6, 3)
    source, target = (chance.permutation(3) for _ in range(2))
    a, b = (np.zeros(extent[order] + chance.integers(0, 3, 3), dtype=np.int64) for order in (source, target))
    strides = []
    for array, order in ((a, source), (b, target)):
        found = np.zeros(3, dtype=np.int64)
        found[order] = np.array(array.strides) // 8
        strides.append(found)
    planes = planes_of(extent[None], strides[0][None], strides[1][None])
    seen = [
        tuple(
            offset[i] + row * stride[i] + element for offset, stride in zip(planes.offset, planes.stride, strict=True)
        )
        for i in range(len(planes.box))
        for row in range(planes.rows[i])
        for element in range(planes.run[i])
    ]
    wanted = [(int(c @ strides[0]), int(c @ strides[1])) for c in np.ndindex(*extent)]
    assert sorted((int(x), int(y)) for x, y in seen) == sorted(wanted)
    assert num_runs(extent[None], strides[0][None], strides[1][None])[0] == planes.rows.sum()
