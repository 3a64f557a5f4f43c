"""What each transport can do. This is the only place: the registry chooses by it, transports carry their row."""

from __future__ import annotations

from dataclasses import dataclass

from weft.core.streams.pair_links import MAPPED

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

    @property
    def is_mapped(self) -> bool:
        """Whether the sender's own instructions write the target's memory (`weft.transport.mapped`)."""
        return self.name in MAPPED


CAPABILITIES = {
    record.name: record
    for record in (
        Capabilities(name="local", one_host=True),
        Capabilities(name="shm", one_host=True, any_memory=False),
        Capabilities(name="cma", one_host=True),
        Capabilities(name="cuda_ipc", one_host=True, memory=_CUDA),
        Capabilities(name="nixl", memory=_CPU | _CUDA),
        Capabilities(name="mooncake", needs_target_cpu=True),
        Capabilities(name="uccl", memory=_CUDA),
    )
}
