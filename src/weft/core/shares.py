"""How much of the same bytes each holder should send, where ways share resources: the best shares, cut anywhere.

A *demand* is all that one engine rank wants of what one group of trainer ranks holds; each holder is a *way* for it.
A way uses up to five resources: a port or link out, a port or link in, the uplinks of both hosts, cross-rail capacity.
The shares that minimise the load of the busiest resource solve a linear program. It is approximated with prices: busy
resources are expensive, every demand moves from expensive ways to cheap ones, and prices grow steeper as the shares
settle. Any prices also give a lower bound (every demand on its cheapest way), which tells when to stop.

    ways = find_ways(topology, holders, group, receiver)
    shares = best_shares(ways, num_bytes)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from weft.core.geometry.boxes import Ints
from weft.core.layout import RankGroups
from weft.core.topology import Topology

Floats = NDArray[np.float64]

GOOD_ENOUGH = 1.002
"""Stop this close to the lower bound."""
MAX_ROUNDS = 600
FIRST_STEEPNESS, MOST_STEEPNESS, STEEPER = 8.0, 1000.0, 1.5
"""Price of a resource that is as busy as the busiest, over one that is idle: e to this power."""
ROUNDS_PER_STEEPNESS = 40
GRAIN = 1000
"""Shares are whole multiples of 1/GRAIN: a plan does not depend on the last bits of a processor's arithmetic."""


@dataclass(frozen=True, kw_only=True)
class Ways:
    """The possible senders of each demand, and the resources each way uses."""

    first: Ints
    """Demand d has ways `first[d]` to `first[d + 1]`."""
    sender: NDArray[np.int32]
    resource: Ints
    """Matrix [way, 5] of resource numbers; 0 stands for none."""
    rate: Floats
    """Bytes per second of each resource."""

    @property
    def demand(self) -> Ints:
        """Demand of each way."""
        return np.repeat(np.arange(len(self.first) - 1), np.diff(self.first))


def find_ways(topology: Topology, holders: RankGroups, group: Ints, receiver: Ints) -> Ways:
    """The ways of demands that are given by the group that holds them and the engine rank that wants them."""
    sizes = holders.sizes[group]
    sender, to = holders.expand(group), np.repeat(receiver, sizes)
    out, into = topology.trainer_device[sender], topology.engine_device[to]
    local = topology.is_local[sender, to]
    crossing = ~local & topology.changes_rail[sender, to]
    reached = topology.nic.efficiency
    out_port, in_port = topology.port_of(out), topology.port_of(into)
    link, uplink = np.full(len(out), topology.link_bytes_per_s), np.full(len(out), topology.uplink_bytes_per_s)
    cross = np.full(len(out), topology.cross_rail_bytes_per_s)
    names, rates = zip(
        _either(local, (out, link), (out_port, topology.port_rate(out_port) * reached)),
        _either(local, (into, link), (in_port, topology.port_rate(in_port) * reached)),
        _either(local, None, (topology.host_of(out), uplink)),
        _either(local, None, (topology.host_of(into), uplink)),
        _either(~crossing, None, (topology.host_of(out), cross)),
        strict=True,
    )
    width = max(int(name.max(initial=0)) for name in names) + 1
    keys = np.stack([np.where(name > 0, name + number * width, 0) for number, name in enumerate(names)], axis=1)
    found, at, resource = np.unique(np.append(keys, 0), return_index=True, return_inverse=True)
    rate = np.append(np.stack(rates, axis=1), np.inf)[at]
    return Ways(
        first=np.concatenate([[0], np.cumsum(sizes)]),
        sender=sender,
        resource=resource[:-1].reshape(keys.shape),
        rate=np.where(found > 0, rate, np.inf),
    )


def _either(
    first: NDArray[np.bool_], one: tuple[Ints, Floats] | None, other: tuple[Ints, Floats]
) -> tuple[Ints, Floats]:
    """Names (1, 2, …; 0: none) and rates of the resources of ways that use one kind or the other."""
    name, rate = 2 * other[0] + 1, other[1]
    if one is None:
        name = np.where(first, 0, name)
    else:
        name, rate = np.where(first, 2 * one[0] + 2, name), np.where(first, one[1], rate)
    return np.where(np.isfinite(rate), name, 0), rate


def best_shares(ways: Ways, num_bytes: Floats) -> Floats:
    """The fraction of its demand that each way should carry."""
    ways = _without_fixed(ways)
    starts, demand = ways.first[:-1], ways.demand
    shares = 1.0 / np.diff(ways.first)[demand]
    if not ways.resource.any():
        return shares
    best, least_s, bound_s = shares, np.inf, 0.0
    steepness = FIRST_STEEPNESS
    for number in range(MAX_ROUNDS):
        busy = busy_seconds(ways, shares * num_bytes[demand])
        busiest_s = float(busy.max(initial=0.0))
        if busiest_s < least_s:
            best, least_s = shares, busiest_s
        price = _prices(ways, busy, steepness)
        bound_s = max(bound_s, float(num_bytes @ np.minimum.reduceat(price, starts)))
        if least_s <= GOOD_ENOUGH * bound_s:
            break
        mean = np.maximum(np.add.reduceat(shares * price, starts), np.finfo(float).tiny)[demand]
        shares = np.maximum(shares * np.exp((mean - price) / mean * 4 / steepness), 1e-9)
        shares /= np.add.reduceat(shares, starts)[demand]
        if number % ROUNDS_PER_STEEPNESS == ROUNDS_PER_STEEPNESS - 1:
            steepness = min(steepness * STEEPER, MOST_STEEPNESS)
    return np.round(best * GRAIN) / GRAIN


def _without_fixed(ways: Ways) -> Ways:
    """The same ways without the resources whose load no choice changes: the others decide."""
    demand, num_resources = ways.demand, len(ways.rate)
    fixed = np.ones(num_resources, dtype=bool)
    for column in ways.resource.T:
        pair, num_ways = np.unique(demand * num_resources + column, return_counts=True)
        fixed[(pair % num_resources)[num_ways < np.diff(ways.first)[pair // num_resources]]] = False
    return replace(ways, resource=np.where(fixed[ways.resource], 0, ways.resource))


def busy_seconds(ways: Ways, num_bytes: Floats) -> Floats:
    """How long each resource is busy when every way carries so many bytes."""
    carried = np.zeros(len(ways.rate))
    for column in ways.resource.T:
        carried += np.bincount(column, weights=num_bytes, minlength=len(carried))
    return np.asarray(carried / ways.rate)


def _prices(ways: Ways, busy: Floats, steepness: float) -> Floats:
    """Price of one byte on each way, where the prices of a second of every resource add up to one."""
    dear = np.exp(steepness * (busy / busy.max() - 1))
    dear[0] = 0.0
    per_byte = dear / dear.sum() / ways.rate
    return np.asarray(per_byte[ways.resource].sum(axis=1))
