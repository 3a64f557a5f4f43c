"""Who takes part in the next round: all members, or, with a quorum and a plan, those that are there. Pure.

The first plan needs all members. From then on the weights and places of all of them are known: engines that are away
are left out if enough others are there, with all their ranks and as planned. Nothing is planned again for that.

    numbers = Numbers(num_trainers=1, num_engine_ranks=4, ranks_per_engine=2, needed_engines=1)
    found = attend(present, as_planned, numbers)
    found.engines       # {0, 1}: engine 2 or 3 is away
    found.missing       # (): no round has to wait for it
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from weft.runtime.control.member_id import MemberId

MAX_NAMED = 4
"""Maximum members named in a list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """How many members a fleet has, and how many of its engines a version needs."""

    num_trainers: int
    num_engine_ranks: int
    ranks_per_engine: int
    needed_engines: int

    @property
    def has_quorum(self) -> bool:
        """Whether versions may go on without some engines."""
        return self.needed_engines * self.ranks_per_engine < self.num_engine_ranks

    @property
    def trainers(self) -> list[MemberId]:
        """All trainers."""
        return [MemberId.trainer(rank) for rank in range(self.num_trainers)]

    @property
    def engines(self) -> list[list[MemberId]]:
        """The ranks of every engine."""
        size = self.ranks_per_engine
        starts = range(0, self.num_engine_ranks, size)
        return [[MemberId.engine(rank) for rank in range(start, start + size)] for start in starts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attendance:
    """Who takes part in the next round beside all trainers, or why it cannot begin."""

    engines: frozenset[int] = frozenset()
    """Engine ranks."""
    missing: tuple[MemberId, ...] = ()
    """Members that have to join first; none if the round can begin."""
    why: str = ""
    """Why a quorum of engines is not enough, if one is there."""


def attend(present: Set[MemberId], as_planned: Set[MemberId] | None, numbers: Numbers) -> Attendance:
    """Who takes part. `as_planned`: those present for which the plan was made as they are; None: there is no plan."""
    trainers, engines = numbers.trainers, numbers.engines
    ranks = [rank for engine in engines for rank in engine]
    absent = tuple(member for member in (*trainers, *ranks) if member not in present)
    if not absent:
        return Attendance(engines=_numbers_of(ranks))
    why = _why_all(present, as_planned, numbers) if numbers.has_quorum else ""
    whole = [engine for engine in engines if set(engine) <= (as_planned or set())]
    if why or len(whole) < numbers.needed_engines:
        return Attendance(missing=absent, why=why)
    if not present >= set(trainers):
        return Attendance(missing=tuple(member for member in absent if member.side == "trainer"))
    return Attendance(engines=_numbers_of(rank for engine in whole for rank in engine))


def _why_all(present: Set[MemberId], as_planned: Set[MemberId] | None, numbers: Numbers) -> str:
    """Why all members are needed; empty if a quorum is enough."""
    if as_planned is None:
        return "the first plan needs all members"
    changed = [trainer for trainer in numbers.trainers if trainer in present and trainer not in as_planned]
    return f"{named(changed)} has changed, and a new plan needs all members" if changed else ""


def _numbers_of(members: Iterable[MemberId]) -> frozenset[int]:
    return frozenset(member.rank for member in members)


def named(members: Sequence[MemberId | str]) -> str:
    """Members by name, or what they say, if they are few."""
    shown = ", ".join(map(str, members[:MAX_NAMED]))
    return shown if len(members) <= MAX_NAMED else f"{shown} and {len(members) - MAX_NAMED} others"
