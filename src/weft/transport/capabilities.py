"""What each transport can do. This is the only place: the registry chooses by it, transports carry their row."""

from __future__ import annotations

from dataclasses import dataclass

_CPU, _CUDA = frozenset({"cpu"}), frozenset({"cuda"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a transport can do, fixed."""

    name: str
    one_host: bool = False
    """Works only between processes of one host."""
    any_memory: bool = True
    """Ordinary memory can be a destination; otherwise it must come from `allocate`."""
    needs_target_cpu: bool = False
    """Whether the target must run code for a write to land."""
    memory: frozenset[str] = _CPU
    """Kinds of memory it moves between: `cpu`, `cuda`."""
    is_mapped: bool = False
    """Whether the sender's own instructions write the target's memory (`weft.transport.mapped`)."""


CAPABILITIES = {
    record.name: record
    for record in (
        Capabilities(name="local", one_host=True, is_mapped=True),
        Capabilities(name="shm", one_host=True, any_memory=False, is_mapped=True),
        Capabilities(name="cma", one_host=True),
        Capabilities(name="cuda_ipc", one_host=True, memory=_CUDA, is_mapped=True),
        Capabilities(name="nixl", memory=_CPU | _CUDA),
        Capabilities(name="mooncake", needs_target_cpu=True),
        Capabilities(name="uccl", memory=_CUDA),
    )
}
