"""`mooncake`: CPU memory through Mooncake's transfer engine, over TCP or RDMA; for clusters that already run it.

WARNING: the engine listens on every interface (0.0.0.0 and ::) whatever host it is given, and does not authenticate
its peers. Any process that reaches its ports can read and write the registered memory: use it inside a trusted network
only. `host` is merely the name by which peers reach this member.

Precautions that measurements showed to matter (0.3.13, TCP): overlapping registrations are refused, so they are merged;
a call with more than 2048 pieces fails; every failure is the same -1, so a failed call is followed by a check whether
the peer is alive; a stalled peer is noticed only after 30 s (MC_TRANSFER_TIMEOUT), and what was sent to it may still
land when it resumes; what the engine knows of an address is kept forever, even when another process listens there now,
so a peer is recognised by a random cookie read from its memory; without a network card `rdma` silently becomes TCP, so
it is refused here. All of this was run over TCP only.

Arrivals are cells {tag, bytes} in the target's memory, written after the bytes they count were acknowledged.
"""

from __future__ import annotations

import bisect
import importlib
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from weft import native
from weft.devices import CPU, memory_kind
from weft.errors import (
    ConfigError,
    PeerLost,
    RegistrationError,
    TransferTimeout,
    TransportError,
    TransportUnavailable,
)
from weft.transport.base import MAX_WRITERS, Batch, Descriptor, Endpoint, Handle, Ranges
from weft.transport.capabilities import CAPABILITIES
from weft.transport.chunked import ChunkedBatch, ChunkedTransport
from weft.transport.host import CELL_BYTES, boot_id

PIECES_PER_CALL = 2048
STALL_S = 5.0
"""A call that failed after this long was waiting for an answer; if the peer is gone, it fails within about a second."""
LOOPBACK = "127.0.0.1"
_COOKIE, _READ_BACK, _VALUE, _CELLS = 0, 16, 32, 64
"""Offsets in a member's control block: its own cookie, one read from a peer, a word to be written, arrival cells."""
_COOKIE_BYTES = 16


class _EndpointData(msgspec.Struct, frozen=True):
    host: str
    port: int
    boot_id: str
    control_address: int
    cookie: bytes


@dataclass
class _Peer:
    member: str
    name: str
    """The engine's name for it: `host:port`."""
    cell: int
    """Address of this writer's arrival cell in the peer."""
    ranges: Ranges = field(default_factory=Ranges)
    tag: int = 0
    counted: int = 0

    def close(self) -> None:
        """Nothing to release: the engine keeps its connections."""


class MooncakeTransport(ChunkedTransport[_Peer]):
    """One transfer engine; its own threads receive what peers write, not the target's Python code."""

    capabilities = CAPABILITIES["mooncake"]

    def __init__(
        self,
        member: str,
        *,
        writer: int = 0,
        num_threads: int = 1,
        device: str = CPU,
        host: str = LOOPBACK,
        protocol: str = "tcp",
        nics: str = "",
    ) -> None:
        """`host`: name or address by which peers reach this member; `nics`: limits `rdma` to some, such as `mlx5_0`."""
        if memory_kind(device) != CPU:
            raise TransportUnavailable(f"mooncake moves CPU memory, not {device} memory", hint="use nixl or uccl")
        self._engine = _start_engine(host, protocol, nics)
        super().__init__(member, writer=writer, num_threads=num_threads)
        self._host = host
        self._control = np.zeros(_CELLS + MAX_WRITERS * CELL_BYTES, dtype=np.uint8)
        self._control[_COOKIE : _COOKIE + _COOKIE_BYTES] = np.frombuffer(secrets.token_bytes(_COOKIE_BYTES), np.uint8)
        self._control_address = int(self._control.ctypes.data)
        self._spans = _Spans(self._engine)
        self._spans.add(self._control_address, self._control_address + self._control.nbytes)
        self._zeros: dict[tuple[str, int], int] = {}

    @property
    def endpoint(self) -> Endpoint:
        """Where the engine listens, and how to recognise it."""
        data = _EndpointData(
            self._host, self._engine.get_rpc_port(), boot_id(), self._control_address, self._control_bytes(_COOKIE)
        )
        return Endpoint(transport="mooncake", member=self.member, data=msgspec.msgpack.encode(data))

    def _control_bytes(self, place: int) -> bytes:
        return self._control[place : place + _COOKIE_BYTES].tobytes()

    def _describe(self, address: int, num_bytes: int) -> Descriptor:
        self._spans.add(address, address + num_bytes)
        return Descriptor(transport="mooncake", address=address, num_bytes=num_bytes, data=b"")

    def register_source(self, address: int, num_bytes: int) -> Handle:
        """The engine has to know sources as well."""
        return self.register(address, num_bytes)[0]

    def deregister(self, handle: Handle) -> None:
        """Undo a registration and tell the engine."""
        super().deregister(handle)
        self._spans.remove(handle.address, handle.address + handle.num_bytes)

    def _open(self, endpoint: Endpoint, descriptors: Sequence[Descriptor]) -> _Peer:
        where = msgspec.msgpack.decode(endpoint.data, type=_EndpointData)
        if where.host == LOOPBACK and where.boot_id != boot_id():
            raise TransportUnavailable(
                f"{endpoint.member} is on another host but can be reached at {LOOPBACK} only",
                hint="open its transport with host= a name or address that other hosts can reach",
            )
        cell = where.control_address + _CELLS + self._writer_number * CELL_BYTES
        peer = _Peer(endpoint.member, self._recognise(where, endpoint.member), cell)
        for descriptor in descriptors:
            peer.ranges.add(descriptor.address, descriptor.num_bytes)
        return peer

    def _recognise(self, where: _EndpointData, member: str) -> str:
        """The engine's name for a peer, once the peer has shown its cookie.

        What the engine knows of `host:port` never changes. Where it is outdated, because the peer was restarted on the
        same port, `host:0port` makes it ask again.
        """
        address = where.host, where.port
        known = self._zeros.get(address)
        for zeros in (0,) if known is None else (known, known + 1):
            name = f"{where.host}:{'0' * zeros}{where.port}"
            started = time.monotonic()
            status = self._engine.transfer_sync_read(
                name, self._control_address + _READ_BACK, where.control_address + _COOKIE, _COOKIE_BYTES
            )
            if status == 0 and self._control_bytes(_READ_BACK) == where.cookie:
                self._zeros[address] = zeros
                return name
            _check_stall(member, started)
        if status == 0:
            raise PeerLost(f"the process at `{name}` is not {member}: its cookie does not match")
        raise PeerLost(f"{member} does not answer at `{name}`")

    def _translate(self, peer: _Peer, batch: Batch, at: NDArray[np.int64]) -> Batch:
        """Chunks with no more rows than one engine call accepts."""
        chunked = super()._translate(peer, batch, at)
        assert isinstance(chunked, ChunkedBatch)
        chunks = (part for chunk in chunked.chunks for part in at_most(chunk, PIECES_PER_CALL))
        return replace(chunked, chunks=tuple(chunks))

    def _check_alive(self, peer: _Peer) -> None:
        """Nothing to check: every write is acknowledged, so a write to a peer that is gone fails."""

    def _write_chunk(self, peer: _Peer, chunk: Batch) -> int:
        digest = 0
        if chunk.position is not None:
            digest = native.digest(chunk.src, chunk.position, chunk.length, num_threads=self._num_threads)
        self._transfer(peer, chunk.src.tolist(), chunk.dst.tolist(), chunk.length.tolist())
        return digest

    def _announce(self, peer: _Peer, tag: int) -> None:
        """A new tag is first written with zero bytes, so that no reader ever sees it with the old count."""
        if tag != peer.tag:
            self._poke(peer, 1, 0)
            self._poke(peer, 0, tag)
            peer.tag, peer.counted = tag, 0

    def _count(self, peer: _Peer, tag: int, num_bytes: int) -> None:
        """Raise this writer's cell in the peer; the bytes have landed, since their write was acknowledged."""
        self._poke(peer, 1, peer.counted + num_bytes)
        peer.counted += num_bytes

    def _poke(self, peer: _Peer, word: int, value: int) -> None:
        self._control[_VALUE : _VALUE + 8].view(np.uint64)[0] = value
        self._transfer(peer, [self._control_address + _VALUE], [peer.cell + 8 * word], [8])

    def _transfer(self, peer: _Peer, src: list[int], dst: list[int], length: list[int]) -> None:
        """Write and wait until it has landed; maps the engine's -1 to weft's errors."""
        started = time.monotonic()
        if self._engine.batch_transfer_sync_write(peer.name, src, dst, length) == 0:
            return
        _check_stall(peer.member, started)  # first: the engine's check below takes a minute if the peer is stalled
        if self._engine.send_probe(peer.name) != 0:
            raise PeerLost(f"{peer.member} at `{peer.name}` is gone")
        raise TransportError(
            f"mooncake could not write to {peer.member}", hint="the engine prints the reason on stderr, on both sides"
        )

    def arrived(self, tag: int, *, writer: int) -> int:
        """Bytes counted in the writer's cell."""
        return native.arrived(self._control_address + _CELLS + writer * CELL_BYTES, 1, tag)

    def forget_arrivals(self) -> None:
        """Empty all cells."""
        self._control[_CELLS:] = 0

    def _release(self) -> None:
        """The engine ends its threads and listeners with its last reference."""
        self._spans.clear()
        del self._spans, self._engine


def _start_engine(host: str, protocol: str, nics: str) -> Any:
    if protocol not in ("tcp", "rdma"):
        raise ConfigError(f"unknown mooncake protocol `{protocol}`", hint="tcp, rdma")
    try:
        module = importlib.import_module("mooncake.engine")
    except ImportError as error:
        raise TransportUnavailable(
            f"mooncake cannot be imported: {error}",
            hint="pip install mooncake-transfer-engine-non-cuda; apt install libibverbs1",
        ) from error
    if protocol == "rdma" and not any(Path("/sys/class/infiniband").glob("*")):
        raise TransportUnavailable("this host has no RDMA network card", hint="use protocol tcp")
    engine = module.TransferEngine()
    status = engine.initialize(host, "P2PHANDSHAKE", protocol, nics)
    if status != 0:
        raise TransportUnavailable(
            f"mooncake's engine did not start with {protocol} at {host} ({status})",
            hint="it prints the reason on stderr",
        )
    return engine


def _check_stall(member: str, started: float) -> None:
    waited_s = time.monotonic() - started
    if waited_s >= STALL_S:
        raise TransferTimeout(
            f"{member} has not answered for {waited_s:.1f} s",
            hint="what was sent may still land; abort the version it belongs to",
        )


def at_most(batch: Batch, num_rows: int) -> Iterable[Batch]:
    """A batch in parts of at most that many rows."""
    for a in range(0, batch.num_rows, num_rows):
        b = a + num_rows
        yield Batch(
            peer=batch.peer,
            src=batch.src[a:b],
            dst=batch.dst[a:b],
            length=batch.length[a:b],
            position=None if batch.position is None else batch.position[a:b],
        )


@dataclass
class AddressSpan:
    """Memory the engine has registered, and the registrations it stands for."""

    start: int
    end: int
    members: list[tuple[int, int]]


def merge_overlaps(members: Iterable[tuple[int, int]]) -> list[AddressSpan]:
    """The fewest spans that hold all (start, end); spans that only touch stay separate.

    merge_overlaps([(0, 10), (5, 20), (20, 30)])       # spans 0 to 20 and 20 to 30
    """
    spans: list[AddressSpan] = []
    for start, end in sorted(members):
        if spans and start < spans[-1].end:
            spans[-1].end = max(spans[-1].end, end)
            spans[-1].members.append((start, end))
        else:
            spans.append(AddressSpan(start, end, [(start, end)]))
    return spans


class _Spans:
    """What one engine has registered. It refuses overlaps, so overlapping registrations share one span.

    While a span grows or shrinks it is briefly unregistered: no peer may be writing there.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._spans: list[AddressSpan] = []

    def add(self, start: int, end: int) -> None:
        """Register; if that raises RegistrationError, everything stays as it was."""
        a, b = self._overlapping(start, end)
        self._replace(a, b, [(start, end), *(member for span in self._spans[a:b] for member in span.members)])

    def remove(self, start: int, end: int) -> None:
        """Undo one `add`."""
        a, b = self._overlapping(start, end)
        members = [member for span in self._spans[a:b] for member in span.members]
        members.remove((start, end))
        self._replace(a, b, members)

    def clear(self) -> None:
        """Undo everything."""
        self._replace(0, len(self._spans), [])

    def _overlapping(self, start: int, end: int) -> tuple[int, int]:
        first = bisect.bisect_right(self._spans, start, key=lambda span: span.end)
        return first, bisect.bisect_left(self._spans, end, lo=first, key=lambda span: span.start)

    def _replace(self, a: int, b: int, members: list[tuple[int, int]]) -> None:
        old = {(span.start, span.end) for span in self._spans[a:b]}
        spans = merge_overlaps(members)
        new = {(span.start, span.end) for span in spans}
        for start, _ in old - new:
            self._engine.unregister_memory(start)
        for start, end in new - old:
            status = self._engine.register_memory(start, end - start)
            if status != 0:
                for known, known_end in old - new:
                    self._engine.register_memory(known, known_end - known)
                raise RegistrationError(f"mooncake cannot register {end - start} bytes at {start:#x} ({status})")
        self._spans[a:b] = spans
