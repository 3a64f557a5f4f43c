"""Which elements of a quantised matrix share a scale: 128×128 blocks, a row, or all of them."""

from __future__ import annotations

import enum

import numpy as np

from weft.core.geometry.boxes import Ints

QUANT_BLOCK = 128
"""Side of the square blocks that share one FP8 scale."""

SCALE_SUFFIX = "::scale"
"""Ends the name of the virtual tensor that holds a weight's block scales."""


class Scaling(enum.StrEnum):
    """Which elements share a scale."""

    BLOCK = "block"
    """128×128 blocks of a matrix."""
    CHANNEL = "channel"
    """Rows: output channels."""
    TENSOR = "tensor"
    """All."""


def block_sides(shape: tuple[int, ...], scaling: Scaling = Scaling.BLOCK) -> tuple[int, ...]:
    """Elements along each side of the boxes that share a scale."""
    whole = tuple(max(size, 1) for size in shape)
    return {
        Scaling.BLOCK: (QUANT_BLOCK,) * len(shape),
        Scaling.CHANNEL: (1, *whole[1:])[: len(shape)],
        Scaling.TENSOR: whole,
    }[scaling]


def scale_shape(shape: tuple[int, ...], scaling: Scaling = Scaling.BLOCK) -> tuple[int, ...]:
    """Shape of the scales of a weight."""
    return tuple(-(-size // side) for size, side in zip(shape, block_sides(shape, scaling), strict=True))


def block_sides_of(shapes: Ints, num_dims: Ints, scaling: Ints) -> Ints:
    """`block_sides` of many tensors: shapes with trailing ones, and kinds as numbers in the order of `Scaling`."""
    dim = np.arange(shapes.shape[1])
    kinds = list(Scaling)
    block = np.where(dim < num_dims[:, None], QUANT_BLOCK, 1)
    whole = np.maximum(shapes, 1)
    sides = np.where((scaling == kinds.index(Scaling.TENSOR))[:, None], whole, block)
    return np.where((scaling == kinds.index(Scaling.CHANNEL))[:, None], np.where(dim == 0, 1, whole), sides)


def cut_blocks(lo: Ints, extent: Ints, shape: Ints, sides: Ints) -> tuple[Ints, Ints]:
    """For boxes of tensors: how many blocks each touches, and how many of those lie wholly inside it."""
    end = lo + extent
    touched = -(-end // sides) - lo // sides
    whole_end = np.where(end == shape, -(-end // sides), end // sides)
    inside = np.maximum(whole_end - -(-lo // sides), 0)
    return touched.prod(axis=1), inside.prod(axis=1)
