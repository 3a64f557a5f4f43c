"""Which hosts carry less than they report, from what writes of the last versions took.

A slow sending host makes its own trainers late, and no others; a slow receiving host makes all that is written to its
engines late. So a host is compared with the others of its side. Its rate is bytes of all its links that cross the
network, over the time until the last of them was written; its *use* is this rate over what its network cards report.
Nobody knows what a network really reaches of that, but it should be the same part everywhere: a host whose use is
notably lower than that of the others is slow.

Hosts at the other end may be the limit, whatever a host's own cards could do. A host is not slow if those it writes to
(or that write to it) are busy and it has its part of what they carry.

    rates = HostRates()
    rates.add(links, trainers={0: "a", 1: "b"}, engines={0: "c", 1: "d"}, reported={"a": 1.0, "b": 0.25})
    rates.slow_hosts({})                                    # after some versions: {"b": 0.1}
"""

from __future__ import annotations

import logging
import statistics
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from weft.runtime.compile.matching import host_speeds
from weft.runtime.control.member_id import MemberId
from weft.runtime.controller.membership import Member
from weft.runtime.controller.written_links import WrittenLinks

log = logging.getLogger(__name__)
Int64s = NDArray[np.int64]
Floats = NDArray[np.float64]
NUM_VERSIONS = 3
"""A host is judged by the median of so many versions."""
SLOW = 0.75
"""A host whose use is less than this part of the others' is slow. One of three cards that is gone leaves 0.67."""
FAIR = 0.6
"""Hosts that share the cards at the other end do so unevenly: of two, the first to end has had up to twice the rate of
the other, and TCP has given one of them 1.4 times as much. More than this part is a host's fair part."""
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
        joins = [known.join for known in members.values()]
        sides = {"trainers": _hosts(members, "trainer"), "engines": _hosts(members, "engine")}
        self._rates.add(links, **sides, reported=host_speeds(joins, {}))
        self._found = self._rates.slow_hosts(self.planned)
        self._report(members)
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
                log.warning("the host of %s carries only %.2f of what it reports, compared with the others", who, share)
        self.by_members = named

    def plan_for_found(self) -> None:
        """The next plan counts with what was found."""
        self.planned = self._found


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """What a host carried in one version."""

    share: float
    """Its use, over that of the others."""
    own_share: float
    """The same; 1 if it was held up by the hosts at the other end."""


class HostRates:
    """What the hosts of a fleet carry of what they report, compared with the others."""

    def __init__(self) -> None:
        self._carried: dict[str, deque[Carried]] = defaultdict(lambda: deque(maxlen=NUM_VERSIONS))

    def add(
        self,
        links: WrittenLinks,
        *,
        trainers: Mapping[int, str],
        engines: Mapping[int, str],
        reported: Mapping[str, float] | None = None,
    ) -> None:
        """A version was written; `trainers`, `engines`: the host of every rank.

        `reported`: what the cards of each host carry by its own account, in any unit; without it, all are alike.
        """
        if not (links.seconds >= MIN_SECONDS).any():
            return
        names = sorted({*trainers.values(), *engines.values()})
        cards = np.array([(reported or {}).get(name, 1.0) for name in names])
        source, target = _numbers(links.trainer, trainers, names), _numbers(links.engine, engines, names)
        counts = (source >= 0) & (target >= 0) & (source != target) & (links.seconds > 0)
        flows = Flows(
            hosts=source[counts],
            peers=target[counts],
            num_bytes=links.num_bytes[counts],
            seconds=links.seconds[counts],
            cards=cards,
        )
        found = flows.carried()
        for number, carried in flows.turned().carried().items():
            other = found.get(number, carried)
            found[number] = Carried(
                share=min(carried.share, other.share), own_share=min(carried.own_share, other.own_share)
            )
        for number, carried in found.items():
            self._carried[names[number]].append(carried)

    def slow_hosts(self, known: Mapping[str, float]) -> dict[str, float]:
        """Hosts that were slow in the last versions, and the share of what they report that each carries.

        `known`: what was found before; it stands for hosts that have not been measured often enough since. Hosts that
        have been planned around are not excused: the others are busy then, because they carry more.
        """
        judged = {
            host: statistics.median(each.share if host in known else each.own_share for each in carried)
            for host, carried in self._carried.items()
            if len(carried) == NUM_VERSIONS
        }
        slow = {host: share for host, share in judged.items() if share < SLOW}
        return {host: share for host, share in known.items() if host not in judged} | slow

    def forget(self) -> None:
        """The members have changed."""
        self._carried.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class Flows:
    """Links that cross the network, by the numbers of their hosts, and the cards of every host."""

    hosts: Int64s
    peers: Int64s
    num_bytes: Int64s
    seconds: Floats
    cards: Floats

    def turned(self) -> Flows:
        """The same, seen from the other side."""
        return replace(self, hosts=self.peers, peers=self.hosts)

    def carried(self) -> dict[int, Carried]:
        """What the hosts of this side carried, if they were busy for long enough to tell, and there are several."""
        rate = self._rate()
        use, use_of_peers = rate / self.cards, self.turned()._rate() / self.cards
        part = rate / np.minimum(self.cards, self._fair_part())
        moved, busiest = np.maximum(self._sum(self.num_bytes), 1), max(use.max(), use_of_peers.max())
        is_limited = self._sum(self.num_bytes * use_of_peers[self.peers]) / moved >= SLOW * busiest
        measured = np.flatnonzero(rate)
        found = {}
        for host in measured.tolist() if len(measured) > 1 else ():
            others = measured[measured != host]
            share = float(use[host] / np.median(use[others]))
            is_held_up = is_limited[host] and part[host] >= FAIR * np.median(part[others])
            found[host] = Carried(share=share, own_share=1.0 if is_held_up else share)
        return found

    def _rate(self) -> Floats:
        """Of every host; a host's links end with the last of them. 0: not known."""
        took = np.zeros(len(self.cards))
        np.maximum.at(took, self.hosts, self.seconds)
        is_long = took >= MIN_SECONDS
        return np.where(is_long, self._sum(self.num_bytes) / np.where(is_long, took, 1.0), 0.0)

    def _fair_part(self) -> Floats:
        """What every host may have of its peers' cards, if these are shared evenly; at least something."""
        pairs = np.unique(self.hosts * len(self.cards) + self.peers)
        hosts, peers = pairs // len(self.cards), pairs % len(self.cards)
        each = self.cards / np.maximum(np.bincount(peers, minlength=len(self.cards)), 1)
        part = np.bincount(hosts, weights=each[peers], minlength=len(self.cards))
        return np.where(part > 0, part, self.cards)

    def _sum(self, of_link: Int64s | Floats) -> Floats:
        return np.bincount(self.hosts, weights=of_link, minlength=len(self.cards)).astype(np.float64)


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
