"""How matrices are cut into tiles for kernels, and what kernels are told of each."""

from __future__ import annotations

import numpy as np
import pytest

from weft.codec.gpu.matrix_tiles import FULL, KNOWN, MatrixBox, MatrixTiles

BASE = 1 << 40
"""An aligned address."""


def box(rows: int, columns: int, block: tuple[int, int], **changes: int) -> MatrixBox:
    """A matrix of BF16, whole and contiguous, that becomes FP8 in an aligned place; or with some changes."""
    made = MatrixBox(
        src=BASE, stride=2 * columns, width=2, to=0, to_width=1, first_row=0, first_column=0, rows=rows,
        columns=columns, grid=0, first_block=0, grid_rows=rows, grid_columns=columns, block_rows=block[0],
        block_columns=block[1],
    )  # fmt: skip
    return made._replace(**changes)


def row(columns: int, **changes: int) -> MatrixBox:
    """Two rows that have a scale each."""
    return box(2, columns, (1, columns), **changes)


@pytest.mark.parametrize(
    ("matrix", "is_full"),
    [
        (row(48), [True, True]),
        (row(4864), [True, True]),
        (row(48, src=BASE + 2), [False, False]),
        (row(48, src=BASE + 16), [True, True]),
        (row(48, stride=2 * 50), [True, False]),
        (row(48, to=1), [False, False]),
        (row(48, to=32), [True, True]),
        (row(24), [False, False]),
        (row(40), [False, False]),
        (row(48, grid_columns=96, block_columns=96), [True, True]),
        (row(48, grid_columns=96, block_columns=96, first_column=8, src=BASE + 16), [True, True]),
    ],
)
def test_full_rows_are_aligned_in_both_memories(matrix, is_full):
    tiles = MatrixTiles.of([matrix])
    assert tiles.is_row.all()
    assert tiles.is_full.tolist() == is_full


@pytest.mark.parametrize(
    ("matrix", "is_full"),
    [
        (box(128, 256, (128, 128)), [True, True]),
        (box(128, 256, (128, 128), src=BASE + 2), [False, False]),
        (box(128, 256, (128, 128), to=8), [False, False]),
        (box(128, 256, (128, 128), stride=2 * 260), [False, False]),
        (box(128, 200, (128, 128)), [False, False]),
        (box(127, 256, (128, 128)), [False, False]),
    ],
)
def test_full_squares_are_aligned_in_both_memories(matrix, is_full):
    tiles = MatrixTiles.of([matrix])
    assert not tiles.is_row.any()
    assert tiles.is_full.tolist() == is_full


def test_only_blocks_of_one_row_are_rows():
    tiles = MatrixTiles.of([box(1, 300, (128, 128)), row(300), box(2, 300, (2, 300))])
    assert tiles.is_row.tolist() == [False] * 3 + [True] * 2 + [False] * 3
    assert tiles.columns.tolist() == [128, 128, 44, 300, 300, 128, 128, 44]
    assert tiles.is_whole.tolist() == [True] * 5 + [False] * 3


def test_parts_of_rows_are_not_whole():
    tiles = MatrixTiles.of([row(48, grid_columns=96, block_columns=96, first_column=48, first_row=3, first_block=5)])
    assert tiles.is_whole.tolist() == [False, False]
    assert tiles.block.tolist() == [8, 9]


def test_kernels_are_told_everything():
    """As tile_kernels takes it apart."""
    matrices = [row(70_000, grid=3), row(50), box(130, 131_000, (128, 128))._replace(columns=128)]
    tiles = MatrixTiles.of(matrices)
    is_known = np.arange(len(tiles.src)) % 2 == 1
    src, to, strides, shape, block, grid = tiles.table(is_known=is_known).T
    assert np.array_equal(src, tiles.src)
    assert np.array_equal(to, tiles.to)
    assert (strides & 0xFFFFFFFF).tolist() == [70_000, 70_000, 50, 50, 131_000, 131_000]
    assert (strides >> 32).tolist() == [70_000, 70_000, 50, 50, 128, 128]
    assert (shape & 0xFFFF).tolist() == [1, 1, 1, 1, 128, 2]
    assert ((shape >> 16) & 0xFFFF).tolist() == [FULL, FULL | KNOWN, 0, KNOWN, FULL, KNOWN]
    assert (shape >> 32).tolist() == [70_000, 70_000, 50, 50, 128, 128]
    assert np.array_equal(block, tiles.block)
    assert grid.tolist() == [3, 3, 0, 0, 0, 0]


def test_tiles_read_what_they_cover():
    address, num_bytes = MatrixTiles.of([box(130, 200, (128, 128))._replace(columns=150)]).source_spans(2)
    assert (address - BASE).tolist() == [0, 256, 128 * 400, 128 * 400 + 256]
    assert num_bytes.tolist() == [127 * 400 + 256, 127 * 400 + 44, 400 + 256, 400 + 44]
