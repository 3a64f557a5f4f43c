from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from weft.core.geometry import boxes


def brute_force_defects(owner, lo, extent, shapes) -> set[int]:
    bad = set()
    for number, shape in enumerate(shapes):
        count = np.zeros(shape, dtype=int)
        for i in np.flatnonzero(owner == number):
            count[tuple(slice(a, a + n) for a, n in zip(lo[i], extent[i], strict=True))] += 1
        if (count != 1).any():
            bad.add(number)
    return bad


@given(data=st.data())
def test_cover_defects_agrees_with_counting_every_element(data):
    shapes = np.array(data.draw(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=3)))
    rows = []
    for number, shape in enumerate(shapes):
        cells = list(itertools.product(range(shape[0]), range(shape[1])))
        for cell in cells:
            rows += [(number, cell, (1, 1))] * data.draw(st.sampled_from([1, 1, 1, 1, 1, 0, 2]))
    order = data.draw(st.permutations(range(len(rows))))
    owner = np.array([rows[i][0] for i in order], dtype=np.int64)
    lo = np.array([rows[i][1] for i in order], dtype=np.int64).reshape(-1, 2)
    extent = np.array([rows[i][2] for i in order], dtype=np.int64).reshape(-1, 2)
    assert set(boxes.cover_defects(owner, lo, extent, shapes)) == brute_force_defects(owner, lo, extent, shapes)


def test_overlap_that_hides_behind_equal_volume_is_found():
    shapes = np.array([[4, 4]])
    lo = np.array([[0, 0], [0, 0]])
    extent = np.array([[2, 4], [2, 4]])
    assert boxes.cover_defects(np.array([0, 0]), lo, extent, shapes) == {0: 0}


def test_box_outside_the_tensor_is_a_defect():
    assert 0 in boxes.cover_defects(np.array([0]), np.array([[1]]), np.array([[4]]), np.array([[4]]))


def test_many_owners_are_proven_in_several_sorts(monkeypatch):
    monkeypatch.setattr(boxes, "BOXES_PER_SORT", 3)
    owner = np.repeat(np.arange(10), 4)
    lo = np.tile(np.arange(4), 10)[:, None]
    extent = np.ones((40, 1), dtype=np.int64)
    shapes = np.full((10, 1), 4)
    assert boxes.cover_defects(owner, lo, extent, shapes) == {}
    lo[17] = 0
    assert list(boxes.cover_defects(owner, lo, extent, shapes)) == [4]


def test_contiguous_run_needs_every_memory_to_agree():
    extent = np.array([[2, 4]])
    whole, strided, transposed = np.array([[4, 1]]), np.array([[8, 1]]), np.array([[1, 2]])
    assert boxes.contiguous_run(extent, whole).tolist() == [8]
    assert boxes.contiguous_run(extent, whole, strided).tolist() == [4]
    assert boxes.contiguous_run(extent, whole, transposed).tolist() == [1]
