"""Weights of the members of a case, at addresses that are reserved and never touched.

sides = lay_out(PRESETS["chen-kimi-k2"].case())
TrainerWeights(sides).of(17)            # what trainer 17 holds
EngineWeights(sides).of(3)              # what engine rank 3 holds, as boxes of checkpoint tensors
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from weft.core.case import Sides
from weft.core.geometry.alignment import aligned
from weft.core.geometry.boxes import Ints
from weft.core.layout import DTYPE_BYTES, Tensor
from weft.core.layouts.engine_boxes import EngineBoxes, held_rows
from weft.runtime.weights import Held, Weights
from weft.transport.pages import Reserved

Box = tuple[Tensor, tuple[str, ...], tuple[int, ...], tuple[int, ...]]
"""A tensor, its other names, and the first coordinate and extent of what is held of it."""


class TrainerWeights:
    """Weights of any trainer of a case."""

    def __init__(self, sides: Sides) -> None:
        self._layout = sides.trainer

    def of(self, rank: int) -> Weights:
        """One trainer's weights."""
        layout = self._layout
        rows = np.flatnonzero(held_rows(layout, rank))
        columns = (layout.tensor_of[rows], layout.lo[rows], layout.extent[rows])
        boxes = []
        for number, lo, extent in zip(*(column.tolist() for column in columns), strict=True):
            tensor = layout.tensors[number]
            dims = len(tensor.shape)
            boxes.append((tensor, (), tuple(lo[:dims]), tuple(extent[:dims])))
        return _reserved(boxes)


class EngineWeights:
    """Weights of any engine rank of a case."""

    def __init__(self, sides: Sides) -> None:
        self._boxes = EngineBoxes(sides.recipe, {tensor.name: tensor.shape for tensor in sides.trainer.tensors})

    def of(self, rank: int) -> Weights:
        """One engine rank's weights. A fused tensor is held as the boxes it consists of."""
        return _reserved([(box.tensor, box.aliases, box.lo, box.extent) for box in self._boxes.of(rank)])


def _reserved(boxes: Sequence[Box]) -> Weights:
    """Boxes one after the other, at addresses without memory."""
    sizes = [prod(extent) * DTYPE_BYTES[tensor.dtype] for tensor, _, _, extent in boxes]
    room: Ints = aligned(np.array(sizes, dtype=np.int64))
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
    return Weights.of(held, ((memory.address, memory.num_bytes),), keep=memory)


def _row_major(extent: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(extent[dim + 1 :]) for dim in range(len(extent)))
