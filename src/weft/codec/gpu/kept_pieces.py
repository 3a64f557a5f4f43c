"""Where the elements of an image's blocks are in the weights. Pure NumPy.

A block that lies in one piece has an address. Any other one is cut into pieces, each of which is rows of equal length,
one stride apart; pieces of a block are sorted, and there may be gaps between them.

    rows 512, run 48, stride 96 elements     ->  blocks 0 and 1, one piece each: rows of 48 elements
    rows 1, run 40000 elements               ->  blocks 0, 1, 2: an address each
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.codec.conversion import ChunkFill
from weft.codec.delta import BLOCK
from weft.codec.image import ImageLayout, Section
from weft.core.geometry.planes import Planes

Int64s = NDArray[np.int64]
ALIGN = 16
"""Of blocks that are read in vectors."""


def is_copied(layout: ImageLayout, fill: ChunkFill) -> bool:
    """Whether a Chunk is whole elements of the weights, copied unchanged."""
    if len(fill.boxes):
        return False
    planes = fill.planes
    is_packed = (planes.rows == 1) | (planes.dst_stride == planes.length)
    width = np.zeros(len(planes), dtype=np.uint64)
    for part in layout.sections:
        width[_inside(planes, part)] = part.width
    odd = (planes.src | planes.length | np.where(planes.rows > 1, planes.src_stride, np.uint64(0))) % np.maximum(
        width, 1
    )
    return bool((is_packed & (width > 0) & (odd == 0)).all())


def _inside(planes: Planes, part: Section) -> NDArray[np.bool_]:
    """Planes that go to a section."""
    begin = planes.dst.astype(np.int64)
    return (begin >= part.begin) & (begin < part.begin + part.num_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSources:
    """The blocks of a section, each of which is in one of the two tables."""

    direct: Int64s
    """Blocks that lie in one piece: which, and their addresses."""
    gathered: Int64s
    """Others: which, the first of their pieces, and how many."""
    pieces: Int64s
    """First element in the block and the one after the last (upper half), address of the first row, elements of a row
    and those skipped in the first one (upper half), bytes from row to row. The last one is empty."""


def block_sources(planes: Planes, part: Section, image: int) -> BlockSources:
    """Where the blocks of a section are; `image`: its address in the image, which is to be aligned as well."""
    block, first, last, piece = _cut(planes, part)
    num_blocks = -(-part.num_elements // BLOCK)
    count = np.bincount(block, minlength=num_blocks)
    begin = np.searchsorted(block, np.arange(num_blocks))
    elements = np.minimum(part.num_elements - np.arange(num_blocks) * BLOCK, BLOCK)
    address, run, skipped = piece[:, 0], piece[:, 1], piece[:, 2]
    is_row = (first == 0) & (last == elements[block]) & (skipped == 0) & (run >= last)
    is_direct = np.zeros(num_blocks, dtype=bool)
    is_direct[block[is_row & (address % ALIGN == 0) & (image % ALIGN == 0)]] = True
    which, others = np.flatnonzero(is_direct), np.flatnonzero(~is_direct)
    is_empty = count[others] == 0
    nothing = np.array([[0, 0, 1, 0]], dtype=np.int64)
    columns = first | (last << 32), address, run | (skipped << 32), piece[:, 3]
    return BlockSources(
        direct=np.stack([which, address[begin[which]]], axis=1),
        gathered=np.stack(
            [others, np.where(is_empty, len(piece), begin[others]), np.maximum(count[others], 1)], axis=1
        ),
        pieces=np.concatenate([np.stack(columns, axis=1), nothing]),
    )


def _cut(planes: Planes, part: Section) -> tuple[Int64s, Int64s, Int64s, Int64s]:
    """Planes cut at the borders of blocks: the block of each piece, its first element there and the one after its last;
    and where it is: address of its first row, elements of a row, those skipped in the first row, stride."""
    mine = planes.take(_inside(planes, part) & (planes.rows * planes.length > 0))
    to, src, rows, length, stride = (
        column.astype(np.int64) for column in (mine.dst, mine.src, mine.rows, mine.length, mine.src_stride)
    )
    begin, run = (to - part.begin) // part.width, length // part.width
    end = begin + rows * run
    order = np.argsort(begin, kind="stable")
    begin, end, run, src, stride = (column[order] for column in (begin, end, run, src, stride))
    num_cut = (end - 1) // BLOCK - begin // BLOCK + 1
    plane = np.repeat(np.arange(len(begin)), num_cut)
    block = begin[plane] // BLOCK + np.arange(len(plane)) - np.repeat(np.cumsum(num_cut) - num_cut, num_cut)
    first, last = np.maximum(begin[plane], block * BLOCK), np.minimum(end[plane], (block + 1) * BLOCK)
    row, skipped = np.divmod(first - begin[plane], run[plane])
    address = src[plane] + row * stride[plane]
    is_one_row = skipped + last - first <= run[plane]
    piece = np.stack(
        [
            np.where(is_one_row, address + skipped * part.width, address),
            np.where(is_one_row, BLOCK, run[plane]),
            np.where(is_one_row, 0, skipped),
            np.where(is_one_row, 0, stride[plane]),
        ],
        axis=1,
    )
    return block, first - block * BLOCK, last - block * BLOCK, piece
