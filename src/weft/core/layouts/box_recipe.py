"""Recipes of engines whose tensors are one box of a source each, from the columns that members report.

The same recipe as `Recipe.from_pieces` gives for one piece per tensor, at the speed of NumPy instead of Python.

    recipe = recipe_of_boxes(taken, num_ranks=2)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from weft.core.geometry.boxes import Ints, pad_dims, row_major_strides
from weft.core.geometry.fingerprint import by_appearance, distinct_rows
from weft.core.geometry.scaling import Scaling
from weft.core.layout import Layout, Tensor, group_ranks, tensors_of
from weft.core.recipe import Recipe
from weft.errors import LayoutError

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenBoxes:
    """Tensors of engine ranks, in the order of ranks: each is a box of a source. Coordinates have equal widths."""

    names: Sequence[str]
    """Different names of tensors."""
    sources: Sequence[str]
    """Different names of sources."""
    dtypes: Sequence[str]
    rank: Int64s
    name: Int64s
    source: Int64s
    dtype: Int64s
    num_dims: Int64s
    """Of the tensor; trailing dimensions have one element."""
    extent: Int64s
    src_lo: Int64s
    src_dims: Int64s
    op: Int64s

    def __len__(self) -> int:
        return len(self.rank)

    def tensors(self, rows: Ints) -> tuple[Tensor, ...]:
        """Several of the tensors."""
        names = (self.names[number] for number in self.name[rows].tolist())
        return tensors_of(names, self.dtypes, self.dtype[rows], self.num_dims[rows], self.extent[rows])


def recipe_of_boxes(
    taken: TakenBoxes, *, num_ranks: int, num_replicas: int = 1, scaling: Mapping[str, Scaling] | None = None
) -> Recipe:
    """The recipe of these tensors; tensors that are equal on several ranks share a row.

    `num_ranks` counts the ranks of all replicas. `scaling`: see `Recipe.from_pieces`.
    """
    recipe = replace(unchecked_recipe(taken, num_ranks=num_ranks), num_replicas=num_replicas)
    recipe.check_cover()
    recipe.check_scales()
    return recipe.with_scaling(scaling or {})


def unchecked_recipe(taken: TakenBoxes, *, num_ranks: int) -> Recipe:
    """The same, for callers that add other tensors before they check it."""
    if not len(taken):
        raise LayoutError("the engine ranks are invalid", problems=("no engine rank has a tensor",))
    numbers = (taken.name, taken.source, taken.dtype, taken.num_dims, taken.src_dims, taken.op)
    _, same = distinct_rows(np.concatenate([np.stack(numbers, axis=1), taken.extent, taken.src_lo], axis=1))
    first, row = by_appearance(same)
    order = np.argsort(row, kind="stable")
    width = max(int(taken.num_dims.max()), int(taken.src_dims.max()))
    extent, src_lo = (_as_wide(column, width, fill)[first] for column, fill in ((taken.extent, 1), (taken.src_lo, 0)))
    count = np.arange(len(first), dtype=np.int32)
    used, src = by_appearance(taken.source[first])
    return Recipe(
        engine=whole_tensors(taken.tensors(first), extent, row[order], taken.rank[order], num_ranks=num_ranks),
        sources=tuple(taken.sources[number] for number in taken.source[first][used].tolist()),
        dst=count,
        src=src.astype(np.int32),
        op=taken.op[first].astype(np.int8),
        dst_lo=np.zeros_like(extent),
        extent=extent,
        src_lo=src_lo,
        axes=np.where(np.arange(width) < taken.num_dims[first][:, None], np.arange(width), -1),
        src_dims=taken.src_dims[first].astype(np.int8),
    )


def whole_tensors(
    tensors: tuple[Tensor, ...], extent: Int64s, tensor: Int64s, rank: Int64s, *, num_ranks: int
) -> Layout:
    """Whole tensors of these extents: pair i says that `rank[i]` has `tensor[i]`, numbers in ascending order."""
    groups, group_of = group_ranks(tensor, rank)
    return Layout(
        side="engine",
        num_ranks=num_ranks,
        tensors=tensors,
        tensor_of=np.arange(len(tensors), dtype=np.int32),
        group_of=group_of,
        lo=np.zeros_like(extent),
        extent=extent,
        strides=row_major_strides(extent),
        groups=groups,
    )


def _as_wide(column: Int64s, width: int, fill: int) -> Int64s:
    """Coordinates widened to `width` dimensions; the added ones are filled."""
    return pad_dims(column, max(width, column.shape[1]), fill)[:, :width]
