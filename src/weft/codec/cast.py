"""Casts between FP32, BF16 and FP16: round to nearest, ties to even; NaN stays NaN, and overflow becomes infinity."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.codec.memory import Floats, matrix_view
from weft.errors import CodecError
from weft.native import compiled

_codec = compiled("weft._codec")

KINDS = {"fp32": "<f4", "bf16": "<u2", "fp16": "<f2"}


def cast(
    src: int, src_stride: int, src_dtype: str, dst: int, dst_stride: int, dst_dtype: str, *, rows: int, columns: int
) -> None:
    """Cast a matrix in memory; strides are in bytes from row to row."""
    cast_all(np.array([(src, src_stride, 0, dst_stride, rows, columns)]), dst, src_dtype, dst_dtype)


def cast_all(table: NDArray[np.int64], dst: int, src_dtype: str, dst_dtype: str) -> None:
    """Cast many matrices. Each row of the table: address, bytes from row to row, offset of the result from `dst`, bytes
    from row to row of the result, rows, columns."""
    if src_dtype not in KINDS or dst_dtype not in KINDS:
        raise CodecError(f"{src_dtype} cannot be cast to {dst_dtype}", hint=f"{', '.join(KINDS)}")
    if _codec is not None and {src_dtype, dst_dtype} == {"fp32", "bf16"}:
        width = np.full((len(table), 1), np.dtype(KINDS[src_dtype]).itemsize)
        _codec.cast(np.concatenate([table, width], axis=1), dst)
        return
    for src, src_stride, at, dst_stride, rows, columns in table.tolist():
        values = matrix_view(src, src_stride, rows, columns, KINDS[src_dtype])
        target = matrix_view(dst + at, dst_stride, rows, columns, KINDS[dst_dtype])
        _cast_slowly(values, src_dtype, target, dst_dtype)


def _cast_slowly(values: NDArray[Any], src_dtype: str, target: NDArray[Any], dst_dtype: str) -> None:
    wide = _from_bf16(values) if src_dtype == "bf16" else values.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        target[...] = _to_bf16(wide) if dst_dtype == "bf16" else wide


def _from_bf16(values: np.ndarray) -> Floats:
    return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _to_bf16(values: Floats) -> np.ndarray:
    bits = np.ascontiguousarray(values).view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(is_nan, bits >> np.uint32(16) | np.uint32(0x40), nearest).astype(np.uint16)
