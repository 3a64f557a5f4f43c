"""The links of one trainer, on one device: engine ranks are landing areas beside its weights, behind a paced NIC.

The plan is made for a transport that takes descriptors, whose name this one has; a write is a copy on the device.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from weft.bench.pace import Pace
from weft.config import LARGEST_CHUNK
from weft.devices import DeviceWork
from weft.transport.base import Batch, Descriptor, Endpoint, Ranges
from weft.transport.capabilities import CAPABILITIES
from weft.transport.chunked import ChunkedTransport

STANDS_FOR = "nixl"


@dataclass
class _Peer:
    ranges: Ranges = field(default_factory=Ranges)

    def close(self) -> None:
        """Nothing to release."""


class PacedTransport(ChunkedTransport[_Peer]):
    """Copies on one device, one after the other, at the rate of a NIC."""

    capabilities = CAPABILITIES[STANDS_FOR]
    _chunk_bytes = LARGEST_CHUNK

    def __init__(self, member: str, work: DeviceWork) -> None:
        super().__init__(member)
        self._work = work
        self.pace = Pace(float("inf"))
        self._landed: Counter[tuple[int, int]] = Counter()

    @property
    def endpoint(self) -> Endpoint:
        """The member's name is enough."""
        return Endpoint(transport=STANDS_FOR, member=self.member, data=b"")

    def _describe(self, address: int, num_bytes: int) -> Descriptor:
        return Descriptor(transport=STANDS_FOR, address=address, num_bytes=num_bytes, data=b"")

    def _open(self, endpoint: Endpoint, descriptors: Sequence[Descriptor]) -> _Peer:
        peer = _Peer()
        for descriptor in descriptors:
            peer.ranges.add(descriptor.address, descriptor.num_bytes)
        return peer

    def _check_alive(self, peer: _Peer) -> None:
        """It lives as long as this process."""

    def _write_chunk(self, peer: _Peer, chunk: Batch) -> int:
        began_at = time.monotonic()
        self._work.copy(chunk.dst, chunk.src, chunk.length)
        self.pace.take(chunk.num_bytes, began_at)
        return 0

    def _count(self, peer: _Peer, tag: int, num_bytes: int) -> None:
        """Nothing is read there."""

    def land(self, tag: int, writer: int, dst: int, src: int, num_bytes: int) -> None:
        """Receive bytes of a writer through this member's own NIC."""
        began_at = time.monotonic()
        self._work.copy(*(np.array([value], dtype=np.uint64) for value in (dst, src, num_bytes)))
        self.pace.take(num_bytes, began_at)
        self._landed[tag, writer] += num_bytes

    def arrived(self, tag: int, *, writer: int) -> int:
        """Bytes received from a writer."""
        return self._landed[tag, writer]

    def forget_arrivals(self) -> None:
        """Forget all counts."""
        self._landed.clear()
