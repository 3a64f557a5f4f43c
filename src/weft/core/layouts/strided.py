"""Recipes from traced loaders: strided copies between contiguous tensors, turned into as few boxes as possible.

Running an engine's loader once with stand-in tensors gives, for every copy it makes, a view of the destination and a
view of a checkpoint tensor. A strided view is already the composition of every narrow, chunk, transpose and reshape
the loader did.

    recipe = recipe_from_strided({0: local_tensors}, {0: copies}, checkpoint_tensors)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from weft.core.layout import Tensor
from weft.core.recipe import Op, Piece, Recipe
from weft.errors import LayoutError

MAX_BOXES_PER_VIEW = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StridedPiece:
    """One copy of a traced loader: a view of the destination ← a view of a source, offsets and strides in elements."""

    dst: str
    source: str
    shape: tuple[int, ...]
    dst_offset: int
    dst_strides: tuple[int, ...]
    src_offset: int
    src_strides: tuple[int, ...]
    op: Op = Op.COPY


def recipe_from_strided(
    tensors: Mapping[int, Sequence[Tensor]],
    pieces: Mapping[int, Sequence[StridedPiece]],
    sources: Sequence[Tensor],
    *,
    num_replicas: int = 1,
) -> Recipe:
    """A recipe from each rank's local tensors and the copies its loader made."""
    src_shape = {tensor.name: tensor.shape for tensor in sources}
    boxed: dict[int, list[Piece]] = {}
    for rank, local in tensors.items():
        dst_shape = {tensor.name: tensor.shape for tensor in local}
        unknown = [p for p in pieces[rank] if p.dst not in dst_shape or p.source not in src_shape]
        if unknown:
            raise LayoutError(
                f"engine rank {rank} has copies between tensors that do not exist",
                problems=tuple(f"{p.dst} ← {p.source}" for p in unknown),
            )
        boxed[rank] = [
            box for piece in pieces[rank] for box in boxes_of_view(piece, dst_shape[piece.dst], src_shape[piece.source])
        ]
    return Recipe.from_pieces(tensors, boxed, num_replicas=num_replicas)


def boxes_of_view(piece: StridedPiece, dst_shape: tuple[int, ...], src_shape: tuple[int, ...]) -> list[Piece]:
    """The boxes of a strided copy between two contiguous tensors.

    View dimensions that walk along one tensor dimension on each side stay whole; others (a step larger than one, or
    two view dimensions along the same tensor dimension) are enumerated. Views that run on from one row into the next
    (a flattened tensor) are cut at the rows first.
    """
    _check_view(piece, dst_shape, src_shape)
    found: list[Piece] = []
    waiting = [piece]
    while waiting:
        view = waiting.pop()
        parts = _cut_at_rows(view, dst_shape, src_shape)
        if parts:
            waiting.extend(reversed(parts))
        else:
            found.extend(_boxes_inside_rows(view, dst_shape, src_shape))
        if len(found) + len(waiting) > MAX_BOXES_PER_VIEW:
            raise _too_many_boxes(piece, len(found) + len(waiting))
    return found


def _check_view(piece: StridedPiece, dst_shape: tuple[int, ...], src_shape: tuple[int, ...]) -> None:
    sides = (
        (piece.dst, piece.dst_offset, piece.dst_strides, dst_shape),
        (piece.source, piece.src_offset, piece.src_strides, src_shape),
    )
    for name, offset, strides, shape in sides:
        size = int(np.prod(shape, dtype=np.int64))
        if len(strides) != len(piece.shape) or any(n < 1 for n in piece.shape):
            raise LayoutError(f"a view of `{name}` has shape {list(piece.shape)} and strides {list(strides)}")
        last = offset + sum((n - 1) * stride for n, stride in zip(piece.shape, strides, strict=True))
        if offset < 0 or any(stride < 0 for stride in strides) or last >= size:
            raise LayoutError(
                f"a view of `{name}` reaches element {last}, the tensor has {size}",
                hint="offsets and strides are counted in elements of the whole tensor",
            )


def _too_many_boxes(piece: StridedPiece, count: int) -> LayoutError:
    return LayoutError(
        f"the copy of `{piece.source}` into `{piece.dst}` falls into more than {count} boxes",
        hint="declare this tensor's pieces by hand, or let the engine load it",
    )


def _cut_at_rows(piece: StridedPiece, dst_shape: tuple[int, ...], src_shape: tuple[int, ...]) -> list[StridedPiece]:
    """Nothing if the view stays inside the rows of both tensors; else the same copy in parts that come closer."""
    for offset, strides, shape in (
        (piece.src_offset, piece.src_strides, src_shape),
        (piece.dst_offset, piece.dst_strides, dst_shape),
    ):
        start = [int(at) for at in np.unravel_index(offset, shape)]
        walks = [_walk(stride, shape) if n > 1 else (0, 0) for n, stride in zip(piece.shape, strides, strict=True)]
        for dim, size in enumerate(shape):
            along = [i for i, (walked, step) in enumerate(walks) if walked == dim and step and piece.shape[i] > 1]
            reach = start[dim] + sum((piece.shape[i] - 1) * walks[i][1] for i in along)
            if reach >= size:
                longest = max(along, key=lambda i: (piece.shape[i] - 1) * walks[i][1])
                return _cut_view(piece, longest, walks[longest][1], size, size - 1 - reach)
    return []


def _cut_view(piece: StridedPiece, i: int, step: int, size: int, room: int) -> list[StridedPiece]:
    """Cut view dimension i, which walks out of a tensor dimension of `size` by -`room` steps."""
    count = piece.shape[i]
    row = size // step
    reach_of_others = size - 1 - room - (count - 1) * step
    if size % step == 0 and count % row == 0 and reach_of_others < step and row < count:
        return [_reshaped(piece, i, count // row, row)]
    head = (size - 1 - reach_of_others) // step + 1
    if not 0 < head < count:
        raise LayoutError(
            f"the copy of `{piece.source}` into `{piece.dst}` cannot be followed",
            hint="declare this tensor's pieces by hand, or let the engine load it",
        )
    rest = replace(
        piece,
        shape=(*piece.shape[:i], count - head, *piece.shape[i + 1 :]),
        src_offset=piece.src_offset + head * piece.src_strides[i],
        dst_offset=piece.dst_offset + head * piece.dst_strides[i],
    )
    return [replace(piece, shape=(*piece.shape[:i], head, *piece.shape[i + 1 :])), rest]


def _reshaped(piece: StridedPiece, i: int, outer: int, inner: int) -> StridedPiece:
    """The same view with dimension i seen as outer × inner."""

    def strides(given: tuple[int, ...]) -> tuple[int, ...]:
        return (*given[:i], given[i] * inner, given[i], *given[i + 1 :])

    return replace(
        piece,
        shape=(*piece.shape[:i], outer, inner, *piece.shape[i + 1 :]),
        src_strides=strides(piece.src_strides),
        dst_strides=strides(piece.dst_strides),
    )


def _boxes_inside_rows(piece: StridedPiece, dst_shape: tuple[int, ...], src_shape: tuple[int, ...]) -> list[Piece]:
    """Boxes of a view whose dimensions each stay inside one tensor dimension."""
    walks = [
        (size, _walk(src_stride, src_shape), _walk(dst_stride, dst_shape))
        for size, src_stride, dst_stride in zip(piece.shape, piece.src_strides, piece.dst_strides, strict=True)
        if size > 1
    ]
    whole, enumerated = _partition_walks(_merge_walks(walks))
    count = int(np.prod([size for size, _, _ in enumerated], dtype=np.int64)) if enumerated else 1
    if count > MAX_BOXES_PER_VIEW:
        raise _too_many_boxes(piece, count)
    axes = [-1] * len(dst_shape)
    extent = [1] * len(dst_shape)
    for size, (src_dim, _), (dst_dim, _) in whole:
        axes[dst_dim], extent[dst_dim] = src_dim, size
    src_start = [int(at) for at in np.unravel_index(piece.src_offset, src_shape)]
    dst_start = [int(at) for at in np.unravel_index(piece.dst_offset, dst_shape)]
    found = []
    for index in np.ndindex(*[size for size, _, _ in enumerated]):
        src_lo, dst_lo = list(src_start), list(dst_start)
        for step, (_, (src_dim, src_step), (dst_dim, dst_step)) in zip(index, enumerated, strict=True):
            src_lo[src_dim] += step * src_step
            dst_lo[dst_dim] += step * dst_step
        found.append(
            Piece(
                dst=piece.dst,
                source=piece.source,
                dst_lo=tuple(dst_lo),
                extent=tuple(extent),
                src_lo=tuple(src_lo),
                axes=tuple(axes),
                op=piece.op,
            )
        )
    return found


_Walk = tuple[int, int]
"""Tensor dimension a view dimension walks along, and its step there."""


def _walk(stride: int, shape: tuple[int, ...]) -> _Walk:
    pitch = 1
    for dim in range(len(shape) - 1, -1, -1):
        if stride < pitch * shape[dim] and stride % pitch == 0:
            return dim, stride // pitch
        pitch *= shape[dim]
    raise LayoutError(f"a view with stride {stride} does not fit a tensor of shape {list(shape)}")


def _merge_walks(walks: list[tuple[int, _Walk, _Walk]]) -> list[tuple[int, _Walk, _Walk]]:
    """Join neighbouring view dimensions that are one longer walk on both sides (a reshape of heads, say)."""
    merged: list[tuple[int, _Walk, _Walk]] = []
    for size, src, dst in walks:
        if merged:
            outer, outer_src, outer_dst = merged[-1]
            joins = outer_src == (src[0], src[1] * size) and outer_dst == (dst[0], dst[1] * size)
            if joins:
                merged[-1] = (outer * size, src, dst)
                continue
        merged.append((size, src, dst))
    return merged


def _partition_walks(
    walks: list[tuple[int, _Walk, _Walk]],
) -> tuple[list[tuple[int, _Walk, _Walk]], list[tuple[int, _Walk, _Walk]]]:
    """Walks that can stay whole (longest first), and those that must be enumerated."""
    whole: list[tuple[int, _Walk, _Walk]] = []
    enumerated: list[tuple[int, _Walk, _Walk]] = []
    for walk in sorted(walks, key=lambda w: -w[0]):
        _, (src_dim, src_step), (dst_dim, dst_step) = walk
        free = all(src_dim != s[0] and dst_dim != d[0] for _, s, d in whole)
        (whole if src_step == dst_step == 1 and free else enumerated).append(walk)
    return whole, enumerated
