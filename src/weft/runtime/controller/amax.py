"""Agreeing on the largest magnitudes of FP8 blocks that lie on several trainers: the maximum of what they found.

The controller collects, group by group, what each holder found in its blocks and answers when the last one is there.
Only blocks that shard borders cut travel, four bytes each; which ones a trainer means it says once per plan.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from weft.codec.memory import Floats
from weft.errors import VersionError

Keys = NDArray[np.uint64]


class AmaxExchange:
    """What holders have found so far; belongs to one plan."""

    def __init__(self, holders: Mapping[int, frozenset[int]]) -> None:
        """For each group, the trainers that hold some of it."""
        self._holders = holders
        self._keys: dict[tuple[int, int], Keys] = {}
        self._spread: dict[int, _Spread] = {}
        self._found: dict[int, dict[int, Floats]] = {}
        """Group → trainer → what it found, in the version under way."""
        self._version: int | None = None
        self.num_bytes = 0
        """Bytes of magnitudes that came in and went out for the last version."""

    def add(self, version: int, trainer: int, group: int, keys: Keys, values: Floats) -> dict[int, Floats]:
        """One holder's magnitudes; returns what to answer to whom when a group is complete. Raises VersionError."""
        self.learn(trainer, group, keys)
        if version != self._version:
            self._version, self._found, self.num_bytes = version, {}, 0
        holders = self._holders.get(group, frozenset())
        known = self._keys.get((trainer, group), keys)
        found = self._found.setdefault(group, {})
        if trainer not in holders or trainer in found or len(known) != len(values):
            raise VersionError(f"trainer {trainer} sent {len(values)} magnitudes of group {group}, not as planned")
        found[trainer] = values
        self.num_bytes += values.nbytes
        if len(found) < len(holders):
            return {}
        answer = self._largest(group, found)
        self.num_bytes += sum(values.nbytes for values in answer.values())
        return answer

    def learn(self, trainer: int, group: int, keys: Keys) -> None:
        """Which blocks a trainer means, from now on."""
        if len(keys) and trainer in self._holders.get(group, frozenset()):
            self._keys[trainer, group] = keys
            self._spread.pop(group, None)

    def _largest(self, group: int, found: Mapping[int, Floats]) -> dict[int, Floats]:
        if group not in self._spread:
            none = np.zeros(0, dtype=np.uint64)
            self._spread[group] = _Spread({t: self._keys.get((t, group), none) for t in sorted(found)})
        return self._spread[group].largest(found)


class _Spread:
    """The blocks of one group, in the order of their keys: sorted once per plan."""

    def __init__(self, keys: Mapping[int, Keys]) -> None:
        self._trainers = list(keys)
        joined = np.concatenate([*keys.values(), np.zeros(0, dtype=np.uint64)])
        self._order = np.argsort(joined, kind="stable")
        is_first = np.diff(joined[self._order], prepend=np.uint64(0)) > 0
        is_first[:1] = True
        self._first = np.flatnonzero(is_first)
        self._block = np.empty(len(joined), dtype=np.int64)
        self._block[self._order] = np.cumsum(is_first) - 1
        self._ends = np.cumsum([len(mine) for mine in keys.values()]).tolist()

    def largest(self, found: Mapping[int, Floats]) -> dict[int, Floats]:
        """For each trainer the maximum over all holders of its blocks."""
        values = np.concatenate([found[trainer] for trainer in self._trainers])
        agreed = values
        if len(values):
            agreed = np.maximum.reduceat(values[self._order], self._first)[self._block]
        begins = [0, *self._ends[:-1]]
        return {t: agreed[a:b] for t, a, b in zip(self._trainers, begins, self._ends, strict=True)}
