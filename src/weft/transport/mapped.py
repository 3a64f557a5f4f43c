"""Transports that map the target's memory: the sender's own instructions write it, plane by plane.

Writes are prepared once, Chunk by Chunk (`prepare_direct`), and posted for every version. The target counts the bytes
of a Chunk when it has landed, in Chunk order.
"""

from __future__ import annotations

import abc
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, TypeVar

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


@dataclass(slots=True)
class _Write(Generic[AnyPeer]):
    """A batch that is being written."""

    batch: DirectBatch
    peer: AnyPeer
    future: Future[WriteResult] = field(default_factory=Future)
    cancelled: threading.Event = field(default_factory=threading.Event)
    is_started: bool = False
    """Whether no more Chunks will be started."""
    num_in_flight: int = 0
    num_bytes: int = 0
    digest: int = 0
    error: TransportError | None = None

    def fail(self, error: TransportError) -> None:
        """It cannot be written whole; the first error counts."""
        self.error = self.error or error

    def settle(self) -> None:
        """It has ended."""
        if self.future.done():
            return
        if self.error is None:
            self.future.set_result(WriteResult(num_bytes=self.num_bytes, digest=self.digest & _MASK))
            return
        how_far = f"({self.num_bytes} of {self.batch.num_bytes} bytes written)"
        self.future.set_exception(type(self.error)(f"{self.error} {how_far}", hint=self.error.hint))


class _Started(NamedTuple, Generic[AnyPeer]):
    """A Chunk that is being copied."""

    write: _Write[AnyPeer]
    planes: Planes
    wait: Callable[[], int]
    """Waits for it, and gives its digest."""


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
        writes = [_Write(batch, self._known(batch.peer)) for batch in batches]
        self._writer.submit(self._write_all, writes, tag)
        return [Ticket(write.future, write.batch, tag, write.cancelled) for write in writes]

    def _write_all(self, writes: Sequence[_Write[AnyPeer]], tag: int) -> None:
        """One batch after the other; the next one's Chunks are started while the last one's are being copied."""
        started: deque[_Started[AnyPeer]] = deque()
        try:
            for write in writes:
                self._start_all(write, tag, started)
            while started:
                self._finish(started.popleft(), tag)
        except Exception as error:  # a bug in weft: nothing reads this thread's result
            for write in writes:
                write.fail(TransportError(f"{type(error).__name__} while writing to {write.batch.peer}: {error}"))
        for each in started:  # nothing may still be in flight when a write has ended
            with contextlib.suppress(Exception):  # the first error is the one that counts
                each.wait()
        for write in writes:
            write.settle()

    def _start_all(self, write: _Write[AnyPeer], tag: int, started: deque[_Started[AnyPeer]]) -> None:
        """Start the Chunks of a batch, and finish earlier ones meanwhile; its own errors do not stop other batches."""
        batch = write.batch
        try:
            self._announce(write.peer, tag)
            if batch.num_there:
                self._count(write.peer, tag, batch.num_there)
                write.num_bytes += batch.num_there
            for planes in batch.chunks:
                if write.error is not None:
                    break
                if write.cancelled.is_set():
                    raise TransportError(f"writing to {batch.peer} was stopped")
                self._check_alive(write.peer)
                write.num_in_flight += 1
                started.append(_Started(write, planes, self._start_planes(write.peer, planes)))
                while len(started) > self._num_ahead:
                    self._finish(started.popleft(), tag)
        except TransportError as error:
            write.fail(error)
        write.is_started = True
        self._end_if_done(write)

    def _finish(self, each: _Started[AnyPeer], tag: int) -> None:
        """Wait for a Chunk, and count it at its target."""
        write = each.write
        write.num_in_flight -= 1
        try:
            write.digest += each.wait()
            self._count(write.peer, tag, each.planes.num_bytes)
            write.num_bytes += each.planes.num_bytes
        except TransportError as error:
            write.fail(error)
        self._end_if_done(write)

    def _end_if_done(self, write: _Write[AnyPeer]) -> None:
        """A batch has ended when nothing of it is in flight, and nothing more will be."""
        if not write.is_started or write.num_in_flight:
            return
        try:
            if write.error is None:
                self._check_alive(write.peer)
        except TransportError as error:
            write.fail(error)
        write.settle()

    _num_ahead = 0
    """Chunks that are started before another is waited for, of one batch or of several."""

    def _start_planes(self, peer: AnyPeer, planes: Planes) -> Callable[[], int]:
        """Start copying a Chunk; the returned function waits for it and gives its digest, or 0 if not digested."""
        digest = self._copy_planes(peer, planes)
        return lambda: digest

    @abc.abstractmethod
    def _copy_planes(self, peer: AnyPeer, planes: Planes) -> int:
        """Copy a Chunk; returns its digest, or 0 if it is not digested."""
