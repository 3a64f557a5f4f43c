"""Base of transports that do their own copying: a batch is written chunk by chunk, each counted as it lands.

Chunks are small enough for the digest to find its bytes in the cache, and let receivers verify the first ones while the
rest is still in flight. Between chunks a writer checks whether its peer is alive and whether it should stop.
"""

from __future__ import annotations

import abc
import threading
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from weft import native
from weft.core.geometry.planes import Planes
from weft.errors import TransportError
from weft.transport.base import Batch, Peer, Transport, WriteResult, split_batch

CHUNK_BYTES = 16 << 20
AnyPeer = TypeVar("AnyPeer", bound=Peer)


@dataclass(frozen=True, kw_only=True)
class ChunkedBatch(Batch):
    """A batch and the chunks it is written in."""

    chunks: tuple[Batch, ...]


class ChunkedTransport(Transport[AnyPeer]):
    """Writes chunk after chunk on one thread."""

    _chunk_bytes = CHUNK_BYTES

    def _translate(self, peer: AnyPeer, batch: Batch, at: NDArray[np.int64]) -> Batch:
        batch = self._locate(peer, batch, at)
        return ChunkedBatch(
            peer=batch.peer,
            src=batch.src,
            dst=batch.dst,
            length=batch.length,
            position=batch.position,
            digested=batch.digested,
            chunks=tuple(split_batch(batch, self._chunk_bytes)),
        )

    def _locate(self, peer: AnyPeer, batch: Batch, at: NDArray[np.int64]) -> Batch:
        """The batch with its destinations as `_write_chunk` needs them."""
        del peer, at
        return batch

    def _write(self, batch: Batch, tag: int, cancelled: threading.Event) -> WriteResult:
        assert isinstance(batch, ChunkedBatch)
        peer = self._known(batch.peer)
        digest, written = 0, 0
        try:
            self._announce(peer, tag)
            if batch.digested is not None:
                digest = self._digest(batch.digested)
            for chunk in batch.chunks:
                if cancelled.is_set():
                    raise TransportError(f"writing to {batch.peer} was stopped")
                self._check_alive(peer)
                digest += self._write_chunk(peer, chunk)
                written += chunk.num_bytes
                self._count(peer, tag, chunk.num_bytes)
            self._check_alive(peer)
        except TransportError as error:
            raise type(error)(f"{error} ({written} of {batch.num_bytes} bytes written)", hint=error.hint) from error
        return WriteResult(num_bytes=written, digest=digest & ((1 << 64) - 1))

    def _digest(self, planes: Planes) -> int:
        """Digest of what is written, computed at the source."""
        return native.digest_planes(planes, num_threads=self._num_threads)

    def credit(self, peer: str, tag: int, num_bytes: int) -> None:
        """Raise this member's arrival cell in the peer."""
        known = self._known(peer)
        self._announce(known, tag)
        self._count(known, tag, num_bytes)

    def _announce(self, peer: AnyPeer, tag: int) -> None:
        """A batch under this tag begins."""

    @abc.abstractmethod
    def _check_alive(self, peer: AnyPeer) -> None:
        """Raise PeerLost if the peer is gone."""

    @abc.abstractmethod
    def _write_chunk(self, peer: AnyPeer, chunk: Batch) -> int:
        """Write some rows; returns their digest, or 0 if they are not digested."""

    @abc.abstractmethod
    def _count(self, peer: AnyPeer, tag: int, num_bytes: int) -> None:
        """Tell the peer that more bytes have landed."""
