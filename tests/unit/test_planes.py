"""Planes: C code and plain NumPy copy and digest the same, bundled or not, on one thread or several."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest

from weft import native
from weft.core.geometry.planes import LONG_ROW, Planes, bundled, planes_of


def memory(array: np.ndarray) -> np.ndarray:
    return np.array([array.ctypes.data])


def column_cuts(source: np.ndarray, targets: list[np.ndarray], positions: list[int]) -> list[Planes]:
    """A matrix cut between receivers by columns."""
    tables, first = [], 0
    for target, position in zip(targets, positions, strict=True):
        extent = np.array([target.shape])
        strides = [np.array([[s // a.itemsize for s in a.strides]]) for a in (source, target)]
        table = Planes.of(
            planes_of(extent, *strides),
            src=memory(source[:, first:]),
            dst=memory(target),
            width=np.array([source.itemsize]),
            position=np.array([position]),
        )
        tables.append(table)
        first += target.shape[1]
    return tables


@pytest.fixture
def matrix():
    return np.random.default_rng(1).integers(0, 2**16, (777, 1234), dtype=np.uint16)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("digesting", [False, True])
def test_a_matrix_cut_by_columns(matrix, num_threads, digesting):
    widths = [1, 500, 33, 700]
    targets = [np.zeros((777, width), dtype=np.uint16) for width in widths]
    positions = [16, 1 << 20, 2 << 20, 3 << 20]
    table = bundled(column_cuts(matrix, targets, positions), list(range(4)))
    assert len(set(table.bundle.tolist())) == 1
    if digesting:
        found = native.copy_digest_planes(table, num_groups=4, num_threads=num_threads)
        wanted = [native.digest_bytes(t.view(np.uint8).reshape(-1), p) for t, p in zip(targets, positions, strict=True)]
        assert found == wanted
    else:
        assert native.copy_planes(table, num_threads=num_threads) == matrix.nbytes
    assert np.array_equal(np.concatenate(targets, axis=1), matrix)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_replicas_get_the_same_bytes_and_one_digest(num_threads):
    source = np.random.default_rng(2).integers(0, 255, 5 * LONG_ROW + 77, dtype=np.uint8)
    targets = [np.zeros_like(source) for _ in range(3)]
    extent, strides = np.array([[len(source)]]), np.array([[1]])
    tables = [
        Planes.of(
            planes_of(extent, strides, strides),
            src=memory(source),
            dst=memory(target),
            width=np.array([1]),
            position=np.array([8]),
        )
        for target in targets
    ]
    table = bundled(tables, [0, 1, 1])
    assert len(set(table.bundle.tolist())) == 2, "the long part, and what is left of it"
    found = native.copy_digest_planes(table, num_groups=1, num_threads=num_threads)
    assert found == [native.digest_bytes(source, 8)]
    assert all(np.array_equal(target, source) for target in targets)


def test_digests_of_strided_memory(matrix):
    part = matrix[5:700, 10:300]
    extent = np.array([part.shape])
    compact = np.array([[part.shape[1], 1]])
    planes = planes_of(extent, np.array([[1234, 1]]), compact)
    table = Planes.of(planes, src=memory(part), dst=memory(part), width=np.array([2]), position=np.array([0]))
    data = np.ascontiguousarray(part).view(np.uint8).reshape(-1)
    assert native.digest_planes(table) == native.digest_bytes(data, 0)
    assert native.digest_planes(table, num_threads=2) == native.digest_bytes(data, 0)


def test_runs_are_the_same_walk(matrix):
    targets = [np.zeros((777, 617), dtype=np.uint16) for _ in range(2)]
    for table in column_cuts(matrix, targets, [0, 0]):
        dst, src, length, _ = table.runs
        for to, start, size in zip(dst.tolist(), src.tolist(), length.tolist(), strict=True):
            ctypes.memmove(to, start, size)
    assert np.array_equal(np.concatenate(targets, axis=1), matrix)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_single_rows_of_all_sizes_are_copied_and_digested_like_in_numpy(num_threads, monkeypatch):
    """Short rows have a way of their own through the C code, among them rows that are long, several, or empty."""
    rng = np.random.default_rng(3)
    length = rng.choice([0, 1, 8, 16, 63, 64, 65, 127, 128, 191, 192, 256, 1000, 1023, 1024, 1025, 5000], 4000)
    rows = np.where(rng.random(4000) < 0.05, 3, 1)
    begin = np.cumsum(rows * length) - rows * length
    data = rng.integers(0, 256, int((rows * length).sum()) + 8, dtype=np.uint8)
    moved = rng.integers(0, 64, 4000) * rng.integers(0, 2, 4000)
    order, group = rng.permutation(4000), rng.integers(0, 4, 4000)

    def table(target: np.ndarray) -> Planes:
        columns = {
            "dst": target.ctypes.data + begin,
            "src": data.ctypes.data + begin + (begin > 0) * 3,
            "rows": rows,
            "length": length,
            "dst_stride": length,
            "src_stride": length,
            "position": (begin + 63) // 64 * 64 + moved,
            "position_stride": length + 64,
            "group": group,
        }
        return Planes(**{name: column[order].astype(np.uint64) for name, column in columns.items()})

    found, expected, copied = (np.zeros_like(data) for _ in range(3))
    digests = native.copy_digest_planes(table(found), num_groups=3, num_threads=num_threads)
    whole = native.digest_planes(replace(table(found), group=None), num_threads=num_threads)
    assert native.copy_planes(table(copied), num_threads=num_threads) == table(copied).num_bytes
    monkeypatch.setattr(native, "_native", None)
    monkeypatch.setattr(native, "_said", True)
    assert native.copy_digest_planes(table(expected), num_groups=3) == digests
    assert native.digest_planes(replace(table(found), group=None)) == whole
    assert np.array_equal(found, expected)
    assert np.array_equal(copied, expected)


def test_no_planes_are_no_work():
    none = np.zeros(0, dtype=np.uint64)
    table = Planes(dst=none, src=none, rows=none, length=none, dst_stride=none, src_stride=none)
    assert native.copy_planes(table) == 0
    assert len(bundled([table, table], [0, 1])) == 0
