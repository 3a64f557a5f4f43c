"""Hosts, devices, NICs, rails and links: what the bytes travel over.

A Topology is a kind of host repeated as often as the ranks need. Devices reach the network through NICs (their own,
several, or shared ones); devices of one NVLink domain reach each other through their links. Presets describe
well-known machines; a TOML file describes others (`docs/topology.md`).

    topology = load_topology("h100-ib400").place(num_trainers=128, num_engines=32)

Before a run, ranks fill hosts in order (`Cluster.place`); during one, members report where they are (`place_members`).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.config import read_toml
from weft.errors import ConfigError

PLACEMENTS = ("separate", "packed")
MAX_PAIRS = 1 << 26
"""Most trainer-engine pairs a plan may have (8192 × 8192)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """One network card of a host."""

    gbps: float
    """Line rate per direction, in Gb/s."""
    devices: tuple[int, ...]
    """Devices of the host that use it; several devices share its rate."""
    rail: int = 0
    """Switch plane; traffic between different rails crosses the spine."""
    efficiency: float = 1.0
    """Fraction of the line rate that large writes reach."""
    latency_us: float = 10.0
    """Time of one write beyond its bytes, when nothing else is in flight."""
    gap_us: float = 0.1
    """Shortest time between two writes in a row."""

    @property
    def line_bytes_per_s(self) -> float:
        """Line rate in bytes per second."""
        return self.gbps * 1e9 / 8


CPU, CUDA = "cpu", "cuda"
MEMORY_KINDS = frozenset({CPU, CUDA})
"""Kinds of memory that members have their weights in."""
DEFAULT_OP_US = 10.0
"""Cost of one write beyond its bytes, where a topology has none (measured with NIXL on an H200: 8 to 12)."""
OP_US = {("cma", "cpu"): 0.1, ("nixl", "cpu"): 1.2}
"""The same in CPU memory, measured separately: rows of one kernel call, rows of one NIXL transfer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostKind:
    """What every host looks like."""

    devices: int
    nics: tuple[Nic, ...]
    link_gb_per_s: float
    """NVLink, PCIe or memory rate between devices of one domain: per device and direction, GB/s."""
    pinned_gb_per_s: float
    """Pinned host memory ↔ device, per device and direction, GB/s."""
    device_gb_per_s: float = 2000.0
    """Local device memory copy, one way, GB/s."""
    domain_hosts: int = 1
    """Hosts whose devices share one link domain (18 for NVL72)."""
    uplink_gbps: float = 0.0
    """Limit of a whole host towards the network, Gb/s; 0: only its NICs."""
    cross_rail_gbps: float = 0.0
    """Limit of a whole host for traffic that changes rail, Gb/s; 0: none."""
    cpu_gb_per_s: float = 6.0
    """Local copy of CPU memory, one way, by one core while the others are busy, too, GB/s."""
    op_us: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Time of one write beyond its bytes, by transport and the memory it reaches (`cpu`, `cuda`), in microseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A kind of cluster, not yet filled with ranks."""

    name: str
    host: HostKind
    placement: str = "separate"
    """`separate`: trainers and engines on different hosts; `packed`: engines continue where trainers end."""

    def place(self, *, num_trainers: int, num_engines: int) -> Topology:
        """Give every rank a device, hosts filled in rank order."""
        _check_pairs(num_trainers, num_engines)
        per_host = self.host.devices
        first_engine = num_trainers
        if self.placement == "separate":
            per_domain = per_host * self.host.domain_hosts
            first_engine = -(-num_trainers // per_domain) * per_domain
        trainers = np.arange(num_trainers)
        engines = first_engine + np.arange(num_engines)
        return Topology(cluster=self, trainer_device=trainers, engine_device=engines)


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A cluster with a device for every trainer and engine rank. Devices are numbered through all hosts.

    >>> topology = load_topology("h100-ib400").place(num_trainers=16, num_engines=8)
    >>> topology.host_of(topology.engine_device).tolist()                # engines on a host of their own
    [2, 2, 2, 2, 2, 2, 2, 2]
    """

    cluster: Cluster
    trainer_device: NDArray[np.int64]
    engine_device: NDArray[np.int64]
    host_speed: tuple[float, ...] = ()
    """What the NICs of each host carry, as a fraction of the cluster's; 1 for hosts beyond its end."""

    @property
    def host(self) -> HostKind:
        """What every host looks like."""
        return self.cluster.host

    @property
    def num_trainers(self) -> int:
        """Trainer ranks."""
        return len(self.trainer_device)

    @property
    def num_engines(self) -> int:
        """Engine ranks, of all replicas."""
        return len(self.engine_device)

    def host_of(self, device: NDArray[np.int64]) -> NDArray[np.int64]:
        """Host number of devices."""
        return device // self.host.devices

    def domain_of(self, device: NDArray[np.int64]) -> NDArray[np.int64]:
        """Link domain number of devices."""
        return self.host_of(device) // self.host.domain_hosts

    def port_of(self, device: NDArray[np.int64]) -> NDArray[np.int64]:
        """Port number of devices: the NICs a device uses, shared with the devices that use them too."""
        ports = np.array(self._ports[0])
        return self.host_of(device) * len(self._ports[1]) + ports[device % self.host.devices]

    def rail_of(self, device: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rail of a device's first NIC."""
        rails = {d: nic.rail for nic in reversed(self.host.nics) for d in nic.devices}
        return np.array([rails[d] for d in range(self.host.devices)])[device % self.host.devices]

    @cached_property
    def _ports(self) -> tuple[list[int], list[float]]:
        """Port of each device of a host, and the rate of each port: devices joined by shared NICs are one port."""
        port = list(range(self.host.devices))
        for nic in self.host.nics:
            joined = {port[d] for d in nic.devices}
            port = [min(joined) if p in joined else p for p in port]
        numbers = {p: i for i, p in enumerate(sorted(set(port)))}
        rates = [0.0] * len(numbers)
        for nic in self.host.nics:
            rates[numbers[port[nic.devices[0]]]] += nic.line_bytes_per_s
        return [numbers[p] for p in port], rates

    def port_rate(self, port: NDArray[np.int64]) -> NDArray[np.float64]:
        """Line rate of ports, bytes per second and direction."""
        rates = np.array(self._ports[1])
        found = rates[port % len(rates)]
        return found * self._speed_of(port // len(rates)) if self.host_speed else found

    def _speed_of(self, host: NDArray[np.int64]) -> NDArray[np.float64]:
        speed = np.array([*self.host_speed, 1.0])
        return speed[np.minimum(host, len(self.host_speed))]

    @property
    def nic(self) -> Nic:
        """The first NIC: per-write costs are taken from it (all NICs of a host are alike)."""
        return self.host.nics[0]

    @property
    def link_bytes_per_s(self) -> float:
        """Rate between two devices of one domain."""
        return self.host.link_gb_per_s * 1e9

    @property
    def uplink_bytes_per_s(self) -> float:
        """Limit of one host towards the network; infinite if only its NICs limit it."""
        return self.host.uplink_gbps * 1e9 / 8 or np.inf

    @property
    def cross_rail_bytes_per_s(self) -> float:
        """Limit of one host for traffic that changes rail; infinite if there is none."""
        return self.host.cross_rail_gbps * 1e9 / 8 or np.inf

    def min_run_bytes(self, transport: str, memory: str = "cuda") -> int:
        """Runs of at least this length are worth a write of their own: packing and scattering them would take longer.

        `memory`: where the engine's weights are, `cuda` (the memory of a host's devices) or `cpu`.
        """
        op_us = self.host.op_us.get(transport, {}).get(memory, OP_US.get((transport, memory), DEFAULT_OP_US))
        copy_gb_per_s = self.host.cpu_gb_per_s if memory == "cpu" else self.host.device_gb_per_s
        return int(op_us * 1e-6 * copy_gb_per_s * 1e9 / 2)

    @cached_property
    def is_local(self) -> NDArray[np.bool_]:
        """Matrix [trainer, engine]: whether the pair shares a link domain, whose rate it has."""
        return self.domain_of(self.trainer_device)[:, None] == self.domain_of(self.engine_device)

    @cached_property
    def shares_host(self) -> NDArray[np.bool_]:
        """Matrix [trainer, engine]: whether the pair is on one host."""
        return self.host_of(self.trainer_device)[:, None] == self.host_of(self.engine_device)

    @cached_property
    def changes_rail(self) -> NDArray[np.bool_]:
        """Matrix [trainer, engine]: whether network traffic of the pair crosses rails."""
        return self.rail_of(self.trainer_device)[:, None] != self.rail_of(self.engine_device)

    @property
    def is_uniform(self) -> bool:
        """Whether every sender reaches every engine the same way, so that only its own port matters."""
        limited = self.host.uplink_gbps or self.host.cross_rail_gbps
        return not self.is_local.any() and not limited

    def to_json(self) -> dict[str, Any]:
        """A description that `topology_from_mapping` reads; with devices where ranks do not fill hosts in order."""
        host = asdict(self.host)
        usual = self.cluster.place(num_trainers=self.num_trainers, num_engines=self.num_engines)
        devices = {"trainer": self.trainer_device.tolist(), "engine": self.engine_device.tolist()}
        is_usual = devices == {"trainer": usual.trainer_device.tolist(), "engine": usual.engine_device.tolist()}
        return {
            "name": self.cluster.name,
            "placement": self.cluster.placement,
            "nic": [{**nic, "devices": list(nic["devices"])} for nic in host.pop("nics")],
            "host": host,
            **({} if is_usual else {"devices": devices}),
            **({"speeds": list(self.host_speed)} if self.host_speed else {}),
        }


Seat = tuple[str, int | None]
"""Where a member is: the name of its host, and the number of its device there (None: any, as for CPU memory)."""


def place_members(
    cluster: Cluster, *, trainers: Sequence[Seat], engines: Sequence[Seat], speeds: Mapping[str, float] | None = None
) -> Topology:
    """Give every rank the device it reports, on the host it reports; seats are in rank order.

    Hosts are numbered by the lowest rank on them, trainers first. Members without a device number take the one that
    fewest others use. Where a host has more members than devices, members share devices and so their rates.
    `speeds`: hosts whose NICs carry only a fraction of what the cluster's do.
    """
    _check_pairs(len(trainers), len(engines))
    hosts = _host_numbers(cluster, trainers, engines)
    per_host = cluster.host.devices
    used = {host: np.zeros(per_host, dtype=np.int64) for host in hosts}
    device = np.zeros(len(trainers) + len(engines), dtype=np.int64)
    seats = list(enumerate([*trainers, *engines]))
    for member, (host, number) in sorted(seats, key=lambda seat: seat[1][1] is None):  # the numbered ones first
        on_host = int(used[host].argmin()) if number is None else number % per_host
        used[host][on_host] += 1
        device[member] = hosts[host] * per_host + on_host
    first_engine = len(trainers)
    return Topology(
        cluster=cluster,
        trainer_device=device[:first_engine],
        engine_device=device[first_engine:],
        host_speed=_host_speed(hosts, speeds or {}),
    )


def _host_speed(hosts: Mapping[str, int], speeds: Mapping[str, float]) -> tuple[float, ...]:
    """By host number; empty if all are alike."""
    known = {number: speeds[host] for host, number in hosts.items() if speeds.get(host, 1.0) != 1.0}
    return tuple(known.get(number, 1.0) for number in range(max(known) + 1)) if known else ()


def _host_numbers(cluster: Cluster, trainers: Sequence[Seat], engines: Sequence[Seat]) -> dict[str, int]:
    """Numbers of hosts by name. Where sides are separate, hosts with engines only begin a link domain of their own."""
    first = dict.fromkeys(host for host, _ in trainers)
    then = dict.fromkeys(host for host, _ in engines if host not in first)
    in_domain = cluster.host.domain_hosts if cluster.placement == "separate" else 1
    start = -(-len(first) // in_domain) * in_domain
    return {host: number for number, host in enumerate(first)} | {
        host: number for number, host in enumerate(then, start=start)
    }


def _check_pairs(num_trainers: int, num_engines: int) -> None:
    if num_trainers * num_engines > MAX_PAIRS:
        raise ConfigError(
            f"{num_trainers} trainers × {num_engines} engine ranks are more pairs than weft supports",
            hint=f"use at most {MAX_PAIRS} pairs",
        )


def _one_nic_each(devices: int, **nic: Any) -> tuple[Nic, ...]:
    return tuple(Nic(devices=(device,), rail=device, **nic) for device in range(devices))


CX7 = {"efficiency": 0.934, "latency_us": 11.2, "gap_us": 0.09}
EFA = {"efficiency": 0.864, "latency_us": 32.1, "gap_us": 0.482}
"""Fitted to fabric-lib's published micro-benchmarks (`weft validate`, row T3)."""

PRESETS: dict[str, Cluster] = {
    "h100-ib400": Cluster(
        name="h100-ib400",
        host=HostKind(
            devices=8,
            nics=_one_nic_each(8, gbps=400, **CX7),
            link_gb_per_s=450,
            pinned_gb_per_s=55,
            device_gb_per_s=1500,
        ),
    ),
    "h200-efa3200": Cluster(
        name="h200-efa3200",
        host=HostKind(
            devices=8,
            nics=tuple(Nic(devices=(i // 2,), rail=i, gbps=200, **EFA) for i in range(16)),
            link_gb_per_s=450,
            pinned_gb_per_s=55,
            device_gb_per_s=2100,
        ),
    ),
    "gb200-nvl72": Cluster(
        name="gb200-nvl72",
        host=HostKind(
            devices=4,
            nics=_one_nic_each(4, gbps=400, **CX7),
            link_gb_per_s=900,
            pinned_gb_per_s=200,
            device_gb_per_s=3500,
            domain_hosts=18,
        ),
    ),
    "ethernet-10g": Cluster(
        name="ethernet-10g",
        host=HostKind(
            devices=1,
            nics=(Nic(devices=(0,), gbps=10, efficiency=0.94, latency_us=50, gap_us=5),),
            link_gb_per_s=10,
            pinned_gb_per_s=12,
            device_gb_per_s=10,
        ),
    ),
}


def load_topology(name: str) -> Cluster:
    """A cluster by preset name, or from a TOML file.

    >>> load_topology("h100-ib400").host.devices
    8
    """
    if name in PRESETS:
        return PRESETS[name]
    if name.endswith(".toml"):
        return cluster_from_mapping(read_toml(Path(name)), where=f"`{name}`")
    close = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]}? " if close else ""
    raise ConfigError(
        f"unknown topology `{name}`", hint=f"{hint}presets: {', '.join(PRESETS)}; or a path to a .toml file"
    )


def cluster_from_mapping(table: dict[str, Any], *, where: str) -> Cluster:
    """A cluster from the tables of a TOML file (or of a plan's header)."""
    nics = table.get("nic")
    host = table.get("host")
    if not isinstance(nics, list) or not nics or not isinstance(host, dict):
        raise ConfigError(f"{where} needs a [host] table and at least one [[nic]]", hint="see docs/topology.md")
    unknown = set(table) - {"name", "placement", "host", "nic"}
    if unknown:
        raise ConfigError(f"{where}: unknown key `{sorted(unknown)[0]}`", hint="keys: name, placement, host, nic")
    cards = tuple(_nic(nic, where=f"{where} [[nic]] {i}") for i, nic in enumerate(nics))
    kind = _build(HostKind, {**host, "nics": cards}, where=f"{where} [host]")
    _check_nics(kind, where)
    placement = table.get("placement", "separate")
    if placement not in PLACEMENTS:
        raise ConfigError(f"{where}: placement is {placement!r}", hint=f"use {' or '.join(PLACEMENTS)}")
    return Cluster(name=str(table.get("name", where)), host=kind, placement=placement)


def cluster_toml(cluster: Cluster) -> str:
    """A cluster as the TOML file `load_topology` reads."""
    host = asdict(cluster.host)
    nics = host.pop("nics")
    lines = [f'name = "{cluster.name}"', f'placement = "{cluster.placement}"', "", "[host]"]
    lines += [f"{name} = {_toml(value)}" for name, value in host.items()]
    for nic in nics:
        lines += ["", "[[nic]]", *(f"{name} = {_toml(value)}" for name, value in nic.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{name} = {_toml(part)}" for name, part in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(part) for part in value) + "]"
    return repr(value)


def topology_from_mapping(table: dict[str, Any], *, num_trainers: int, num_engines: int, where: str) -> Topology:
    """A topology from what `Topology.to_json` gives."""
    kind = {key: value for key, value in table.items() if key not in ("devices", "speeds")}
    usual = cluster_from_mapping(kind, where=where).place(num_trainers=num_trainers, num_engines=num_engines)
    usual = replace(usual, host_speed=_speeds(table.get("speeds", []), where=where))
    devices = table.get("devices")
    if devices is None:
        return usual
    most = (num_trainers + num_engines + usual.host.domain_hosts) * usual.host.devices
    sides = {"trainer": num_trainers, "engine": num_engines}
    for side, num_ranks in sides.items():
        given = devices.get(side) if isinstance(devices, dict) else None
        if not isinstance(given, list) or len(given) != num_ranks or not _are_numbers(given, most):
            raise ConfigError(
                f"{where}: invalid devices of {side} ranks", hint=f"expected {num_ranks} numbers below {most}"
            )
    trainer, engine = (np.array(devices[side], dtype=np.int64) for side in sides)
    return replace(usual, trainer_device=trainer, engine_device=engine)


def _speeds(values: Any, *, where: str) -> tuple[float, ...]:
    is_list = isinstance(values, list) and len(values) <= MAX_PAIRS
    if not is_list or not all(type(value) in (int, float) and 0 < value <= 1 for value in values):
        raise ConfigError(f"{where}: invalid speeds of hosts", hint="expected fractions: above 0, up to 1")
    return tuple(values)


def _are_numbers(values: list[Any], most: int) -> bool:
    return all(type(value) is int and 0 <= value < most for value in values)


def _nic(table: Any, *, where: str) -> Nic:
    devices = table.get("devices") if isinstance(table, dict) else None
    if not isinstance(devices, list) or not all(type(device) is int for device in devices):
        raise ConfigError(f"{where}: devices is {devices!r}", hint="give the devices that use it: devices = [0, 1]")
    built: Nic = _build(Nic, {**table, "devices": tuple(devices)}, where=where)
    if not 0 < built.efficiency <= 1:
        raise ConfigError(
            f"{where}: efficiency is {built.efficiency}", hint="expected a fraction of the line rate: above 0, up to 1"
        )
    return built


_COUNTS = {"devices": 1024, "domain_hosts": 65_536, "rail": 65_536}
"""The keys that are whole numbers, and their maxima."""


def _build(kind: type[Any], values: dict[str, Any], *, where: str) -> Any:
    """A Nic or HostKind from a table, with errors that name the key."""
    known = {field.name: field for field in fields(kind)}
    for name, value in values.items():
        if name not in known:
            raise ConfigError(f"{where}: unknown key `{name}`", hint=f"keys: {', '.join(known)}")
        if isinstance(value, tuple):
            continue
        if name == "op_us":
            _check_costs(value, where)
            continue
        whole = name in _COUNTS
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or not 0 <= value < 1e9:
            expected = "a whole number" if whole else "a number"
            raise ConfigError(f"{where}: {name} is {value!r}", hint=f"expected {expected} that is not negative")
        if whole and value > _COUNTS[name]:
            raise ConfigError(f"{where}: {name} is {value}", hint=f"expected at most {_COUNTS[name]}")
    for name in ("gbps", "link_gb_per_s", "pinned_gb_per_s", "device_gb_per_s", "devices", "domain_hosts"):
        if values.get(name) == 0:
            raise ConfigError(f"{where}: {name} is 0", hint="a rate or count must be positive")
    try:
        return kind(**values)
    except TypeError as error:
        missing = str(error).rpartition("argument")[2].strip(" s:")
        raise ConfigError(f"{where}: missing {missing}", hint=f"keys: {', '.join(known)}") from error


def _check_costs(table: Any, where: str) -> None:
    """Raise unless this is a table of costs of one write, by transport and memory."""
    kinds = list(table.values()) if isinstance(table, Mapping) else [table]
    of_memory = [costs for costs in kinds if isinstance(costs, Mapping) and set(costs) <= MEMORY_KINDS]
    if len(of_memory) < len(kinds):
        hint = "give microseconds by transport and memory: op_us = { nixl = { cpu = 1.2, cuda = 10 } }"
        raise ConfigError(f"{where}: op_us is {table!r}", hint=hint)
    for cost in (cost for costs in of_memory for cost in costs.values()):
        if isinstance(cost, bool) or not isinstance(cost, int | float) or not 0 <= cost < 1e9:
            raise ConfigError(f"{where}: op_us has {cost!r}", hint="expected a number that is not negative")


def with_cards(cluster: Cluster, gbps: Sequence[float]) -> Cluster:
    """The same hosts with these network cards, which devices share as evenly as possible; costs stay those it has."""
    usual, devices = cluster.host.nics[0], cluster.host.devices
    nics = tuple(
        replace(usual, gbps=rate, devices=served, rail=rail)
        for rail, (rate, served) in enumerate(zip(gbps, _served(len(gbps), devices), strict=True))
    )
    return replace(cluster, host=replace(cluster.host, nics=nics))


def _served(num_cards: int, num_devices: int) -> list[tuple[int, ...]]:
    """The devices each card serves: cards and devices in order, shared out evenly; all by all if that does not go."""
    if num_devices % num_cards == 0:
        each = num_devices // num_cards
        return [tuple(range(card * each, (card + 1) * each)) for card in range(num_cards)]
    if num_cards % num_devices == 0:
        return [(card * num_devices // num_cards,) for card in range(num_cards)]
    return [tuple(range(num_devices))] * num_cards


def _check_nics(kind: HostKind, where: str) -> None:
    served = {device for nic in kind.nics for device in nic.devices}
    if any(not nic.devices for nic in kind.nics):
        raise ConfigError(f"{where}: a [[nic]] serves no device", hint="give devices = [0, …]")
    outside = sorted(device for device in served if not 0 <= device < kind.devices)
    if outside:
        raise ConfigError(
            f"{where}: NIC device {outside[0]} is not on the host", hint=f"expected 0 to {kind.devices - 1}"
        )
    missing = sorted(set(range(kind.devices)) - served)
    if missing:
        raise ConfigError(f"{where}: device {missing[0]} has no NIC", hint="list it in some [[nic]].devices")
    sets = {frozenset(nic.devices) for nic in kind.nics}
    if sum(len(devices) for devices in sets) > len(served):
        raise ConfigError(
            f"{where}: NICs are shared by overlapping groups of devices", hint="devices share all their NICs or none"
        )
    if len({(nic.efficiency, nic.latency_us, nic.gap_us) for nic in kind.nics}) > 1:
        raise ConfigError(
            f"{where}: NICs differ in efficiency, latency_us or gap_us",
            hint="use one set of costs for all NICs of a host",
        )


def with_placement(cluster: Cluster, placement: str) -> Cluster:
    """The same cluster with another placement."""
    if placement not in PLACEMENTS:
        raise ConfigError(f"unknown placement `{placement}`", hint=f"use {' or '.join(PLACEMENTS)}")
    return replace(cluster, placement=placement)
