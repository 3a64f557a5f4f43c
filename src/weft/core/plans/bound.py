"""How good a plan is: the time its busiest resource needs, and a lower bound no plan of direct sends can beat.

Direct means that every byte goes straight from a trainer rank that holds it to the engine rank that wants it, as in all
of weft's plans. Engines that forward bytes to each other could be faster where replicas want the same bytes.

Resources are trainer ports (transmit), engine ports (receive), links inside a domain, host uplinks, and cross-rail
capacity. The makespan is the busiest one's bytes over its line rate, or its writes times the NIC's gap.

The bound counts bytes only. For any set A of sender resources, the bytes that *only* members of A can send need at
least bytes(A) / rate(A); the sets tried are those of the busiest senders of the plan itself, which is exact when the
plan is balanced. Receivers and uplinks are bounded the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.core.plans.plan import Plan
from weft.core.topology import Topology

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """Makespan of a plan and bound for direct sends, in seconds, with the resource that decides each."""

    makespan_s: float
    bottleneck: str
    bound_s: float
    bound_by: str
    busy_s: dict[str, float]
    """Seconds of the busiest resource of each kind."""
    bounds_s: dict[str, float]
    """Lower bound of each kind."""

    @property
    def over_bound(self) -> float:
        """Makespan relative to the bound: 1.0 is optimal."""
        return self.makespan_s / self.bound_s if self.bound_s else 1.0


def balance(plan: Plan) -> Balance:
    """Measure a plan against its lower bound."""
    busy = _busy(plan)
    bounds = _bounds(plan)
    bottleneck = max(busy, key=lambda name: busy[name])
    bound_by = max(bounds, key=lambda name: bounds[name])
    return Balance(
        makespan_s=busy[bottleneck],
        bottleneck=bottleneck,
        bound_s=bounds[bound_by],
        bound_by=bound_by,
        busy_s=busy,
        bounds_s=bounds,
    )


def _busy(plan: Plan) -> dict[str, float]:
    """Seconds of the busiest resource of each kind under the plan."""
    topology = plan.topology
    writes = np.where(topology.is_local, 0, plan.pair_writes).sum(axis=1)
    gaps_s = _per_port(topology, topology.trainer_device, writes) * topology.nic.gap_us * 1e-6
    busy = busy_by_bytes(plan)
    return busy | {"trainer NICs": max(busy["trainer NICs"], float(gaps_s.max()))}


def busy_by_bytes(plan: Plan) -> dict[str, float]:
    """Seconds of the busiest resource of each kind, if single writes cost nothing."""
    topology = plan.topology
    local = topology.is_local
    moved = plan.pair_bytes
    wired = np.where(local, 0, moved)
    trainers, engines = topology.trainer_device, topology.engine_device
    busy = {
        "trainer NICs": float(_port_seconds(topology, trainers, wired.sum(axis=1)).max()),
        "engine NICs": float(_port_seconds(topology, engines, wired.sum(axis=0)).max()),
    }
    if local.any():
        inside = np.where(local, moved, 0)
        busiest = max(_per_device(trainers, inside.sum(axis=1)).max(), _per_device(engines, inside.sum(axis=0)).max())
        busy["links inside a domain"] = float(busiest / topology.link_bytes_per_s)
    if topology.host.uplink_gbps:
        out = _per_host(topology, trainers, wired.sum(axis=1)).max()
        into = _per_host(topology, engines, wired.sum(axis=0)).max()
        busy["host uplinks"] = float(max(out, into) / topology.uplink_bytes_per_s)
    if topology.host.cross_rail_gbps:
        crossing = np.where(topology.changes_rail, wired, 0)
        most = _per_host(topology, trainers, crossing.sum(axis=1)).max()
        busy["cross-rail links"] = float(most / topology.cross_rail_bytes_per_s)
    return busy


def _bounds(plan: Plan) -> dict[str, float]:
    """Lower bounds by kind of resource: bytes that must pass it, whatever the sender."""
    topology = plan.topology
    group, receiver, size = _flows(plan)
    local, crossing = _ways(plan, group, receiver)
    must_wire = np.where(local == 0, size, 0).astype(np.float64)
    num_groups = len(plan.trainer.groups.sizes)
    by_receiver = np.bincount(receiver, weights=must_wire, minlength=topology.num_engines)
    trainers, engines = topology.trainer_device, topology.engine_device
    sent = np.where(topology.is_local, 0, plan.pair_bytes).sum(axis=1)

    def forced(flow_bytes: Floats, resource: NDArray[np.int64], rate: Callable[[NDArray[np.int64]], Floats]) -> float:
        by_group = np.asarray(np.bincount(group, weights=flow_bytes, minlength=num_groups), dtype=np.float64)
        return _forced(plan, by_group, resource, sent, rate)

    bounds = {
        "trainer NICs": forced(must_wire, topology.port_of(trainers), topology.port_rate),
        "engine NICs": float(_port_seconds(topology, engines, by_receiver).max()),
    }
    holders = plan.trainer.groups.sizes[group]
    if topology.is_local.any():
        inside = np.bincount(receiver, weights=np.where(local == holders, size, 0), minlength=topology.num_engines)
        bounds["links inside a domain"] = float(_per_device(engines, inside).max() / topology.link_bytes_per_s)
    if topology.host.uplink_gbps:
        rate = topology.uplink_bytes_per_s
        out = forced(must_wire, topology.host_of(trainers), lambda hosts: np.full(len(hosts), rate))
        bounds["host uplinks"] = max(out, float(_per_host(topology, engines, by_receiver).max() / rate))
    if topology.host.cross_rail_gbps:
        rate = topology.cross_rail_bytes_per_s
        must_cross = np.where(crossing == holders, size, 0).astype(np.float64)
        bounds["cross-rail links"] = forced(
            must_cross, topology.host_of(trainers), lambda hosts: np.full(len(hosts), rate)
        )
    return bounds


def _ways(plan: Plan, group: NDArray[np.int64], receiver: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """How many holders of each flow share the receiver's domain, and how many must change rail to reach it."""
    topology, groups = plan.topology, plan.trainer.groups
    none = np.zeros(len(group))
    if topology.is_uniform:
        return none, none
    num_groups = len(groups.sizes)
    group_of_member = np.repeat(np.arange(num_groups), groups.sizes)
    local, crossing = none.copy(), none.copy()
    for engine in np.unique(receiver):
        flows = np.flatnonzero(receiver == engine)
        is_local = topology.is_local[groups.members, engine]
        changes = ~is_local & topology.changes_rail[groups.members, engine]
        local[flows] = np.bincount(group_of_member, weights=is_local, minlength=num_groups)[group[flows]]
        crossing[flows] = np.bincount(group_of_member, weights=changes, minlength=num_groups)[group[flows]]
    return local, crossing


def _forced(
    plan: Plan,
    by_group: Floats,
    resource_of: NDArray[np.int64],
    sent: NDArray[np.int64],
    rate_of: Callable[[NDArray[np.int64]], Floats],
) -> float:
    """Largest bytes(A) / rate(A) over the sets A of the k busiest resources, k = 1, 2, …

    `by_group` are the bytes that each holder group must put on the wire; they belong to A when all holders are in A.
    """
    groups = plan.trainer.groups
    names, resource = np.unique(resource_of, return_inverse=True)
    rate = rate_of(names)
    level = np.bincount(resource, weights=sent, minlength=len(names)) / rate
    rank_in_order = np.empty(len(names), dtype=np.int64)
    order = np.argsort(-level, kind="stable")
    rank_in_order[order] = np.arange(len(names))
    last_needed = np.maximum.reduceat(rank_in_order[resource][groups.members], groups.starts[:-1])
    inside = np.bincount(last_needed, weights=by_group, minlength=len(names))
    return float((np.cumsum(inside) / np.cumsum(rate[order])).max())


def _flows(plan: Plan) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Bytes by (holder group, receiver): all that matters about possible senders and receivers."""
    num_engines = plan.topology.num_engines
    group = np.repeat(plan.trainer.group_of[plan.shard].astype(np.int64), plan.fan_out)
    size = np.repeat(plan.row_bytes, plan.fan_out)
    total = np.bincount(group * num_engines + plan.receiver, weights=size)
    used = np.flatnonzero(total)
    return used // num_engines, used % num_engines, total[used].astype(np.int64)


def _per_port(topology: Topology, devices: NDArray[np.int64], values: NDArray[np.int64]) -> Floats:
    _, port = np.unique(topology.port_of(devices), return_inverse=True)
    return np.asarray(np.bincount(port, weights=values), dtype=np.float64)


def _port_seconds(topology: Topology, devices: NDArray[np.int64], moved: Floats | NDArray[np.int64]) -> Floats:
    names, port = np.unique(topology.port_of(devices), return_inverse=True)
    return np.asarray(np.bincount(port, weights=moved) / topology.port_rate(names))


def _per_device(devices: NDArray[np.int64], values: Floats | NDArray[np.int64]) -> Floats:
    _, device = np.unique(devices, return_inverse=True)
    return np.asarray(np.bincount(device, weights=values), dtype=np.float64)


def _per_host(topology: Topology, devices: NDArray[np.int64], values: Floats | NDArray[np.int64]) -> Floats:
    return np.asarray(np.bincount(topology.host_of(devices), weights=values), dtype=np.float64)
