"""A topology from what this host reports: network cards and GPUs.

cluster = detect(like="h100-ib400")        # rates that a host does not report are those of the preset
"""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

from weft.core.topology import Cluster, Nic, load_topology
from weft.errors import ConfigError
from weft.transport.network_cards import SYSFS, VARIABLE, NetworkCard, host_gbps, network_cards

GPUS = Path("/proc/driver/nvidia/gpus")
LIKE_GPU, LIKE_CPU = "h100-ib400", "ethernet-10g"


def detect(like: str | None, *, sysfs: Path = SYSFS, gpus: Path = GPUS) -> Cluster:
    """This host, repeated. `like`: where rates that it does not report are taken from."""
    num_devices = max(len(list(gpus.iterdir())) if gpus.is_dir() else 0, 1)
    base = load_topology(like or (LIKE_GPU if gpus.is_dir() else LIKE_CPU))
    cards = _cards(sysfs)
    usual = base.host.nics[0]
    nics = tuple(
        replace(usual, gbps=card.gbps, devices=devices, rail=rail)
        for rail, (card, devices) in enumerate(zip(cards, _served(len(cards), num_devices), strict=True))
    )
    host = replace(base.host, devices=num_devices, nics=_checked(nics))
    return replace(base, name=socket.gethostname(), host=host)


def _cards(sysfs: Path) -> list[NetworkCard]:
    if os.environ.get(VARIABLE):
        return [NetworkCard(name=VARIABLE, gbps=host_gbps(sysfs))]
    return network_cards(sysfs)


def _served(num_cards: int, num_devices: int) -> list[tuple[int, ...]]:
    """The devices each card serves: cards and devices in order, shared out evenly; all by all if that does not go."""
    if num_cards and num_devices % num_cards == 0:
        each = num_devices // num_cards
        return [tuple(range(card * each, (card + 1) * each)) for card in range(num_cards)]
    if num_cards % num_devices == 0:
        return [(card * num_devices // num_cards,) for card in range(num_cards)]
    return [tuple(range(num_devices))] * num_cards


def _checked(nics: tuple[Nic, ...]) -> tuple[Nic, ...]:
    if not nics:
        raise ConfigError("no network card of this host reports its rate", hint=f"set {VARIABLE} to its rate in Gb/s")
    return nics
