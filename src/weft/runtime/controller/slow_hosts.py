"""Which hosts carry less than the others, from what writes of the last versions took.

A slow sending host makes its own trainers late, and no others; a slow receiving host makes all that is written to its
engines late. So a host is compared with the others of its side: bytes of all its links that cross the network, over
the time until the last of them was written.

    rates = HostRates()
    rates.add(parts, trainers={0: "a", 1: "b"}, engines={0: "c", 1: "d"})       # after every version
    rates.slow_hosts({})                                                       # {"b": 0.1}
"""

from __future__ import annotations

import logging
import statistics
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

from weft.runtime.compile.matching import host_speeds
from weft.runtime.control.member_id import MemberId
from weft.runtime.control.messages import WriteReport
from weft.runtime.controller.membership import Member

log = logging.getLogger(__name__)
NUM_VERSIONS = 3
"""A host is judged by the median of so many versions."""
SLOW = 0.7
"""A host that carries less than this part of what the others do is slow."""
NOTABLE = 1.25
"""Rates that differ by less than this factor are the same."""
MIN_SECONDS = 0.02
"""Shorter writes say more about latency than about rates."""


class SlowHosts:
    """Hosts that carry less than they report, as measured and as planned for."""

    def __init__(self) -> None:
        self._rates = HostRates()
        self.planned: dict[str, float] = {}
        """What the plan in force, or being made, counts with."""
        self._found: dict[str, float] = {}
        self.by_members: dict[str, float] = {}
        """What was found last, by the members on those hosts."""

    def begin(self) -> None:
        """A plan is made: rates under the previous one do not count any more."""
        self._rates.forget()

    def look(self, parts: Sequence[WriteReport], members: Mapping[MemberId, Member]) -> bool:
        """A version was written: whether hosts carry notably less, or more, than planned for."""
        self._rates.add(parts, trainers=_hosts(members, "trainer"), engines=_hosts(members, "engine"))
        self._found = self._rates.slow_hosts(self.planned)
        self._report(members)
        joins = [known.join for known in members.values()]
        return differ(host_speeds(joins, self._found), host_speeds(joins, self.planned))

    def _report(self, members: Mapping[MemberId, Member]) -> None:
        """Once, when it has changed."""
        on_host: dict[str, list[str]] = defaultdict(list)
        for member, known in sorted(members.items()):
            on_host[known.join.place.host].append(str(member))
        named = {", ".join(on_host[host]): round(share, 3) for host, share in self._found.items() if host in on_host}
        if differ(named, self.by_members):
            for who, share in named.items():
                log.warning("the host of %s carries %.2f of what the others do", who, share)
        self.by_members = named

    def plan_for_found(self) -> None:
        """The next plan counts with what was found."""
        self.planned = self._found


class HostRates:
    """What the hosts of a fleet carry, as a share of what the others do."""

    def __init__(self) -> None:
        self._shares: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=NUM_VERSIONS))

    def add(self, parts: Sequence[WriteReport], *, trainers: Mapping[int, str], engines: Mapping[int, str]) -> None:
        """A version was written; `trainers`, `engines`: the host of every rank."""
        wired = [part for part in parts if trainers.get(part.trainer) != engines.get(part.engine)]
        found: dict[str, float] = {}
        for side in (
            [(trainers.get(part.trainer), part) for part in wired],
            [(engines.get(part.engine), part) for part in wired],
        ):
            for host, share in _shares([(host, part) for host, part in side if host is not None]).items():
                found[host] = min(share, found.get(host, share))
        for host, share in found.items():
            self._shares[host].append(share)

    def slow_hosts(self, known: Mapping[str, float]) -> dict[str, float]:
        """Hosts that were slow in the last versions, and the share of the others' rate that each carries.

        `known`: what was found before; it stands for hosts that have not been measured often enough since.
        """
        judged = {host: statistics.median(found) for host, found in self._shares.items() if len(found) == NUM_VERSIONS}
        slow = {host: share for host, share in judged.items() if share < SLOW}
        return {host: share for host, share in known.items() if host not in judged} | slow

    def forget(self) -> None:
        """The members have changed."""
        self._shares.clear()


def _hosts(members: Mapping[MemberId, Member], side: str) -> dict[int, str]:
    """The host of every rank of a side."""
    return {member.rank: known.join.place.host for member, known in members.items() if member.side == side}


def differ(found: Mapping[str, float], known: Mapping[str, float]) -> bool:
    """Whether hosts are notably slower or faster than was known."""
    pairs = ((found.get(host, 1.0), known.get(host, 1.0)) for host in {*found, *known})
    return any(max(now, before) > NOTABLE * min(now, before) for now, before in pairs)


def _shares(parts: Sequence[tuple[str, WriteReport]]) -> dict[str, float]:
    """The rate of each host of a side, over the median of the other hosts'."""
    num_bytes: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    for host, part in parts:
        num_bytes[host] += part.num_bytes
        seconds[host] = max(seconds[host], part.seconds)
    rates = {host: num_bytes[host] / seconds[host] for host in num_bytes if seconds[host] >= MIN_SECONDS}
    shares = {}
    for host, rate in rates.items():
        others = [other for name, other in rates.items() if name != host]
        if others and (usual := statistics.median(others)) > 0:
            shares[host] = rate / usual
    return shares
