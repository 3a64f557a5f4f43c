"""All transports by name, and which one a link takes.

The rule, in this order: `shm` for CPU memory on one host (`cma` where the engine's memory cannot be shared), `cuda_ipc`
for GPU memory on one host, `nixl` between hosts. A transport that is requested by name is used or refused. A slower
transport than the intended one is an error, unless falling back was allowed.

    choose(trainer_place, engine_place)        # Choice(transport="shm", reason="one host, CPU memory")
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from weft.devices import CPU, device_number, memory_kind
from weft.errors import ConfigError, TransportUnavailable
from weft.transport.base import Transport
from weft.transport.capabilities import CAPABILITIES
from weft.transport.host import boot_id
from weft.transport.network_cards import host_gbps, rdma_cards

_HOMES = {
    "shm": ("weft.transport.shm", "ShmTransport"),
    "cma": ("weft.transport.cma", "CmaTransport"),
    "cuda_ipc": ("weft.transport.cuda_ipc", "CudaIpcTransport"),
    "nixl": ("weft.transport.nixl", "NixlTransport"),
    "mooncake": ("weft.transport.mooncake", "MooncakeTransport"),
    "uccl": ("weft.transport.uccl", "UcclTransport"),
}
NAMES = tuple(_HOMES)
_PACKAGES = {
    "nixl": (("nixl_cu13", "nixl_cu12"), "pip install --no-deps nixl-cu13==1.5.1"),
    "mooncake": (("mooncake",), "pip install mooncake-transfer-engine-non-cuda; apt install libibverbs1"),
    "uccl": (("uccl",), "pip install uccl (needs CUDA 12 and an RDMA network card)"),
    "cuda_ipc": (("torch",), "pip install torch (with CUDA)"),
}


class Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where a member is and what it can use; travels when it joins."""

    host: str
    """Identifies this boot of the host."""
    container: str
    """Identifies its process namespace: processes of one host in two containers cannot open each other's memory."""
    user: int
    device: str
    """Where its weights lie: `cpu`, `cuda:0`."""
    installed: tuple[str, ...]
    """Transports whose packages are installed."""
    shareable: bool = True
    """Whether its destination memory can be shared memory."""
    device_number: int | None = None
    """Which of the host's GPUs `device` is; None: CPU memory, or unknown."""
    nics: tuple[str, ...] = ()
    """RDMA cards of its host, as far as it sees them."""
    nic_gbps: float = 0.0
    """The rate of its host's network cards together, as the host reports it; 0: unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a link uses, and why."""

    transport: str
    reason: str


def place_here(device: str = CPU, *, shareable: bool = True) -> Place:
    """This process."""
    return Place(
        host=boot_id(),
        container=str(Path("/proc/self/ns/pid").readlink()),
        user=os.getuid(),
        device=device,
        installed=tuple(name for name in NAMES if is_installed(name)),
        shareable=shareable,
        device_number=device_number(device, os.environ.get("CUDA_VISIBLE_DEVICES")),
        nics=rdma_cards(),
        nic_gbps=host_gbps(),
    )


def is_installed(name: str) -> bool:
    """Whether a transport's packages are installed."""
    packages, _ = _PACKAGES.get(name, ((), ""))
    return not packages or any(importlib.util.find_spec(package) is not None for package in packages)


def open_transport(
    name: str,
    member: str,
    *,
    writer: int,
    num_threads: int,
    device: str,
    nixl_devices: str,
    host: str = "127.0.0.1",
    is_near: bool = True,
) -> Transport[Any]:
    """A member's side of a transport. `host`: where other hosts reach this one; `is_near`: whether peers are on it."""
    if name not in _HOMES:
        raise ConfigError(f"unknown transport `{name}`", hint=f"auto, {', '.join(NAMES)}")
    module, kind = _HOMES[name]
    options: dict[str, Any] = {"writer": writer, "num_threads": num_threads}
    if name not in ("shm", "cma"):
        options["device"] = device
    if name == "nixl":
        options |= {"devices": nixl_devices, "is_near": is_near}
    if name == "mooncake":
        options["host"] = host
    return getattr(importlib.import_module(module), kind)(member, **options)


def choose(src: Place, dst: Place, *, wanted: str = "auto", allow_fallback: bool = False) -> Choice:
    """The transport of one link; raises TransportUnavailable where the intended one does not work."""
    if wanted != "auto" and wanted not in NAMES:
        raise ConfigError(f"unknown transport `{wanted}`", hint=f"auto, {', '.join(NAMES)}")
    if "local" in src.installed and "local" in dst.installed:
        return Choice(transport="local", reason="inside one process")
    meant, reason = (wanted, "asked for") if wanted != "auto" else _default(src, dst)
    obstacle = _obstacle(meant, src, dst)
    if obstacle is None:
        return Choice(transport=meant, reason=reason)
    if allow_fallback:
        for name in ("cma", "nixl", "mooncake"):
            if _obstacle(name, src, dst) is None:
                return Choice(transport=name, reason=f"fallback: {meant} {obstacle[0]}")
    raise TransportUnavailable(f"{meant} {obstacle[0]}", hint=obstacle[1])


def is_cut_by_closing(transport: str, writer: Place, target: Place) -> bool:
    """Whether a writer is kept out for good when its target closes the transport.

    Connections and remote keys end with the target's side. Processes of one host and container reach each other's
    memory without either, through shared mappings or kernel copies; NIXL also uses these there.
    """
    if transport in ("local", "mooncake"):  # Mooncake's TCP was measured; the target's own threads write
        return True
    return not CAPABILITIES[transport].one_host and (writer.host, writer.container) != (target.host, target.container)


def _default(src: Place, dst: Place) -> tuple[str, str]:
    if src.host != dst.host:
        return "nixl", "different hosts"
    if src.container != dst.container or src.user != dst.user:
        return "nixl", "one host, but different containers or users"
    if memory_kind(src.device) == "cuda":
        return "cuda_ipc", "one host, GPU memory"
    if dst.shareable:
        return "shm", "one host, CPU memory"
    return "cma", "one host, CPU memory that cannot be moved into shared memory"


def _obstacle(name: str, src: Place, dst: Place) -> tuple[str, str] | None:  # noqa: PLR0911 - one reason each
    """Why a link cannot use a transport, and what to do about it; None if it can."""
    kinds = {memory_kind(src.device), memory_kind(dst.device)}
    if len(kinds) > 1:
        return "does not move between CPU and GPU memory", "hold the weights of both sides in one kind of memory"
    if not kinds <= CAPABILITIES[name].memory:
        return f"does not move {kinds.pop()} memory", "ask for another transport, or for `auto`"
    if CAPABILITIES[name].one_host and (src.host != dst.host or src.container != dst.container):
        return "works only within one host and container", "use nixl between hosts and containers"
    if name in ("shm", "cma") and src.user != dst.user:
        return "works only between processes of one user", "run both sides as one user, or use nixl"
    if name == "shm" and not dst.shareable:
        return "needs shareable memory", "use cma, or receive in `shadow` mode"
    missing = [side for side, place in (("trainer", src), ("engine", dst)) if name not in place.installed]
    if missing:
        return f"is not installed on the {' and the '.join(missing)} side", _PACKAGES[name][1]
    return None
