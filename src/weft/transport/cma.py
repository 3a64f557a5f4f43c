"""`cma`: several processes on one host, ordinary CPU memory. The kernel copies straight into the other process.

Works on tensors as they are, of busy or stopped processes; about half as fast as shared memory. Needs the same user or
CAP_SYS_PTRACE. As root a wrong process number would mean writing into a stranger, so a peer is recognised by its start
time and by a random cookie read back from its memory before the first write.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from weft import native
from weft.errors import PeerLost, TransportError, TransportUnavailable
from weft.transport.base import Batch, Capabilities, Column, Descriptor, Endpoint, Ranges, Transport
from weft.transport.host import CELL_BYTES, NUM_CELLS, LivingProcess, ProcessIdentity, check_writer

_ROW = np.array([8], dtype=np.uint64)


class _EndpointData(msgspec.Struct, frozen=True):
    process: ProcessIdentity
    cookie_address: int
    cookie: bytes
    cells_address: int


@dataclass
class _Peer:
    process: LivingProcess
    cell: int
    """Address of this writer's arrival cell in the peer."""
    ranges: Ranges = field(default_factory=Ranges)
    tag: int = 0
    counted: int = 0

    def close(self) -> None:
        self.process.close()


class CmaTransport(Transport[_Peer]):
    """Kernel copies between processes of one host."""

    capabilities = Capabilities(name="cma", one_host=True, any_memory=True, needs_target_cpu=False)

    def __init__(self, member: str, *, writer: int = 0, num_threads: int = 1) -> None:
        """`writer` is this member's number among all that write to the same targets: its arrival cell."""
        super().__init__(member, num_threads=num_threads)
        self._cell_offset = check_writer(writer) * CELL_BYTES
        self._cookie = np.frombuffer(secrets.token_bytes(16), dtype=np.uint8).copy()
        self._cells = np.zeros((NUM_CELLS, 2), dtype=np.uint64)

    @property
    def endpoint(self) -> Endpoint:
        """This process, and how to recognise it."""
        data = _EndpointData(
            ProcessIdentity.of(os.getpid()),
            self._cookie.ctypes.data,
            self._cookie.tobytes(),
            self._cells.ctypes.data,
        )
        return Endpoint(transport="cma", member=self.member, data=msgspec.msgpack.encode(data))

    def _describe(self, address: int, num_bytes: int) -> Descriptor:
        return Descriptor(transport="cma", address=address, num_bytes=num_bytes, data=b"")

    def _open(self, endpoint: Endpoint, descriptors: Sequence[Descriptor]) -> _Peer:
        """Recognise the peer by its cookie and remember what may be written."""
        where = msgspec.msgpack.decode(endpoint.data, type=_EndpointData)
        process = LivingProcess(where.process, endpoint.member)
        try:
            found = native.read_process(process.pid, where.cookie_address, len(where.cookie))
        except OSError as error:
            process.close()
            raise _failure(error, endpoint.member, process.pid) from error
        if found != where.cookie:
            process.close()
            raise PeerLost(f"process {process.pid} is not {endpoint.member}: it does not know the cookie")
        peer = _Peer(process=process, cell=where.cells_address + self._cell_offset)
        for descriptor in descriptors:
            peer.ranges.add(descriptor.address, descriptor.num_bytes)
        return peer

    def prepare(self, peer: str, src: Column, dst: Column, length: Column) -> Batch:
        """Rows stay in the peer's address space."""
        self._registered.find(src, length, whose=self.member)
        self._known(peer).ranges.find(dst, length, whose=peer)
        return Batch(
            peer=peer,
            src=np.ascontiguousarray(src),
            dst=np.ascontiguousarray(dst),
            length=np.ascontiguousarray(length),
        )

    def _write(self, batch: Batch, tag: int) -> int:
        peer = self._known(batch.peer)
        peer.process.check()
        try:
            written = native.write_process(peer.process.pid, batch.dst, batch.src, batch.length)
            self._count(peer, tag, written)
        except OSError as error:
            raise _failure(error, batch.peer, peer.process.pid) from error
        peer.process.check()
        return written

    def _count(self, peer: _Peer, tag: int, written: int) -> None:
        """Raise this writer's cell in the peer. A new tag is announced with zero bytes first, so that no reader ever
        sees it together with the old count."""
        if tag != peer.tag:
            self._poke(peer, 1, 0)
            self._poke(peer, 0, tag)
            peer.tag, peer.counted = tag, 0
        peer.counted += written
        self._poke(peer, 1, peer.counted)

    @staticmethod
    def _poke(peer: _Peer, word: int, value: int) -> None:
        source = np.array([value], dtype=np.uint64)
        target = np.array([peer.cell + 8 * word], dtype=np.uint64)
        address = np.array([source.ctypes.data], dtype=np.uint64)
        native.write_process(peer.process.pid, target, address, _ROW)

    def arrived(self, tag: int) -> int:
        """Bytes counted in this member's cells."""
        return native.arrived(self._cells.ctypes.data, NUM_CELLS, tag)


def _failure(error: OSError, member: str, pid: int) -> TransportError:
    if isinstance(error, ProcessLookupError):
        return PeerLost(f"{member} (process {pid}) is gone")
    if isinstance(error, PermissionError):
        return TransportUnavailable(
            f"the kernel does not allow writing into {member} (process {pid})",
            hint="run both as the same user, allow ptrace (kernel.yama.ptrace_scope=0), or use the shm transport",
        )
    return TransportError(f"writing into {member} (process {pid}) failed: {error.strerror}")
