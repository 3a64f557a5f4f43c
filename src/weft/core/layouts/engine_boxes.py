"""What one engine rank holds of checkpoint tensors: the boxes its fused, cut and stacked tensors consist of.

    boxes = EngineBoxes(recipe, {tensor.name: tensor.shape for tensor in trainer.tensors})
    boxes.of(3)                                              # of engine rank 3

A member reports its weights in this form: every box under the name of the tensor it comes from, scales as
`NAME_scale_inv`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.core.geometry.scaling import Scaling, scale_shape
from weft.core.layout import Layout, Tensor
from weft.core.recipe import Op, Recipe

Dims = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBox:
    """A box of a checkpoint tensor, or of its scales, inside an engine tensor."""

    tensor: Tensor
    """The checkpoint tensor, in the engine's precision."""
    aliases: tuple[str, ...]
    """Its name, where the rank holds several boxes of it."""
    source: str
    """The checkpoint tensor whose elements, or scales, these are."""
    op: Op
    lo: Dims
    extent: Dims
    inside: int
    """Number of the engine tensor, in the recipe's layout."""
    at: Dims
    """Where the box begins in the engine tensor."""
    axes: Dims
    """The dimension of the checkpoint tensor each dimension of the engine tensor walks along; -1: none."""

    def strides_in(self, strides: Dims) -> Dims:
        """Strides of the box, in the dimensions of the checkpoint tensor, given those of the engine tensor."""
        found = [1] * len(self.extent)
        for dim, axis in enumerate(self.axes[: len(strides)]):
            if 0 <= axis < len(found):
                found[axis] = strides[dim]
        return tuple(found)


class EngineBoxes:
    """The boxes of all ranks of a recipe."""

    def __init__(self, recipe: Recipe, shapes: Mapping[str, Dims]) -> None:
        """`shapes`: shapes of checkpoint tensors, by name."""
        self._recipe = recipe
        self._shapes = [shapes[name] for name in recipe.sources]
        self._scale_shapes = [
            scale_shape(shape, recipe.scaling.get(name, Scaling.BLOCK)) if len(shape) == 2 else ()
            for name, shape in zip(recipe.sources, self._shapes, strict=True)
        ]

    def of(self, rank: int) -> list[EngineBox]:
        """The boxes of one rank, in the order of the recipe; padding is left out."""
        recipe, seen = self._recipe, Counter[str]()
        mine = np.flatnonzero(held_rows(recipe.engine, rank)[recipe.dst] & (recipe.op != Op.PAD))
        columns = (recipe.op, recipe.src, recipe.dst, recipe.src_lo, recipe.src_extent, recipe.dst_lo, recipe.axes)
        boxes = []
        for op, src, dst, lo, extent, at, axes in zip(*(column[mine].tolist() for column in columns), strict=True):
            source, shape = recipe.sources[src], self._shapes[src]
            name = source
            if op == Op.SCALE:
                name, shape = f"{source}_scale_inv", self._scale_shapes[src]
            seen[name] += 1
            names = (name, ()) if seen[name] == 1 else (f"box {seen[name]} of {name}", (name,))
            inside = recipe.engine.tensors[dst]
            boxes.append(
                EngineBox(
                    tensor=Tensor(name=names[0], dtype=inside.dtype, shape=shape),
                    aliases=names[1],
                    source=source,
                    op=Op(op),
                    lo=tuple(lo[: len(shape)]),
                    extent=tuple(extent[: len(shape)]),
                    inside=dst,
                    at=tuple(at[: len(inside.shape)]),
                    axes=tuple(axes[: len(inside.shape)]),
                )
            )
        return boxes


def held_rows(layout: Layout, rank: int) -> NDArray[np.bool_]:
    """Which rows of a layout one rank holds."""
    groups = layout.groups
    number = np.repeat(np.arange(len(groups.sizes)), groups.sizes)
    has_rank = np.zeros(len(groups.sizes), dtype=bool)
    has_rank[number[groups.members == rank]] = True
    return np.asarray(has_rank[layout.group_of])
