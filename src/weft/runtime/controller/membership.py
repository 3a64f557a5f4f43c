"""A controller's members, those that are gone, and rounds of opening transports. State without a socket.

A round begins when all members have joined, or as many as `attendance` requires: all of these open the transports
chosen for their links and report what can be written. What was opened in an earlier round does not count.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from weft.config import DeltaPolicy, ReceiverMode, TransferSettings
from weft.devices import CPU, memory_kind
from weft.errors import ProtocolError, TransportUnavailable
from weft.runtime.control.channel import member_of
from weft.runtime.control.member_id import MemberId
from weft.runtime.control.messages import Blocked, Join, Opened
from weft.runtime.controller.attendance import Attendance, Numbers, attend, named
from weft.transport.registry import Choice, Place, choose

Side = Literal["trainer", "engine"]
MAX_CLOCK_STEP_NS = 86_400 * 10**9
"""How far the clocks of two controllers may differ."""
MAX_NICS = 16
"""Maximum NICs shown per member."""


@dataclass(slots=True)
class Member:
    """One process."""

    connection: str
    """Identifies the process behind the member: a replaced process is told apart from its successor."""
    member: MemberId
    join: Join
    incarnation: int
    last_heard: float
    opened: Opened | None = None
    blocked: str = ""
    """Why it cannot open, where it has to wait."""
    waits_since: float | None = None
    """Since when it has waited for its engine's thread, if that is why."""
    transports: dict[int, str] = field(default_factory=dict)
    """The transport it uses in this round for each rank of the other side."""


class Membership:
    """Members, those that are gone, and the round they are in."""

    def __init__(self, numbers: Numbers) -> None:
        self.num = {"trainer": numbers.num_trainers, "engine": numbers.num_engine_ranks}
        self.ranks_per_engine = numbers.ranks_per_engine
        self._numbers = numbers
        self.members: dict[MemberId, Member] = {}
        self._by_connection: dict[str, Member] = {}
        self.lost: dict[MemberId, str] = {}
        """Members that are gone, and why; until they join again."""
        self.round = secrets.randbits(40)
        """Rounds of different controllers have different numbers, so their messages are not confused."""
        self.has_plan = False
        """Whether all that take part in this round have their parts of its plan."""
        self.settled: set[int] = set()
        """Incarnations of trainers that are gone and were not writing; engines hear of them in their next round."""
        self.abandoned: set[int] = set()
        """Engine ranks to which writes that a trainer gave up may still be in flight."""
        self._newest: dict[MemberId, int] = {}
        self._open: dict[str, set[int]] = {side: set() for side in self.num}
        """Ranks that have opened in this round."""
        self._asked: dict[str, set[int]] = {side: set() for side in self.num}
        """Ranks that take part in this round, as far as they are still there."""
        self._is_short = False
        """Whether one of them was lost before all had their parts of the plan."""
        self._as_planned: set[MemberId] | None = None
        """Members for which the plan was made as they are now; None: there is no plan."""
        self._attendance: Attendance | None = None

    def objection(self, member: str) -> str | None:
        """Why a process cannot join under this name; None if it can."""
        named = MemberId.parse(member)
        if named is None or named.side not in self.num:
            return f"`{member}` is neither a trainer nor an engine"
        count = self.num[named.side]
        return None if named.rank < count else f"{member} is out of range: the {named.side} ranks are 0 to {count - 1}"

    def incarnation_of(self, join: Join) -> int:
        """A process's number: when it was created, by this clock, unless a controller has numbered it before.

        Raises ProtocolError if a newer process of its rank is known: a process that was stopped for a while and
        replaced must not replace its successor.
        """
        now = time.time_ns()
        number = join.incarnation or max(now - int(join.age_s * 1e9), 1)
        if number > now + MAX_CLOCK_STEP_NS:
            raise ProtocolError(f"{join.member} claims incarnation {number}, which is in the future")
        newest = self._newest.get(join.member, 0)
        if number < newest:
            raise ProtocolError(
                f"a newer process has joined as {join.member}", hint="end this one: each rank must be one process"
            )
        return number

    def add(self, connection: str, join: Join, incarnation: int) -> None:
        """A process has joined."""
        member = join.member
        self.remove(member, "was replaced")
        self.members[member] = self._by_connection[connection] = Member(
            connection, member, join, incarnation, time.monotonic()
        )
        self.lost.pop(member, None)
        self._attendance = None
        self._learn(member, incarnation)
        for other in join.offered:
            self._learn(MemberId.trainer(other.rank), min(other.incarnation, time.time_ns()))

    def _learn(self, member: MemberId, incarnation: int) -> None:
        """The newest incarnation of a member, as far as is known."""
        if 0 <= member.rank < self.num[member.side]:
            self._newest[member] = max(self._newest.get(member, 0), incarnation)

    @property
    def blocked(self) -> dict[MemberId, str]:
        """Members of this round that wait for lost writers, and why."""
        return {known.member: known.blocked for known in self._waiting if known.waits_since is None}

    @property
    def _waiting(self) -> list[Member]:
        return [known for known in self.taking_part if known.blocked]

    def waiting_since(self, moment: float) -> list[int]:
        """Engine ranks that have waited for their engine's thread since then, or longer."""
        waits = [(known.join.rank, known.waits_since) for known in self._waiting]
        return sorted(rank for rank, since in waits if since is not None and since <= moment)

    def can_do_without(self, ranks: Collection[int]) -> bool:
        """Whether another round could begin without the engines of these ranks, and none has ended yet."""
        gone = {MemberId.engine(other) for rank in ranks for other in self.ranks_of(rank // self.ranks_per_engine)}
        planned = None if self._as_planned is None else self._as_planned - gone
        return not self.has_plan and not attend(self.members.keys() - gone, planned, self._numbers).missing

    def remove(self, member: MemberId, how: str) -> Member | None:
        """A member is gone; None if it was not there."""
        known = self.members.pop(member, None)
        if known is not None:
            del self._by_connection[known.connection]
            self.lost[member] = how
            self._attendance = None
            self._open[member.side].discard(member.rank)
            self._is_short |= not self.has_plan and member.rank in self._asked[member.side]
            self._asked[member.side].discard(member.rank)
            if self._as_planned is not None:
                self._as_planned.discard(member)
        return known

    def remove_all(self) -> None:
        """Remove all members."""
        self.members.clear()
        self._by_connection.clear()
        self._attendance = None
        self._forget_opened()
        self._asked = {side: set() for side in self.num}
        if self._as_planned is not None:
            self._as_planned.clear()

    def _forget_opened(self) -> None:
        self._open = {side: set() for side in self.num}
        for known in self.members.values():
            known.blocked, known.waits_since = "", None

    @property
    def attendance(self) -> Attendance:
        """Who would take part in a round that begins now."""
        if self._attendance is None:
            self._attendance = attend(self.members.keys(), self._as_planned, self._numbers)
        return self._attendance

    def recognise(self, members: Iterable[MemberId]) -> None:
        """The plan was made for these as they are now."""
        self._attendance = None
        self._as_planned = (self._as_planned or set()).union(members)

    @property
    def needs_round(self) -> bool:
        """Whether another round would have members that this one lacks, or this one lost some before it was planned."""
        has_trainers = len(self._asked["trainer"]) == self.num["trainer"]
        return self._is_short or not has_trainers or not self.attendance.engines <= self._asked["engine"]

    def begin_round(self) -> None:
        """What was opened so far no longer counts."""
        self.round += 1
        self.has_plan, self._is_short = False, False
        self._forget_opened()
        self._asked = {"trainer": set(range(self.num["trainer"])), "engine": set(self.attendance.engines)}

    def block(self, known: Member, blocked: Blocked) -> None:
        """An engine rank cannot open yet; what it says of an earlier round does not count."""
        is_present = blocked.round == self.round
        known.blocked = blocked.reason if is_present else ""
        waits = is_present and blocked.by_thread
        known.waits_since = (known.waits_since or time.monotonic()) if waits else None

    def complete_round(self) -> None:
        """All that take part have their parts of the plan. Its engines have heard of trainers that are gone."""
        self.has_plan = True
        self.abandoned -= self._open["engine"]
        if self.is_complete:
            self.settled.clear()

    @property
    def taking_part(self) -> list[Member]:
        """Members of this round that are still there."""
        return [known for member, known in self.members.items() if member.rank in self._asked[member.side]]

    def takes_part(self, member: MemberId) -> bool:
        """Whether a member was asked to open in this round."""
        return member.rank in self._asked[member.side]

    def open(self, known: Member, opened: Opened) -> None:
        """A member has opened transports in this round."""
        known.opened, known.blocked, known.waits_since = opened, "", None
        self._open[known.join.side].add(known.join.rank)

    def name_of(self, connection: str) -> MemberId:
        """The member a connection speaks for, whether or not it has joined."""
        named = MemberId.parse(member_of(connection))
        assert named is not None, connection  # others are not admitted
        return named

    def behind(self, connection: str) -> Member | None:
        """The member that speaks through a connection now."""
        return self._by_connection.get(connection)

    @property
    def is_complete(self) -> bool:
        """Whether all members have joined."""
        return len(self.members) == sum(self.num.values())

    @property
    def has_opened(self) -> bool:
        """Whether all that take part in this round have opened transports."""
        return bool(self._asked["trainer"]) and not self._is_short and self._open == self._asked

    def joins(self, side: Side) -> dict[int, Join]:
        """What members of a side said when they joined, by rank."""
        joins = [known.join for known in self.members.values() if known.join.side == side]
        return {join.rank: join for join in sorted(joins, key=lambda join: join.rank)}

    def opened(self, side: Side) -> dict[int, Opened]:
        """What members of a side have opened in this round, by rank."""
        mine = [known for member, known in self.members.items() if member.side == side]
        return {
            known.join.rank: known.opened
            for known in mine
            if known.opened is not None and known.join.rank in self._open[side]
        }

    def open_ranks(self, side: Side) -> set[int]:
        """Ranks that are present and open in this round."""
        return self._open[side]

    def ranks_of(self, engine: int) -> range:
        """The ranks of one engine."""
        return range(engine * self.ranks_per_engine, (engine + 1) * self.ranks_per_engine)

    def live_engines(self) -> list[int]:
        """Engines of which every rank is present and open."""
        return self._whole_engines(self.open_ranks("engine"))

    def _whole_engines(self, ranks: set[int]) -> list[int]:
        """Engines of which these are all ranks."""
        engines = range(self.num["engine"] // self.ranks_per_engine)
        if len(ranks) == self.num["engine"]:
            return list(engines)
        return [engine for engine in engines if ranks.issuperset(self.ranks_of(engine))]

    def silent_for(self, silence_s: float) -> dict[MemberId, float]:
        """Members that have been silent for too long, and for how long."""
        now = time.monotonic()
        silent = {member: now - known.last_heard for member, known in self.members.items()}
        return {member: seconds for member, seconds in silent.items() if seconds > silence_s}

    def hosts(self) -> list[str]:
        """One line for each host: its members, and which RDMA cards they see."""
        by_host: dict[str, list[Join]] = {}
        for join in (*self.joins("trainer").values(), *self.joins("engine").values()):
            by_host.setdefault(join.place.host, []).append(join)
        lines = []
        for host, joins in by_host.items():
            members = ", ".join(str(join.member) for join in joins)
            nics = ", ".join(dict.fromkeys(nic for join in joins for nic in join.place.nics[:MAX_NICS]))
            lines.append(f"host {host[:8]}: {members}; RDMA cards: {nics or 'none'}")
        return lines

    def use(self, links: Mapping[tuple[int, int], Choice]) -> None:
        """These transports were chosen for the links of this round; those of other engines are not opened."""
        for known in self.members.values():
            known.transports = {}
        for (trainer, engine), choice in links.items():
            if engine in self._asked["engine"]:
                self.members[MemberId.trainer(trainer)].transports[engine] = choice.transport
                self.members[MemberId.engine(engine)].transports[trainer] = choice.transport

    @property
    def obstacle(self) -> str:
        """What the round needs from members; empty if enough have joined and opened."""
        found = self.attendance
        if found.missing:
            return f"waiting for {named(found.missing)} to join" + (f": {found.why}" if found.why else "")
        waits = [known.blocked for known in self._waiting]
        if waits:
            return named(waits)
        members = [*self._numbers.trainers, *map(MemberId.engine, sorted(found.engines))]
        closed = [member for member in members if member.rank not in self._open[member.side]]
        return f"waiting for {named(closed)} to open memory" if closed else ""

    def left_out(self, member: MemberId) -> str:
        """What a member waits for that can take no part although others do; empty if it can."""
        found = self.attendance
        if found.missing or member.side == "trainer" or member.rank in found.engines:
            return ""
        absent = [rank for ranks in self._numbers.engines for rank in ranks if rank not in self.members]
        return f"waiting for {named(absent)} to join"


def choose_links(
    trainers: Mapping[int, Join], engines: Mapping[int, Join], settings: TransferSettings
) -> dict[tuple[int, int], Choice]:
    """The transport of every link between a trainer and an engine rank."""
    own = settings.mode is ReceiverMode.SHADOW or settings.delta is DeltaPolicy.ON  # weft's own memory is written
    joins = (*trainers.values(), *engines.values())
    passes_host = len({memory_kind(join.place.device) for join in joins}) > 1
    places = {}
    for engine, dst in engines.items():
        shareable = own or dst.place.shareable or (passes_host and dst.place.device != CPU)
        places[engine] = msgspec.structs.replace(_linked(dst.place, passes_host), shareable=shareable)
    sources = {trainer: _linked(join.place, passes_host) for trainer, join in trainers.items()}
    chosen: dict[tuple[int, int], Choice] = {}
    problems: dict[tuple[int, int], TransportUnavailable] = {}
    for trainer, source in sources.items():
        for engine, place in places.items():
            try:
                chosen[trainer, engine] = choose(
                    source, place, wanted=settings.transport, allow_fallback=settings.allow_fallback
                )
            except TransportUnavailable as error:
                problems[trainer, engine] = error
    if problems:
        first = next(iter(problems.values()))
        raise TransportUnavailable(str(first), hint=first.hint, members=_unlinked(set(problems), sources, places))
    return chosen


def _unlinked(impossible: Set[tuple[int, int]], trainers: Collection[int], engines: Collection[int]) -> tuple[str, ...]:
    """Members none of whose links is possible, if other members have links: they differ from the others."""
    alone = [MemberId.trainer(t) for t in trainers if all((t, engine) in impossible for engine in engines)]
    alone += [MemberId.engine(e) for e in engines if all((trainer, e) in impossible for trainer in trainers)]
    return tuple(map(str, alone)) if len(impossible) < len(trainers) * len(engines) else ()


def _linked(place: Place, passes_host: bool) -> Place:
    """Where the memory lies that transports move for a member."""
    return msgspec.structs.replace(place, device=CPU) if passes_host else place
