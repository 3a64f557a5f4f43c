"""`cma`: processes on one host, ordinary CPU memory. The kernel copies straight into the other process.

Works on tensors where they are, in busy or stopped processes; about half as fast as shared memory. Needs the same user
or CAP_SYS_PTRACE. For root, a wrong process ID would mean writing into an unrelated process, so a peer is recognised by
its start time and by a random cookie read back from its memory before the first write.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from weft import native
from weft.errors import PeerLost, TransportError, TransportUnavailable
from weft.transport.base import MAX_WRITERS, Batch, Descriptor, Endpoint, Ranges
from weft.transport.capabilities import CAPABILITIES
from weft.transport.chunked import ChunkedTransport
from weft.transport.host import CELL_BYTES, LivingProcess, ProcessIdentity
from weft.transport.pages import Pages

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


class CmaTransport(ChunkedTransport[_Peer]):
    """Kernel copies between processes of one host."""

    capabilities = CAPABILITIES["cma"]

    def __init__(self, member: str, *, writer: int = 0, num_threads: int = 1) -> None:
        super().__init__(member, writer=writer, num_threads=num_threads)
        self._cookie = np.frombuffer(secrets.token_bytes(16), dtype=np.uint8).copy()
        self._cells = Pages(MAX_WRITERS * CELL_BYTES)

    @property
    def endpoint(self) -> Endpoint:
        """This process, and how to recognise it."""
        data = _EndpointData(
            ProcessIdentity.of(os.getpid()),
            self._cookie.ctypes.data,
            self._cookie.tobytes(),
            self._cells.address,
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
            raise PeerLost(f"process {process.pid} is not {endpoint.member}: its cookie does not match")
        peer = _Peer(process=process, cell=where.cells_address + self._writer_number * CELL_BYTES)
        for descriptor in descriptors:
            peer.ranges.add(descriptor.address, descriptor.num_bytes)
        return peer

    def _check_alive(self, peer: _Peer) -> None:
        peer.process.check()

    def _write_chunk(self, peer: _Peer, chunk: Batch) -> int:
        pid = peer.process.pid
        with _failures(peer):
            if chunk.position is not None:
                return native.write_process_digest(pid, chunk.dst, chunk.src, chunk.position, chunk.length)
            native.write_process(pid, chunk.dst, chunk.src, chunk.length)
        return 0

    def _announce(self, peer: _Peer, tag: int) -> None:
        """A new tag is first written with zero bytes, so that no reader ever sees it with the old count."""
        if tag != peer.tag:
            with _failures(peer):
                self._poke(peer, 1, 0)
                self._poke(peer, 0, tag)
            peer.tag, peer.counted = tag, 0

    def _count(self, peer: _Peer, tag: int, num_bytes: int) -> None:
        """Raise this writer's cell in the peer."""
        peer.counted += num_bytes
        with _failures(peer):
            self._poke(peer, 1, peer.counted)

    @staticmethod
    def _poke(peer: _Peer, word: int, value: int) -> None:
        source = np.array([value], dtype=np.uint64)
        target = np.array([peer.cell + 8 * word], dtype=np.uint64)
        address = np.array([source.ctypes.data], dtype=np.uint64)
        native.write_process(peer.process.pid, target, address, _ROW)

    def arrived(self, tag: int, *, writer: int) -> int:
        """Bytes counted in the writer's cell."""
        return native.arrived(self._cells.address + writer * CELL_BYTES, 1, tag)

    def forget_arrivals(self) -> None:
        """Empty all cells."""
        ctypes.memset(self._cells.address, 0, self._cells.num_bytes)

    def _release(self) -> None:
        self._cells.give_up()


@contextlib.contextmanager
def _failures(peer: _Peer) -> Iterator[None]:
    """Maps the kernel's errors to weft's."""
    try:
        yield
    except OSError as error:
        raise _failure(error, peer.process.member, peer.process.pid) from error


def _failure(error: OSError, member: str, pid: int) -> TransportError:
    if isinstance(error, ProcessLookupError):
        return PeerLost(f"{member} (process {pid}) is gone")
    if isinstance(error, PermissionError):
        return TransportUnavailable(
            f"the kernel does not allow writing into {member} (process {pid})",
            hint="run both as the same user, allow ptrace (kernel.yama.ptrace_scope=0), or use the shm transport",
        )
    return TransportError(f"writing into {member} (process {pid}) failed: {error.strerror}")
