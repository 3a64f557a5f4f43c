"""`cuda_ipc`: processes on one host, GPU memory. Writes are device copies into memory that a peer has shared.

Any memory of the CUDA allocator can be a destination, except PyTorch's expandable segments, which CUDA cannot share.
The copy runs on the writer's GPU; arrivals are counted in cells of shared host memory, one per writer.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from weft import native
from weft.config import LARGEST_CHUNK
from weft.core.geometry.planes import Planes
from weft.errors import PeerLost, RegistrationError, TransportError
from weft.transport.base import (
    MAX_WRITERS,
    Batch,
    Descriptor,
    Endpoint,
    Memory,
    Ranges,
)
from weft.transport.capabilities import CAPABILITIES
from weft.transport.cuda_driver import CudaDriver
from weft.transport.device_memory import device_memory
from weft.transport.host import CELL_BYTES, LivingProcess, ProcessIdentity
from weft.transport.mapped import MappedTransport
from weft.transport.shm import SharedMemory


class _EndpointData(msgspec.Struct, frozen=True):
    process: ProcessIdentity
    cells_fd: int


class _DescriptorData(msgspec.Struct, frozen=True):
    handle: bytes
    base: int
    """Start of the allocation that contains the memory, in its owner's address space."""


@dataclass
class _Peer:
    process: LivingProcess
    driver: CudaDriver
    cells: SharedMemory
    ranges: Ranges = field(default_factory=Ranges)
    opened: dict[bytes, int] = field(default_factory=dict)
    """Handle → where the allocation is mapped here."""

    def close(self) -> None:
        """Unmap everything; memory of a process that is gone cannot be unmapped, and need not be."""
        for pointer in self.opened.values():
            with contextlib.suppress(TransportError):
                self.driver.close(pointer)
        self.cells.close()
        self.process.close()


class CudaIpcTransport(MappedTransport[_Peer]):
    """Device copies between processes of one host."""

    capabilities = CAPABILITIES["cuda_ipc"]

    def __init__(self, member: str, *, writer: int = 0, num_threads: int = 1, device: str = "cuda:0") -> None:
        from weft.gpu import GpuWork  # noqa: PLC0415 - torch and Triton only where there is a GPU

        super().__init__(member, writer=writer, num_threads=num_threads)
        index = int(device.partition(":")[2] or 0)
        self._index = index
        self._driver = CudaDriver(index)
        self._work = GpuWork(index)
        self._cells = SharedMemory(MAX_WRITERS * CELL_BYTES)

    @property
    def endpoint(self) -> Endpoint:
        """This process and its arrival cells."""
        data = _EndpointData(ProcessIdentity.of(os.getpid()), self._cells.fd)
        return Endpoint(transport="cuda_ipc", member=self.member, data=msgspec.msgpack.encode(data))

    def allocate(self, num_bytes: int) -> Memory:
        """Device memory."""
        self._check_open()
        return device_memory(self._index, num_bytes)

    def _describe(self, address: int, num_bytes: int) -> Descriptor:
        try:
            handle, base = self._driver.export(address)
        except TransportError as error:
            raise RegistrationError(
                f"CUDA cannot share {num_bytes} bytes at {address:#x}: {error}",
                hint="turn expandable_segments off in PYTORCH_CUDA_ALLOC_CONF, or use nixl",
            ) from error
        data = msgspec.msgpack.encode(_DescriptorData(handle, base))
        return Descriptor(transport="cuda_ipc", address=address, num_bytes=num_bytes, data=data)

    def _open(self, endpoint: Endpoint, descriptors: Sequence[Descriptor]) -> _Peer:
        """Map the peer's allocations and its arrival cells."""
        where = msgspec.msgpack.decode(endpoint.data, type=_EndpointData)
        process = LivingProcess(where.process, endpoint.member)
        try:
            cells = SharedMemory.opened(process.pid, where.cells_fd, MAX_WRITERS * CELL_BYTES)
        except FileNotFoundError:
            process.close()
            raise PeerLost(f"{endpoint.member} (process {process.pid}) is gone") from None
        peer = _Peer(process=process, driver=self._driver, cells=cells)
        try:
            for descriptor in descriptors:
                data = msgspec.msgpack.decode(descriptor.data, type=_DescriptorData)
                if data.handle not in peer.opened:
                    peer.opened[data.handle] = self._driver.open(data.handle)
                shift = peer.opened[data.handle] - data.base
                peer.ranges.add(descriptor.address, descriptor.num_bytes, shift=shift)
        except BaseException:
            peer.close()
            raise
        return peer

    def _locate(self, peer: _Peer, batch: Batch, at: NDArray[np.int64]) -> Batch:
        """The peer's addresses as they are mapped here."""
        return replace(batch, dst=(batch.dst.astype(np.int64) + peer.ranges.shifts()[at]).astype(np.uint64))

    def _check_alive(self, peer: _Peer) -> None:
        peer.process.check()

    def _announce(self, peer: _Peer, tag: int) -> None:
        native.publish(self._cell(peer), tag, 0)

    def _count(self, peer: _Peer, tag: int, num_bytes: int) -> None:
        native.publish(self._cell(peer), tag, num_bytes)

    def _cell(self, peer: _Peer) -> int:
        return peer.cells.address + self._writer_number * CELL_BYTES

    def _write_chunk(self, peer: _Peer, chunk: Batch) -> int:
        with _failures(peer.process.member):
            if chunk.position is not None:
                return self._work.copy_digest(chunk.dst, chunk.src, chunk.position, chunk.length)
            self._work.copy(chunk.dst, chunk.src, chunk.length)
            return 0

    def _digest(self, planes: Planes) -> int:
        return self._work.digest_planes(planes)

    _chunk_bytes = LARGEST_CHUNK
    """Every chunk needs tables of its own, which take longer than the device to move 16 MiB."""
    _num_ahead = 2
    """Keeps the device busy between Chunks."""

    def _start_planes(self, peer: _Peer, planes: Planes) -> Callable[[], int]:
        with _failures(peer.process.member):
            wait = self._work.start_copy(planes, is_digested=planes.position is not None)

        def finish() -> int:
            with _failures(peer.process.member):
                return wait()

        return finish

    def _copy_planes(self, peer: _Peer, planes: Planes) -> int:
        return self._start_planes(peer, planes)()

    def arrived(self, tag: int, *, writer: int) -> int:
        """Bytes counted in the writer's cell."""
        return native.arrived(self._cells.address + writer * CELL_BYTES, 1, tag)

    def forget_arrivals(self) -> None:
        """Empty all cells."""
        ctypes.memset(self._cells.address, 0, self._cells.num_bytes)

    def _release(self) -> None:
        self._cells.close()


@contextlib.contextmanager
def _failures(peer: str) -> Iterator[None]:
    """Maps CUDA's errors to weft's."""
    try:
        yield
    except RuntimeError as error:
        raise TransportError(f"copying to {peer} failed: {error}") from error
