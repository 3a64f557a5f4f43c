"""`uccl`: GPU memory over RDMA through UCCL's P2P engine.

NOT RUN on the hardware it needs: there was no machine with both a GPU and an RDMA network card. It is written against
the signatures of uccl 0.1.1 (x86_64, Python 3.12, libcudart.so.12) and the project's sources; only its refusals are
tested. Treat it as a draft, and run the contract tests first.

What is known: the engine aborts the whole process if there is no GPU, so that is checked first; a piece's size travels
as 32 bits, so rows are cut; it has no deadline, so every write has its own; it cannot notify, so arrivals are cells
{tag, bytes} in the target's host memory, written once the data's completion was seen. PCIe does not guarantee that a
GPU sees the data before its CPU sees the cell; the digests, checked before a version is used, would catch it.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from weft import native
from weft.core.geometry.planes import Column
from weft.devices import device_work, memory_kind
from weft.errors import PeerLost, RegistrationError, TransferTimeout, TransportError, TransportUnavailable
from weft.transport.base import (
    MAX_WRITERS,
    Batch,
    Descriptor,
    Endpoint,
    Handle,
    Ranges,
    Transport,
    WriteResult,
    cut_rows,
    digest_of,
)
from weft.transport.capabilities import CAPABILITIES
from weft.transport.host import CELL_BYTES

PIECE_BYTES = 1 << 30
WRITE_DEADLINE_S = 60.0
_NO_KEYS = (1 << 64) - 1
"""The number of a registration that no network card accepted."""


class _EndpointData(msgspec.Struct, frozen=True):
    metadata: bytes
    cells: bytes
    """Serialized descriptor of the arrival cells."""


@dataclass
class _Peer:
    engine: Any
    connection: int
    cells: Any
    descriptors: dict[int, Any]
    """Keyed by the start of the registered range."""
    ranges: Ranges = field(default_factory=Ranges)
    tag: int = 0
    counted: int = 0

    def close(self) -> None:
        self.engine.remove_remote_endpoint(self.connection)


@dataclass(frozen=True, kw_only=True)
class _UcclBatch(Batch):
    local: list[Any]
    remote: list[Any]


class _Region:
    """Memory in the form `register_memory` expects: a tensor-like object."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self._address, self._num_bytes = address, num_bytes

    def data_ptr(self) -> int:
        return self._address

    def numel(self) -> int:
        return self._num_bytes

    def element_size(self) -> int:
        return 1


class UcclTransport(Transport[_Peer]):
    """One UCCL endpoint, for the memory of one GPU."""

    capabilities = CAPABILITIES["uccl"]

    def __init__(self, member: str, *, writer: int = 0, num_threads: int = 1, device: str = "cuda:0") -> None:
        self._p2p = _load(device)
        super().__init__(member, writer=writer, num_threads=num_threads)
        self._work = device_work(device)
        self._engine = self._p2p.Endpoint(int(device.partition(":")[2]))
        self._engine.start_passive_accept()
        self._registrations: dict[tuple[int, int], tuple[Any, int]] = {}
        self._cells = np.zeros((MAX_WRITERS + 1, 2), dtype=np.uint64)  # this member writes from the last one
        self._cells_descriptor = self._register(int(self._cells.ctypes.data), self._cells.nbytes)

    @property
    def endpoint(self) -> Endpoint:
        """How to reach the endpoint, and its arrival cells."""
        cells = self._engine.get_serialized_descs([self._cells_descriptor])
        data = _EndpointData(self._engine.get_metadata(), cells)
        return Endpoint(transport="uccl", member=self.member, data=msgspec.msgpack.encode(data))

    def _register(self, address: int, num_bytes: int) -> Any:
        descriptors = self._engine.register_memory([_Region(address, num_bytes)])
        if not descriptors or descriptors[0].mr_id == _NO_KEYS or not descriptors[0].rkeys:
            raise RegistrationError(
                f"UCCL cannot register {num_bytes} bytes at {address:#x}",
                hint="GPU memory needs the kernel module nvidia-peermem, or dma-buf",
            )
        return descriptors[0]

    def _describe(self, address: int, num_bytes: int) -> Descriptor:
        known, count = self._registrations.get((address, num_bytes), (None, 0))
        descriptor = known if count else self._register(address, num_bytes)
        self._registrations[address, num_bytes] = descriptor, count + 1
        data = self._engine.get_serialized_descs([descriptor])
        return Descriptor(transport="uccl", address=address, num_bytes=num_bytes, data=data)

    def register_source(self, address: int, num_bytes: int) -> Handle:
        """The engine has to know sources as well."""
        return self.register(address, num_bytes)[0]

    def deregister(self, handle: Handle) -> None:
        """Undo a registration; UCCL is told when the last one of this memory is undone."""
        super().deregister(handle)
        descriptor, count = self._registrations.pop((handle.address, handle.num_bytes))
        if count > 1:
            self._registrations[handle.address, handle.num_bytes] = descriptor, count - 1
        else:
            self._engine.deregister_memory([descriptor])

    def _open(self, endpoint: Endpoint, descriptors: Sequence[Descriptor]) -> _Peer:
        where = msgspec.msgpack.decode(endpoint.data, type=_EndpointData)
        self.disconnect(endpoint.member)  # UCCL connects to an endpoint only once
        ok, connection = self._engine.add_remote_endpoint(where.metadata)
        if not ok:
            raise PeerLost(f"{endpoint.member} does not answer")
        peer = _Peer(self._engine, connection, self._engine.deserialize_descs(where.cells)[0], {})
        longest: dict[int, int] = {}
        for descriptor in descriptors:
            peer.ranges.add(descriptor.address, descriptor.num_bytes)
            if descriptor.num_bytes > longest.get(descriptor.address, 0):
                longest[descriptor.address] = descriptor.num_bytes
                peer.descriptors[descriptor.address] = self._engine.deserialize_descs(descriptor.data)[0]
        return peer

    def _translate(self, peer: _Peer, batch: Batch, at: NDArray[np.int64]) -> Batch:
        """Rows become UCCL descriptors, prepared once and posted for every version."""
        rows = cut_rows(batch, PIECE_BYTES)
        starts, ends = self._registered.columns()
        mine = [self._registrations[int(a), int(b - a)][0] for a, b in zip(starts, ends, strict=True)]
        theirs = [peer.descriptors[int(start)] for start in peer.ranges.columns()[0]]
        local = self._pieces(mine, self._registered.find(rows.src, rows.length, whose=self.member), rows.src, rows)
        remote = self._pieces(theirs, peer.ranges.find(rows.dst, rows.length, whose=batch.peer), rows.dst, rows)
        return _UcclBatch(
            peer=rows.peer,
            src=rows.src,
            dst=rows.dst,
            length=rows.length,
            position=rows.position,
            digested=rows.digested,
            local=local,
            remote=remote,
        )

    def _pieces(self, of: list[Any], at: NDArray[np.int64], address: Column, rows: Batch) -> list[Any]:
        columns = zip(at.tolist(), address.tolist(), rows.length.tolist(), strict=True)
        return [self._piece(of[number], start, size) for number, start, size in columns]

    def _piece(self, of: Any, address: int, num_bytes: int) -> Any:
        """A part of registered memory, with the keys of the whole."""
        piece = self._p2p.XferDesc()
        piece.addr, piece.size = address, num_bytes
        piece.mr_id, piece.lkeys, piece.rkeys = of.mr_id, of.lkeys, of.rkeys
        return piece

    def _write(self, batch: Batch, tag: int, cancelled: threading.Event) -> WriteResult:
        """Post, digest while the bytes travel, wait, then count. Once posted, a write cannot be stopped."""
        assert isinstance(batch, _UcclBatch)
        peer = self._known(batch.peer)
        if cancelled.is_set():
            raise TransportError(f"writing to {batch.peer} was stopped before it began")
        deadline = time.monotonic() + WRITE_DEADLINE_S
        if tag != peer.tag:  # first with zero bytes, so that no reader sees a new tag with the old count
            self._poke(batch.peer, peer, 1, 0, deadline)
            self._poke(batch.peer, peer, 0, tag, deadline)
            peer.tag, peer.counted = tag, 0
        transfer = self._start(batch.peer, peer, batch.local, batch.remote) if batch.local else None
        digest = digest_of(batch, self._work)
        if transfer is not None:
            self._finish(batch.peer, transfer, deadline)
        self._poke(batch.peer, peer, 1, peer.counted + batch.num_bytes, deadline)
        peer.counted += batch.num_bytes
        return WriteResult(num_bytes=batch.num_bytes, digest=digest)

    def _poke(self, member: str, peer: _Peer, word: int, value: int, deadline: float) -> None:
        """Write one word of this writer's arrival cell in the peer."""
        self._cells[MAX_WRITERS, word] = value
        src = self._piece(self._cells_descriptor, int(self._cells[MAX_WRITERS:].ctypes.data) + 8 * word, 8)
        dst = self._piece(peer.cells, peer.cells.addr + self._writer_number * CELL_BYTES + 8 * word, 8)
        self._finish(member, self._start(member, peer, [src], [dst]), deadline)

    def _start(self, member: str, peer: _Peer, local: list[Any], remote: list[Any]) -> int:
        try:
            ok, transfer = self._engine.transfer(peer.connection, "write", local, remote)
        except RuntimeError as error:
            raise TransportError(f"UCCL failed for {member}: {error}") from error
        if not ok:
            raise PeerLost(f"UCCL did not accept a write to {member}")
        return int(transfer)

    def _finish(self, member: str, transfer: int, deadline: float) -> None:
        while True:
            ok, done = self._engine.poll_async(transfer)
            if not ok:
                raise PeerLost(f"{member} is gone: UCCL reports a failed write")
            if done:
                return
            if time.monotonic() > deadline:
                raise TransferTimeout(f"{member} did not accept a write in {WRITE_DEADLINE_S} s")
            time.sleep(2e-5)

    def arrived(self, tag: int, *, writer: int) -> int:
        """Bytes counted in the writer's cell."""
        return native.arrived(int(self._cells.ctypes.data) + writer * CELL_BYTES, 1, tag)

    def forget_arrivals(self) -> None:
        """Empty all cells."""
        self._cells[:MAX_WRITERS] = 0

    def _release(self) -> None:
        registered = [descriptor for descriptor, _ in self._registrations.values()]
        self._engine.deregister_memory([*registered, self._cells_descriptor])
        self._engine = None


def _load(device: str) -> Any:
    """UCCL's module, if everything it needs is present; otherwise it would abort the process."""
    if memory_kind(device) != "cuda":
        raise TransportUnavailable(f"uccl moves GPU memory, not {device} memory", hint="use nixl, or `auto`")
    try:
        module = importlib.import_module("uccl.p2p")
    except ImportError as error:
        raise TransportUnavailable(
            f"uccl.p2p cannot be imported: {error}",
            hint="pip install uccl==0.1.1 nvidia-cuda-runtime-cu12 (x86_64, Python 3.12 or later, an NVIDIA driver)",
        ) from error
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        raise TransportUnavailable("this host has no CUDA device", hint="use nixl, which also moves CPU memory")
    if not any(Path("/sys/class/infiniband").glob("*")):
        raise TransportUnavailable("this host has no RDMA network card", hint="use nixl, which also speaks TCP")
    return module
