"""What a lab looks like: hosts, the rates of their NICs, racks with a shared uplink. From options or a TOML file.

nic = "400mbit"                     # for every host that does not say otherwise
nics = 2

[[host]]
count = 7

[[host]]
nic = "40mbit"                      # a slow one
rack = "b"

[rack.b]
uplink = "1gbit"                    # shared by its hosts, on every rail
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import ConfigError

MAX_HOSTS, MAX_NICS = 64, 4
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg])bit", re.IGNORECASE)
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9}
_HOST_KEYS = {"count", "nic", "nics", "rack"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LabHost:
    """One host."""

    rates: tuple[int, ...]
    """Bits per second of each NIC, in both directions."""
    rack: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LabSpec:
    """A whole lab. NIC number k of every host is on rail k: a switch of its own."""

    hosts: tuple[LabHost, ...]
    uplinks: dict[str, int]
    """Rack → bits per second between its hosts and all others, on every rail."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.hosts) <= MAX_HOSTS:
            raise ConfigError(f"the lab has {len(self.hosts)} hosts", hint=f"expected 1 to {MAX_HOSTS}")
        for number, host in enumerate(self.hosts):
            if not 1 <= len(host.rates) <= MAX_NICS:
                raise ConfigError(f"host {number} has {len(host.rates)} NICs", hint=f"expected 1 to {MAX_NICS}")
            if host.rack is not None and host.rack not in self.uplinks:
                raise ConfigError(f"host {number} is in unknown rack `{host.rack}`", hint="describe it: [rack.NAME]")

    @property
    def num_rails(self) -> int:
        """Switches: as many as the host with the most NICs has."""
        return max(len(host.rates) for host in self.hosts)


def parse_rate(text: str) -> int:
    """Bits per second of `400mbit`, `1gbit`, `2.5gbit`.

    >>> parse_rate("400mbit")
    400000000
    """
    found = _RATE.fullmatch(text.strip()) if isinstance(text, str) else None
    rate = int(float(found[1]) * _UNITS[found[2].lower()]) if found is not None else 0
    if rate < 8000:
        raise ConfigError(f"`{text}` is not a rate", hint="use kbit, mbit or gbit: 400mbit")
    return rate


def alike(*, hosts: int, nic: str, nics: int = 1) -> LabSpec:
    """Hosts that are all the same."""
    rates = (parse_rate(nic),) * nics
    return LabSpec(hosts=(LabHost(rates=rates),) * hosts, uplinks={})


def load_lab(path: Path) -> LabSpec:
    """The lab a TOML file describes. Raises ConfigError with what is wrong in it."""
    try:
        found = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"`{path}` cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"`{path}` is not TOML: {error}") from error
    if unknown := set(found) - {"nic", "nics", "host", "rack"}:
        raise ConfigError(f"`{path}` has an unknown entry `{min(unknown)}`", hint="nic, nics, [[host]], [rack.NAME]")
    return LabSpec(hosts=tuple(_hosts(found)), uplinks=_uplinks(found.get("rack", {})))


def _hosts(found: dict[str, Any]) -> list[LabHost]:
    made: list[LabHost] = []
    for entry in found.get("host", []):
        if not isinstance(entry, dict) or set(entry) - _HOST_KEYS:
            raise ConfigError(f"[[host]] has an unknown entry: {entry}", hint=", ".join(sorted(_HOST_KEYS)))
        values = {"nic": found.get("nic"), "nics": found.get("nics", 1), "count": 1, "rack": None} | entry
        if values["nic"] is None:
            raise ConfigError("a host has no rate", hint='set `nic = "400mbit"` at the top, or for every host')
        for name in ("nics", "count"):
            if not isinstance(values[name], int) or not 1 <= values[name] <= MAX_HOSTS:
                raise ConfigError(f"`{name}` is {values[name]!r}", hint=f"expected 1 to {MAX_HOSTS}")
        made += [LabHost(rates=(parse_rate(values["nic"]),) * values["nics"], rack=values["rack"])] * values["count"]
    return made


def _uplinks(racks: dict[str, Any]) -> dict[str, int]:
    for name, entry in racks.items():
        if not isinstance(entry, dict) or set(entry) != {"uplink"}:
            raise ConfigError(f"[rack.{name}] must say its uplink, and nothing else", hint='uplink = "1gbit"')
    return {name: parse_rate(entry["uplink"]) for name, entry in racks.items()}
