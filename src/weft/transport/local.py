"""`local`: members inside one process, with faults that can be injected; for tests, and for users' own tests.

network = LocalNetwork()
sender, receiver = LocalTransport("trainer 0", network), LocalTransport("engine 0", network)
network.faults["engine 0"] = Faults(corrupt=True)      # the next write to engine 0 flips a bit
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from weft import native
from weft.errors import PeerLost, TransferTimeout
from weft.transport.base import Batch, Capabilities, Column, Descriptor, Endpoint, Ranges, Transport

MAX_STALL_S = 60.0


@dataclass(slots=True, kw_only=True)
class Faults:
    """What goes wrong with writes to one member."""

    lost: bool = False
    """The member is gone."""
    corrupt: bool = False
    """The next write flips one bit of its first row."""
    stalled: threading.Event | None = None
    """Writes wait until the event is set."""


@dataclass(slots=True)
class LocalNetwork:
    """The members of one process that can reach each other."""

    members: dict[str, LocalTransport] = field(default_factory=dict)
    faults: dict[str, Faults] = field(default_factory=dict)


@dataclass
class _Peer:
    target: LocalTransport
    ranges: Ranges = field(default_factory=Ranges)

    def close(self) -> None:
        """Nothing to let go of."""


class LocalTransport(Transport[_Peer]):
    """Plain copies inside one process."""

    capabilities = Capabilities(name="local", one_host=True, any_memory=True, needs_target_cpu=False)

    def __init__(self, member: str, network: LocalNetwork, *, num_threads: int = 1) -> None:
        super().__init__(member, num_threads=num_threads)
        self._network = network
        self._arrived: dict[int, int] = {}
        self._lock = threading.Lock()
        network.members[member] = self

    @property
    def endpoint(self) -> Endpoint:
        """The member's name is enough."""
        return Endpoint(transport="local", member=self.member, data=b"")

    def _describe(self, address: int, num_bytes: int) -> Descriptor:
        return Descriptor(transport="local", address=address, num_bytes=num_bytes, data=b"")

    def _open(self, endpoint: Endpoint, descriptors: Sequence[Descriptor]) -> _Peer:
        target = self._network.members.get(endpoint.member)
        if target is None:
            raise PeerLost(f"{endpoint.member} is gone")
        peer = _Peer(target)
        for descriptor in descriptors:
            peer.ranges.add(descriptor.address, descriptor.num_bytes)
        return peer

    def prepare(self, peer: str, src: Column, dst: Column, length: Column) -> Batch:
        """Addresses are the same on both sides."""
        self._registered.find(src, length, whose=self.member)
        self._known(peer).ranges.find(dst, length, whose=peer)
        return Batch(peer=peer, src=src, dst=dst, length=length)

    def _write(self, batch: Batch, tag: int) -> int:
        target = self._known(batch.peer).target
        faults = self._network.faults.get(batch.peer, Faults())
        if faults.stalled is not None and not faults.stalled.wait(MAX_STALL_S):
            raise TransferTimeout(f"{batch.peer} stalled for {MAX_STALL_S} s")
        if faults.lost or self._network.members.get(batch.peer) is not target:
            raise PeerLost(f"{batch.peer} is gone")
        copied = native.copy(batch.dst, batch.src, batch.length, num_threads=self._num_threads)
        if faults.corrupt:
            faults.corrupt = False
            _flip_a_bit(int(batch.dst[0]))
        with target._lock:
            target._arrived[tag] = target._arrived.get(tag, 0) + copied
        return copied

    def arrived(self, tag: int) -> int:
        """Bytes counted under a tag."""
        with self._lock:
            return self._arrived.get(tag, 0)

    def _release(self) -> None:
        self._network.members.pop(self.member, None)


def _flip_a_bit(address: int) -> None:
    byte = (ctypes.c_uint8 * 1).from_address(address)
    byte[0] ^= 0x10
