"""FP8 on a GPU: Triton kernels that give what the C module gives, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
import triton
import triton.language as tl

from weft.errors import CodecError
from weft.gpu import Pointer

QUANTIZE_ROWS, QUANTIZE_WARPS = 64, 8


@triton.jit
def _quantize_kernel(  # type: ignore[no-untyped-def]
    src_base,
    dst_base,
    src_table,
    dst_table,
    stride_table,
    dst_stride_table,
    extent_table,
    amax_table,
    scale_table,
    SIDE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    KNOWN: tl.constexpr,
    ALIGNED: tl.constexpr,
    WHOLE: tl.constexpr,
    CAREFUL: tl.constexpr,
):
    """One block of at most SIDE × SIDE elements: its scale, and its elements as FP8."""
    tile = tl.program_id(0)
    from_element = tl.load(src_table + tile)
    to_element = tl.load(dst_table + tile)
    stride = tl.load(stride_table + tile).to(tl.int32)
    dst_stride = tl.load(dst_stride_table + tile).to(tl.int32)
    if ALIGNED:
        from_element, to_element = tl.multiple_of(from_element, 16), tl.multiple_of(to_element, 16)
        stride, dst_stride = tl.multiple_of(stride, 16), tl.multiple_of(dst_stride, 16)
    src = src_base + from_element
    dst = dst_base + to_element
    extent = tl.load(extent_table + tile)
    rows = (extent & 0xFFFF).to(tl.int32)
    columns = (extent >> 16).to(tl.int32)
    if KNOWN:
        amax = tl.load(amax_table + tile)
    else:
        most = tl.zeros((ROWS, SIDE), tl.float32)
        for begin in tl.static_range(0, SIDE, ROWS):
            most = tl.maximum(most, tl.abs(load_rows(src, stride, begin, rows, columns, SIDE, ROWS, WHOLE)))
        amax = tl.max(most)
    scale = tl.div_rn(tl.maximum(amax, 1e-10), 448.0)
    factor = tl.div_rn(1.0, scale)
    tl.store(scale_table + tile, scale)
    column = tl.arange(0, SIDE)[None, :]
    for begin in tl.static_range(
        0, SIDE, ROWS
    ):  # read again, from the cache: all at once would need too many registers
        scaled = load_rows(src, stride, begin, rows, columns, SIDE, ROWS, WHOLE) * factor
        inside = tl.minimum(tl.maximum(scaled, -448.0), 448.0)
        if CAREFUL:
            inside = tl.where(scaled == scaled, inside, scaled)  # noqa: PLR0124 - what is not a number stays so
        codes = inside.to(tl.float8e4nv)
        row = begin + tl.arange(0, ROWS)[:, None]
        if WHOLE:
            tl.store(dst + row * dst_stride + column, codes)
        else:
            tl.store(dst + row * dst_stride + column, codes, mask=(row < rows) & (column < columns))


@triton.jit
def load_rows(  # type: ignore[no-untyped-def]
    src, stride, begin, rows, columns, SIDE: tl.constexpr, ROWS: tl.constexpr, WHOLE: tl.constexpr
):
    """Some rows of a block as FP32; zeros outside of it."""
    row = begin + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, SIDE)[None, :]
    if WHOLE:
        values = tl.load(src + row * stride + column)
    else:
        values = tl.load(src + row * stride + column, mask=(row < rows) & (column < columns), other=0.0)
    return values.to(tl.float32)


@dataclass(frozen=True, slots=True)
class QuantizeTiles:
    """Blocks to quantise, as tables in device memory; made once for a plan."""

    src_base: torch.Tensor
    dst_base: torch.Tensor | Pointer
    src: torch.Tensor
    """First element of each block, counted from the base."""
    dst: torch.Tensor
    stride: torch.Tensor
    """In elements, of the source."""
    dst_stride: torch.Tensor
    extent: torch.Tensor
    """Rows + columns << 16."""
    amax: torch.Tensor
    """Known largest magnitudes, where `quantize` is told to use them."""
    scale: torch.Tensor
    """Result."""
    number: torch.Tensor
    """Of each tile in row-major order over its matrix."""
    num_whole: int
    """The first ones are whole blocks, the others lie at a border."""
    aligned: bool
    """Whether everything lies at multiples of 16 elements, so that memory is read in vectors."""


def quantize(tiles: QuantizeTiles, *, width: int, known_amax: bool = False, careful: bool = False) -> None:
    """Quantise blocks; queued on the current stream. `careful`: NaN may occur."""
    for begin, end, whole in ((0, tiles.num_whole, True), (tiles.num_whole, len(tiles.src), False)):
        if end > begin:
            columns = (tiles.src, tiles.dst, tiles.stride, tiles.dst_stride, tiles.extent, tiles.amax, tiles.scale)
            _quantize_kernel[(end - begin,)](
                tiles.src_base,
                tiles.dst_base.view(torch.float8_e4m3fn),
                *(column[begin:end] for column in columns),
                SIDE=128,
                ROWS=QUANTIZE_ROWS,
                WIDTH=width,
                KNOWN=known_amax,
                ALIGNED=tiles.aligned,
                WHOLE=whole,
                CAREFUL=careful,
                num_warps=QUANTIZE_WARPS,
            )


def tiles_of(src: torch.Tensor, dst: torch.Tensor) -> QuantizeTiles:
    """The 128×128 blocks of a matrix, rows of which may be strided, and where their codes go."""
    side = 128
    rows, columns = src.shape
    row, column = (
        corner.reshape(-1)
        for corner in np.meshgrid(np.arange(0, rows, side), np.arange(0, columns, side), indexing="ij")
    )
    height, width = np.minimum(rows - row, side), np.minimum(columns - column, side)
    is_part = (height < side) | (width < side)
    order = np.argsort(is_part, kind="stable")
    row, column, height, width = (part[order] for part in (row, column, height, width))
    number = len(row)
    table = (
        row * src.stride(0) + column,
        row * dst.stride(0) + column,
        np.full(number, src.stride(0)),
        np.full(number, dst.stride(0)),
        height + (width << 16),
    )
    aligned = not any((part % 16).any() for part in table[:4])
    aligned = aligned and src.data_ptr() % 16 == 0 and dst.data_ptr() % 16 == 0
    numbers = [torch.from_numpy(part.astype(np.int64)).to(src.device) for part in table]
    amax, scale = (torch.zeros(number, dtype=torch.float32, device=src.device) for _ in range(2))
    source_address, target, stride, target_stride, extent = numbers
    return QuantizeTiles(
        src_base=src,
        dst_base=dst,
        src=source_address,
        dst=target,
        stride=stride,
        dst_stride=target_stride,
        extent=extent,
        amax=amax,
        scale=scale,
        number=torch.from_numpy(order).to(src.device),
        num_whole=int((~is_part).sum()),
        aligned=aligned,
    )


def join_tiles(parts: list[QuantizeTiles]) -> QuantizeTiles:
    """Blocks of several matrices, quantised by one launch (two, where some are not whole)."""
    first = parts[0]
    parts = [_rebased(part, first) for part in parts]
    names = ("src", "dst", "stride", "dst_stride", "extent", "amax", "scale", "number")
    joined = {
        name: torch.cat(
            [getattr(part, name)[: part.num_whole] for part in parts]
            + [getattr(part, name)[part.num_whole :] for part in parts]
        )
        for name in names
    }
    num_whole = sum(part.num_whole for part in parts)
    return QuantizeTiles(
        src_base=first.src_base,
        dst_base=first.dst_base,
        num_whole=num_whole,
        aligned=all(part.aligned for part in parts),
        **joined,
    )


def _rebased(tiles: QuantizeTiles, base: QuantizeTiles) -> QuantizeTiles:
    """The same blocks, counted from other bases."""
    size = base.src_base.element_size()
    src, odd = divmod(tiles.src_base.data_ptr() - base.src_base.data_ptr(), size)
    dst = tiles.dst_base.data_ptr() - base.dst_base.data_ptr()
    if odd:
        raise CodecError("matrices that do not lie a whole number of elements apart")
    aligned = tiles.aligned and src % 16 == 0 and dst % 16 == 0
    return replace(tiles, src=tiles.src + src, dst=tiles.dst + dst, aligned=aligned)
