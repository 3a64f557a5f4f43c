"""A transport that counts writes instead of moving bytes, between the processes of a rehearsal.

It has the name of a real one that takes descriptors, so that the controller plans for that one. Rows are checked
against registered memory as everywhere; what would have landed is counted on a board that all processes share.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from weft.errors import TransportError
from weft.runtime.control.member_id import MemberId
from weft.transport.base import (
    Batch,
    Descriptor,
    Endpoint,
    Memory,
    Ranges,
    Ticket,
    Transport,
    WriteResult,
)
from weft.transport.capabilities import Capabilities
from weft.transport.pages import Reserved

STANDS_FOR = "nixl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """Arrival cells of all members, in a file: for each target and each writer a tag, and the bytes under it."""

    path: Path
    num_trainers: int
    num_engine_ranks: int

    @property
    def _shape(self) -> tuple[int, int, int]:
        return self.num_trainers + self.num_engine_ranks, max(self.num_trainers, self.num_engine_ranks), 2

    def make(self) -> None:
        """Make the file, all zeros."""
        with self.path.open("wb") as file:
            file.truncate(8 * int(np.prod(self._shape)))

    def map(self) -> NDArray[np.int64]:
        """The cells, as all processes see them."""
        return np.asarray(np.memmap(self.path, dtype=np.int64, mode="r+", shape=self._shape))  # cheaper to index

    def row(self, member: str) -> int:
        """The row of cells of a member."""
        named = MemberId.parse(member)
        if named is None:
            raise TransportError(f"unknown member `{member}`")
        return named.rank + (self.num_trainers if named.side == "engine" else 0)


@dataclass
class _Peer:
    row: int
    ranges: Ranges = field(default_factory=Ranges)

    def close(self) -> None:
        """Nothing to release."""


class CountingTransport(Transport[_Peer]):
    """One member's side. Posting a batch counts it; nothing is read or written."""

    capabilities = Capabilities(name=STANDS_FOR, one_host=False, any_memory=True, needs_target_cpu=False)

    def __init__(self, member: str, board: Board, *, writer: int) -> None:
        super().__init__(member, writer=writer)
        self._board, self._cells = board, board.map()
        self._mine = self._cells[board.row(member)]
        self.num_writes = 0
        """One-sided writes so far."""
        self.num_bytes = 0

    @property
    def endpoint(self) -> Endpoint:
        """The member's name is enough."""
        return Endpoint(transport=STANDS_FOR, member=self.member, data=b"")

    def allocate(self, num_bytes: int) -> Memory:
        """Addresses only."""
        self._check_open()
        memory = Reserved(num_bytes)
        return Memory(address=memory.address, num_bytes=num_bytes, keep=memory, give_up=lambda: True)

    def _describe(self, address: int, num_bytes: int) -> Descriptor:
        return Descriptor(transport=STANDS_FOR, address=address, num_bytes=num_bytes, data=b"")

    def _open(self, endpoint: Endpoint, descriptors: Sequence[Descriptor]) -> _Peer:
        peer = _Peer(self._board.row(endpoint.member))
        for descriptor in descriptors:
            peer.ranges.add(descriptor.address, descriptor.num_bytes)
        return peer

    def post(self, batch: Batch, tag: int) -> Ticket:
        """Count a batch, here and now."""
        self._check_tag(tag)
        future: Future[WriteResult] = Future()
        never = threading.Event()
        future.set_result(self._write(batch, tag, never))
        ticket = Ticket(future, batch, tag, never)
        ticket.began_at = ticket.ended_at = 0.0  # nothing was moved: no host is slow
        return ticket

    def _write(self, batch: Batch, tag: int, cancelled: threading.Event) -> WriteResult:
        del cancelled
        self._count(self._known(batch.peer), tag, batch.num_bytes)
        self.num_writes += batch.num_writes
        self.num_bytes += batch.num_bytes
        return WriteResult(num_bytes=batch.num_bytes, digest=0)

    def _count(self, peer: _Peer, tag: int, num_bytes: int) -> None:
        cell = self._cells[peer.row, self._writer_number]
        if cell[0] != tag:
            cell[1] = 0  # before the tag: a reader never sees the new one with an old count
            cell[0] = tag
        cell[1] += num_bytes

    def credit(self, peer: str, tag: int, num_bytes: int) -> None:
        """Count room in a window."""
        self._count(self._known(peer), tag, num_bytes)

    def arrived(self, tag: int, *, writer: int) -> int:
        """Bytes counted under a tag."""
        found, num_bytes = self._mine[writer].tolist()
        return num_bytes if found == tag else 0

    def forget_arrivals(self) -> None:
        """Forget all counts."""
        self._mine[:] = 0
