"""The FP8 blocks a trainer shares with others, and what each of them found in these blocks: state without a socket.

A block that shard borders cut has the largest magnitude any of its holders found. Two trainers introduce themselves
with the blocks they have parts of, and then tell each other in every version what they found in the blocks both have.
For matrices with a single scale one holder, the hub, collects what all others found, and sends them the largest.

    sharing = Sharing(blocks, peers=[3])
    sharing.met(3, introduction)                         # trainer 3 has parts of these
    sharing.begin(7)
    sharing.found(0, values)                             # here, in group 0
    sharing.due(3)                                       # what trainer 3 has to be told now
    sharing.told(3, Finding(version=7, group=0, is_final=False), values)
    sharing.agreed(0)                                    # the largest of all, for every cut block of the group
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.codec.memory import Floats
from weft.errors import ProtocolError
from weft.runtime.compile.sharing import COLLECTED_ELSEWHERE, COLLECTED_HERE
from weft.runtime.control.columns import expand, squeeze

Int64s = NDArray[np.int64]
MAX_BLOCKS, MAX_NUMBERS = 1 << 40, 1 << 24
"""Limits of a run of blocks, and of a table of runs."""


class CutBlocks(NamedTuple):
    """Blocks of one group that others have parts of."""

    keys: Int64s
    """Numbers that all trainers know, sorted."""
    role: Int64s
    """Which trainer collects their magnitudes."""


class Finding(NamedTuple):
    """Identifies what a trainer tells another."""

    version: int
    group: int
    is_final: bool
    """Whether it is the overall largest, for blocks that the sender collects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _SharedBlocks:
    """What two trainers have in common, seen from one side: for each group, which of the blocks here."""

    told_found: list[Int64s]
    told_final: list[Int64s]
    heard_found: list[Int64s]
    heard_final: list[Int64s]

    def told(self, group: int, *, is_final: bool) -> Int64s:
        """What is told to the other trainer."""
        return (self.told_final if is_final else self.told_found)[group]

    def heard(self, group: int, *, is_final: bool) -> Int64s:
        """What the other trainer tells."""
        return (self.heard_final if is_final else self.heard_found)[group]


class Sharing:
    """One trainer's shared blocks, in one plan."""

    def __init__(self, blocks: Sequence[CutBlocks], *, peers: Collection[int]) -> None:
        """`blocks`: of each group. `peers`: trainers that have to introduce themselves before anything is agreed."""
        self._blocks, self._peers = blocks, frozenset(peers)
        self._introductions: dict[int, bytes] = {}
        self._links: dict[int, _SharedBlocks] = {}
        self._expected: Counter[tuple[int, bool]] = Counter()
        """Trainers that tell something of a group."""
        self._arrived: Counter[tuple[int, bool]] = Counter()
        """Trainers that have told it, in the version under way."""
        self._told: dict[int, dict[Finding, Floats]] = {}
        """For each trainer, what it told of the latest version it reported, which may be the next one here."""
        self._due: dict[int, list[tuple[int, bool]]] = {}
        self.version = -1
        self._found: dict[int, Floats] = {}
        self._collected: dict[int, Floats] = {}
        """For each group, the largest of what was found, once it is complete."""

    @cached_property
    def introduction(self) -> bytes:
        """The blocks here."""
        return _encoded(self._blocks)

    def met(self, peer: int, introduction: bytes) -> None:
        """A trainer has parts of these blocks. If repeated, everything is told again. Raises ProtocolError."""
        if self._introductions.get(peer, introduction) != introduction:
            raise ProtocolError(f"trainer {peer} introduced itself again with different blocks")
        if peer not in self._links:
            self._meet_first(peer, introduction)
        self._due[peer] = [(group, False) for group in self._found]
        self._due[peer] += [(group, True) for group in self._found if self._has_all(group, is_final=False)]

    def _meet_first(self, peer: int, introduction: bytes) -> None:
        self._links[peer] = link = self._link(_Runs.decode(introduction))
        self._introductions[peer] = introduction
        self._due[peer] = []
        for group in range(len(self._blocks)):
            for kind in (False, True):
                self._expected[group, kind] += len(link.heard(group, is_final=kind)) > 0
        for group in self._found:  # only this introduction may have been missing
            if self._has_all(group, is_final=False):
                self._tell_all(group, is_final=True)

    def _link(self, theirs: _Runs) -> _SharedBlocks:
        """What this trainer and another have in common. Two hubs of a matrix are treated like neighbours."""
        parts: tuple[list[Int64s], ...] = ([], [], [], [])
        for keys, role in self._blocks:
            here, others = theirs.find(keys)
            mine = role[here]
            is_direct = (mine == others) & (mine != COLLECTED_ELSEWHERE)
            goes = (mine == COLLECTED_ELSEWHERE) & (others == COLLECTED_HERE)
            comes = (mine == COLLECTED_HERE) & (others == COLLECTED_ELSEWHERE)
            for part, which in zip(parts, (is_direct | goes, comes, is_direct | comes, goes), strict=True):
                part.append(here[which])
        return _SharedBlocks(told_found=parts[0], told_final=parts[1], heard_found=parts[2], heard_final=parts[3])

    def begin(self, version: int) -> None:
        """A version is sent now."""
        self.version, self._found, self._collected = version, {}, {}
        self._due = {peer: [] for peer in self._links}
        early = (finding for told in self._told.values() for finding in told if finding.version == version)
        self._arrived = Counter((finding.group, finding.is_final) for finding in early)

    def found(self, group: int, values: Floats) -> None:
        """Magnitudes found here, in a group."""
        self._found[group] = values
        self._tell_all(group, is_final=False)
        if self._has_all(group, is_final=False):
            self._tell_all(group, is_final=True)

    def _tell_all(self, group: int, *, is_final: bool) -> None:
        for peer in self._links:
            self._due[peer].append((group, is_final))

    @property
    def groups_found(self) -> list[int]:
        """Groups whose magnitudes were found here, in the version under way."""
        return list(self._found)

    def due(self, peer: int) -> list[tuple[Finding, Floats]]:
        """What a trainer has to be told and was not told before."""
        due, self._due[peer] = self._due.get(peer, []), []
        link, found = self._links[peer], []
        for group, is_final in due:
            blocks = link.told(group, is_final=is_final)
            if len(blocks):
                values = self._all_found(group) if is_final else self._found[group]
                found.append((Finding(self.version, group, is_final), values[blocks]))
        return found

    def told(self, peer: int, finding: Finding, values: Floats) -> None:
        """A trainer found this, or collected it; it may be a version ahead. Raises ProtocolError."""
        link, (version, group, is_final) = self._links.get(peer), finding
        is_known = link is not None and 0 <= group < len(self._blocks)
        if link is None or not is_known or len(values) != len(link.heard(group, is_final=is_final)) or not len(values):
            raise ProtocolError(f"trainer {peer} sent {len(values)} magnitudes of group {group}, not as planned")
        told = self._told.setdefault(peer, {})
        newest = next(iter(told)).version if told else -1
        if version < newest or finding in told:
            return
        if version > newest:
            told.clear()
        told[finding] = values
        if version == self.version:
            self._arrived[group, is_final] += 1
            if not is_final and group in self._found and self._has_all(group, is_final=False):
                self._tell_all(group, is_final=True)

    def _has_all(self, group: int, *, is_final: bool) -> bool:
        """Whether all trainers have told what they found, or collected, of a group."""
        return self._links.keys() >= self._peers and (self._arrived[group, is_final] >= self._expected[group, is_final])

    def _all_found(self, group: int) -> Floats:
        """The largest of what was found of a group, here and elsewhere; nothing is missing."""
        if group not in self._collected:
            self._collected[group] = self._raised(self._found[group], group, is_final=False)
        return self._collected[group]

    def _raised(self, values: Floats, group: int, *, is_final: bool) -> Floats:
        """Values, or what others told of a group where that is larger."""
        largest = values.copy()
        for peer, link in self._links.items():
            told = self._told.get(peer, {}).get(Finding(self.version, group, is_final))
            if told is not None:
                at = link.heard(group, is_final=is_final)
                largest[at] = np.maximum(largest[at], told)
        return largest

    def agreed(self, group: int) -> Floats | None:
        """The largest of all for every block of a group; None while some are missing."""
        if group not in self._found or not all(self._has_all(group, is_final=kind) for kind in (False, True)):
            return None
        return self._raised(self._all_found(group), group, is_final=True)

    def missing(self) -> list[int]:
        """Trainers that have not told everything of what was found here."""
        return sorted(peer for peer in self._peers | self._links.keys() if not self._has_told(peer, self._found))

    def _has_told(self, peer: int, groups: Iterable[int]) -> bool:
        link, told = self._links.get(peer), self._told.get(peer, {})
        return link is not None and all(
            not len(link.heard(group, is_final=kind)) or Finding(self.version, group, kind) in told
            for group in groups
            for kind in (False, True)
        )


def _encoded(blocks: Sequence[CutBlocks]) -> bytes:
    """Blocks as runs of consecutive numbers: adjacent blocks have consecutive numbers."""
    none = np.zeros(0, dtype=np.int64)
    keys, role = (np.concatenate([none, *(group[column] for group in blocks)]) for column in (0, 1))
    order = np.argsort(keys, kind="stable")
    keys, role = keys[order], role[order]
    is_start = (np.diff(keys, prepend=-2) != 1) | (np.diff(role, prepend=-1) != 0)
    starts = np.flatnonzero(is_start)
    return squeeze({"first": keys[starts], "count": np.diff(np.append(starts, len(keys))), "role": role[starts]})


@dataclass(frozen=True, slots=True)
class _Runs:
    """Blocks of another trainer, as runs: never takes more memory than the message."""

    first: Int64s
    count: Int64s
    role: Int64s

    @classmethod
    def decode(cls, introduction: bytes) -> _Runs:
        """Raises ProtocolError."""
        runs = expand(introduction, ("first", "count", "role"), max_numbers=MAX_NUMBERS)
        first, count, role = runs["first"], runs["count"], runs["role"]
        is_table = first.ndim == 1 and first.shape == count.shape == role.shape
        if not is_table or (count < 1).any() or (count > MAX_BLOCKS).any():
            raise ProtocolError("table of FP8 blocks has runs of impossible length")
        if (first < 0).any() or (first >= 1 << 62).any() or (first[1:] < first[:-1] + count[:-1]).any():
            raise ProtocolError("table of FP8 blocks names blocks twice, or impossible ones")
        return cls(first, count, role)

    def find(self, keys: Int64s) -> tuple[Int64s, Int64s]:
        """Which of these blocks the other has parts of, and which trainer collects their magnitudes, as it sees it."""
        if not len(self.first):
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        run = np.maximum(np.searchsorted(self.first, keys, side="right") - 1, 0)
        here = np.flatnonzero((keys >= self.first[run]) & (keys < self.first[run] + self.count[run]))
        return here, self.role[run[here]]
