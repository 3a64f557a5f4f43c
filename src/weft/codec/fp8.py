"""FP8 e4m3 with a scale for each block: 128×128, per channel (a row), or per tensor.

The reference, in plain torch for one block `x` of BF16 or FP32 numbers:

    amax = x.float().abs().amax()                          # of finite numbers
    scale = amax.clamp(min=1e-10) / torch.tensor(448.0)     # FP32; a plain 448 is rounded differently on GPUs
    q = (x.float() * (1 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn)

and `q.float() * scale` is what an engine computes with. The largest magnitude of a block does not depend on how the
block is cut: holders of its parts exchange theirs, take the maximum, and each quantises what it holds. No gather.

Numbers that are not finite are an error that names the tensor; where they are allowed, NaN stays NaN and infinities
become ±448.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.codec.memory import Floats, matrix_view
from weft.core.scaling import Scaling, block_sides, scale_shape
from weft.errors import CodecError

try:
    from weft import _codec
except ImportError:  # no compiler at install
    _codec = None

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
        """No magnitude known yet."""
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
    wild = _codec.amax(_numbers(box, grid, amax)) if _codec is not None else _amax_slowly(box, grid, amax)
    if wild and not allow_nonfinite:
        raise CodecError(
            f"`{tensor}` has {wild} elements that are not finite", hint="the policy has diverged, or allow_nonfinite"
        )


def scales(amax: Floats) -> Floats:
    """The scale of each block."""
    return (np.maximum(amax, SMALLEST_AMAX) / LARGEST).astype(np.float32, copy=False)


def quantize(box: Box, grid: Grid, scale: Floats, dst: int, dst_stride: int, *, is_bounded: bool = False) -> None:
    """Write a part of the matrix as FP8 to `dst`, rows `dst_stride` bytes apart.

    `is_bounded`: all numbers are finite, and scales come from their magnitudes; that is faster.
    """
    _check(box, grid, scale)
    factor = np.float32(1.0) / scale
    if _codec is not None:
        _codec.quantize(_numbers(box, grid, factor), dst, dst_stride, is_bounded)
        return
    values = _values(box) * _spread(box, grid, factor)
    matrix_view(dst, dst_stride, box.rows, box.columns, "u1")[:] = to_e4m3(np.clip(values, -LARGEST, LARGEST))


def _numbers(box: Box, grid: Grid, per_block: Floats) -> tuple[int, ...]:
    """A box as the C module takes it."""
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
        raise CodecError(f"a box of {box.rows}×{box.columns} at {box.first} in a matrix of {grid.rows}×{grid.columns}")
    if per_block.shape != grid.shape or per_block.dtype != np.float32 or not per_block.flags.c_contiguous:
        raise CodecError(f"expected one FP32 number for each of {grid.shape} blocks, not {per_block.shape}")


# The same in NumPy


def to_e4m3(values: Floats) -> NDArray[np.uint8]:
    """Numbers inside ±448, or NaN, as e4m3: to nearest, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    with np.errstate(invalid="ignore"):
        small = (magnitude.view(np.float32) + np.float32(16384.0)).view(np.uint32) & np.uint32(0xFF)
    tie = (magnitude >> np.uint32(20)) & np.uint32(1)
    large = (magnitude + np.uint32(0x7FFFF) + tie - np.uint32(120 << 23)) >> np.uint32(20)
    code = np.where(magnitude < np.uint32(0x3C800000), small, large)
    code = np.where(magnitude > np.uint32(0x7F800000), np.uint32(0x7F), code)
    return (code | (bits >> np.uint32(24) & np.uint32(0x80))).astype(np.uint8)


def _values(box: Box) -> Floats:
    if box.width == 4:
        return np.array(matrix_view(box.address, box.stride, box.rows, box.columns, "<f4"))
    bits = matrix_view(box.address, box.stride, box.rows, box.columns, "<u2").astype(np.uint32)
    return (bits << np.uint32(16)).view(np.float32)


def _blocks(box: Box, grid: Grid) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The block row of each row and the block column of each column."""
    height, width = grid.block
    return (box.first[0] + np.arange(box.rows)) // height, (box.first[1] + np.arange(box.columns)) // width


def _spread(box: Box, grid: Grid, per_block: Floats) -> Floats:
    row, column = _blocks(box, grid)
    return per_block[row[:, None], column[None, :]]


def _amax_slowly(box: Box, grid: Grid, amax: Floats) -> int:
    values = np.abs(_values(box))
    finite = np.isfinite(values)
    row, column = _blocks(box, grid)
    np.maximum.at(amax, (row[:, None], column[None, :]), np.where(finite, values, np.float32(0)))
    return int((~finite).sum())
