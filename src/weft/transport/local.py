"""`local`: members inside one process, with fault injection; for weft's tests and for users' own.

network = LocalNetwork()
sender, receiver = LocalTransport("trainer 0", network), LocalTransport("engine 0", network)
network.faults["engine 0"] = Faults(corrupt=True)      # the next write to engine 0 flips a bit
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from weft.core.geometry.planes import Planes
from weft.errors import PeerLost, TransferTimeout
from weft.transport.base import Batch, Descriptor, Endpoint, Ranges
from weft.transport.capabilities import CAPABILITIES
from weft.transport.mapped import MappedTransport
from weft.transport.shm import copy_chunk, copy_planes

MAX_STALL_S = 60.0


@dataclass(slots=True, kw_only=True)
class Faults:
    """Faults injected into writes to one member."""

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
        """Nothing to release."""


class LocalTransport(MappedTransport[_Peer]):
    """Plain copies inside one process."""

    capabilities = CAPABILITIES["local"]

    def __init__(self, member: str, network: LocalNetwork, *, writer: int = 0, num_threads: int = 1) -> None:
        super().__init__(member, writer=writer, num_threads=num_threads)
        self._network = network
        self._arrived: dict[tuple[int, int], int] = {}
        self._lock = threading.Lock()
        network.members[member] = self

    @property
    def endpoint(self) -> Endpoint:
        """The member's name identifies it."""
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

    def _check_alive(self, peer: _Peer) -> None:
        faults = self._network.faults.get(peer.target.member, Faults())
        if faults.stalled is not None and not faults.stalled.wait(MAX_STALL_S):
            raise TransferTimeout(f"{peer.target.member} stalled for {MAX_STALL_S} s")
        if faults.lost or self._network.members.get(peer.target.member) is not peer.target:
            raise PeerLost(f"{peer.target.member} is gone")

    def _write_chunk(self, peer: _Peer, chunk: Batch) -> int:
        digest = copy_chunk(chunk, self._num_threads)
        faults = self._network.faults.get(peer.target.member, Faults())
        if faults.corrupt:
            faults.corrupt = False
            _flip_a_bit(int(chunk.dst[0]))
        return digest

    def _copy_planes(self, peer: _Peer, planes: Planes) -> int:
        digest = copy_planes(planes, self._num_threads)
        faults = self._network.faults.get(peer.target.member, Faults())
        if faults.corrupt and len(planes):
            faults.corrupt = False
            _flip_a_bit(int(planes.dst[0]))
        return digest

    def _count(self, peer: _Peer, tag: int, num_bytes: int) -> None:
        with peer.target._lock:
            key = tag, self._writer_number
            peer.target._arrived[key] = peer.target._arrived.get(key, 0) + num_bytes

    def arrived(self, tag: int, *, writer: int) -> int:
        """Bytes counted under a tag."""
        with self._lock:
            return self._arrived.get((tag, writer), 0)

    def forget_arrivals(self) -> None:
        """Forget all counts."""
        with self._lock:
            self._arrived = {}

    def _release(self) -> None:
        self._network.members.pop(self.member, None)


def _flip_a_bit(address: int) -> None:
    byte = (ctypes.c_uint8 * 1).from_address(address)
    byte[0] ^= 0x10
