"""Copies and digests of planes equal those of the CPU, whatever their shapes and alignment."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from weft import native  # noqa: E402
from weft.core.geometry.planes import Planes  # noqa: E402
from weft.gpu.tiles import BLOCK_BYTES, TILE_UNITS, WHOLE_BLOCKS, walk_table  # noqa: E402
from weft.gpu.walking import FEW_PROGRAMS, copy_with_few  # noqa: E402

MEMORY_BYTES = 1 << 20
MIXTURE = [
    # rows, length, source stride, destination stride, offsets of source, destination and position
    (1, 3 * BLOCK_BYTES + 48, 0, 0, 0, 0, 16),
    (1, BLOCK_BYTES, 0, 0, 3, 3, 3),
    (40, 128, 512, 128, 0, 0, 0),
    (13, 720, 1440, 720, 16, 32, 48),
    (9, 37, 41, 53, 1, 2, 5),
    (7, 30, 32, 34, 2, 4, 6),
    (3, 100, 104, 100, 4, 8, 0),
    (2, 4 * BLOCK_BYTES, 5 * BLOCK_BYTES, 4 * BLOCK_BYTES, 16, 0, BLOCK_BYTES - 32),
    (3, 200, 208, 208, 2, 2, 18),
    (1, 1, 0, 0, 7, 9, 11),
    (0, 5, 5, 5, 0, 0, 0),
    (5, 0, 8, 8, 0, 0, 0),
]


def column(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


def planes(shapes: list[tuple[int, ...]], src: int, dst: int) -> Planes:
    """Planes one after the other in both memories; positions far from each other."""
    rows, length, src_stride, dst_stride, *offsets = zip(*shapes, strict=True)
    starts = []
    for stride, offset in ((src_stride, offsets[0]), (dst_stride, offsets[1])):
        spans = [64 + max(r * s, n) for r, s, n in zip(rows, stride, length, strict=True)]
        first = np.cumsum([0, *spans[:-1]]) // 16 * 16
        starts.append((first + np.array(offset)).tolist())
    return Planes(
        dst=column(starts[1]) + np.uint64(dst),
        src=column(starts[0]) + np.uint64(src),
        rows=column(list(rows)),
        length=column(list(length)),
        dst_stride=column(list(dst_stride)),
        src_stride=column(list(src_stride)),
        position=column([(n << 30) + offset for n, offset in enumerate(offsets[2])]),
        position_stride=column([-(-n // 8) * 8 for n in src_stride]),
    )


def on_device(work, seed: int) -> tuple[torch.Tensor, torch.Tensor, np.ndarray, np.ndarray]:
    """Source and destination, on the device and on the host."""
    data = np.random.default_rng(seed).integers(0, 256, MEMORY_BYTES, dtype=np.uint8)
    source = torch.from_numpy(data.copy()).to(work.device)
    return source, torch.zeros_like(source), data, np.zeros_like(data)


@pytest.mark.parametrize("shapes", [MIXTURE, *([shape] for shape in MIXTURE)])
def test_planes_of_all_kinds(work, shapes):
    source, target, data, expected = on_device(work, len(shapes))
    there = planes(shapes, source.data_ptr(), target.data_ptr())
    wanted = native.copy_digest_planes(planes(shapes, data.ctypes.data, expected.ctypes.data))
    assert work.copy_digest_planes(there) == wanted
    assert np.array_equal(target.cpu().numpy(), expected)
    assert work.digest_planes(there) == wanted[0]
    target.zero_()
    assert work.copy_planes(there) == there.num_bytes
    assert np.array_equal(target.cpu().numpy(), expected)


@pytest.mark.parametrize("shapes", [MIXTURE[:1], MIXTURE * (FEW_PROGRAMS // 8)])
def test_copies_by_a_few_programs(work, shapes):
    source, target, data, expected = on_device(work, 3)
    there = planes(shapes, source.data_ptr(), target.data_ptr())
    native.copy_planes(planes(shapes, data.ctypes.data, expected.ctypes.data))
    table = walk_table(there, is_copied=True, is_digested=False)
    assert (len(table.tiles) > FEW_PROGRAMS) is (len(shapes) > 1)
    with work.stream():
        copy_with_few(work.upload(table.planes), work.upload(table.tiles))
    assert np.array_equal(target.cpu().numpy(), expected)


@pytest.mark.parametrize("tables", [[MIXTURE, MIXTURE[:1], [(0, 5, 5, 5, 0, 0, 0)], MIXTURE[2:5]], [MIXTURE], []])
def test_digests_of_several_tables(work, tables):
    source, target, data, expected = on_device(work, 4)
    there = [planes(shapes, source.data_ptr(), target.data_ptr()) for shapes in tables]
    here = [planes(shapes, data.ctypes.data, expected.ctypes.data) for shapes in tables]
    assert work.digest_each(there) == native.digest_each(here)


@pytest.mark.parametrize("seed", range(6))
def test_random_planes(work, seed):
    rng = np.random.default_rng(seed)
    align = int(rng.choice([1, 2, 4, 8, 16]))
    shapes = []
    for _ in range(12):
        rows, length = int(rng.integers(1, 30)), int(rng.integers(1, 1200 // align)) * align
        strides = [length + int(rng.integers(0, 20)) * align for _ in range(2)]
        shapes.append((rows, length, *strides, *(int(n) * align for n in rng.integers(0, 16, 3))))
    source, target, data, expected = on_device(work, seed)
    there = planes(shapes, source.data_ptr(), target.data_ptr())
    wanted = native.copy_digest_planes(planes(shapes, data.ctypes.data, expected.ctypes.data))
    assert work.copy_digest_planes(there) == wanted
    assert np.array_equal(target.cpu().numpy(), expected)


def test_rows_in_columns(work):
    source, target, data, expected = on_device(work, 5)
    length = column([100, 4096, 33000, 16])
    dst, src = (column([0, 112, 4224, 40000]) + np.uint64(memory.data_ptr()) for memory in (target, source))
    position = column([8, 1 << 20, 2 << 20, 3 << 20])
    for begin, size in zip((0, 112, 4224, 40000), length.tolist(), strict=True):
        expected[begin : begin + size] = data[begin : begin + size]
    wanted = native.digest(src - np.uint64(source.data_ptr()) + np.uint64(data.ctypes.data), position, length)
    assert work.copy_digest(dst, src, position, length) == wanted
    assert np.array_equal(target.cpu().numpy(), expected)
    assert work.digest(dst, position, length) == wanted
    target.zero_()
    work.copy(dst, src, length)
    assert np.array_equal(target.cpu().numpy(), expected)


def test_a_cut_of_many_short_rows_makes_few_tiles():
    rows, run = 100_000, 128
    table = Planes(
        dst=column([0]),
        src=column([1 << 30]),
        rows=column([rows]),
        length=column([run]),
        dst_stride=column([run]),
        src_stride=column([8 * run]),
        position=column([0]),
        position_stride=column([8 * run]),
    )
    for is_digested in (False, True):
        made = walk_table(table, is_copied=True, is_digested=is_digested)
        assert len(made.tiles) == -(-rows * run // 16 // TILE_UNITS)
        assert len(made.planes) == 1


def test_long_runs_are_digested_in_whole_blocks():
    one, none = column([1]), column([0])
    table = Planes(
        dst=none, src=none, rows=one, length=column([10 * BLOCK_BYTES]), dst_stride=none, src_stride=none,
        position=column([BLOCK_BYTES // 2]), position_stride=none,
    )  # fmt: skip
    made = walk_table(table, is_copied=False, is_digested=True)
    whole = made.planes[made.planes[:, 8] == WHOLE_BLOCKS]
    assert whole[:, 6].tolist() == [9]
    assert len(made.planes) == 3
