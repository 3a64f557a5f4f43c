"""The network cards of this host and their rates, as the kernel reports them.

    network_cards()        # [NetworkCard(name="mlx5_0", gbps=400.0), …]

RDMA cards where there are any; otherwise Ethernet, physical cards before virtual ones. Virtual machines and containers
often report no rate, or a wrong one: `WEFT_NIC_GBPS` says it instead, for the whole host.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from weft.errors import ConfigError

SYSFS = Path("/sys/class")
VARIABLE = "WEFT_NIC_GBPS"
_NOT_CARDS = ("bridge", "bonding", "tun_flags")
"""What marks an interface that has no wire of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkCard:
    """One card with a link."""

    name: str
    gbps: float


def rdma_cards(sysfs: Path = SYSFS) -> tuple[str, ...]:
    """Names of the RDMA cards of this host, as far as this process sees them."""
    return tuple(sorted(entry.name for entry in _entries(sysfs / "infiniband")))


def network_cards(sysfs: Path = SYSFS) -> list[NetworkCard]:
    """The cards whose rate is known."""
    return _rdma_cards(sysfs / "infiniband") or _ethernet_cards(sysfs / "net")


def host_gbps(sysfs: Path = SYSFS) -> float:
    """The rate of all cards together, Gb/s; 0: unknown. Raises ConfigError for a wrong `WEFT_NIC_GBPS`."""
    given = os.environ.get(VARIABLE, "").strip()
    if not given:
        return sum(card.gbps for card in network_cards(sysfs))
    try:
        gbps = float(given)
    except ValueError:
        gbps = -1.0
    if not 0 < gbps < 1e6:
        raise ConfigError(f"{VARIABLE} is `{given}`", hint="give the rate of this host's network cards in Gb/s: 400")
    return gbps


def _rdma_cards(folder: Path) -> list[NetworkCard]:
    found = []
    for card in _entries(folder):
        ports = [port for port in _entries(card / "ports") if "ACTIVE" in _text(port / "state")]
        gbps = sum(_number(_text(port / "rate").partition(" ")[0]) for port in ports)
        if gbps > 0:
            found.append(NetworkCard(name=card.name, gbps=gbps))
    return found


def _ethernet_cards(folder: Path) -> list[NetworkCard]:
    cards = [card for card in _entries(folder) if card.name != "lo" and _has_wire(card)]
    physical = [card for card in cards if (card / "device").exists()]
    rates = {card.name: _number(_text(card / "speed")) / 1e3 for card in physical or cards}
    return [NetworkCard(name=name, gbps=gbps) for name, gbps in rates.items() if gbps > 0]


def _has_wire(card: Path) -> bool:
    return _text(card / "operstate") in ("up", "unknown") and not any((card / mark).exists() for mark in _NOT_CARDS)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    """Empty for files the kernel does not let read, such as the speed of an interface that is down."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(text: str) -> float:
    """0 for what is none: interfaces without a known speed say -1, or nothing."""
    try:
        return max(float(text), 0.0)
    except ValueError:
        return 0.0
