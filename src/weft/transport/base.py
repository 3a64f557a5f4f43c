"""The transport contract: what every transport offers, and what is implemented once for all of them.

A member registers memory and gets two things: a Handle, which never leaves the process, and a Descriptor, which
travels to the members that may write there. Writers connect to an Endpoint, prepare a Batch of rows (source address,
destination address, length) once per plan and post it for every version. Writes are one-sided: the target runs no
code for them. It learns of them from counters only: `arrived(tag, writer)` is the number of bytes one writer has
landed under a tag. Bytes of one batch are counted in the order of its rows; no order is assumed between batches.

    handle, descriptor = receiver.register(address, num_bytes)
    peer = sender.connect(receiver.endpoint, [descriptor])
    batch = sender.prepare(peer, src, dst, length)
    sender.post(batch, tag=7).wait(timeout_s=5.0)          # Written(num_bytes=…, digest=…)
    receiver.arrived(7, writer=0)

Destination addresses are in the target's own address space. Every row is checked against the registered ranges of
both sides when a batch is prepared, so a wrong plan cannot write elsewhere.
"""

from __future__ import annotations

import abc
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from weft.core.geometry.planes import Column, Planes
from weft.devices import DeviceWork
from weft.errors import PeerLost, RegistrationError, TransferTimeout, TransportError, WeftError
from weft.transport.capabilities import Capabilities
from weft.transport.pages import Pages

MAX_TAG = (1 << 63) - 1
MAX_WRITERS = 4096


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where a member can be reached; travels over the control plane."""

    transport: str
    member: str
    """Its name in messages: `engine 3`."""
    data: bytes
    """What only the transport understands."""


class Descriptor(msgspec.Struct, frozen=True, kw_only=True):
    """A range of a member's memory that others may write; travels over the control plane."""

    transport: str
    address: int
    num_bytes: int
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Handle:
    """A local registration; never travels."""

    address: int
    num_bytes: int


def _cannot_be_given_up() -> bool:
    return False


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory that may be a destination; it stays alive as long as this object."""

    address: int
    num_bytes: int
    keep: Any = None
    buffer: Any = None
    """The memory as an object that arrays can be made of; it stays mapped while they use it."""
    give_up: Callable[[], bool] = _cannot_be_given_up
    """Frees the memory while a lost writer may still know its address: late writes reach nothing. The addresses stay
    reserved as long as this object is held. Returns False, and does nothing, where the device does not support it."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows to write to one peer; prepared once, posted for every version."""

    peer: str
    src: Column
    dst: Column
    """As the transport writes them: mapped into this process, or in the peer's address space."""
    length: Column
    position: Column | None = None
    """Position of each row in the digest's space; None: not digested."""
    digested: Planes | None = None
    """What is digested, where parts of a row have different positions in the digest's space."""
    num_writes: int = 0
    """Rows that were requested; a transport may split them further."""
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_bytes", int(self.length.sum()))

    @property
    def num_rows(self) -> int:
        """Rows of the batch."""
        return len(self.length)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteResult:
    """The result of writing a batch."""

    num_bytes: int
    digest: int
    """Digest of the bytes as they were read; 0 where the batch is not digested."""


class Posted(Protocol):
    """What an outstanding write writes, and to which peer."""

    @property
    def peer(self) -> str:
        """The member it is written to."""

    @property
    def num_bytes(self) -> int:
        """Total bytes."""


class Ticket:
    """An outstanding write."""

    def __init__(self, future: Future[WriteResult], batch: Posted, tag: int, cancelled: threading.Event) -> None:
        self._future, self._batch, self._tag, self._cancelled = future, batch, tag, cancelled
        self.began_at, self.ended_at = time.monotonic(), 0.0
        """When it was posted, and when it had ended; 0 before."""
        future.add_done_callback(self._end)

    def _end(self, future: Future[WriteResult]) -> None:
        del future
        self.ended_at = time.monotonic()

    def cancel(self) -> None:
        """Stop writing as soon as possible; `wait` then raises TransportError, unless the write was already done."""
        self._cancelled.set()

    @property
    def done(self) -> bool:
        """Whether it has ended, successfully or not; `wait` tells which."""
        return self._future.done()

    def wait(self, timeout_s: float = 60.0) -> WriteResult:
        """What was written. Raises the write's error, or TransferTimeout."""
        try:
            return self._future.result(timeout=timeout_s)
        except FutureTimeout:
            raise TransferTimeout(
                f"writing {self._batch.num_bytes} bytes to {self._batch.peer} (tag {self._tag}) did not finish in "
                f"{timeout_s:.1f} s",
                hint="the peer may be stalled; abort the version this write belongs to",
            ) from None
        except WeftError:
            raise
        except Exception as error:
            raise TransportError(f"writing to {self._batch.peer} failed: {error}") from error


class _SortedRanges(NamedTuple):
    """Ranges by address, a column for each property."""

    starts: Column
    ends: Column
    furthest: Column
    """The largest end so far."""
    shifts: NDArray[np.int64]


class Ranges:
    """Registered address ranges, looked up in bulk."""

    def __init__(self) -> None:
        self._ranges: dict[tuple[int, int], int] = {}
        self._shift: dict[int, int] = {}
        self._sorted: _SortedRanges | None = None

    def add(self, address: int, num_bytes: int, *, shift: int = 0) -> None:
        """Register a range; the same range may be registered more than once.

        `shift`: offset from there to where the same bytes are mapped in this process.
        """
        self._ranges[address, num_bytes] = self._ranges.get((address, num_bytes), 0) + 1
        self._shift[address] = shift
        self._sorted = None

    def add_all(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Register many ranges: address and bytes of each."""
        for known in ranges:
            self._ranges[known] = self._ranges.get(known, 0) + 1
        self._shift.update((address, 0) for address, _ in ranges)
        self._sorted = None

    def remove(self, address: int, num_bytes: int) -> None:
        """Undo one registration."""
        left = self._ranges[address, num_bytes] - 1
        if left:
            self._ranges[address, num_bytes] = left
        else:
            del self._ranges[address, num_bytes]
            self._sorted = None

    def has(self, address: int, num_bytes: int) -> bool:
        """Whether a range is registered."""
        return (address, num_bytes) in self._ranges

    def are_among(self, other: Ranges) -> bool:
        """Whether all of these are also registered there."""
        return self._ranges.keys() <= other._ranges.keys()

    def find(self, address: Column, length: Column, *, whose: str) -> NDArray[np.int64]:
        """For every row, the number of a range (sorted by address) that contains it; raises if there is none."""
        starts, ends, furthest, _ = self._by_address()
        before = np.searchsorted(starts, address, side="right").astype(np.int64) - 1
        inside, at = before >= 0, before
        if len(starts):  # of the ranges that begin before a row, the one that reaches furthest
            at = np.searchsorted(furthest, furthest[np.maximum(before, 0)])
            room = ends[at] - np.minimum(address, ends[at])
            inside &= length <= room
        if not inside.all():
            row = int(np.flatnonzero(~inside)[0])
            raise RegistrationError(
                f"row {row} ({int(length[row])} bytes at {int(address[row]):#x}) is not inside registered memory "
                f"of {whose}",
                hint="register the memory first, and prepare batches from its descriptors",
            )
        return at

    def columns(self) -> tuple[Column, Column]:
        """Starts and ends, sorted; of ranges with the same start, the longest counts."""
        sorted_ranges = self._by_address()
        return sorted_ranges.starts, sorted_ranges.ends

    def shifts(self) -> NDArray[np.int64]:
        """Offset at which each range is mapped in this process, in the order of `columns`."""
        return self._by_address().shifts

    def _by_address(self) -> _SortedRanges:
        """Made once, for as long as the ranges stay the same."""
        if self._sorted is None:
            ranges = np.array(list(self._ranges), dtype=np.uint64).reshape(-1, 2)
            address, num_bytes = ranges[np.lexsort((ranges[:, 1], ranges[:, 0]))].T
            is_longest = np.append(address[1:] != address[:-1], np.ones(min(len(address), 1), dtype=bool))
            starts, ends = address[is_longest], (address + num_bytes)[is_longest]
            shifts = np.array([self._shift[start] for start in starts.tolist()], dtype=np.int64)
            self._sorted = _SortedRanges(starts, ends, np.maximum.accumulate(ends), shifts)
        return self._sorted


class Peer(Protocol):
    """What a transport keeps about a member it writes to."""

    ranges: Ranges

    def close(self) -> None:
        """Let go of the peer and its memory."""


AnyPeer = TypeVar("AnyPeer", bound=Peer)


class Transport(abc.ABC, Generic[AnyPeer]):
    """One member's side of a transport. Only `arrived` is thread-safe; the rest is for a single owner."""

    capabilities: Capabilities

    def __init__(self, member: str, *, writer: int = 0, num_threads: int = 1) -> None:
        """`writer` is this member's number among all writers to the same targets."""
        if not 0 <= writer < MAX_WRITERS:
            raise TransportError(f"writer number {writer} is out of range", hint=f"0 to {MAX_WRITERS - 1}")
        self.member = member
        self._writer_number = writer
        self._num_threads = num_threads
        self._registered = Ranges()
        self._peers: dict[str, AnyPeer] = {}
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"weft-{self.capabilities.name}")
        self._closed = False
        self.cut_peers: frozenset[str] = frozenset()
        """Peers that did not accept a write, so that this side had to be torn down. It must then be closed, and what
        was in flight to these peers may still land there."""

    @property
    @abc.abstractmethod
    def endpoint(self) -> Endpoint:
        """Where others reach this member."""

    def allocate(self, num_bytes: int) -> Memory:
        """Memory this transport writes into best; ordinary memory, unless a transport needs another kind."""
        self._check_open()
        return ordinary_memory(num_bytes)

    def register(self, address: int, num_bytes: int) -> tuple[Handle, Descriptor]:
        """Allow writes from (as a source) and, where possible, into this memory."""
        self._check_range(address, num_bytes)
        descriptor = self._describe(address, num_bytes)
        self._registered.add(address, num_bytes)
        return Handle(address=address, num_bytes=num_bytes), descriptor

    def register_all(self, ranges: Sequence[tuple[int, int]]) -> list[Descriptor]:
        """Allow writes into many ranges: address and bytes of each."""
        return [self.register(address, num_bytes)[1] for address, num_bytes in ranges]

    def register_source(self, address: int, num_bytes: int) -> Handle:
        """Allow writes from this memory only; it may be host memory even where the transport is for device memory."""
        self._check_range(address, num_bytes)
        self._registered.add(address, num_bytes)
        return Handle(address=address, num_bytes=num_bytes)

    def register_sources(self, ranges: Sequence[tuple[int, int]]) -> list[Handle]:
        """Allow writes from many ranges."""
        return [self.register_source(address, num_bytes) for address, num_bytes in ranges]

    def _check_range(self, address: int, num_bytes: int) -> None:
        self._check_open()
        if num_bytes <= 0 or address <= 0:
            raise RegistrationError(f"memory of {num_bytes} bytes at {address:#x} cannot be registered")

    def deregister(self, handle: Handle) -> None:
        """Undo a registration; batches prepared from it must no longer be posted."""
        self._registered.remove(handle.address, handle.num_bytes)

    @abc.abstractmethod
    def _describe(self, address: int, num_bytes: int) -> Descriptor:
        """The descriptor of some memory."""

    def connect(self, endpoint: Endpoint, descriptors: Sequence[Descriptor]) -> str:
        """Make a peer's memory writable from here; returns the peer's name. Raises PeerLost if it is gone.

        Connecting again replaces what was known; this is how a restarted peer is reached.
        """
        self._check_open()
        wrong = {endpoint.transport, *(part.transport for part in descriptors)} - {self.capabilities.name}
        if wrong:
            raise TransportError(f"{endpoint.member} uses transport {wrong.pop()}, expected {self.capabilities.name}")
        try:
            peer = self._open(endpoint, descriptors)
        except (msgspec.DecodeError, ValueError, OverflowError, OSError) as error:
            raise TransportError(f"{endpoint.member} cannot be reached: {type(error).__name__}: {error}") from error
        self.disconnect(endpoint.member)
        self._peers[endpoint.member] = peer
        return endpoint.member

    @abc.abstractmethod
    def _open(self, endpoint: Endpoint, descriptors: Sequence[Descriptor]) -> AnyPeer:
        """Reach a peer."""

    def disconnect(self, peer: str) -> None:
        """Forget a peer and its memory."""
        known = self._peers.pop(peer, None)
        if known is not None:
            known.close()

    def _known(self, peer: str) -> AnyPeer:
        if peer not in self._peers:
            raise PeerLost(f"{self.member} is not connected to {peer}")
        return self._peers[peer]

    def prepare(
        self,
        peer: str,
        src: Column,
        dst: Column,
        length: Column,
        position: Column | None = None,
        digested: Planes | None = None,
    ) -> Batch:
        """Check and translate rows; raises RegistrationError for a row outside registered memory of either side.

        With `position` the bytes are digested on the way, at these positions in the digest's space. `digested` says
        what is digested, where rows consist of parts with positions of their own.
        """
        known = self._known(peer)
        self._registered.find(src, length, whose=self.member)
        at = known.ranges.find(dst, length, whose=peer)
        batch = Batch(peer=peer, src=src, dst=dst, length=length, position=position, digested=digested)
        return replace(self._translate(known, batch, at), num_writes=len(length))

    def _translate(self, peer: AnyPeer, batch: Batch, at: NDArray[np.int64]) -> Batch:
        """A batch as this transport writes it; `at` is the number of each row's range among the peer's."""
        del peer, at
        return batch

    def post(self, batch: Batch, tag: int) -> Ticket:
        """Start writing a batch; the target counts its bytes under `tag`, the newest or a newer one, as they land."""
        self._check_tag(tag)
        cancelled = threading.Event()
        return Ticket(self._writer.submit(self._write, batch, tag, cancelled), batch, tag, cancelled)

    def _check_tag(self, tag: int) -> None:
        self._check_open()
        if not 0 < tag <= MAX_TAG:
            raise TransportError(f"tag {tag} is out of range", hint=f"1 to {MAX_TAG}")

    def post_all(self, batches: Sequence[Batch], tag: int) -> list[Ticket]:
        """Start writing batches to several peers; a transport may interleave them where that is faster."""
        return [self.post(batch, tag) for batch in batches]

    def _write(self, batch: Batch, tag: int, cancelled: threading.Event) -> WriteResult:
        """Write; runs on the writer thread. A transport that starts writes in another way needs none."""
        raise NotImplementedError

    @abc.abstractmethod
    def arrived(self, tag: int, *, writer: int) -> int:
        """Bytes that one writer has landed here under a tag."""

    @abc.abstractmethod
    def forget_arrivals(self) -> None:
        """Count from zero again; only while no connected peer is writing."""

    def credit(self, peer: str, tag: int, num_bytes: int) -> None:
        """Count bytes as arrived at a peer without writing any: a window has room for that many more."""
        raise TransportError(f"the {self.capabilities.name} transport of {self.member} cannot return credits to {peer}")

    def wait_arrived(self, tag: int, num_bytes: int, *, writer: int, timeout_s: float = 60.0) -> None:
        """Wait until that many bytes have landed; raises TransferTimeout."""
        wait_until(
            lambda: self.arrived(tag, writer=writer) >= num_bytes,
            timeout_s=timeout_s,
            what=lambda: f"{self.member} has {self.arrived(tag, writer=writer)} of {num_bytes} bytes under tag {tag}",
        )

    def close(self) -> None:
        """Finish outstanding writes and release everything; may be called twice."""
        if not self._closed:
            self._closed = True
            self._finish_writes()
            for peer in list(self._peers):
                self.disconnect(peer)
            self._release()

    def _finish_writes(self) -> None:
        """Wait for outstanding writes; no more can be posted."""
        self._writer.shutdown(wait=True)

    def _release(self) -> None:
        """Release what the transport holds besides its peers."""

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError(f"the {self.capabilities.name} transport of {self.member} is closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def ordinary_memory(num_bytes: int) -> Memory:
    """Zeroed memory of this process, at a page boundary."""
    pages = Pages(num_bytes)
    return Memory(address=pages.address, num_bytes=num_bytes, keep=pages, give_up=pages.give_up)


def cut_rows(batch: Batch, piece_bytes: int) -> Batch:
    """The same rows in pieces of at most `piece_bytes`."""
    piece = np.uint64(piece_bytes)
    count = np.maximum((batch.length + piece - np.uint64(1)) // piece, np.uint64(1)).astype(np.int64)
    row = np.repeat(np.arange(batch.num_rows), count)
    nth = (np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)).astype(np.uint64)
    offset = nth * piece
    return Batch(
        peer=batch.peer,
        src=batch.src[row] + offset,
        dst=batch.dst[row] + offset,
        length=np.minimum(piece, batch.length[row] - offset),
        position=None if batch.position is None else batch.position[row] + offset,
        digested=batch.digested,
    )


def split_batch(batch: Batch, chunk_bytes: int) -> list[Batch]:
    """A batch as consecutive chunks of about that size; rows are split where needed."""
    if 0 < batch.num_bytes <= chunk_bytes and batch.digested is None:
        return [batch]
    rows = cut_rows(batch, chunk_bytes)
    ends = np.cumsum(rows.length)
    number = (ends - np.uint64(1)) // np.uint64(chunk_bytes)
    borders = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), rows.num_rows]
    return [
        Batch(
            peer=rows.peer,
            src=rows.src[a:b],
            dst=rows.dst[a:b],
            length=rows.length[a:b],
            position=None if rows.position is None else rows.position[a:b],
        )
        for a, b in itertools.pairwise(borders)
        if b > a
    ]


def digest_of(batch: Batch, work: DeviceWork, num_threads: int = 1) -> int:
    """Digest of what a batch reads; 0 if the batch is not digested."""
    if batch.digested is not None:
        return work.digest_planes(batch.digested, num_threads=num_threads)
    if batch.position is not None:
        return work.digest(batch.src, batch.position, batch.length, num_threads=num_threads)
    return 0


def wait_until(reached: Callable[[], bool], *, timeout_s: float, what: Callable[[], str]) -> None:
    """Poll with growing pauses up to one millisecond; raises TransferTimeout with `what()`."""
    deadline = time.monotonic() + timeout_s
    pause_s = 1e-5
    while not reached():
        if time.monotonic() > deadline:
            raise TransferTimeout(f"{what()} after {timeout_s:.1f} s")
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, 1e-3)
