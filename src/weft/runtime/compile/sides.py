"""The shards of all members of one side, as one table: what matching, layouts and recipes are computed from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, count

import numpy as np
from numpy.typing import NDArray

from weft.runtime.control.held import HeldTable, concatenated

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """All trainers, or all engine ranks: their shards in the order of members."""

    held: HeldTable
    starts: dict[int, int]
    """The first shard of each member, by rank."""
    rank: Int64s
    """Rank of the member that holds each shard."""
    names: tuple[str, ...]
    """The distinct names of shards, in order of first appearance."""
    name: Int64s
    """Numbers in `names`."""

    @classmethod
    def of(cls, tables: Mapping[int, HeldTable]) -> Side:
        """What these ranks hold."""
        held = concatenated(list(tables.values()))
        numbers = dict(zip(dict.fromkeys(held.names), count(), strict=False))
        return cls(
            held=held,
            starts=dict(zip(tables, accumulate(map(len, tables.values()), initial=0), strict=False)),
            rank=np.repeat(np.array(list(tables), dtype=np.int64), [len(table) for table in tables.values()]),
            names=tuple(numbers),
            name=np.fromiter(map(numbers.__getitem__, held.names), dtype=np.int64, count=len(held)),
        )

    def rows_by_name(self) -> dict[str, int]:
        """The last shard of each name, and the first of each alias that is not a name."""
        rows = dict(zip(self.held.names, count(), strict=False))
        for row, aliases in self.held.aliases.items():
            for alias in aliases:
                rows.setdefault(alias, row)
        return rows

    def dtype_name(self, row: int) -> str:
        """The dtype of a shard."""
        return self.held.dtypes[self.held.dtype[row]]

    def shape(self, row: int) -> list[int]:
        """The shape of the tensor a shard belongs to."""
        return self.held.shape[row, : self.held.num_dims[row]].tolist()
