"""A controller's members, those that are gone, and rounds of opening transports. State without a socket.

A round begins when all members have joined: all open the transports chosen for their links and report what can be
written. What was opened in an earlier round does not count.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from weft.config import DeltaPolicy, ReceiverMode, TransferSettings
from weft.devices import CPU, memory_kind
from weft.errors import ProtocolError, TransportUnavailable
from weft.runtime.control.channel import member_of
from weft.runtime.control.member_id import MemberId
from weft.runtime.control.messages import Blocked, Join, Opened
from weft.transport.registry import Choice, Place, choose

Side = Literal["trainer", "engine"]
MAX_CLOCK_STEP_NS = 86_400 * 10**9
"""How far the clocks of two controllers may differ."""
MAX_NICS = 16
"""Maximum NICs shown per member."""
MAX_NAMED = 4
"""Maximum members named in a list."""


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

    def __init__(self, *, num_trainers: int, num_engine_ranks: int, ranks_per_engine: int) -> None:
        self.num = {"trainer": num_trainers, "engine": num_engine_ranks}
        self.ranks_per_engine = ranks_per_engine
        self.members: dict[MemberId, Member] = {}
        self._by_connection: dict[str, Member] = {}
        self.lost: dict[MemberId, str] = {}
        """Members that are gone, and why; until they join again."""
        self.round = secrets.randbits(40)
        """Rounds of different controllers have different numbers, so their messages are not confused."""
        self.has_plan = False
        """Whether all have their parts of this round's plan."""
        self.settled: set[int] = set()
        """Incarnations of trainers that are gone and were not writing; engines hear of them in the next round."""
        self.abandoned: set[int] = set()
        """Engine ranks to which writes that a trainer gave up may still be in flight."""
        self._newest: dict[MemberId, int] = {}
        self._open: dict[str, set[int]] = {side: set() for side in self.num}
        """Ranks that have opened in this round."""
        self._asked: set[MemberId] = set()
        """Members that were asked to open in this round, and are still there."""

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
        self._learn(member, incarnation)
        for other in join.offered:
            self._learn(MemberId.trainer(other.rank), min(other.incarnation, time.time_ns()))

    def _learn(self, member: MemberId, incarnation: int) -> None:
        """The newest incarnation of a member, as far as is known."""
        if 0 <= member.rank < self.num[member.side]:
            self._newest[member] = max(self._newest.get(member, 0), incarnation)

    @property
    def blocked(self) -> dict[MemberId, str]:
        """Members that wait for lost writers, and why."""
        waits = {member: known for member, known in self.members.items() if known.blocked}
        return {member: known.blocked for member, known in waits.items() if known.waits_since is None}

    def waiting_since(self, moment: float) -> list[int]:
        """Engine ranks that have waited for their engine's thread since then, or longer."""
        waits = [(known.join.rank, known.waits_since) for known in self.members.values()]
        return sorted(rank for rank, since in waits if since is not None and since <= moment)

    def remove(self, member: MemberId, how: str) -> Member | None:
        """A member is gone; None if it was not there."""
        known = self.members.pop(member, None)
        if known is not None:
            del self._by_connection[known.connection]
            self.lost[member] = how
            self._open[known.join.side].discard(known.join.rank)
            self._asked.discard(member)
        return known

    def remove_all(self) -> None:
        """Remove all members."""
        self.members.clear()
        self._by_connection.clear()
        self._forget_opened()

    def begin_round(self) -> None:
        """What was opened so far no longer counts."""
        self.round += 1
        self.has_plan = False
        self._forget_opened()

    def _forget_opened(self) -> None:
        self._open, self._asked = {side: set() for side in self.num}, set()
        for known in self.members.values():
            known.blocked, known.waits_since = "", None

    def block(self, known: Member, blocked: Blocked) -> None:
        """An engine rank cannot open yet; what it says of an earlier round does not count."""
        is_present = blocked.round == self.round
        known.blocked = blocked.reason if is_present else ""
        waits = is_present and blocked.by_thread
        known.waits_since = (known.waits_since or time.monotonic()) if waits else None

    def open(self, known: Member, opened: Opened) -> None:
        """A member has opened transports in this round."""
        known.opened, known.blocked, known.waits_since = opened, "", None
        self._open[known.join.side].add(known.join.rank)

    def was_asked(self, known: Member) -> bool:
        """Whether a member was asked to open in this round, since it has joined."""
        return known.member in self._asked

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
        """Whether all members have joined and have opened transports in this round."""
        return all(len(self._open[side]) == count for side, count in self.num.items())

    @property
    def rest_has_opened(self) -> bool:
        """Whether all members have opened in this round that were asked to and were not lost since."""
        return len(self._asked) == sum(map(len, self._open.values()))

    def can_end_round(self, *, needed_engines: int, without: Collection[int] = ()) -> bool:
        """Whether all trainers and enough engines are there to get a plan in this round, and have none yet.

        `without`: engine ranks that are not waited for.
        """
        if self.has_plan:
            return False
        engines = {member.rank for member in self._asked if member.side == "engine"}
        num_trainers, whole = len(self._asked) - len(engines), self._whole_engines(engines - set(without))
        return num_trainers == self.num["trainer"] and len(whole) >= needed_engines

    def joins(self, side: Side) -> dict[int, Join]:
        """What members of a side said when they joined, by rank."""
        joins = [known.join for known in self.members.values() if known.join.side == side]
        return {join.rank: join for join in sorted(joins, key=lambda join: join.rank)}

    def opened(self, side: Side) -> dict[int, Opened]:
        """What members of a side have opened, by rank."""
        mine = [known for known in self.members.values() if known.join.side == side]
        return {known.join.rank: known.opened for known in mine if known.opened is not None}

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
        """These transports were chosen for this round, and members are asked to open them."""
        self._asked = set(self.members)
        for known in self.members.values():
            known.transports = {}
        for (trainer, engine), choice in links.items():
            self.members[MemberId.trainer(trainer)].transports[engine] = choice.transport
            self.members[MemberId.engine(engine)].transports[trainer] = choice.transport

    @property
    def obstacle(self) -> str:
        """What the round needs from members; empty if all have joined and opened."""
        if self.has_opened:
            return ""
        members = [MemberId(side, rank) for side, count in self.num.items() for rank in range(count)]
        missing = [member for member in members if member not in self.members]
        if missing:
            return f"waiting for {_named(missing)} to join"
        waits = [known.blocked for known in self.members.values() if known.blocked]
        if waits:
            return _named(waits)
        closed = [member for member in members if member.rank not in self._open[member.side]]
        return f"waiting for {_named(closed)} to open memory"


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


def _named(members: Sequence[MemberId | str]) -> str:
    """Members by name, or what they say, if they are few."""
    shown = ", ".join(map(str, members[:MAX_NAMED]))
    return shown if len(members) <= MAX_NAMED else f"{shown} and {len(members) - MAX_NAMED} others"
