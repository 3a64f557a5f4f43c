"""Who sends: the policies that choose a sender when several ranks hold the same bytes.

`balanced`     largest first onto the holder whose port is free soonest, fewest-choices first, then refined; where
               ways share ports, uplinks or rails, or end in links: the best shares of all holders together (`shares`)
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

from weft.core.layout import RankGroups
from weft.core.shares import best_shares, find_ways
from weft.core.topology import Topology

MAX_REFINEMENTS = 20


class Policy(enum.StrEnum):
    """Names of the policies, as the command line takes them."""

    BALANCED = "balanced"
    GREEDY = "greedy"
    ROUND_ROBIN = "round_robin"
    RANK0 = "rank0"


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What must be sent: rows with their bytes, holders and receivers."""

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
        """Rows with a single holder."""
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
    group: int
    """Of the holders."""
    receiver: int
    """0 where it does not matter."""
    num_bytes: int
    """Of one route."""

    def give(self, sender: NDArray[np.int32], holders: NDArray[np.int32], counts: NDArray[np.int64]) -> None:
        """Give every holder its counted number of routes."""
        sender[self.routes] = holders[_interleave(counts)]


def _balanced(demand: Demand, sender: NDArray[np.int32]) -> None:
    """Where every sender is limited by its own port only, fill ports; elsewhere weigh all resources together."""
    topology = demand.topology
    ports = topology.port_of(topology.trainer_device)
    if topology.is_uniform and len(np.unique(ports)) == len(ports):
        _fill_ports(demand, sender)
    else:
        _share_ways(demand, sender)


def _fill_ports(demand: Demand, sender: NDArray[np.int32]) -> None:
    """Fill class by class, then take each class out and fill it again until the busiest port stays the same.

    A refill never raises the sum of squared levels, so refining comes close to the best balance that exists; `bound`
    says how close.
    """
    topology = demand.topology
    rate = topology.port_rate(topology.port_of(topology.trainer_device))
    copies = np.diff(demand.first)
    forced = np.repeat(demand.is_forced, copies)
    size = np.repeat(demand.row_bytes, copies)[forced].astype(np.float64)
    level = np.bincount(sender[forced], weights=size, minlength=len(rate)) / rate
    classes = _classes(demand, by_receiver=False)
    counts: list[NDArray[np.int64]] = []
    busiest = np.inf
    for _ in range(1 + MAX_REFINEMENTS):
        for i, route_class in enumerate(classes):
            holders = demand.holders.of(route_class.group)
            cost = route_class.num_bytes / rate[holders]
            if i < len(counts):
                level[holders] -= counts[i] * cost
            else:
                counts.append(np.zeros(len(holders), dtype=np.int64))
            counts[i] = _water_fill(level[holders], cost, len(route_class.routes))
            level[holders] += counts[i] * cost
        if level.max() >= busiest * (1 - 1e-6):
            break
        busiest = float(level.max())
    for route_class, count in zip(classes, counts, strict=True):
        route_class.give(sender, demand.holders.of(route_class.group), count)


def _share_ways(demand: Demand, sender: NDArray[np.int32]) -> None:
    """Find the best shares as if bytes could be cut anywhere, then fill them with routes, the largest first."""
    num_engines = demand.topology.num_engines
    copies = np.diff(demand.first)
    receiver = demand.receivers.expand(demand.receiver_group).astype(np.int64)
    key = np.repeat(demand.holder_group.astype(np.int64), copies) * num_engines + receiver
    wanted = np.bincount(key, weights=np.repeat(demand.row_bytes, copies)).astype(np.float64)
    used = np.flatnonzero(wanted)
    ways = find_ways(demand.topology, demand.holders, used // num_engines, used % num_engines)
    missing = best_shares(ways, wanted[used]) * wanted[used][ways.demand]
    number = {int(key): i for i, key in enumerate(used)}
    for route_class in _classes(demand, by_receiver=True):
        i = number[route_class.group * num_engines + route_class.receiver]
        mine = slice(int(ways.first[i]), int(ways.first[i + 1]))
        size = np.full(mine.stop - mine.start, float(route_class.num_bytes))
        counts = _water_fill(-missing[mine], size, len(route_class.routes))
        missing[mine] -= counts * size
        route_class.give(sender, ways.sender[mine], counts)


def _classes(demand: Demand, *, by_receiver: bool) -> list[_Class]:
    """Interchangeable routes, those with the fewest possible senders first, then the largest first."""
    rows = np.flatnonzero(~demand.is_forced)
    first = demand.first
    copies = np.diff(first)[rows]
    routes = np.repeat(first[rows], copies) + np.arange(copies.sum()) - np.repeat(np.cumsum(copies) - copies, copies)
    group = np.repeat(demand.holder_group[rows], copies)
    size = np.repeat(demand.row_bytes[rows], copies)
    receiver = (
        demand.receivers.expand(demand.receiver_group[rows]) if by_receiver else np.zeros(len(routes), dtype=np.int64)
    )
    order = np.lexsort((receiver, group, -size, demand.holders.sizes[group]))
    keys = np.stack([group[order], size[order], receiver[order]])
    starts = np.flatnonzero(np.concatenate([[True], (keys[:, 1:] != keys[:, :-1]).any(axis=0)]))
    return [
        _Class(
            routes=np.sort(routes[order[start:end]]),
            group=int(keys[0, start]),
            receiver=int(keys[2, start]),
            num_bytes=int(keys[1, start]),
        )
        for start, end in zip(starts, np.append(starts[1:], len(order)), strict=True)
    ]


def _interleave(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Bin numbers, each as often as counted, spread evenly so that neighbours differ."""
    bins = np.repeat(np.arange(len(counts)), counts)
    ends = np.cumsum(counts)
    nth = np.arange(len(bins)) - np.repeat(ends - counts, counts)
    return bins[np.lexsort((bins, (nth + 0.5) / counts[bins]))]
