"""Columns of N-dimensional boxes: intersection, contiguity, and the exact-cover proof.

A column of boxes is two integer arrays of shape (n, D): `lo` and `extent`. Used by layouts (do the shards
tile each tensor?), recipes (do the pieces tile each engine tensor?) and plans (do the routes?).

The proof. The indicator function of a box, differenced once along every dimension, is a handful of signed
unit impulses at the box's 2^D corners. Differencing is linear and invertible, so a set of boxes covers a
tensor exactly once if and only if the impulses of all boxes sum to the impulses of the tensor itself.
Adding up impulses is one sort: exact, order-free, and it scales to millions of boxes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[Any]
"""An integer column, or (n, D) coordinates."""

BOXES_PER_SORT = 2_000_000
"""How many boxes are proven at once: bounds the memory of the proof to about 500 MB."""
CORNERS_PER_SORT = 2.0**60
"""Grid points of the tensors proven at once: corner positions must fit into 62 bits."""


def pad_dims(coordinates: Ints, num_dims: int, fill: int) -> Ints:
    """Append trailing dimensions filled with `fill` so that (n, d) coordinates become (n, num_dims)."""
    missing = num_dims - coordinates.shape[1]
    if missing == 0:
        return coordinates
    return np.pad(coordinates, ((0, 0), (0, missing)), constant_values=fill)


def volume(extent: Ints) -> NDArray[np.int64]:
    """Elements of each box."""
    return np.prod(extent, axis=1, dtype=np.int64)


def intersect(lo_a: Ints, extent_a: Ints, lo_b: Ints, extent_b: Ints) -> tuple[Ints, Ints]:
    """Row-wise intersection; an empty one has an extent of zero or less in some dimension."""
    lo = np.maximum(lo_a, lo_b)
    extent = np.minimum(lo_a + extent_a, lo_b + extent_b) - lo
    return lo, extent


def row_major_strides(extent: Ints) -> Ints:
    """Strides, in elements, of boxes stored contiguously in row-major order."""
    strides = np.ones_like(extent)
    for dim in range(extent.shape[1] - 2, -1, -1):
        strides[:, dim] = strides[:, dim + 1] * extent[:, dim + 1]
    return strides


def contiguous_run(extent: Ints, *strides_of: Ints) -> NDArray[np.int64]:
    """Elements, from the first one on, that lie next to each other in every one of the given memories."""
    return split_contiguous(extent, *strides_of)[0]


def split_contiguous(extent: Ints, *strides_of: Ints) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The length of the contiguous runs of each box, and the extents that are left to walk from run to run."""
    outer = np.array(extent, dtype=np.int64)
    run = np.ones(len(extent), dtype=np.int64)
    unbroken = np.ones(len(extent), dtype=bool)
    for dim in range(extent.shape[1] - 1, -1, -1):
        adjacent = np.ones(len(extent), dtype=bool)
        for strides in strides_of:
            adjacent &= strides[:, dim] == run
        unbroken &= adjacent | (outer[:, dim] == 1)
        run = np.where(unbroken, run * outer[:, dim], run)
        outer[:, dim] = np.where(unbroken, 1, outer[:, dim])
    return run, outer


def cover_defects(owner: Ints, lo: Ints, extent: Ints, shapes: Ints) -> dict[int, int]:
    """Owners whose boxes do not cover them exactly once, with the surplus elements (negative: missing).

    `owner[i]` is the row of `shapes` that box i belongs to. An empty answer is a proof of exact cover.
    """
    outside = ((lo < 0) | (extent < 1) | (lo + extent > shapes[owner])).any(axis=1)
    suspects = set(np.unique(owner[outside]).tolist())
    if suspects:
        owner, lo, extent = owner[~outside], lo[~outside], extent[~outside]
    order = None if _is_sorted(owner) else np.argsort(owner, kind="stable")
    if order is not None:
        owner, lo, extent = owner[order], lo[order], extent[order]
    num_boxes = np.bincount(owner, minlength=len(shapes))
    ends = np.cumsum(num_boxes)
    corners = np.cumsum(np.prod(shapes + 1.0, axis=1))
    first_owner = 0
    while first_owner < len(shapes):
        first_box = int(ends[first_owner] - num_boxes[first_owner])
        last_owner = int(np.searchsorted(ends, first_box + BOXES_PER_SORT, side="right"))
        by_size = int(np.searchsorted(corners, corners[first_owner] + CORNERS_PER_SORT, side="right"))
        last_owner = max(min(last_owner, by_size), first_owner + 1)
        owners, rows = slice(first_owner, last_owner), slice(first_box, int(ends[last_owner - 1]))
        suspects |= {
            int(bad) + first_owner
            for bad in _unbalanced(owner[rows] - first_owner, lo[rows], extent[rows], shapes[owners])
        }
        first_owner = last_owner
    if not suspects:
        return {}
    surplus = np.bincount(owner, weights=volume(extent), minlength=len(shapes)) - volume(shapes)
    return {bad: int(surplus[bad]) for bad in sorted(suspects)}


def _is_sorted(column: Ints) -> bool:
    return bool((column[1:] >= column[:-1]).all())


def _unbalanced(owner: Ints, lo: Ints, extent: Ints, shapes: Ints) -> NDArray[np.int64]:
    """Owners whose corner impulses do not cancel against those of the whole tensor."""
    grid = (shapes + 1).astype(np.int64)
    base = np.concatenate([[0], np.cumsum(np.prod(grid, axis=1))])
    pitch = row_major_strides(grid)
    boxes = _corner_keys(base[owner], pitch[owner], lo, extent, negate=False)
    wholes = _corner_keys(base[:-1], pitch, np.zeros_like(shapes), shapes, negate=True)
    keys = np.sort(np.concatenate([boxes, wholes]))
    corner, sign = keys >> 1, 1 - 2 * (keys & 1)
    starts = np.flatnonzero(np.concatenate([[True], corner[1:] != corner[:-1]]))
    impulse = np.add.reduceat(sign, starts)
    bad_corners = corner[starts[impulse != 0]]
    return np.unique(np.searchsorted(base, bad_corners, side="right") - 1)


def _corner_keys(base: Ints, pitch: Ints, lo: Ints, extent: Ints, *, negate: bool) -> NDArray[np.int64]:
    """Two times the position of every corner, plus one where its impulse is negative."""
    num_dims = lo.shape[1]
    at_lo = base + (lo * pitch).sum(axis=1)
    step = extent.astype(np.int64) * pitch
    keys = np.empty((2**num_dims, len(lo)), dtype=np.int64)
    for corner in range(2**num_dims):
        far = [dim for dim in range(num_dims) if corner >> dim & 1]
        position = at_lo + sum((step[:, dim] for dim in far), np.int64(0))
        keys[corner] = 2 * position + ((len(far) % 2 == 1) != negate)
    return keys.ravel()
