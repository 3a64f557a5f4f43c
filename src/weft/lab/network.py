"""The network of a lab: a namespace for every host, one for the switches, and cards between them.

A NIC is a pair of virtual cards. Its end in the host sends at its rate, its end at the switch sends to the host at the
same rate. A rack has a switch of its own on every rail, with an uplink to the rail's core switch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import NamedTuple

from weft.errors import WeftError
from weft.lab.commands import batch, call, links, namespaces
from weft.lab.spec import LabSpec

_SUBNET = "10.77"
_BURST_S, _SLOW_BURST_S = 0.005, 0.1
"""What a card may send at once, in seconds of its rate: timers are not exact. Slow cards have more time."""
_PACKET_BYTES, _FRAMES_BYTES = 128 << 10, 4 << 10
"""More than a packet before it is cut into frames, and more than two frames: the least for fast and for slow cards."""
_QUEUE_S, _MIN_QUEUE_BYTES = 0.05, 128 << 10
"""What may wait for a card."""
_CONGESTION = "reno"
"""How TCP shares a card in labs: every kernel has it. BBR, the default of some machines, paces itself and leaves a card
idle at times, and more so when many connections begin at once."""

END_S, LOOK_S = 10.0, 0.01
"""How long processes that are killed may take to end, and how often that is looked at."""


class Counters(NamedTuple):
    """What a host has sent and received over one NIC."""

    sent_bytes: int
    received_bytes: int
    sent_packets: int
    received_packets: int


class Network:
    """The namespaces of one lab."""

    def __init__(self, name: str, spec: LabSpec) -> None:
        self.name, self._spec = name, spec
        self._switch = f"{_prefix(name)}sw"

    def namespace(self, host: int) -> str:
        """A host's namespace."""
        return f"{_prefix(self.name)}h{host}"

    def address(self, host: int, nic: int = 0) -> str:
        """A host's address on a rail."""
        return f"{_SUBNET}.{nic}.{host + 1}"

    def build(self) -> None:
        """Make everything."""
        hosts = range(len(self._spec.hosts))
        batch("ip", [f"netns add {name}" for name in (self._switch, *map(self.namespace, hosts))])
        batch("ip", list(self._switch_lines()), namespace=self._switch)
        batch("ip", list(self._card_lines()))
        batch("ip", list(self._port_lines()), namespace=self._switch)
        for host in hosts:
            batch("ip", list(self._host_lines(host)), namespace=self.namespace(host))
            self.heal(host)
        for rack, rate in self._spec.uplinks.items():
            for rail in range(self._spec.num_rails):
                self._limit(self._switch, f"{_rack_port(self._rack(rack), rail)}a", rate)
                self._limit(self._switch, f"{_rack_port(self._rack(rack), rail)}b", rate)

    def _rack(self, name: str) -> int:
        return list(self._spec.uplinks).index(name)

    def _switch_lines(self) -> Iterator[str]:
        """Switches: one for each rail, and one for each rack on it."""
        yield "link set lo up"
        for rail in range(self._spec.num_rails):
            yield f"link add core{rail} type bridge"
            yield f"link set core{rail} up"
            for rack in range(len(self._spec.uplinks)):
                port = _rack_port(rack, rail)
                yield f"link add {port} type bridge"
                yield f"link set {port} up"
                yield f"link add {port}a type veth peer name {port}b"
                yield f"link set {port}a master {port} up"
                yield f"link set {port}b master core{rail} up"

    def _cards(self) -> Iterator[tuple[int, int]]:
        for host, described in enumerate(self._spec.hosts):
            for nic in range(len(described.rates)):
                yield host, nic

    def _card_lines(self) -> Iterator[str]:
        for host, nic in self._cards():
            ends = f"{_port(host, nic)} netns {self._switch}", f"eth{nic} netns {self.namespace(host)}"
            yield f"link add {ends[0]} type veth peer name {ends[1]}"

    def _port_lines(self) -> Iterator[str]:
        for host, nic in self._cards():
            rack = self._spec.hosts[host].rack
            switch = f"core{nic}" if rack is None else _rack_port(self._rack(rack), nic)
            yield f"link set {_port(host, nic)} master {switch} up"

    def _host_lines(self, host: int) -> Iterator[str]:
        yield "link set lo up"
        for nic in range(len(self._spec.hosts[host].rates)):
            address = self.address(host, nic)
            yield f"addr add {address}/24 dev eth{nic}"
            yield f"link set eth{nic} up"
            yield f"route replace {_SUBNET}.{nic}.0/24 dev eth{nic} src {address} congctl {_CONGESTION}"

    def _limit(self, namespace: str, card: str, rate: int) -> None:
        bytes_per_s = rate / 8
        least = max(min(bytes_per_s * _SLOW_BURST_S, _PACKET_BYTES), _FRAMES_BYTES)
        burst = int(max(bytes_per_s * _BURST_S, least))
        limit = burst + int(max(bytes_per_s * _QUEUE_S, _MIN_QUEUE_BYTES))
        what = f"tbf rate {rate}bit burst {burst}b limit {limit}b"
        call("tc", "-n", namespace, "qdisc", "replace", "dev", card, "root", *what.split())

    def slow(self, host: int, rate: int) -> None:
        """Give all NICs of a host another rate."""
        for nic in range(len(self._spec.hosts[host].rates)):
            self._set_rate(host, nic, rate)

    def _set_rate(self, host: int, nic: int, rate: int) -> None:
        self._limit(self.namespace(host), f"eth{nic}", rate)
        self._limit(self._switch, _port(host, nic), rate)

    def cut(self, host: int) -> None:
        """Take a host off the network: nothing arrives, nothing is refused."""
        self._switch_ports(host, "down")

    def heal(self, host: int) -> None:
        """Connect a host, at the rates it should have."""
        self._switch_ports(host, "up")
        for nic, rate in enumerate(self._spec.hosts[host].rates):
            self._set_rate(host, nic, rate)

    def _switch_ports(self, host: int, state: str) -> None:
        num_nics = len(self._spec.hosts[host].rates)
        batch("ip", [f"link set {_port(host, nic)} {state}" for nic in range(num_nics)], namespace=self._switch)

    def counters(self) -> dict[tuple[int, int], Counters]:
        """Of every (host, NIC), as the switch counts them."""
        found = {link["ifname"]: link["stats64"] for link in links(self._switch)}
        return {
            (host, nic): Counters(
                *(int(found[_port(host, nic)][way][unit]) for unit in ("bytes", "packets") for way in ("rx", "tx"))
            )
            for host, nic in self._cards()
        }


def _prefix(name: str) -> str:
    return f"weft-{name}-"


def _port(host: int, nic: int) -> str:
    return f"h{host}n{nic}"


def _rack_port(rack: int, rail: int) -> str:
    return f"r{rack}n{rail}"


def remove(name: str) -> None:
    """Remove the namespaces of a lab, and whatever runs in them."""
    for namespace in namespaces():
        if namespace.startswith(_prefix(name)):
            try:
                _end_processes(namespace)
                call("ip", "netns", "del", namespace)
            except WeftError:
                if namespace in namespaces():  # otherwise another lab that began has removed it, too
                    raise


def _end_processes(namespace: str) -> None:
    """Kill what runs in a namespace, and what it starts meanwhile."""
    deadline = time.monotonic() + END_S
    while processes := call("ip", "netns", "pids", namespace).split():
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        if time.monotonic() > deadline:
            raise WeftError(
                f"processes in `{namespace}` have not ended in {END_S:.0f} s: {', '.join(processes)}",
                hint="run `weft lab clean` when they have",
            )
        time.sleep(LOOK_S)
