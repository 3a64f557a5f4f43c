"""`nixl`: RDMA, NVLink, TCP or shared memory through NIXL and UCX; the default transport between hosts.

Precautions that measurements showed to matter: the wrapper's progress thread spins on a whole core unless it is given a
pause; NIXL never times out, so every write has its own deadline; one large descriptor is never split, so rows are cut
into pieces; an agent's name must be new after a restart. The target's progress thread acknowledges writes, not its
Python code.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from weft import native
from weft.core.geometry.planes import Column
from weft.devices import CPU, DeviceWork, device_work, memory_kind
from weft.errors import PeerLost, RegistrationError, TransferTimeout, TransportError
from weft.transport.base import (
    Batch,
    Descriptor,
    Endpoint,
    Handle,
    Memory,
    Ranges,
    Ticket,
    Transport,
    WriteResult,
    cut_rows,
    digest_of,
)
from weft.transport.capabilities import CAPABILITIES
from weft.transport.device_memory import device_memory
from weft.transport.nixl_agents import CardAgent, divide, load, make_agents
from weft.transport.nixl_arrivals import Announcements, Announcer

log = logging.getLogger(__name__)

PIECE_BYTES = {"cpu": 4 << 20, "cuda": 2 << 30}
"""Largest descriptor: a CPU copies pieces in parallel; a GPU is fastest with few large ones."""
SHORTEST_LOOK_S, LONGEST_LOOK_S = 2e-5, 1e-3
WRITE_DEADLINE_S = 200.0
CUT_S = 2.0
"""A write that was given up is usually done by then. A stalled peer never accepts it, and NIXL keeps reading the source
after the request and the peer were released: only ending the agent stops that (`docs/LOG.md`)."""


class _AgentData(msgspec.Struct, frozen=True):
    name: str
    metadata: bytes


class _EndpointData(msgspec.Struct, frozen=True):
    agents: tuple[_AgentData, ...]


@dataclass
class _Registered:
    """One NIXL registration of several ranges, with every agent."""

    handles: list[Any]
    count: int

    def is_last(self) -> bool:
        """One of the ranges is no longer needed; returns whether it was the last."""
        self.count -= 1
        return self.count == 0


@dataclass(frozen=True)
class _Link:
    """One of our agents, and the peer's agent it writes to."""

    own: CardAgent
    name: str


@dataclass
class _Peer:
    links: list[_Link]
    ranges: Ranges = field(default_factory=Ranges)
    announcer: Announcer = field(default_factory=Announcer)
    is_lost: bool = False

    def reaches(self, where: _EndpointData, ranges: Ranges) -> bool:
        """Whether this connection is to these agents, and all memory it knows is among these ranges."""
        known = [agent.name for agent in where.agents]
        is_same = [link.name for link in self.links] == known[: len(self.links)]
        return is_same and not self.is_lost and self.ranges.are_among(ranges)

    def close(self) -> None:
        for link in self.links:
            link.own.agent.remove_remote_agent(link.name)


@dataclass(frozen=True, eq=False)
class _CardTransfer:
    """NIXL's handle of what one card writes of a batch; it keeps the agent alive."""

    agent: Any
    handle: Any
    num_bytes: int

    @property
    def state(self) -> str:
        return str(self.agent.check_xfer_state(self.handle))

    @property
    def is_stalled(self) -> bool:
        """Whether it is known to be still going on."""
        try:
            return self.state == "PROC"
        except Exception:  # its peer is gone
            return False


@dataclass(eq=False)
class _PreparedTransfer:
    """A batch, as NIXL writes it."""

    peer: str
    cards: list[_CardTransfer]
    """Empty once the agents were torn down."""
    under_way: list[_CardTransfer] = field(default_factory=list)

    @property
    def is_torn(self) -> bool:
        return not self.cards

    def tear(self) -> None:
        """Let go of the agents."""
        self.cards, self.under_way = [], []


@dataclass(frozen=True, kw_only=True)
class _NixlBatch(Batch):
    transfer: _PreparedTransfer
    work: DeviceWork
    """Computes the digest of what is read."""
    digest_key: bytes
    """The same for batches with the same digest: those of replicas."""


@dataclass(eq=False)
class _Write:
    """A write that was posted, or is about to be."""

    batch: _NixlBatch
    cancelled: threading.Event
    future: Future[WriteResult] = field(default_factory=Future)
    began_at: float = field(default_factory=time.monotonic)
    given_up_at: float | None = None
    digest: Future[int] | None = None
    """Of what is written, found while the bytes travel; replicas share it."""
    is_over: bool = False
    """No card writes any longer."""
    failure: TransportError | None = None
    """Of one card; the others may still be writing."""


class NixlTransport(Transport[_Peer]):
    """NIXL with the UCX backend, for the memory of one device."""

    capabilities = CAPABILITIES["nixl"]

    def __init__(
        self,
        member: str,
        *,
        writer: int = 0,
        num_threads: int = 1,
        device: str = CPU,
        devices: str = "",
        is_near: bool = True,
    ) -> None:
        """`devices` limits UCX to some network devices, such as `lo` or `mlx5_0:1`; empty: all. Several Ethernet cards
        get an agent each.

        `is_near`: whether any peer is on this host. NIXL's own threads then copy; for others they would only spin.
        """
        api, bindings = load()
        super().__init__(member, writer=writer, num_threads=num_threads)
        self._kind = "DRAM" if memory_kind(device) == CPU else "VRAM"
        self._piece_bytes = PIECE_BYTES[memory_kind(device)]
        self._device_number = 0 if device == CPU else int(device.partition(":")[2])
        self._work = device_work(device)
        self._errors = bindings
        self._agents = make_agents(api, member, devices=devices, is_near=is_near, num_threads=num_threads)
        self._num_prepared = 0
        self._lists: dict[tuple[int, int], _Registered | None] = {}
        """What is registered with NIXL; None: registered as a part of another range."""
        self._host_sources: set[tuple[int, int]] = set()
        """Pinned host memory that writes may come from, where this transport is for GPU memory."""
        self._arrivals = Announcements()
        self._lock = threading.Lock()
        self._posting = threading.Lock()
        """Held while a write is posted, and while the agent is torn down."""
        self._under_way: list[_Write] = []
        self._watcher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weft-nixl-watch")
        """Looks at writes while the next ones are posted."""
        self._digester = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weft-nixl-digest")
        self._transfers: weakref.WeakSet[_PreparedTransfer] = weakref.WeakSet()

    @property
    def endpoint(self) -> Endpoint:
        """The agents and everything registered so far; read it after registering."""
        agents = tuple(_AgentData(each.name, each.agent.get_agent_metadata()) for each in self._agents)
        data = _EndpointData(agents)
        return Endpoint(transport="nixl", member=self.member, data=msgspec.msgpack.encode(data))

    def _describe(self, address: int, num_bytes: int) -> Descriptor:
        self._make_known([(address, num_bytes)])
        return Descriptor(transport="nixl", address=address, num_bytes=num_bytes, data=b"")

    def register_all(self, ranges: Sequence[tuple[int, int]]) -> list[Descriptor]:
        """All ranges in one NIXL call."""
        for address, num_bytes in ranges:
            self._check_range(address, num_bytes)
        self._make_known(ranges)
        for address, num_bytes in ranges:
            self._registered.add(address, num_bytes)
        return [Descriptor(transport="nixl", address=a, num_bytes=n, data=b"") for a, n in ranges]

    def _make_known(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Register what is not inside a registered range: NIXL does not find memory that was registered twice."""
        wanted = [known for known in dict.fromkeys(ranges) if known not in self._lists]
        old = [known for known, registered in self._lists.items() if registered is not None]
        fresh, furthest = [], -1
        for start, size, is_new in sorted(
            [(*known, False) for known in old] + [(*known, True) for known in wanted],
            key=lambda entry: (entry[0], -entry[1], entry[2]),
        ):
            if is_new and start + size > furthest:
                fresh.append((start, size))
            furthest = max(furthest, start + size)
        if fresh:
            registered = _Registered(self._register(fresh, self._device_number, self._kind), len(fresh))
            self._lists |= dict.fromkeys(fresh, registered)
        for known in wanted:
            self._lists.setdefault(known, None)

    def register_source(self, address: int, num_bytes: int) -> Handle:
        """Pinned host memory is registered as host memory, even where this transport is for GPU memory."""
        if self._kind == "DRAM" or not _is_pinned(address, num_bytes):
            return self.register(address, num_bytes)[0]
        self._check_range(address, num_bytes)
        self._lists[address, num_bytes] = _Registered(self._register([(address, num_bytes)], 0, "DRAM"), 1)
        self._host_sources.add((address, num_bytes))
        self._registered.add(address, num_bytes)
        return Handle(address=address, num_bytes=num_bytes)

    def register_sources(self, ranges: Sequence[tuple[int, int]]) -> list[Handle]:
        """Device memory, in one NIXL call."""
        self.register_all(ranges)
        return [Handle(address=address, num_bytes=num_bytes) for address, num_bytes in ranges]

    def _register(self, ranges: Sequence[tuple[int, int]], device: int, kind: str) -> list[Any]:
        """NIXL's own registrations, of each agent."""
        try:
            return [
                each.agent.register_memory([(*known, device, "") for known in ranges], kind) for each in self._agents
            ]
        except Exception as error:
            total = sum(size for _, size in ranges)
            raise RegistrationError(
                f"NIXL cannot register {total} bytes in {len(ranges)} ranges starting at {ranges[0][0]:#x}: {error}"
            ) from error

    def allocate(self, num_bytes: int) -> Memory:
        """Device memory."""
        if self._kind == "DRAM":
            return super().allocate(num_bytes)
        return device_memory(self._device_number, num_bytes)

    def deregister(self, handle: Handle) -> None:
        """Undo a registration and tell NIXL."""
        super().deregister(handle)
        if not self._registered.has(handle.address, handle.num_bytes):
            self._host_sources.discard((handle.address, handle.num_bytes))
            registered = self._lists.pop((handle.address, handle.num_bytes), None)  # None if this was torn down
            if registered is not None and registered.is_last():
                self._deregister(registered)

    def _deregister(self, registered: _Registered) -> None:
        for each, handle in zip(self._agents, registered.handles, strict=True):
            each.agent.deregister_memory(handle)

    def _open(self, endpoint: Endpoint, descriptors: Sequence[Descriptor]) -> _Peer:
        where = msgspec.msgpack.decode(endpoint.data, type=_EndpointData)
        if not where.agents:
            raise TransportError(f"{endpoint.member} has no NIXL agent")
        if len(where.agents) != len(self._agents):
            cards = f"{len(self._agents)} and {len(where.agents)} network cards"
            log.warning("%s and %s name %s: the first are used", self.member, endpoint.member, cards)
        ranges = Ranges()
        for descriptor in descriptors:
            ranges.add(descriptor.address, descriptor.num_bytes)
        known = self._peers.get(endpoint.member)
        is_known = known is not None and known.reaches(where, ranges)
        if is_known:  # NIXL keeps the sockets of connections it is told to remove
            del self._peers[endpoint.member]
        else:
            self.disconnect(endpoint.member)
        try:
            links = [
                self._link(own, theirs, is_known=is_known)
                for own, theirs in zip(self._agents, where.agents, strict=False)  # as many cards as both have
            ]
        except Exception as error:
            raise self._failure(error, endpoint.member) from error
        return _Peer(links=links, ranges=ranges)

    @staticmethod
    def _link(own: CardAgent, theirs: _AgentData, *, is_known: bool) -> _Link:
        name = own.agent.add_remote_agent(theirs.metadata).decode()
        if not is_known:
            own.agent.make_connection(name)
        return _Link(own, name)

    def _translate(self, peer: _Peer, batch: Batch, at: NDArray[np.int64]) -> Batch:
        """Rows become NIXL descriptors, prepared once and posted for every version."""
        rows = cut_rows(batch, self._piece_bytes)
        try:
            on_host = self._is_on_host(rows)
            shares = divide(rows, [link.own for link in peer.links], first=self._num_prepared)
            names = {link.own.name: link.name for link in peer.links}
            cards = [self._prepare_card(own, names[own.name], share, on_host=on_host) for own, share in shares]
            transfer = _PreparedTransfer(batch.peer, cards)
        except Exception as error:
            raise self._failure(error, batch.peer) from error
        self._num_prepared += 1
        self._transfers.add(transfer)
        return _NixlBatch(
            peer=batch.peer,
            src=rows.src,
            dst=rows.dst,
            length=rows.length,
            position=rows.position,
            digested=rows.digested,
            transfer=transfer,
            work=native if on_host else self._work,
            digest_key=_digest_key(rows),
        )

    def _prepare_card(self, own: CardAgent, name: str, rows: Batch, *, on_host: bool) -> _CardTransfer:
        """What one agent writes."""
        table = self._table(rows.src, rows.length, 0 if on_host else self._device_number)
        local = own.agent.prep_xfer_dlist("NIXL_INIT_AGENT", table, "DRAM" if on_host else self._kind)
        table = self._table(rows.dst, rows.length, self._device_number)
        remote = own.agent.prep_xfer_dlist(name, table, self._kind)
        order = np.arange(rows.num_rows, dtype=np.int32)
        handle = own.agent.make_prepped_xfer("WRITE", local, order, remote, order)
        return _CardTransfer(own.agent, handle, rows.num_bytes)

    def _is_on_host(self, rows: Batch) -> bool:
        """Whether these rows are read from pinned host memory."""
        first = int(rows.src[0]) if rows.num_rows else 0
        return any(start <= first < start + size for start, size in self._host_sources)

    @staticmethod
    def _table(address: Column, length: Column, device: int) -> Column:
        """NIXL's (address, length, device) rows."""
        return np.stack([address, length, np.full_like(length, device)], axis=1)

    def post(self, batch: Batch, tag: int) -> Ticket:
        """Start writing a batch, beside those that are being written."""
        return self.post_all([batch], tag)[0]

    def post_all(self, batches: Sequence[Batch], tag: int) -> list[Ticket]:
        """Everything travels at once; NIXL decides the order."""
        self._check_tag(tag)
        cancelled = threading.Event()
        writes = [self._new_write(batch, cancelled) for batch in batches]
        self._writer.submit(self._begin_all, writes, tag)
        return [Ticket(write.future, write.batch, tag, cancelled) for write in writes]

    @staticmethod
    def _new_write(batch: Batch, cancelled: threading.Event) -> _Write:
        assert isinstance(batch, _NixlBatch)
        return _Write(batch, cancelled)

    def _finish_writes(self) -> None:
        for threads in (self._writer, self._digester, self._watcher):
            threads.shutdown(wait=True)

    def _begin_all(self, writes: Sequence[_Write], tag: int) -> None:
        """Post writes; those that could be posted are watched from now on."""
        digests: dict[bytes, Future[int]] = {}
        for write in writes:
            try:
                self._begin(write, tag)
            except Exception as error:
                write.future.set_exception(error)
            else:
                key = write.batch.digest_key
                if key not in digests:
                    digests[key] = self._digester.submit(digest_of, write.batch, write.batch.work)
                write.digest = digests[key]
                self._under_way.append(write)
        self._watcher.submit(self._watch)

    def _begin(self, write: _Write, tag: int) -> None:
        """Post a write. Once a card has begun it cannot be stopped; if then another cannot, that is told at the end."""
        batch, transfer = write.batch, write.batch.transfer
        with self._posting:
            self._check_whole(batch)
            peer = self._known(batch.peer)
            if write.cancelled.is_set():
                raise TransportError(f"writing to {batch.peer} was stopped before it began")
            if transfer.under_way:
                raise TransportError(f"these bytes are still being written to {batch.peer}")
            for card in transfer.cards:
                try:
                    card.agent.transfer(card.handle, peer.announcer.note(self._writer_number, tag, card.num_bytes))
                except Exception as error:
                    write.failure = self._failure(error, batch.peer)
                    break
                transfer.under_way.append(card)
            if write.failure is not None and not transfer.under_way:
                raise write.failure

    def _watch(self) -> None:
        """Look at all writes under way until they have ended: NIXL announces a write when it is seen to have.

        At most half of the time: the interpreter is needed for the next ones.
        """
        moved_at = time.monotonic()
        while self._under_way:
            began = time.monotonic()
            for write in list(self._under_way):
                if self._has_ended(write):
                    self._under_way.remove(write)
                    moved_at = time.monotonic()
            now = time.monotonic()
            time.sleep(max(look_s(now - moved_at), now - began))

    def _has_ended(self, write: _Write) -> bool:
        """Look at one write; tells those that wait for it how it ended."""
        assert write.digest is not None
        try:
            write.is_over = write.is_over or self._is_over(write)
            if write.is_over and write.failure is not None:
                raise write.failure
            if write.is_over and write.digest.done():
                write.future.set_result(WriteResult(num_bytes=write.batch.num_bytes, digest=write.digest.result()))
        except Exception as error:
            wait([write.digest])  # it reads the source, which may be freed once this is known to have failed
            failure = error if isinstance(error, TransportError) else self._failure(error, write.batch.peer)
            write.future.set_exception(failure.with_traceback(None))  # whose frames would keep the agents
        return write.future.done()

    def _is_over(self, write: _Write) -> bool:
        """Whether no card writes any longer."""
        batch, transfer = write.batch, write.batch.transfer
        self._check_whole(batch)
        for card in list(transfer.under_way):
            try:
                state = card.state
            except Exception as error:
                state, write.failure = "ERR", self._failure(error, batch.peer)
            if state == "PROC":
                continue
            transfer.under_way.remove(card)
            if state != "DONE" and write.failure is None:
                write.failure = TransportError(f"NIXL reports {state} for a write to {batch.peer}")
        if transfer.under_way:
            self._check_late(write)
        return not transfer.under_way

    def _check_late(self, write: _Write) -> None:
        """A write that was given up, or takes far too long, is stopped by tearing this side down."""
        now = time.monotonic()
        if write.given_up_at is None and (write.cancelled.is_set() or write.failure is not None):
            write.given_up_at = now
        is_cut = write.given_up_at is not None and now > write.given_up_at + CUT_S
        if is_cut or now > write.began_at + WRITE_DEADLINE_S:
            self._tear_down()
            took = f"{write.batch.num_bytes} bytes in {now - write.began_at:.1f} s"
            raise PeerLost(f"{write.batch.peer} did not accept {took}")

    def _tear_down(self) -> None:
        """End the agents and with them everything in flight; the transport cannot be used afterwards."""
        with self._posting:
            for transfer in list(self._transfers):
                if any(card.is_stalled for card in transfer.under_way):
                    self.cut_peers |= {transfer.peer}
                transfer.tear()
            self._peers, self._lists, self._agents = {}, {}, []

    def _check_whole(self, batch: _NixlBatch) -> None:
        if batch.transfer.is_torn:
            raise PeerLost(f"{batch.peer} is not connected: {', '.join(sorted(self.cut_peers))} had to be cut off")

    def write_bare(self, batches: Sequence[Batch]) -> None:
        """Post batches and wait, with nothing of weft around them: the baseline of benchmarks."""
        cards = [card for batch in batches if isinstance(batch, _NixlBatch) for card in batch.transfer.cards]
        deadline = time.monotonic() + WRITE_DEADLINE_S
        waiting = [card for card in cards if card.agent.transfer(card.handle) == "PROC"]
        while waiting:
            if time.monotonic() > deadline:
                raise TransferTimeout(f"NIXL did not finish in {WRITE_DEADLINE_S} s")
            time.sleep(SHORTEST_LOOK_S)
            waiting = [card for card in waiting if card.state == "PROC"]

    def _failure(self, error: Exception, peer: str) -> TransportError:
        """Maps NIXL's errors to weft's."""
        gone = (self._errors.nixlRemoteDisconnectError, self._errors.nixlBackendError)
        if isinstance(error, gone):
            if peer in self._peers:
                self._peers[peer].is_lost = True
            return PeerLost(f"{peer} is gone: {error}")
        return TransportError(f"NIXL failed for {peer}: {type(error).__name__} {error}")

    def arrived(self, tag: int, *, writer: int) -> int:
        """Bytes announced by a writer, in the order it posted them; NIXL delivers an announcement after its data."""
        with self._lock:
            for note in self._new_notes():
                self._arrivals.count(note)
            return self._arrivals.num_bytes(tag, writer)

    def _new_notes(self) -> list[bytes]:
        """What peers announced since the last look."""
        return [note for each in self._agents for notes in each.agent.get_new_notifs().values() for note in notes]

    def credit(self, peer: str, tag: int, num_bytes: int) -> None:
        """A notification without data."""
        known = self._known(peer)
        link = known.links[0]
        try:
            link.own.agent.send_notif(link.name, known.announcer.note(self._writer_number, tag, num_bytes))
        except Exception as error:
            raise self._failure(error, peer) from error

    def forget_arrivals(self) -> None:
        """Drop all announcements, read or unread."""
        with self._lock:
            self._new_notes()
            self._arrivals = Announcements()

    def _release(self) -> None:
        """Without its agents nothing in this process is reachable: connections and keys end with them."""
        for registered in {id(known): known for known in self._lists.values() if known is not None}.values():
            self._deregister(registered)
        for transfer in list(self._transfers):
            transfer.tear()
        self._lists, self._agents = {}, []


def _digest_key(rows: Batch) -> bytes:
    """Names what is digested, and at which positions."""
    columns = (rows.src, rows.length, rows.position) if rows.digested is None else rows.digested.digested
    key = hashlib.blake2b(digest_size=16)
    for column in columns:
        key.update(b"none" if column is None else column.tobytes())
    return key.digest()


def _is_pinned(address: int, num_bytes: int) -> bool:
    from weft.gpu import pinned_view  # noqa: PLC0415 - torch and Triton only where there is a GPU

    return pinned_view(address, num_bytes) is not None


def look_s(waited_s: float) -> float:
    """When to look again after nothing has ended for so long: soon at first, then after a 256th of it."""
    return min(max(waited_s / 256, SHORTEST_LOOK_S), LONGEST_LOOK_S)
