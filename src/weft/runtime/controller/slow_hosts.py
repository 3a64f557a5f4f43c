"""Which hosts carry less than the others, from what writes of the last versions took.

A slow sending host makes its own trainers late, and no others; a slow receiving host makes all that is written to its
engines late. So a host is compared with the others of its side: bytes of all its links that cross the network, over
the time until the last of them was written.

    rates = HostRates()
    rates.add(links, trainers={0: "a", 1: "b"}, engines={0: "c", 1: "d"})       # after every version
    rates.slow_hosts({})                                                       # {"b": 0.1}
"""

from __future__ import annotations

import logging
import statistics
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from weft.runtime.compile.matching import host_speeds
from weft.runtime.control.member_id import MemberId
from weft.runtime.controller.membership import Member
from weft.runtime.controller.written_links import WrittenLinks

log = logging.getLogger(__name__)
Int64s = NDArray[np.int64]
NUM_VERSIONS = 3
"""A host is judged by the median of so many versions."""
SLOW = 0.6
"""A host that carries less than this part of what the others do is slow. Two that share a receiver's card differ, too:
the first to end has had up to twice the rate of the other, and TCP has given one of them 1.4 times as much."""
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

    def look(self, links: WrittenLinks, members: Mapping[MemberId, Member]) -> bool:
        """A version was written: whether hosts carry notably less, or more, than planned for."""
        self._rates.add(links, trainers=_hosts(members, "trainer"), engines=_hosts(members, "engine"))
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
                log.warning("the host of %s carries only %.2f of what the other hosts carry", who, share)
        self.by_members = named

    def plan_for_found(self) -> None:
        """The next plan counts with what was found."""
        self.planned = self._found


class HostRates:
    """What the hosts of a fleet carry, as a share of what the others do."""

    def __init__(self) -> None:
        self._shares: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=NUM_VERSIONS))

    def add(self, links: WrittenLinks, *, trainers: Mapping[int, str], engines: Mapping[int, str]) -> None:
        """A version was written; `trainers`, `engines`: the host of every rank."""
        if not (links.seconds >= MIN_SECONDS).any():
            return
        names = sorted({*trainers.values(), *engines.values()})
        source, target = _numbers(links.trainer, trainers, names), _numbers(links.engine, engines, names)
        counts = (source >= 0) & (target >= 0) & (source != target) & (links.seconds > 0)
        num_bytes, seconds = links.num_bytes[counts], links.seconds[counts]
        sending, receiving = (_shares(names, hosts[counts], num_bytes, seconds) for hosts in (source, target))
        found = sending
        for host, share in receiving.items():
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


def _numbers(ranks: Int64s, hosts: Mapping[int, str], names: Sequence[str]) -> Int64s:
    """The number of each rank's host; -1 where it is not known."""
    numbers = {name: number for number, name in enumerate(names)}
    of_rank = np.full(int(ranks.max(initial=-1)) + 1, -1, dtype=np.int64)
    for rank, host in hosts.items():
        if rank < len(of_rank):
            of_rank[rank] = numbers[host]
    return of_rank[ranks]


def _shares(names: Sequence[str], hosts: Int64s, num_bytes: Int64s, seconds: NDArray[np.float64]) -> dict[str, float]:
    """The rate of each host of one side, over the median of the other hosts'.

    `hosts`: of each link. A host's links end with the last of them.
    """
    moved = np.bincount(hosts, weights=num_bytes, minlength=len(names))
    took = np.zeros(len(names))
    np.maximum.at(took, hosts, seconds)
    rates = {int(host): float(moved[host] / took[host]) for host in np.flatnonzero(took >= MIN_SECONDS)}
    shares = {}
    for host, rate in rates.items():
        usual = statistics.median([other for number, other in rates.items() if number != host] or [0.0])
        if usual > 0:
            shares[names[host]] = rate / usual
    return shares
