"""`shm`: processes on one host, CPU memory. Writes are plain copies into memory that both sides have mapped.

Destinations must lie in memory from `allocate`: anonymous shared memory that vanishes with its processes, so nothing is
ever left behind in /dev/shm. Sources may be any memory. The target runs no code; arrivals are counted in cells of
shared memory, one per writer.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from weft import native
from weft.core.geometry.planes import Planes
from weft.errors import PeerLost, RegistrationError, TransportError
from weft.transport.base import (
    MAX_WRITERS,
    Batch,
    Descriptor,
    Endpoint,
    Memory,
    Ranges,
    Ticket,
    WriteResult,
)
from weft.transport.capabilities import CAPABILITIES
from weft.transport.host import CELL_BYTES, LivingProcess, ProcessIdentity
from weft.transport.mapped import DirectBatch, MappedTransport
from weft.transport.pages import address_of, reserve
from weft.transport.together import Together

_NAME = "weft"
_FALLOC_KEEP_SIZE, _FALLOC_PUNCH_HOLE = 1, 2
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


class SharedMemory:
    """Anonymous memory that other processes can map while this one lives."""

    def __init__(self, num_bytes: int) -> None:
        self.fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        os.ftruncate(self.fd, num_bytes)
        self._map = mmap.mmap(self.fd, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.num_bytes = num_bytes
        self.address = address_of(self._map)

    @classmethod
    def opened(cls, pid: int, fd: int, num_bytes: int) -> SharedMemory:
        """Another process's memory, mapped here."""
        memory = cls.__new__(cls)
        memory.fd = -1
        path = f"/proc/{pid}/fd/{fd}"
        if not os.readlink(path).startswith(f"/memfd:{_NAME} "):  # never a file, whatever a peer claims
            raise RegistrationError(f"descriptor {fd} of process {pid} is not weft's shared memory")
        memory.fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if os.fstat(memory.fd).st_size < num_bytes:
            raise RegistrationError(f"shared memory {fd} of process {pid} is smaller than {num_bytes} bytes")
        memory._map = mmap.mmap(memory.fd, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        memory.num_bytes = num_bytes
        memory.address = address_of(memory._map)
        return memory

    @property
    def buffer(self) -> mmap.mmap:
        """The memory as an object; it stays mapped while this is in use."""
        return self._map

    def _close_fd(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self._close_fd()

    def give_up(self) -> bool:
        """Free its pages, also in processes that have it mapped; they may go on writing there, but nothing is read."""
        flags = _FALLOC_KEEP_SIZE | _FALLOC_PUNCH_HOLE
        _libc.fallocate(self.fd, flags, 0, self.num_bytes)  # if it fails, the last process to unmap frees them
        self._close_fd()
        reserve(self.address, self.num_bytes)
        return True

    def close(self) -> None:
        """Unmap, unless arrays still use the memory; it is freed with the last user in any case."""
        self._close_fd()
        try:
            self._map.close()
        except BufferError:
            return


class _EndpointData(msgspec.Struct, frozen=True):
    process: ProcessIdentity
    cells_fd: int


class _DescriptorData(msgspec.Struct, frozen=True):
    fd: int
    """Negative: not shared, a source only."""
    memory_address: int
    memory_bytes: int


@dataclass
class _Peer:
    process: LivingProcess
    cell: int
    memories: list[SharedMemory]
    ranges: Ranges = field(default_factory=Ranges)

    def close(self) -> None:
        self.process.close()
        for memory in self.memories:
            memory.close()


class ShmTransport(MappedTransport[_Peer]):
    """Shared memory between processes of one host."""

    capabilities = CAPABILITIES["shm"]

    def __init__(self, member: str, *, writer: int = 0, num_threads: int = 1) -> None:
        super().__init__(member, writer=writer, num_threads=num_threads)
        self._cells = SharedMemory(MAX_WRITERS * CELL_BYTES)
        self._memories: list[SharedMemory] = []
        self._together: dict[tuple[int, ...], Together] = {}
        """The batches that were last posted together."""

    @property
    def endpoint(self) -> Endpoint:
        """This process and its arrival cells."""
        data = _EndpointData(ProcessIdentity.of(os.getpid()), self._cells.fd)
        return Endpoint(transport="shm", member=self.member, data=msgspec.msgpack.encode(data))

    def allocate(self, num_bytes: int) -> Memory:
        """Shared memory; freed when no process holds or maps it any more."""
        self._check_open()
        shared = SharedMemory(num_bytes)
        self._memories.append(shared)
        return Memory(
            address=shared.address, num_bytes=num_bytes, keep=shared, buffer=shared.buffer, give_up=shared.give_up
        )

    def _describe(self, address: int, num_bytes: int) -> Descriptor:
        data = _DescriptorData(-1, 0, 0)
        for memory in self._memories:
            if memory.address <= address and address + num_bytes <= memory.address + memory.num_bytes:
                data = _DescriptorData(memory.fd, memory.address, memory.num_bytes)
        return Descriptor(transport="shm", address=address, num_bytes=num_bytes, data=msgspec.msgpack.encode(data))

    def _open(self, endpoint: Endpoint, descriptors: Sequence[Descriptor]) -> _Peer:
        """Map the peer's memory and its arrival cells."""
        where = msgspec.msgpack.decode(endpoint.data, type=_EndpointData)
        peer = _Peer(process=LivingProcess(where.process, endpoint.member), cell=0, memories=[])
        try:
            cells = SharedMemory.opened(peer.process.pid, where.cells_fd, MAX_WRITERS * CELL_BYTES)
            peer.memories.append(cells)
            peer.cell = cells.address + self._writer_number * CELL_BYTES
            mapped: dict[int, SharedMemory] = {}
            for descriptor in descriptors:
                self._map_descriptor(peer, descriptor, mapped)
        except FileNotFoundError:
            peer.close()
            raise PeerLost(f"{endpoint.member} (process {peer.process.pid}) is gone") from None
        except BaseException:
            peer.close()
            raise
        return peer

    def _map_descriptor(self, peer: _Peer, descriptor: Descriptor, mapped: dict[int, SharedMemory]) -> None:
        data = msgspec.msgpack.decode(descriptor.data, type=_DescriptorData)
        if data.fd < 0:
            raise RegistrationError(
                f"memory of {peer.process.member} at {descriptor.address:#x} is not shared and cannot be written",
                hint="allocate destinations with the transport, or use the cma transport",
            )
        if data.fd not in mapped:
            mapped[data.fd] = SharedMemory.opened(peer.process.pid, data.fd, data.memory_bytes)
            peer.memories.append(mapped[data.fd])
        last = descriptor.address + descriptor.num_bytes
        if not data.memory_address <= descriptor.address <= last <= data.memory_address + data.memory_bytes:
            raise RegistrationError(f"a descriptor of {peer.process.member} lies outside its shared memory")
        shift = mapped[data.fd].address - data.memory_address
        peer.ranges.add(descriptor.address, descriptor.num_bytes, shift=shift)

    def _locate(self, peer: _Peer, batch: Batch, at: NDArray[np.int64]) -> Batch:
        """Translate the peer's addresses into this process's mapping of them."""
        return replace(batch, dst=(batch.dst.astype(np.int64) + peer.ranges.shifts()[at]).astype(np.uint64))

    def post_direct(self, batches: Sequence[DirectBatch], tag: int) -> list[Ticket]:
        """Everything is mapped here, so the planes of all peers are copied in source order."""
        if len(batches) < 2:
            return super().post_direct(batches, tag)
        self._check_tag(tag)
        key = tuple(id(batch) for batch in batches)
        if key not in self._together:
            self._together = {key: Together.of(batches)}
        futures: list[Future[WriteResult]] = [Future() for _ in batches]
        cancelled = threading.Event()
        self._writer.submit(self._write_together, self._together[key], tag, futures, cancelled)
        return [Ticket(future, batch, tag, cancelled) for future, batch in zip(futures, batches, strict=True)]

    def _write_together(
        self, job: Together, tag: int, futures: Sequence[Future[WriteResult]], cancelled: threading.Event
    ) -> None:
        """Copy, and resolve every future whatever happens: nothing else watches this thread."""
        try:
            outcomes = self._copy_all(job, tag, cancelled)
        except Exception as error:
            failure = error if isinstance(error, TransportError) else TransportError(f"writing failed: {error}")
            for future in futures:
                future.set_exception(failure)
            return
        for future, outcome in zip(futures, outcomes, strict=True):
            if isinstance(outcome, WriteResult):
                future.set_result(outcome)
            else:
                future.set_exception(outcome)

    def _copy_all(self, job: Together, tag: int, cancelled: threading.Event) -> list[WriteResult | PeerLost]:
        """Copy Chunk by Chunk. A peer that is gone does not stop the others: its memory is still mapped here."""
        batches = job.batches
        written, digests = [0] * len(batches), [0] * len(batches)
        peers = [self._known(batch.peer) for batch in batches]
        for peer in peers:
            self._announce(peer, tag)
        for number, planes in enumerate(job.chunks):
            if cancelled.is_set():
                raise TransportError("writing was stopped")
            for i, digest in enumerate(self._copy(planes, len(batches))):
                digests[i] += digest
            for i, batch in enumerate(batches):
                if number < len(batch.chunks):
                    written[i] += batch.chunks[number].num_bytes
                    self._count(peers[i], tag, batch.chunks[number].num_bytes)
        return [
            PeerLost(f"{batch.peer} (process {peer.process.pid}) has ended ({done} of {batch.num_bytes} bytes written)")
            if peer.process.has_ended
            else WriteResult(num_bytes=done, digest=digests[twin] & ((1 << 64) - 1))
            for peer, batch, done, twin in zip(peers, batches, written, job.twin, strict=True)
        ]

    def _copy(self, planes: Planes, num_groups: int) -> list[int]:
        if planes.position is None:
            native.copy_planes(planes, num_threads=self._num_threads)
            return []
        return native.copy_digest_planes(planes, num_groups=num_groups, num_threads=self._num_threads)

    def _copy_planes(self, peer: _Peer, planes: Planes) -> int:
        del peer
        return copy_planes(planes, self._num_threads)

    def _check_alive(self, peer: _Peer) -> None:
        peer.process.check()

    def _write_chunk(self, peer: _Peer, chunk: Batch) -> int:
        return copy_chunk(chunk, self._num_threads)

    def _announce(self, peer: _Peer, tag: int) -> None:
        native.publish(peer.cell, tag, 0)

    def _count(self, peer: _Peer, tag: int, num_bytes: int) -> None:
        native.publish(peer.cell, tag, num_bytes)

    def arrived(self, tag: int, *, writer: int) -> int:
        """Bytes counted in the writer's cell."""
        return native.arrived(self._cells.address + writer * CELL_BYTES, 1, tag)

    def forget_arrivals(self) -> None:
        """Empty all cells."""
        ctypes.memset(self._cells.address, 0, self._cells.num_bytes)

    def _release(self) -> None:
        self._memories = []
        self._cells.close()


def copy_planes(planes: Planes, num_threads: int) -> int:
    """Copy planes inside this process's address space, digesting them on the way if required."""
    if planes.position is not None:
        return native.copy_digest_planes(planes, num_threads=num_threads)[0]
    native.copy_planes(planes, num_threads=num_threads)
    return 0


def copy_chunk(chunk: Batch, num_threads: int) -> int:
    """Copy rows inside this process's address space, digesting them on the way if required."""
    if chunk.position is not None:
        return native.copy_digest(chunk.dst, chunk.src, chunk.position, chunk.length, num_threads=num_threads)
    native.copy(chunk.dst, chunk.src, chunk.length, num_threads=num_threads)
    return 0
