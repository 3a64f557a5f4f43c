"""Which of a member's shards holds a row of a layout: the plan is in rows, members report shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from weft.core.geometry.boxes import Ints, pad_dims
from weft.core.geometry.fingerprint import mix
from weft.core.layout import Layout
from weft.runtime.control.held import HeldTable

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowNumbers:
    """The rows of a layout that a member holds, in order, and the number of its shard behind each.

    numbers[rows]                       # the shards' numbers; -1: not held
    """

    rows: Int64s
    shards: Int64s

    def __getitem__(self, rows: Ints) -> Int64s:
        if not len(self.rows):
            return np.full(len(rows), -1, dtype=np.int64)
        at = np.minimum(np.searchsorted(self.rows, rows), len(self.rows) - 1)
        return np.where(self.rows[at] == rows, self.shards[at], -1)


class LayoutRows:
    """The rows of a layout, found by name and box."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        names = [tensor.name for tensor in layout.tensors]
        self._number = {name: number for number, name in enumerate(dict.fromkeys(names))}
        name = np.fromiter(map(self._number.__getitem__, names), dtype=np.int64, count=len(names))
        self._name = name[layout.tensor_of]

    def numbers(self, rank: int, held: HeldTable, lo: Int64s) -> RowNumbers:
        """Which rows a member holds, with which shards. `lo`: where these begin, in the layout's coordinates."""
        layout = self._layout
        rows = np.flatnonzero(layout.groups.contain(layout.group_of, np.full(len(layout.lo), rank)))
        width = max(layout.num_dims, lo.shape[1])
        found = np.full(len(rows), -1, dtype=np.int64)
        wanted = _boxes(self._name[rows], layout.lo[rows], layout.extent[rows], width)
        for name, shard in self._names(held):
            mine = _boxes(name, lo[shard], held.extent[shard], width)
            at = self._last_named(name, mine, wanted)
            others = np.flatnonzero(at < 0)
            at[others] = _last_equal(mine, wanted[others])
            found[at >= 0] = shard[at[at >= 0]]
        return RowNumbers(rows[found >= 0], found[found >= 0])

    def _last_named(self, name: Int64s, table: Int64s, wanted: Int64s) -> Int64s:
        """For every wanted row, the last one of a table with its name, if it is equal; -1 otherwise.

        Most members hold one shard per tensor: nothing else has to be searched.
        """
        last = np.full(len(self._number) + 1, -1, dtype=np.int64)  # the last entry is for names not in the layout
        last[name] = np.arange(len(name))
        at = last[wanted[:, 0]]
        is_equal = (at >= 0) & (table[at] == wanted).all(axis=1) if len(table) else np.zeros(len(at), dtype=bool)
        return np.where(is_equal, at, -1)

    def _names(self, held: HeldTable) -> Iterator[tuple[Int64s, Int64s]]:
        """Numbers of the names of shards, with the shards: aliases first, because names take precedence."""
        pairs = [(alias, shard) for shard, aliases in held.aliases.items() for alias in aliases]
        if pairs:
            yield self._looked_up([alias for alias, _ in pairs]), np.array([shard for _, shard in pairs])
        yield self._looked_up(held.names), np.arange(len(held))

    def _looked_up(self, names: Sequence[str]) -> Int64s:
        return np.fromiter(map(self._number.get, names, repeat(-1)), dtype=np.int64, count=len(names))


def _boxes(name: Int64s, lo: Ints, extent: Ints, width: int) -> Int64s:
    """A table of names and boxes."""
    columns = (name[:, None], pad_dims(lo, width, 0), pad_dims(extent, width, 1))
    return np.concatenate(columns, axis=1).astype(np.int64)


def _last_equal(table: Int64s, wanted: Int64s) -> Int64s:
    """For every wanted row, the last equal one of a table; -1 if there is none."""
    if not len(table) or not len(wanted):
        return np.full(len(wanted), -1, dtype=np.int64)
    none = np.zeros(1, dtype=np.uint64)
    keys, wanted_keys = (mix(np.repeat(none, len(rows)), rows) for rows in (table, wanted))
    order = np.argsort(keys, kind="stable")
    at = order[np.maximum(np.searchsorted(keys[order], wanted_keys, side="right") - 1, 0)]
    return np.where((table[at] == wanted).all(axis=1), at, -1)
