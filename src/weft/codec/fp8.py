"""FP8 e4m3 with a scale for each block: 128×128, per channel (a row), or per tensor.

The reference, in plain torch for one block `x` of BF16 or FP32 numbers:

    amax = x.float().abs().amax()                          # of finite numbers
    scale = amax.clamp(min=1e-10) / torch.tensor(448.0)     # FP32; a plain 448 is rounded differently on GPUs
    q = (x.float() * (1 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn)

and `q.float() * scale` is what an engine computes with. The largest magnitude of a block does not depend on how the
block is cut: the holders of its parts exchange theirs, take the maximum, and each quantises what it holds. No gather.

Non-finite numbers are an error that names the tensor; where they are allowed, NaN stays NaN and infinities become ±448.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.codec.memory import Floats, matrix_view
from weft.core.geometry.scaling import Scaling, block_sides, scale_shape
from weft.errors import CodecError
from weft.native import compiled

_codec = compiled("weft._codec")

Int64s = NDArray[np.int64]
LARGEST = np.float32(448.0)
SMALLEST_AMAX = np.float32(1e-10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """How a matrix is cut into blocks that share a scale."""

    rows: int
    columns: int
    scaling: Scaling = Scaling.BLOCK

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of a block."""
        height, width = block_sides((self.rows, self.columns), self.scaling)
        return height, width

    @property
    def shape(self) -> tuple[int, int]:
        """Blocks along each side."""
        height, width = scale_shape((self.rows, self.columns), self.scaling)
        return height, width

    def zeros(self) -> Floats:
        """Magnitudes before any is known."""
        return np.zeros(self.shape, dtype=np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """Part of a matrix in memory: rows of BF16 (width 2) or FP32 (width 4) numbers."""

    address: int
    stride: int
    """Bytes from row to row."""
    width: int
    first: tuple[int, int]
    """Row and column of its first element in the matrix."""
    rows: int
    columns: int


def add_amax(box: Box, grid: Grid, amax: Floats, *, tensor: str = "", allow_nonfinite: bool = False) -> None:
    """Raise `amax` to the largest magnitudes found in a part of the matrix."""
    _check(box, grid, amax)
    wild = int(amax_boxes(np.array([_numbers(box, grid, amax)]))[0])
    if wild and not allow_nonfinite:
        raise not_finite(tensor, wild)


def not_finite(tensor: str, num_elements: int) -> CodecError:
    """The error for a tensor with non-finite elements."""
    return CodecError(
        f"`{tensor}` has {num_elements} elements that are not finite",
        hint="the policy may have diverged; set allow_nonfinite to send it anyway",
    )


def scales(amax: Floats) -> Floats:
    """The scale of each block."""
    return (np.maximum(amax, SMALLEST_AMAX) / LARGEST).astype(np.float32, copy=False)


def factors(scale: Floats) -> Floats:
    """What the numbers of each block are multiplied by."""
    return np.float32(1.0) / scale


def quantize(box: Box, grid: Grid, scale: Floats, dst: int, dst_stride: int, *, is_bounded: bool = False) -> None:
    """Write a part of the matrix as FP8 to `dst`, rows `dst_stride` bytes apart.

    `is_bounded`: all numbers are finite, and the scales come from their magnitudes; this is faster.
    """
    _check(box, grid, scale)
    factor = factors(scale)
    quantize_boxes(np.array([(*_numbers(box, grid, factor), 0, dst_stride)]), dst, is_bounded=is_bounded)


def amax_boxes(table: Int64s) -> Int64s:
    """Raise the numbers of blocks to the largest magnitudes found in many boxes; returns the number of non-finite
    elements of each box.

    A row of the table is a box: address, stride in bytes, rows, columns, bytes of an element, its first row and column
    in the matrix, rows and columns of a block, blocks in a row of the matrix, and the address of its blocks' numbers.
    """
    if _codec is None:
        return np.array([_amax_slowly(*row) for row in table.tolist()], dtype=np.int64)
    wild = np.zeros(len(table), dtype=np.int64)
    _codec.amax(table, wild)
    return wild


def quantize_boxes(table: Int64s, dst: int, *, is_bounded: bool = False) -> None:
    """Write many boxes as FP8. Rows are those of `amax_boxes`, with the factors of blocks, and two more numbers: offset
    of the codes from `dst`, and bytes from row to row of the codes."""
    if _codec is not None:
        _codec.quantize(table, dst, is_bounded)
        return
    for *box, at, stride in table.tolist():
        _quantize_slowly(*box, to=dst + at, dst_stride=stride)


def _numbers(box: Box, grid: Grid, per_block: Floats) -> tuple[int, ...]:
    """A box as a row of a table."""
    return (
        box.address,
        box.stride,
        box.rows,
        box.columns,
        box.width,
        *box.first,
        *grid.block,
        grid.shape[1],
        int(per_block.ctypes.data),
    )


def _check(box: Box, grid: Grid, per_block: Floats) -> None:
    inside = box.first[0] + box.rows <= grid.rows and box.first[1] + box.columns <= grid.columns and min(box.first) >= 0
    if not inside or box.width not in (2, 4):
        raise CodecError(
            f"invalid box of {box.rows}×{box.columns} at {box.first} in a matrix of {grid.rows}×{grid.columns}"
        )
    if per_block.shape != grid.shape or per_block.dtype != np.float32 or not per_block.flags.c_contiguous:
        raise CodecError(f"expected one FP32 number for each of {grid.shape} blocks, got {per_block.shape}")


# The same in NumPy


def to_e4m3(values: Floats) -> NDArray[np.uint8]:
    """Numbers within ±448, or NaN, as e4m3: round to nearest, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    with np.errstate(invalid="ignore"):
        small = (magnitude.view(np.float32) + np.float32(16384.0)).view(np.uint32) & np.uint32(0xFF)
    tie = (magnitude >> np.uint32(20)) & np.uint32(1)
    large = (magnitude + np.uint32(0x7FFFF) + tie - np.uint32(120 << 23)) >> np.uint32(20)
    code = np.where(magnitude < np.uint32(0x3C800000), small, large)
    code = np.where(magnitude > np.uint32(0x7F800000), np.uint32(0x7F), code)
    return (code | (bits >> np.uint32(24) & np.uint32(0x80))).astype(np.uint8)


def _values(address: int, stride: int, rows: int, columns: int, width: int) -> Floats:
    if width == 4:
        return np.array(matrix_view(address, stride, rows, columns, "<f4"))
    bits = matrix_view(address, stride, rows, columns, "<u2").astype(np.uint32)
    return (bits << np.uint32(16)).view(np.float32)


def _blocks(
    rows: int, columns: int, first: tuple[int, int], height: int, width: int, across: int, numbers: int
) -> tuple[Floats, NDArray[np.int64], NDArray[np.int64]]:
    """The numbers of all blocks, the block row of each row and the block column of each column."""
    row, column = (first[0] + np.arange(rows)) // height, (first[1] + np.arange(columns)) // width
    return matrix_view(numbers, 4 * across, int(row[-1]) + 1, across, "<f4"), row, column


def _amax_slowly(
    address: int, stride: int, rows: int, columns: int, width: int, top: int, left: int, *blocks: int
) -> int:
    values = np.abs(_values(address, stride, rows, columns, width))
    finite = np.isfinite(values)
    amax, row, column = _blocks(rows, columns, (top, left), *blocks)
    np.maximum.at(amax, (row[:, None], column[None, :]), np.where(finite, values, np.float32(0)))
    return int((~finite).sum())


def _quantize_slowly(
    address: int,
    stride: int,
    rows: int,
    columns: int,
    width: int,
    top: int,
    left: int,
    *blocks: int,
    to: int,
    dst_stride: int,
) -> None:
    factor, row, column = _blocks(rows, columns, (top, left), *blocks)
    values = _values(address, stride, rows, columns, width) * factor[row[:, None], column[None, :]]
    matrix_view(to, dst_stride, rows, columns, "u1")[:] = to_e4m3(np.clip(values, -LARGEST, LARGEST))
