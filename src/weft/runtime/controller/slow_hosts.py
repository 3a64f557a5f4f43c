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
        if not self._found and not self.by_members:
            return
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
        if all(part.seconds < MIN_SECONDS for part in parts):
            return
        sending, receiving = _Side(), _Side()
        for part in parts:
            source, target = trainers.get(part.trainer), engines.get(part.engine)
            if source is not None and target is not None and source != target and part.seconds:
                sending.add(source, part)
                receiving.add(target, part)
        found = sending.shares()
        for host, share in receiving.shares().items():
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


class _Side:
    """What the hosts of one side carried in one version."""

    def __init__(self) -> None:
        self._bytes: dict[str, int] = {}
        self._seconds: dict[str, float] = {}

    def add(self, host: str, part: WriteReport) -> None:
        """One link."""
        self._bytes[host] = self._bytes.get(host, 0) + part.num_bytes
        self._seconds[host] = max(self._seconds.get(host, 0.0), part.seconds)

    def shares(self) -> dict[str, float]:
        """The rate of each host, over the median of the other hosts'."""
        rates = {host: self._bytes[host] / seconds for host, seconds in self._seconds.items() if seconds >= MIN_SECONDS}
        shares = {}
        for host, rate in rates.items():
            usual = statistics.median([other for name, other in rates.items() if name != host] or [0.0])
            if usual > 0:
                shares[host] = rate / usual
        return shares
