"""A topology from what this host reports: network cards and GPUs.

cluster = detect(like="h100-ib400")        # rates that a host does not report are those of the preset
"""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

from weft.core.topology import Cluster, load_topology, with_cards
from weft.errors import ConfigError
from weft.transport.network_cards import SYSFS, VARIABLE, NetworkCard, host_gbps, network_cards

GPUS = Path("/proc/driver/nvidia/gpus")
LIKE_GPU, LIKE_CPU = "h100-ib400", "ethernet-10g"


def detect(like: str | None, *, sysfs: Path = SYSFS, gpus: Path = GPUS) -> Cluster:
    """This host, repeated. `like`: where rates that it does not report are taken from."""
    num_devices = max(len(list(gpus.iterdir())) if gpus.is_dir() else 0, 1)
    base = load_topology(like or (LIKE_GPU if gpus.is_dir() else LIKE_CPU))
    cards = _cards(sysfs)
    if not cards:
        raise ConfigError("no network card of this host reports its rate", hint=f"set {VARIABLE} to its rate in Gb/s")
    host = replace(base.host, devices=num_devices)
    return with_cards(replace(base, name=socket.gethostname(), host=host), [card.gbps for card in cards])


def _cards(sysfs: Path) -> list[NetworkCard]:
    if os.environ.get(VARIABLE):
        return [NetworkCard(name=VARIABLE, gbps=host_gbps(sysfs))]
    return network_cards(sysfs)
