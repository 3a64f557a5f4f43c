"""Recipes of engines whose tensors are one box of a source each, from the columns that members report.

The same recipe as `Recipe.from_pieces` gives for one piece per tensor, at the speed of NumPy instead of Python.

    recipe = recipe_of_boxes(taken, num_ranks=2)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.core.geometry.boxes import Ints, pad_dims, row_major_strides
from weft.core.geometry.fingerprint import by_appearance, distinct_rows
from weft.core.geometry.scaling import Scaling
from weft.core.layout import Layout, Tensor, group_ranks, tensors_of
from weft.core.recipe import Op, Piece, Recipe
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

    def tensor(self, row: int) -> Tensor:
        """One of the tensors."""
        shape = tuple(self.extent[row, : self.num_dims[row]].tolist())
        return Tensor(name=self.names[self.name[row]], dtype=self.dtypes[self.dtype[row]], shape=shape)

    def piece(self, row: int) -> Piece:
        """The only piece of one of the tensors."""
        dims = int(self.num_dims[row])
        return Piece(
            dst=self.names[self.name[row]],
            source=self.sources[self.source[row]],
            dst_lo=(0,) * dims,
            extent=tuple(self.extent[row, :dims].tolist()),
            src_lo=tuple(self.src_lo[row, : self.src_dims[row]].tolist()),
            axes=tuple(range(dims)),
            op=Op(int(self.op[row])),
        )

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
    if not len(taken):
        raise LayoutError("the engine ranks are invalid", problems=("no engine rank has a tensor",))
    numbers = (taken.name, taken.source, taken.dtype, taken.num_dims, taken.src_dims, taken.op)
    _, same = distinct_rows(np.concatenate([np.stack(numbers, axis=1), taken.extent, taken.src_lo], axis=1))
    first, row = by_appearance(same)
    order = np.argsort(row, kind="stable")
    groups, group_of = group_ranks(row[order], taken.rank[order])
    width = max(int(taken.num_dims.max()), int(taken.src_dims.max()))
    extent, src_lo = (_as_wide(column, width, fill)[first] for column, fill in ((taken.extent, 1), (taken.src_lo, 0)))
    count = np.arange(len(first), dtype=np.int32)
    used, src = by_appearance(taken.source[first])
    engine = Layout(
        side="engine",
        num_ranks=num_ranks,
        tensors=taken.tensors(first),
        tensor_of=count,
        group_of=group_of,
        lo=np.zeros_like(extent),
        extent=extent,
        strides=row_major_strides(extent),
        groups=groups,
    )
    recipe = Recipe(
        engine=engine,
        sources=tuple(taken.sources[number] for number in taken.source[first][used].tolist()),
        dst=count,
        src=src.astype(np.int32),
        op=taken.op[first].astype(np.int8),
        dst_lo=np.zeros_like(extent),
        extent=extent,
        src_lo=src_lo,
        axes=np.where(np.arange(width) < taken.num_dims[first][:, None], np.arange(width), -1),
        num_replicas=num_replicas,
        src_dims=taken.src_dims[first].astype(np.int8),
    )
    recipe.check_cover()
    recipe.check_scales()
    return recipe.with_scaling(scaling or {})


def _as_wide(column: Int64s, width: int, fill: int) -> Int64s:
    """Coordinates widened to `width` dimensions; the added ones are filled."""
    return pad_dims(column, max(width, column.shape[1]), fill)[:, :width]
