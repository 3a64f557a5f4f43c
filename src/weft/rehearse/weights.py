"""Weights of the members of a case, at addresses that are reserved and never touched.

sides = lay_out(PRESETS["chen-kimi-k2"].case())
TrainerWeights(sides).of(17)            # what trainer 17 holds
EngineWeights(sides).of(3)              # what engine rank 3 holds, as boxes of checkpoint tensors
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

from weft.core.boxes import Ints
from weft.core.case import Sides
from weft.core.layout import DTYPE_BYTES, Layout, Tensor
from weft.core.recipe import Op
from weft.core.scaling import Scaling, scale_shape
from weft.runtime.weights import Held, Weights
from weft.transport.pages import Reserved

ALIGN = 256
Box = tuple[Tensor, tuple[str, ...], tuple[int, ...], tuple[int, ...]]
"""A tensor, its other names, and the first coordinate and extent of what is held of it."""


class TrainerWeights:
    """Of any trainer of a case."""

    def __init__(self, sides: Sides) -> None:
        self._layout = sides.trainer

    def of(self, rank: int) -> Weights:
        """One trainer's weights."""
        layout = self._layout
        rows = np.flatnonzero(_held_rows(layout, rank))
        columns = (layout.tensor_of[rows], layout.lo[rows], layout.extent[rows])
        boxes = []
        for number, lo, extent in zip(*(column.tolist() for column in columns), strict=True):
            tensor = layout.tensors[number]
            dims = len(tensor.shape)
            boxes.append((tensor, (), tuple(lo[:dims]), tuple(extent[:dims])))
        return _reserved(boxes)


class EngineWeights:
    """Of any engine rank of a case."""

    def __init__(self, sides: Sides) -> None:
        recipe = self._recipe = sides.recipe
        shapes = {tensor.name: tensor.shape for tensor in sides.trainer.tensors}
        self._shapes = [shapes[name] for name in recipe.sources]
        self._scale_shapes = [
            scale_shape(shape, recipe.scaling.get(name, Scaling.BLOCK)) if len(shape) == 2 else ()
            for name, shape in zip(recipe.sources, self._shapes, strict=True)
        ]

    def of(self, rank: int) -> Weights:
        """One engine rank's weights. A fused tensor is held as the boxes it consists of."""
        recipe, seen = self._recipe, Counter[str]()
        mine = np.flatnonzero(_held_rows(recipe.engine, rank)[recipe.dst] & (recipe.op != Op.PAD))
        columns = (recipe.op[mine], recipe.src[mine], recipe.dst[mine], recipe.src_lo[mine], recipe.src_extent[mine])
        boxes: list[Box] = []
        for op, src, dst, lo, extent in zip(*(column.tolist() for column in columns), strict=True):
            name, shape = recipe.sources[src], self._shapes[src]
            if op == Op.SCALE:
                name, shape = f"{name}_scale_inv", self._scale_shapes[src]
            seen[name] += 1
            names = (name, ()) if seen[name] == 1 else (f"box {seen[name]} of {name}", (name,))
            dtype = recipe.engine.tensors[dst].dtype
            dims = len(shape)
            tensor = Tensor(name=names[0], dtype=dtype, shape=shape)
            boxes.append((tensor, names[1], tuple(lo[:dims]), tuple(extent[:dims])))
        return _reserved(boxes)


def _held_rows(layout: Layout, rank: int) -> NDArray[np.bool_]:
    """Which rows of a layout one rank holds."""
    groups = layout.groups
    number = np.repeat(np.arange(len(groups.sizes)), groups.sizes)
    has_rank = np.zeros(len(groups.sizes), dtype=bool)
    has_rank[number[groups.members == rank]] = True
    return np.asarray(has_rank[layout.group_of])


def _reserved(boxes: Sequence[Box]) -> Weights:
    """Boxes one after the other, at addresses that have no memory."""
    sizes = [prod(extent) * DTYPE_BYTES[tensor.dtype] for tensor, _, _, extent in boxes]
    room: Ints = -(-np.array(sizes, dtype=np.int64) // ALIGN) * ALIGN
    memory = Reserved(int(room.sum()))
    begins = (memory.address + np.cumsum(room) - room).tolist()
    strides: dict[tuple[int, ...], tuple[int, ...]] = {}
    held = tuple(
        Held(
            tensor=tensor,
            aliases=aliases,
            lo=lo,
            extent=extent,
            strides=strides.setdefault(extent, _row_major(extent)),
            address=begin,
        )
        for (tensor, aliases, lo, extent), begin in zip(boxes, begins, strict=True)
    )
    return Weights(held, ((memory.address, memory.num_bytes),), keep=memory)


def _row_major(extent: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(extent[dim + 1 :]) for dim in range(len(extent)))
