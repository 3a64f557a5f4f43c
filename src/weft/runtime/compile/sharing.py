"""Which trainers hold parts of the same FP8 blocks and have to exchange magnitudes.

Holders of a block that shard borders cut exchange them directly: a border has few sides. A matrix with a single scale
lies on all trainers; there one holder, the hub, collects the magnitudes of all others and sends them the largest. Where
several trainers hold the same shard, any of them will do: all hold the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from weft.core.geometry.fingerprint import distinct_rows
from weft.core.layout import RankGroups
from weft.core.plans.plan import Plan
from weft.core.streams.exchange import ScaleGroups

Int64s = NDArray[np.int64]
DIRECT, COLLECTED_HERE, COLLECTED_ELSEWHERE = range(3)
"""Which trainer collects the magnitudes of a matrix, as one trainer sees it."""
NO_HUB = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbours:
    """Trainers that exchange magnitudes."""

    pairs: frozenset[tuple[int, int]]
    """Which trainer connects to which: those with fewer neighbours to those with more."""
    hub: Int64s
    """For every trainer tensor: the group of ranks of its hub, or `NO_HUB`."""

    @classmethod
    def of(cls, plan: Plan, groups: ScaleGroups) -> Neighbours:
        """From the shards of the quantised matrices."""
        cut = _CutShards(plan, groups)
        return cls(pairs=frozenset(_directed(_trainer_pairs(cut.touching(), plan.trainer.groups))), hub=cut.hub)

    def servers_of(self, trainer: int) -> list[int]:
        """Those a trainer connects to."""
        return sorted(server for client, server in self.pairs if client == trainer)

    def clients_of(self, trainer: int) -> list[int]:
        """Those that connect to a trainer."""
        return sorted(client for client, server in self.pairs if server == trainer)

    def roles(self, ranks: RankGroups, trainer: int, tensors: Int64s) -> Int64s:
        """Which trainer collects the magnitudes of these tensors."""
        hubs = self.hub[tensors]
        number = np.repeat(np.arange(len(ranks.sizes)), ranks.sizes)
        is_mine = np.isin(hubs, number[ranks.members == trainer])
        return np.where(hubs == NO_HUB, DIRECT, np.where(is_mine, COLLECTED_HERE, COLLECTED_ELSEWHERE))


class _CutShards:
    """Shards whose borders cut blocks, sorted by tensor."""

    def __init__(self, plan: Plan, groups: ScaleGroups) -> None:
        layout = plan.trainer
        shards = np.flatnonzero(groups.group[layout.tensor_of] >= 0)
        side, shape = plan.recipe.block_sides(layout)[:, :2], layout.shapes[:, :2]
        tensor = layout.tensor_of[shards]
        lo, end = layout.lo[shards, :2], layout.lo[shards, :2] + layout.extent[shards, :2]
        is_cut = ((lo % side[tensor] != 0) | ((end % side[tensor] != 0) & (end < shape[tensor]))).any(axis=1)
        lo, end = lo[is_cut] // side[tensor[is_cut]], -(-end[is_cut] // side[tensor[is_cut]])
        self._ranks, self._tensor = layout.group_of[shards[is_cut]], tensor[is_cut]
        self._distinct, number = distinct_rows(np.concatenate([self._ranks[:, None], lo, end], axis=1))
        order = np.lexsort((number, self._tensor))
        self._ranks, self._tensor, self._number = self._ranks[order], self._tensor[order], number[order]
        has_one_block = (side >= shape).all(axis=1)
        self.hub = np.full(len(layout.tensors), len(layout.groups.sizes), dtype=np.int64)
        np.minimum.at(self.hub, self._tensor, self._ranks)
        self.hub[~has_one_block | (self.hub == len(layout.groups.sizes))] = NO_HUB

    def touching(self) -> set[tuple[int, int]]:
        """Pairs of rank groups that have to exchange magnitudes."""
        found: set[tuple[int, int]] = set()
        for ranks, first, last in self._kinds(self.hub[self._tensor] == NO_HUB):
            meet = np.triu((first[:, None] < last).all(axis=2) & (first < last[:, None]).all(axis=2), k=1)
            mine, theirs = np.nonzero(meet)
            found.update(zip(ranks[mine].tolist(), ranks[theirs].tolist(), strict=True))
        for ranks, _, _ in self._kinds(self.hub[self._tensor] != NO_HUB):
            found.update((int(ranks.min()), other) for other in ranks.tolist())
        return found

    def _kinds(self, which: NDArray[np.bool_]) -> Iterator[tuple[Int64s, Int64s, Int64s]]:
        """Once for tensors that are cut alike: the groups of ranks that hold their shards, and the blocks of each."""
        tensor, number = self._tensor[which], self._number[which]
        starts = np.flatnonzero(np.diff(tensor, prepend=-1))
        sizes = np.diff(np.append(starts, len(tensor)))
        for size in np.unique(sizes).tolist():
            for kind in distinct_rows(number[starts[sizes == size][:, None] + np.arange(size)])[0]:
                table = self._distinct[kind]
                yield table[:, 0], table[:, 1:3], table[:, 3:]


def _trainer_pairs(touching: Iterable[tuple[int, int]], ranks: RankGroups) -> set[tuple[int, int]]:
    """Trainers that exchange magnitudes: every member of a group with one member of the other."""
    found: set[tuple[int, int]] = set()
    for pair in touching:
        sides = [ranks.members[ranks.starts[group] : ranks.starts[group + 1]].tolist() for group in pair]
        for mine, theirs in (sides, sides[::-1]):
            for number, trainer in enumerate(mine):
                if trainer not in theirs:
                    other = theirs[number % len(theirs)]
                    found.add((min(trainer, other), max(trainer, other)))
    return found


def _directed(pairs: set[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Client and server of each pair."""
    ends = sorted(trainer for pair in pairs for trainer in pair)
    count = {trainer: len(list(same)) for trainer, same in groupby(ends)}
    for a, b in pairs:
        yield (b, a) if (count[a], -a) > (count[b], -b) else (a, b)
