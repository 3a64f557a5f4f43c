"""Weights under other names: what a trainer holds, as boxes of the tensors its checkpoint would have.

A trainer may hold tensors that its checkpoint does not have (all experts of a layer in one), or name them differently.
Engines load checkpoints, so both sides use the checkpoint's names. Nothing is copied: a shard of a fused parameter
becomes several shards of the checkpoint's tensors, in the same memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from weft.core.layout import DTYPE_BYTES, Tensor
from weft.core.recipe import Piece
from weft.runtime.weights import Held, Weights


def renamed(weights: Weights, pieces: Iterable[Piece], tensors: Iterable[Tensor]) -> Weights:
    """The same weights as boxes of `tensors`; `pieces` says how these are made from the present ones."""
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    by_source: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_source.setdefault(piece.source, []).append(piece)
    boxes: dict[tuple[int, tuple[int, ...], tuple[int, ...]], Held] = {}
    for held in weights.held:
        for name in (held.tensor.name, *held.aliases):
            for piece in by_source.get(name, ()):
                for box in _meet(held, piece, shapes[piece.dst]):
                    place = (box.address, box.extent, box.strides)
                    known = boxes.setdefault(place, box)
                    if known is not box:  # tied: the same memory under several names
                        boxes[place] = replace(known, aliases=(*known.aliases, box.tensor.name))
    return Weights.of(tuple(boxes.values()), weights.ranges, keep=weights.keep, device=weights.device)


def _meet(held: Held, piece: Piece, shape: tuple[int, ...]) -> Iterator[Held]:
    """The part of a shard that belongs to a piece."""
    lo = [max(a, b) for a, b in zip(held.lo, piece.src_lo, strict=True)]
    ends = zip(held.lo, held.extent, piece.src_lo, piece.source_extent, strict=True)
    hi = [min(a + n, b + m) for a, n, b, m in ends]
    if any(end <= start for start, end in zip(lo, hi, strict=True)):
        return
    offset = sum((at - first) * stride for at, first, stride in zip(lo, held.lo, held.strides, strict=True))
    num_dims = len(piece.extent)
    at, extent, strides = list(piece.dst_lo), [1] * num_dims, [1] * num_dims
    for dim, axis in piece.walked:
        at[dim] += lo[axis] - piece.src_lo[axis]
        extent[dim], strides[dim] = hi[axis] - lo[axis], held.strides[axis]
    yield Held(
        tensor=Tensor(name=piece.dst, dtype=held.tensor.dtype, shape=shape),
        lo=tuple(at),
        extent=tuple(extent),
        strides=tuple(strides),
        address=held.address + offset * DTYPE_BYTES[held.tensor.dtype],
    )
