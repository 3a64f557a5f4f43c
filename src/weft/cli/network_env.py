"""The environment variables NCCL, Gloo, UCX and UCCL need for one network interface, from what the machine has.

variables = network_variables("ens1f0")        # or None: the first that is up
"""

from __future__ import annotations

from pathlib import Path

from weft.errors import ConfigError

NET, INFINIBAND = Path("/sys/class/net"), Path("/sys/class/infiniband")
ROCE_V2 = "RoCE v2"


def interfaces(net: Path = NET) -> list[str]:
    """Names of the network interfaces, loopback last."""
    names = sorted(path.name for path in net.iterdir()) if net.exists() else []
    return sorted(names, key=lambda name: (name == "lo", name))


def network_variables(interface: str | None, *, net: Path = NET, infiniband: Path = INFINIBAND) -> dict[str, str]:
    """What to export before members start."""
    names = interfaces(net)
    chosen = interface or _default(net) or next(iter(names), "")
    if chosen not in names:
        raise ConfigError(f"unknown network interface `{chosen}`", hint=f"interfaces: {', '.join(names) or 'none'}")
    found = {"NCCL_SOCKET_IFNAME": chosen, "GLOO_SOCKET_IFNAME": chosen, "OMP_NUM_THREADS": "1"}
    adapter = _adapter(chosen, net, infiniband)
    if adapter is None:
        return found | {"NCCL_IB_DISABLE": "1", "UCX_NET_DEVICES": chosen, "UCX_TLS": "tcp,sm,self"}
    found |= {"NCCL_IB_DISABLE": "0", "NCCL_IB_HCA": adapter, "UCX_NET_DEVICES": f"{adapter}:1"}
    index = _gid_index(infiniband / adapter / "ports" / "1")
    if index is not None:
        found |= {"NCCL_IB_GID_INDEX": str(index), "UCX_IB_GID_INDEX": str(index), "UCCL_IB_GID_INDEX": str(index)}
    return found


def _default(net: Path) -> str | None:
    """The first interface that is up, loopback excluded."""
    up = [name for name in interfaces(net) if name != "lo" and _text(net / name / "operstate") in ("up", "unknown")]
    return up[0] if up else None


def _adapter(interface: str, net: Path, infiniband: Path) -> str | None:
    """The RDMA adapter on the same device as an interface."""
    device = net / interface / "device"
    if not device.exists() or not infiniband.exists():
        return None
    for adapter in sorted(infiniband.iterdir()):
        if (adapter / "device").resolve() == device.resolve():
            return adapter.name
    return None


def _gid_index(port: Path) -> int | None:
    """Index of a port's first RoCE v2 address that is neither empty nor link-local; None on InfiniBand."""
    types = port / "gid_attrs" / "types"
    for entry in sorted(types.iterdir(), key=lambda path: int(path.name)) if types.exists() else ():
        address = _text(port / "gids" / entry.name)
        if _text(entry) == ROCE_V2 and address.replace(":", "").strip("0") and not address.startswith("fe80"):
            return int(entry.name)
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
