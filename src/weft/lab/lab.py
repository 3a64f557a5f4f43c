"""A lab while it exists: processes on its hosts, faults in its network, counters of its NICs."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from weft.errors import ConfigError
from weft.lab import records
from weft.lab.commands import check_possible
from weft.lab.network import Network
from weft.lab.spec import LabSpec, parse_rate

_NAME = re.compile(r"[a-z0-9]{1,16}")
MASTER_PORT = 29500
_ENTER = 'mount --bind "$1" /proc/sys/kernel/random/boot_id && hostname "$2" && shift 2 && exec "$@"'
"""Gives a process a boot and a host name of its own: neither weft nor UCX takes two hosts for one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NicTraffic:
    """What one NIC has carried so far."""

    host: int
    nic: int
    sent_bytes: int
    received_bytes: int
    sent_packets: int
    received_packets: int
    """Of any length up to 64 KB: those of fast cards are counted before they are cut into frames."""


class Lab:
    """Exists inside its context. `name`: of its namespaces; labs of different names never meet."""

    def __init__(self, spec: LabSpec, name: str | None = None) -> None:
        check_possible()
        self.spec, self.name = spec, secrets.token_hex(3) if name is None else name
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"invalid lab name `{self.name}`", hint="use 1 to 16 lower-case letters and digits")
        self._network = Network(self.name, spec)

    @classmethod
    def running(cls, name: str | None) -> Self:
        """A lab another process has made, for faults and counters; the only one if no name is given."""
        record = records.find(name)
        return cls(record.spec, record.name)

    def __enter__(self) -> Self:
        records.remove_leftovers()
        records.write(self.name, self.spec)
        try:
            for host in range(len(self.spec.hosts)):
                records.boot_file(self.name, host).write_text(f"{uuid.uuid4()}\n")
            self._network.build()
        except BaseException:
            records.remove_lab(self.name)
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        records.remove_lab(self.name)

    def address(self, host: int, nic: int = 0) -> str:
        """Where other hosts reach one."""
        return self._network.address(host, nic)

    def environment(self, host: int) -> dict[str, str]:
        """What tells a process which host it is on, and torch, Gloo and UCX which NICs to use."""
        cards = ",".join(f"eth{nic}" for nic in range(len(self.spec.hosts[host].rates)))
        return {
            "WEFT_LAB": self.name,
            "WEFT_LAB_HOST": str(host),
            "WEFT_LAB_HOSTS": str(len(self.spec.hosts)),
            "WEFT_LAB_ADDRESS": self.address(host),
            "RANK": str(host),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(len(self.spec.hosts)),
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(MASTER_PORT),
            "GLOO_SOCKET_IFNAME": "eth0",
            "NCCL_SOCKET_IFNAME": cards,
            "UCX_NET_DEVICES": cards,
            "UCX_TLS": "tcp,self",
            "WEFT_NIC_GBPS": f"{sum(self.spec.hosts[host].rates) / 1e9:.6g}",
        }

    def start(
        self, host: int, command: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a process on a host. It ends with the process that started it."""
        boot = str(records.boot_file(self.name, host))
        entered = ["ip", "netns", "exec", self._network.namespace(host), "unshare", "--uts"]
        named = ["sh", "-c", _ENTER, "sh", boot, f"{self.name}-h{host}", *command]
        return subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *entered, *named],
            env={**os.environ, **self.environment(host), **(env or {})},
            **options,
        )

    def cut(self, host: int) -> None:
        """Take a host off the network: nothing arrives, nothing is refused."""
        self._network.cut(self._known(host))

    def slow(self, host: int, rate: str) -> None:
        """Give all NICs of a host another rate."""
        self._network.slow(self._known(host), parse_rate(rate))

    def heal(self, host: int) -> None:
        """Connect a host again, at the rates it should have."""
        self._network.heal(self._known(host))

    def _known(self, host: int) -> int:
        if not 0 <= host < len(self.spec.hosts):
            raise ConfigError(f"the lab has no host {host}", hint=f"expected 0 to {len(self.spec.hosts) - 1}")
        return host

    def traffic(self) -> list[NicTraffic]:
        """What every NIC has carried since the lab was made, as the switches count it."""
        return [
            NicTraffic(host=host, nic=nic, **found._asdict())
            for (host, nic), found in sorted(self._network.counters().items())
        ]
