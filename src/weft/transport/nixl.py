"""`nixl`: RDMA, NVLink, TCP or shared memory through NIXL and UCX; the default transport between hosts.

Precautions that measurements showed to matter: the wrapper's progress thread spins on a whole core unless it is given a
pause; NIXL never times out, so every write has its own deadline; one large descriptor is never split, so rows are cut
into pieces; an agent's name must be new after a restart. The target's progress thread acknowledges writes, not its
Python code.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import threading
import time
import uuid
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
from weft.errors import PeerLost, RegistrationError, TransferTimeout, TransportError, TransportUnavailable
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
from weft.transport.network_cards import rdma_cards

PIECE_BYTES = {"cpu": 4 << 20, "cuda": 2 << 30}
"""Largest descriptor: a CPU copies pieces in parallel; a GPU is fastest with few large ones."""
RAIL_BYTES = 2 << 10
"""Smallest part of a row for each of several network cards, over TCP. UCX puts shorter rows on the first card only;
with its default these are rows of 4 KB, as engine ranks get them from matrices that are cut by columns. RDMA cards,
which have not been tried, keep UCX's default."""
_RAIL_VARIABLE = "UCX_MIN_RMA_CHUNK_SIZE"
PROGRESS_PAUSE_US = 1000
SHORTEST_LOOK_S, LONGEST_LOOK_S = 2e-5, 1e-3
WRITE_DEADLINE_S = 200.0
CUT_S = 2.0
"""A write that was given up is usually done by then. A stalled peer never accepts it, and NIXL keeps reading the source
after the request and the peer were released: only ending the agent stops that (`docs/LOG.md`)."""
_MODULES = ("nixl_cu13", "nixl_cu12")


class _EndpointData(msgspec.Struct, frozen=True):
    agent: str
    metadata: bytes


class _Arrival(msgspec.Struct, frozen=True):
    writer: int
    tag: int
    num_bytes: int
    at: int
    """Bytes written or credited under this tag before."""


@dataclass
class _Registered:
    """One NIXL registration of several ranges."""

    handle: Any
    count: int

    def is_last(self) -> bool:
        """One of the ranges is no longer needed; returns whether it was the last."""
        self.count -= 1
        return self.count == 0


@dataclass
class _Arrived:
    """What one writer has announced under a tag; announcements may overtake each other."""

    prefix: int = 0
    """Bytes without a gap, from the first one on."""
    beyond: dict[int, int] = field(default_factory=dict)

    def add(self, at: int, num_bytes: int) -> None:
        """Add bytes that begin at an offset."""
        self.beyond[at] = num_bytes
        while (size := self.beyond.pop(self.prefix, None)) is not None and size > 0:
            self.prefix += size


@dataclass
class _Peer:
    agent: Any
    name: str
    ranges: Ranges = field(default_factory=Ranges)
    tag: int = 0
    posted: int = 0
    """Bytes under the last tag."""
    is_lost: bool = False

    def reaches(self, agent: str, ranges: Ranges) -> bool:
        """Whether this connection is to this agent, and all memory it knows is among these ranges."""
        return self.name == agent and not self.is_lost and self.ranges.are_among(ranges)

    def note(self, writer: int, tag: int, num_bytes: int) -> bytes:
        """The announcement of the next bytes."""
        if tag != self.tag:
            self.tag, self.posted = tag, 0
        note = _Arrival(writer, tag, num_bytes, self.posted)
        self.posted += num_bytes
        return msgspec.msgpack.encode(note)

    def close(self) -> None:
        self.agent.remove_remote_agent(self.name)


@dataclass(eq=False)
class _PreparedTransfer:
    """NIXL's handle of a batch, which keeps the agent alive; None once the agent was torn down."""

    peer: str
    handle: Any
    is_posted: bool = False


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
    is_written: bool = False


class NixlTransport(Transport[_Peer]):
    """One NIXL agent with the UCX backend, for the memory of one device."""

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
        """`devices` limits UCX to some network devices, such as `lo` or `mlx5_0:1`; empty: all.

        `is_near`: whether any peer is on this host. NIXL's own threads then copy; for others they would only spin.
        """
        api, bindings = _load()
        super().__init__(member, writer=writer, num_threads=num_threads)
        self._kind = "DRAM" if memory_kind(device) == CPU else "VRAM"
        self._piece_bytes = PIECE_BYTES[memory_kind(device)]
        self._device_number = 0 if device == CPU else int(device.partition(":")[2])
        self._work = device_work(device)
        self._errors = bindings
        self._agent_name = f"{member} {uuid.uuid4().hex}"
        parameters = {"num_threads": str(num_threads if is_near else 0), "split_batch_size": "16"}
        of_ucx = [f"NET_DEVICES={devices}"] if devices else []
        if not (is_near or rdma_cards() or _RAIL_VARIABLE in os.environ):
            of_ucx.append(f"{_RAIL_VARIABLE.removeprefix('UCX_')}={RAIL_BYTES}")
        if of_ucx:
            parameters["engine_config"] = ",".join(of_ucx)
        self._agent = _make_agent(api, self._agent_name, parameters)
        self._lists: dict[tuple[int, int], _Registered | None] = {}
        """What is registered with NIXL; None: registered as a part of another range."""
        self._host_sources: set[tuple[int, int]] = set()
        """Pinned host memory that writes may come from, where this transport is for GPU memory."""
        self._arrived: dict[tuple[int, int], _Arrived] = {}
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
        """The agent and everything registered so far; read it after registering."""
        data = _EndpointData(self._agent_name, self._agent.get_agent_metadata())
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

    def _register(self, ranges: Sequence[tuple[int, int]], device: int, kind: str) -> Any:
        """NIXL's own registration."""
        try:
            return self._agent.register_memory([(*known, device, "") for known in ranges], kind)
        except Exception as error:
            total = sum(size for _, size in ranges)
            raise RegistrationError(
                f"NIXL cannot register {total} bytes in {len(ranges)} ranges starting at {ranges[0][0]:#x}: {error}"
            ) from error

    def allocate(self, num_bytes: int) -> Memory:
        """Device memory."""
        if self._kind == "DRAM":
            return super().allocate(num_bytes)
        from weft.gpu import GpuWork  # noqa: PLC0415 - torch and Triton only where there is a GPU

        tensor = GpuWork(self._device_number).allocate(num_bytes)
        return Memory(address=tensor.data_ptr(), num_bytes=num_bytes, keep=tensor)

    def deregister(self, handle: Handle) -> None:
        """Undo a registration and tell NIXL."""
        super().deregister(handle)
        if not self._registered.has(handle.address, handle.num_bytes):
            self._host_sources.discard((handle.address, handle.num_bytes))
            registered = self._lists.pop((handle.address, handle.num_bytes), None)  # None if this was torn down
            if registered is not None and registered.is_last():
                self._agent.deregister_memory(registered.handle)

    def _open(self, endpoint: Endpoint, descriptors: Sequence[Descriptor]) -> _Peer:
        where = msgspec.msgpack.decode(endpoint.data, type=_EndpointData)
        ranges = Ranges()
        for descriptor in descriptors:
            ranges.add(descriptor.address, descriptor.num_bytes)
        known = self._peers.get(endpoint.member)
        is_known = known is not None and known.reaches(where.agent, ranges)
        if is_known:  # NIXL keeps the sockets of connections it is told to remove
            del self._peers[endpoint.member]
        else:
            self.disconnect(endpoint.member)
        try:
            name = self._agent.add_remote_agent(where.metadata).decode()
            if not is_known:
                self._agent.make_connection(name)
        except Exception as error:
            raise self._failure(error, endpoint.member) from error
        return _Peer(agent=self._agent, name=name, ranges=ranges)

    def _translate(self, peer: _Peer, batch: Batch, at: NDArray[np.int64]) -> Batch:
        """Rows become NIXL descriptors, prepared once and posted for every version."""
        rows = cut_rows(batch, self._piece_bytes)
        try:
            on_host = self._is_on_host(rows)
            table = self._table(rows.src, rows.length, 0 if on_host else self._device_number)
            local = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", table, "DRAM" if on_host else self._kind)
            table = self._table(rows.dst, rows.length, self._device_number)
            remote = self._agent.prep_xfer_dlist(peer.name, table, self._kind)
            order = np.arange(rows.num_rows, dtype=np.int32)
            transfer = _PreparedTransfer(
                batch.peer, self._agent.make_prepped_xfer("WRITE", local, order, remote, order)
            )
        except Exception as error:
            raise self._failure(error, batch.peer) from error
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
                self._begin(write.batch, tag, write.cancelled)
            except Exception as error:
                write.future.set_exception(error)
            else:
                key = write.batch.digest_key
                if key not in digests:
                    digests[key] = self._digester.submit(digest_of, write.batch, write.batch.work)
                write.digest = digests[key]
                self._under_way.append(write)
        self._watcher.submit(self._watch)

    def _begin(self, batch: _NixlBatch, tag: int, cancelled: threading.Event) -> None:
        """Post a write. Once posted it cannot be stopped."""
        with self._posting:
            self._check_whole(batch)
            peer = self._known(batch.peer)
            if cancelled.is_set():
                raise TransportError(f"writing to {batch.peer} was stopped before it began")
            note = peer.note(self._writer_number, tag, batch.num_bytes)
            try:
                self._agent.transfer(batch.transfer.handle, note)
                batch.transfer.is_posted = True
            except Exception as error:
                raise self._failure(error, batch.peer) from error

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
        """Look at one write; tells whoever waits for it how it ended."""
        assert write.digest is not None
        try:
            write.is_written = write.is_written or self._is_written(write)
            if write.is_written and write.digest.done():
                write.future.set_result(WriteResult(num_bytes=write.batch.num_bytes, digest=write.digest.result()))
        except Exception as error:
            wait([write.digest])  # it reads the source, which may be freed once this is known to have failed
            is_ours = isinstance(error, TransportError)
            write.future.set_exception(error if is_ours else self._failure(error, write.batch.peer))
        return write.future.done()

    def _is_written(self, write: _Write) -> bool:
        """Whether all bytes of a write have arrived."""
        batch = write.batch
        self._check_whole(batch)
        state = self._agent.check_xfer_state(batch.transfer.handle)
        if state == "PROC":
            self._check_late(write)
            return False
        batch.transfer.is_posted = False
        if state != "DONE":
            raise TransportError(f"NIXL reports {state} for a write to {batch.peer}")
        return True

    def _check_late(self, write: _Write) -> None:
        """A write that was given up, or takes far too long, is stopped by tearing this side down."""
        now = time.monotonic()
        if write.given_up_at is None and write.cancelled.is_set():
            write.given_up_at = now
        is_cut = write.given_up_at is not None and now > write.given_up_at + CUT_S
        if is_cut or now > write.began_at + WRITE_DEADLINE_S:
            self._tear_down()
            took = f"{write.batch.num_bytes} bytes in {now - write.began_at:.1f} s"
            raise PeerLost(f"{write.batch.peer} did not accept {took}")

    def _tear_down(self) -> None:
        """End the agent and with it everything in flight; the transport cannot be used afterwards."""
        with self._posting:
            for transfer in list(self._transfers):
                if transfer.is_posted and self._agent.check_xfer_state(transfer.handle) == "PROC":
                    self.cut_peers |= {transfer.peer}
                transfer.handle = None
            self._peers, self._lists, self._agent = {}, {}, None

    def _check_whole(self, batch: _NixlBatch) -> None:
        if batch.transfer.handle is None:
            raise PeerLost(f"{batch.peer} is not connected: {', '.join(sorted(self.cut_peers))} had to be cut off")

    def write_bare(self, batches: Sequence[Batch]) -> None:
        """Post batches and wait, with nothing of weft around them: the baseline of benchmarks."""
        transfers = [batch.transfer.handle for batch in batches if isinstance(batch, _NixlBatch)]
        deadline = time.monotonic() + WRITE_DEADLINE_S
        waiting = [transfer for transfer in transfers if self._agent.transfer(transfer) == "PROC"]
        while waiting:
            if time.monotonic() > deadline:
                raise TransferTimeout(f"NIXL did not finish in {WRITE_DEADLINE_S} s")
            time.sleep(SHORTEST_LOOK_S)
            waiting = [transfer for transfer in waiting if self._agent.check_xfer_state(transfer) == "PROC"]

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
            for notes in self._agent.get_new_notifs().values():
                for note in notes:
                    self._count(note)
            found = self._arrived.get((tag, writer))
            return 0 if found is None else found.prefix

    def credit(self, peer: str, tag: int, num_bytes: int) -> None:
        """A notification without data."""
        known = self._known(peer)
        try:
            self._agent.send_notif(known.name, known.note(self._writer_number, tag, num_bytes))
        except Exception as error:
            raise self._failure(error, peer) from error

    def _count(self, note: bytes) -> None:
        """Count a note; only each writer's newest tag is kept, so nothing grows with the number of versions."""
        try:
            arrival = msgspec.msgpack.decode(note, type=_Arrival)
        except msgspec.DecodeError:  # not from a weft member
            return
        key = arrival.tag, arrival.writer
        if key not in self._arrived:
            self._arrived = {known: n for known, n in self._arrived.items() if known[1] != arrival.writer}
            self._arrived[key] = _Arrived()
        self._arrived[key].add(arrival.at, arrival.num_bytes)

    def forget_arrivals(self) -> None:
        """Drop all announcements, read or unread."""
        with self._lock:
            self._agent.get_new_notifs()
            self._arrived = {}

    def _release(self) -> None:
        """Without its agent nothing in this process is reachable: connections and keys end with it."""
        for registered in {id(known): known for known in self._lists.values() if known is not None}.values():
            self._agent.deregister_memory(registered.handle)
        for transfer in list(self._transfers):
            transfer.handle = None
        self._lists, self._agent = {}, None


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


def _load() -> tuple[Any, Any]:
    """The Python binding, whichever CUDA build is installed; CPU memory needs no CUDA."""
    for name in _MODULES:
        try:
            found = importlib.import_module(f"{name}._api"), importlib.import_module(f"{name}._bindings")
            logging.getLogger("nixl").setLevel(logging.WARNING)  # it prints a greeting on stdout, which is for data
            return found
        except ImportError:
            continue
    raise TransportUnavailable("NIXL is not installed", hint="pip install --no-deps nixl-cu13==1.5.1")


def look_s(waited_s: float) -> float:
    """When to look again after nothing has ended for so long: soon at first, then after a 256th of it."""
    return min(max(waited_s / 256, SHORTEST_LOOK_S), LONGEST_LOOK_S)


def _make_agent(api: Any, name: str, parameters: dict[str, str]) -> Any:
    """An agent whose progress thread pauses between polls; the wrapper hard-codes a busy loop."""
    base = api.nixlBind.nixlAgentConfig

    class PausingConfig(base):  # type: ignore[misc, valid-type]
        @property
        def pthrDelay(self) -> int:
            return int(base.pthrDelay.__get__(self))

        @pthrDelay.setter
        def pthrDelay(self, _: int) -> None:
            base.pthrDelay.__set__(self, PROGRESS_PAUSE_US)

    settings = api.nixl_agent_config(
        enable_prog_thread=True, backends=[], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    )
    api.nixlBind.nixlAgentConfig = PausingConfig
    try:
        agent = api.nixl_agent(name, settings)
    finally:
        api.nixlBind.nixlAgentConfig = base
    agent.create_backend("UCX", parameters)
    return agent
