"""Transports that map the target's memory: the sender's own instructions write it, plane by plane.

Writes are prepared once, Chunk by Chunk (`prepare_direct`), and posted for every version. The target counts the bytes
of a Chunk when it has landed, in Chunk order.
"""

from __future__ import annotations

import abc
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from weft.core.geometry.planes import Planes, cut_long_rows, joined
from weft.errors import TransportError
from weft.transport.base import Handle, Peer, Ticket, WriteResult
from weft.transport.chunked import ChunkedTransport

AnyPeer = TypeVar("AnyPeer", bound=Peer)
_MASK = (1 << 64) - 1


@dataclass(frozen=True, kw_only=True)
class DirectBatch:
    """Planes to write to one peer, Chunk by Chunk; destinations as they are mapped here."""

    peer: str
    chunks: tuple[Planes, ...]
    num_there: int = 0
    """Bytes that were written there by other means before this is posted."""
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_bytes", self.num_there + sum(planes.num_bytes for planes in self.chunks))

    @property
    def is_digested(self) -> bool:
        """Whether its bytes are digested on the way."""
        return any(planes.position is not None for planes in self.chunks)


class MappedTransport(ChunkedTransport[AnyPeer]):
    """Writes planes straight to where they belong."""

    def register_sources(self, ranges: Sequence[tuple[int, int]]) -> list[Handle]:
        """Allow writes from many ranges; only their addresses have to be known."""
        for address, num_bytes in ranges:
            self._check_range(address, num_bytes)
        self._registered.add_all(ranges)
        return [Handle(address=address, num_bytes=num_bytes) for address, num_bytes in ranges]

    def prepare_direct(self, peer: str, chunks: Sequence[Planes]) -> DirectBatch:
        """Check and map planes; raises RegistrationError for one outside registered memory of either side."""
        known = self._known(peer)
        if self._num_threads > 1:
            chunks = [cut_long_rows(planes) for planes in chunks]
        table = joined(chunks)
        self._registered.find(*table.src_spans, whose=self.member)
        at = known.ranges.find(*table.dst_spans, whose=peer)
        mapped = (table.dst.astype(np.int64) + known.ranges.shifts()[at]).astype(np.uint64)
        ends = np.cumsum([len(planes) for planes in chunks])
        return DirectBatch(
            peer=peer,
            chunks=tuple(
                replace(planes, dst=dst) for planes, dst in zip(chunks, np.split(mapped, ends[:-1]), strict=True)
            ),
        )

    def mapped(self, peer: str, address: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where a peer's memory is mapped here; raises RegistrationError for addresses that are not mapped."""
        known = self._known(peer)
        at = known.ranges.find(address.astype(np.uint64), np.ones(len(address), dtype=np.uint64), whose=peer)
        return address + known.ranges.shifts()[at]

    def post_direct(self, batches: Sequence[DirectBatch], tag: int) -> list[Ticket]:
        """Start writing; the target counts bytes under `tag` as Chunks land."""
        self._check_tag(tag)
        tickets = []
        for batch in batches:
            cancelled = threading.Event()
            written = self._writer.submit(self._write_direct, batch, tag, cancelled)
            tickets.append(Ticket(written, batch, tag, cancelled))
        return tickets

    def _write_direct(self, batch: DirectBatch, tag: int, cancelled: threading.Event) -> WriteResult:
        peer = self._known(batch.peer)
        digest, written = 0, 0
        started: deque[tuple[Planes, Callable[[], int]]] = deque()
        try:
            self._announce(peer, tag)
            if batch.num_there:
                self._count(peer, tag, batch.num_there)
                written += batch.num_there
            for number, planes in enumerate(batch.chunks, 1):
                if cancelled.is_set():
                    raise TransportError(f"writing to {batch.peer} was stopped")
                self._check_alive(peer)
                started.append((planes, self._start_planes(peer, planes)))
                while len(started) > (self._num_ahead if number < len(batch.chunks) else 0):
                    chunk, wait = started.popleft()
                    digest += wait()
                    written += chunk.num_bytes
                    self._count(peer, tag, chunk.num_bytes)
            self._check_alive(peer)
        except TransportError as error:
            raise type(error)(f"{error} ({written} of {batch.num_bytes} bytes written)", hint=error.hint) from error
        finally:
            for _, wait in started:  # nothing may still be in flight when this returns
                wait()
        return WriteResult(num_bytes=written, digest=digest & _MASK)

    _num_ahead = 0
    """Chunks started before the first of them is waited for."""

    def _start_planes(self, peer: AnyPeer, planes: Planes) -> Callable[[], int]:
        """Start copying a Chunk; the returned function waits for it and gives its digest, or 0 if not digested."""
        digest = self._copy_planes(peer, planes)
        return lambda: digest

    @abc.abstractmethod
    def _copy_planes(self, peer: AnyPeer, planes: Planes) -> int:
        """Copy a Chunk; returns its digest, or 0 if it is not digested."""
