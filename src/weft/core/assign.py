"""Who sends: the policies that choose a sender when several ranks hold the same bytes.

`balanced`     largest first onto the holder whose port is free soonest, fewest-choices first, then refined
`greedy`       in list order, the holder with the least bytes so far (Chen; rl-weight-broadcast)
`round_robin`  engine-rank affinity, few sessions per source (miles)
`rank0`        the lowest rank that holds the bytes: the usual bottleneck, as a baseline

Rows with a single holder have no choice under any policy. All policies are deterministic.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.core.boxes import Ints
from weft.core.layout import RankGroups
from weft.core.topology import Topology

MAX_REFINEMENTS = 20
SHARED_ROUNDS = 16
"""Holders that share a port, an uplink or cross-rail capacity raise it together: their classes are filled in steps."""


class Policy(enum.StrEnum):
    """Names of the policies, as the command line takes them."""

    BALANCED = "balanced"
    GREEDY = "greedy"
    ROUND_ROBIN = "round_robin"
    RANK0 = "rank0"


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What has to be sent: rows with their bytes, holders and receivers."""

    row_bytes: NDArray[np.int64]
    holder_group: NDArray[np.int32]
    """Group of trainer ranks that hold each row."""
    receiver_group: NDArray[np.int32]
    """Group of engine ranks each row goes to."""
    holders: RankGroups
    receivers: RankGroups
    topology: Topology
    num_replicas: int

    @property
    def first(self) -> NDArray[np.int64]:
        """Where each row's routes begin; one entry more than rows."""
        return np.concatenate([[0], np.cumsum(self.receivers.sizes[self.receiver_group])])

    @property
    def is_forced(self) -> NDArray[np.bool_]:
        """Rows with one holder only."""
        return self.holders.sizes[self.holder_group] == 1


def choose_senders(demand: Demand, policy: Policy) -> NDArray[np.int32]:
    """The sender of every route, rows in order, receivers of a row in rank order."""
    lowest = demand.holders.members[demand.holders.starts[demand.holder_group]]
    sender = np.repeat(lowest, np.diff(demand.first))
    if policy is Policy.RANK0 or demand.is_forced.all():
        return sender
    if policy is Policy.GREEDY:
        _greedy(demand, sender)
    elif policy is Policy.ROUND_ROBIN:
        _round_robin(demand, sender)
    else:
        _balanced(demand, sender)
    return sender


def fill_order(levels: NDArray[np.float64], cost: NDArray[np.float64], num_items: int) -> NDArray[np.int64]:
    """Which bin takes each of `num_items` equal items, if every item goes to the lowest bin (ties: first bin).

    An item raises bin i by `cost[i]`. Equal to the one-by-one loop, without the loop.
    """
    counts = _water_fill(levels, cost, num_items)
    bins = np.repeat(np.arange(len(levels)), counts)
    ends = np.cumsum(counts)
    nth = np.arange(num_items) - np.repeat(ends - counts, counts)
    return bins[np.lexsort((bins, levels[bins] + nth * cost[bins]))]


def _water_fill(levels: NDArray[np.float64], cost: NDArray[np.float64], num_items: int) -> NDArray[np.int64]:
    """How many items each bin takes: whole items below a common level, the rest where it ends lowest."""
    order = np.argsort(levels, kind="stable")
    capacity = np.cumsum(1 / cost[order])
    pressure = np.cumsum(levels[order] / cost[order])
    surface = (num_items + pressure) / capacity
    reached = np.searchsorted(np.append(levels[order][1:], np.inf) >= surface, True)
    level = surface[reached]
    counts = np.maximum(np.floor((level - levels) / cost), 0).astype(np.int64)
    while (excess := int(counts.sum()) - num_items) > 0:  # rounding put the surface a hair too high
        counts[np.argsort(-(levels + counts * cost), kind="stable")[:excess]] -= 1
        counts = np.maximum(counts, 0)
    while (missing := num_items - int(counts.sum())) > 0:
        lowest = np.argsort(levels + (counts + 1) * cost, kind="stable")[: min(missing, len(levels))]
        counts[lowest] += 1
    return counts


def _greedy(demand: Demand, sender: NDArray[np.int32]) -> None:
    """In row order; the routes of one row are equal items, so a row is one fill."""
    sent = np.zeros(demand.topology.num_trainers)
    first = demand.first
    copies = np.diff(first)
    total = demand.row_bytes * copies
    groups = [demand.holders.of(group) for group in range(len(demand.holders.starts) - 1)]
    done = 0
    for row in np.flatnonzero(~demand.is_forced).tolist():
        if done < row:
            np.add.at(sent, sender[first[done:row]], total[done:row])
        holders = groups[demand.holder_group[row]]
        size = float(demand.row_bytes[row])
        chosen = holders[_fill_small(sent[holders].tolist(), size, int(copies[row]))]
        sender[first[row] : first[row + 1]] = chosen
        np.add.at(sent, chosen, size)
        done = row + 1


def _fill_small(levels: list[float], cost: float, num_items: int) -> NDArray[np.int64]:
    """`fill_order` for equal costs; a handful of items is quicker one by one."""
    if num_items * len(levels) > 1000:
        return fill_order(np.array(levels), np.full(len(levels), cost), num_items)
    chosen = []
    for _ in range(num_items):
        lowest = levels.index(min(levels))
        levels[lowest] += cost
        chosen.append(lowest)
    return np.array(chosen, dtype=np.int64)


def round_robin_sources(num_sources: int, num_engines: int, ranks_per_engine: int) -> dict[int, list[tuple[int, int]]]:
    """miles' assignment: for each source the (engine, rank) targets it serves.

    Sources and targets are zipped until one list ends; every remaining target goes to the least loaded source that
    already serves the same engine rank (its buffers are the same), or else to the next source in turn.
    """
    targets = [(engine, rank) for engine in range(num_engines) for rank in range(ranks_per_engine)]
    served: dict[int, list[tuple[int, int]]] = {source: [] for source in range(num_sources)}
    for source, target in zip(served, targets, strict=False):
        served[source].append(target)
    turn = 0
    for target in targets[num_sources:]:
        same_rank = [s for s, given in served.items() if any(rank == target[1] for _, rank in given)]
        if same_rank:
            source = min(same_rank, key=lambda s: (len(served[s]), s))
        else:
            source = turn % num_sources
            turn += 1
        served[source].append(target)
    return {source: given for source, given in served.items() if given}


def _round_robin(demand: Demand, sender: NDArray[np.int32]) -> None:
    ranks_per_engine = demand.topology.num_engines // demand.num_replicas
    first = demand.first
    tables: dict[int, NDArray[np.int64]] = {}
    for row in np.flatnonzero(~demand.is_forced):
        holders = demand.holders.of(demand.holder_group[row])
        if len(holders) not in tables:
            served = round_robin_sources(len(holders), demand.num_replicas, ranks_per_engine)
            source_of = np.zeros(demand.topology.num_engines, dtype=np.int64)
            for source, targets in served.items():
                source_of[[engine * ranks_per_engine + rank for engine, rank in targets]] = source
            tables[len(holders)] = source_of
        receivers = demand.receivers.of(demand.receiver_group[row])
        sender[first[row] : first[row + 1]] = holders[tables[len(holders)][receivers]]


@dataclass(slots=True)
class _Class:
    """Routes that are interchangeable: same size, same holders and, where the way matters, same receiver."""

    routes: NDArray[np.int64]
    holders: NDArray[np.int32]
    num_bytes: int
    """Of one route."""
    exits: NDArray[np.int64]
    """Port or link each holder uses for these routes."""
    crosses: NDArray[np.bool_]
    """Whether each holder's way changes rail."""
    cost: NDArray[np.float64]
    """Seconds one route keeps each holder's exit busy."""
    counts: NDArray[np.int64]
    """Routes each holder was given."""


def _balanced(demand: Demand, sender: NDArray[np.int32]) -> None:
    """Fill class by class, then take each class out and fill it again until the busiest exit stays the same.

    A refill never raises the sum of squared levels, so refining comes close to the best balance that exists; `bound`
    says how close.
    """
    exits = _Exits(demand.topology)
    exits.add_forced(demand, sender)
    classes = _classes(demand, exits)
    for route_class in classes:
        exits.fill(route_class)
    busiest = exits.busiest()
    for _ in range(MAX_REFINEMENTS):
        for route_class in classes:
            exits.take_out(route_class)
            exits.fill(route_class)
        if exits.busiest() >= busiest * (1 - 1e-6):
            break
        busiest = exits.busiest()
    for route_class in classes:
        sender[route_class.routes] = route_class.holders[_interleave(route_class.counts)]


class _Exits:
    """How long every sender-side resource is busy: trainer ports, links inside a domain, host uplinks, cross-rail."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        ports = topology.port_of(topology.trainer_device)
        names, self._port = np.unique(ports, return_inverse=True)
        devices, self._link = np.unique(topology.trainer_device, return_inverse=True)
        self._rate = np.concatenate([topology.port_rate(names), np.full(len(devices), topology.link_bytes_per_s)])
        self._first_link = len(names)
        self._is_inside = bool(topology.is_local.all())
        self.is_uniform = topology.is_uniform or self._is_inside
        """Whether every sender reaches every engine the same way: through its port, or inside one domain."""
        self._level = np.zeros(len(self._rate))
        self._host = topology.host_of(topology.trainer_device)
        num_hosts = int(self._host.max()) + 1
        self._uplink_rate = topology.uplink_bytes_per_s
        self._uplink_s = np.zeros(num_hosts)
        self._cross_rate = topology.cross_rail_bytes_per_s
        self._cross_s = np.zeros(num_hosts)

    def busiest(self) -> float:
        """Seconds of the busiest resource."""
        return float(max(self._level.max(), self._uplink_s.max(), self._cross_s.max()))

    def of(
        self, holders: NDArray[np.int32], receiver: Ints | int | None
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The exit each holder uses towards a receiver, and whether that changes rail (`None`: any receiver)."""
        if receiver is None:
            exits = self._first_link + self._link[holders] if self._is_inside else self._port[holders]
            return exits, np.zeros(len(holders), dtype=bool)
        local = self._topology.is_local[holders, receiver]
        exits = np.where(local, self._first_link + self._link[holders], self._port[holders])
        return exits, ~local & self._topology.changes_rail[holders, receiver]

    def rate(self, exits: Ints) -> NDArray[np.float64]:
        """Bytes per second of exits."""
        return self._rate[exits]

    def add_forced(self, demand: Demand, sender: NDArray[np.int32]) -> None:
        """Count the routes that have no choice."""
        copies = np.diff(demand.first)
        forced = np.repeat(demand.is_forced, copies)
        size = np.repeat(demand.row_bytes, copies)[forced].astype(np.float64)
        receiver = None if self.is_uniform else demand.receivers.expand(demand.receiver_group)[forced]
        exits, crosses = self.of(sender[forced], receiver)
        self._add(sender[forced], exits, crosses, size)

    def _add(self, holders: Ints, exits: Ints, crosses: NDArray[np.bool_], num_bytes: NDArray[np.float64]) -> None:
        """Count bytes on every resource they pass."""
        self._level += np.bincount(exits, weights=num_bytes, minlength=len(self._level)) / self._rate
        wired, host = exits < self._first_link, self._host[holders]
        num_hosts = len(self._uplink_s)
        self._uplink_s += np.bincount(host, weights=num_bytes * wired, minlength=num_hosts) / self._uplink_rate
        self._cross_s += np.bincount(host, weights=num_bytes * crosses, minlength=num_hosts) / self._cross_rate

    def fill(self, route_class: _Class) -> None:
        """Spread a class over its holders; holders that share an exit or a host's limit see each other's load."""
        route_class.counts = np.zeros(len(route_class.holders), dtype=np.int64)
        alone = len(np.unique(route_class.exits)) == len(route_class.exits)
        shared = not alone or np.isfinite(self._uplink_rate) or np.isfinite(self._cross_rate)
        left = len(route_class.routes)
        step = -(-left // SHARED_ROUNDS) if shared else left
        while left > 0:
            taken = _water_fill(self._levels(route_class), self._costs(route_class), min(step, left))
            self._count(route_class, taken)
            route_class.counts += taken
            left -= step

    def _levels(self, route_class: _Class) -> NDArray[np.float64]:
        """How busy each holder's way out is: its exit, or the limit of its host behind it."""
        levels = self._level[route_class.exits].copy()
        host = self._host[route_class.holders]
        wired = route_class.exits < self._first_link
        levels[wired] = np.maximum(levels, self._uplink_s[host])[wired]
        levels[route_class.crosses] = np.maximum(levels, self._cross_s[host])[route_class.crosses]
        return levels

    def _costs(self, route_class: _Class) -> NDArray[np.float64]:
        """Seconds one more route adds to the slowest resource of each way."""
        wired = route_class.exits < self._first_link
        cost = np.maximum(route_class.cost, np.where(wired, route_class.num_bytes / self._uplink_rate, 0))
        return np.maximum(cost, np.where(route_class.crosses, route_class.num_bytes / self._cross_rate, 0))

    def take_out(self, route_class: _Class) -> None:
        """Undo a fill."""
        self._count(route_class, -route_class.counts)

    def _count(self, route_class: _Class, counts: NDArray[np.int64]) -> None:
        num_bytes = counts.astype(np.float64) * route_class.num_bytes
        self._add(route_class.holders, route_class.exits, route_class.crosses, num_bytes)


def _classes(demand: Demand, exits: _Exits) -> list[_Class]:
    """Interchangeable routes, those with the fewest possible senders first, then the largest first."""
    rows = np.flatnonzero(~demand.is_forced)
    first = demand.first
    copies = np.diff(first)[rows]
    routes = np.repeat(first[rows], copies) + np.arange(copies.sum()) - np.repeat(np.cumsum(copies) - copies, copies)
    group = np.repeat(demand.holder_group[rows], copies)
    size = np.repeat(demand.row_bytes[rows], copies)
    uniform = exits.is_uniform
    receiver = (
        np.zeros(len(routes), dtype=np.int64) if uniform else demand.receivers.expand(demand.receiver_group[rows])
    )
    order = np.lexsort((receiver, group, -size, demand.holders.sizes[group]))
    keys = np.stack([group[order], size[order], receiver[order]])
    starts = np.flatnonzero(np.concatenate([[True], (keys[:, 1:] != keys[:, :-1]).any(axis=0)]))
    found = []
    for start, end in zip(starts, np.append(starts[1:], len(order)), strict=True):
        holders = demand.holders.of(int(keys[0, start]))
        ways, crosses = exits.of(holders, None if uniform else int(keys[2, start]))
        num_bytes = int(keys[1, start])
        found.append(
            _Class(
                routes=np.sort(routes[order[start:end]]),
                holders=holders,
                num_bytes=num_bytes,
                exits=ways,
                crosses=crosses,
                cost=num_bytes / exits.rate(ways),
                counts=np.zeros(len(holders), dtype=np.int64),
            )
        )
    return found


def _interleave(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Bin numbers, each as often as counted, spread evenly so that neighbours differ."""
    bins = np.repeat(np.arange(len(counts)), counts)
    ends = np.cumsum(counts)
    nth = np.arange(len(bins)) - np.repeat(ends - counts, counts)
    return bins[np.lexsort((bins, (nth + 0.5) / counts[bins]))]
