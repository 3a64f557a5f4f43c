"""A link of limited rate between two processes of this machine."""

from __future__ import annotations

import time
from typing import Any

from weft.bench.pace import Pace
from weft.transport.base import Batch
from weft.transport.shm import ShmTransport


class LimitedShm(ShmTransport):
    """Shared memory behind a link of limited rate."""

    def __init__(self, member: str, *, writer: int, bytes_per_s: float) -> None:
        super().__init__(member, writer=writer)
        self._pace = Pace(bytes_per_s)

    def _write_chunk(self, peer: Any, chunk: Batch) -> int:
        began_at = time.monotonic()
        digest = super()._write_chunk(peer, chunk)
        self._pace.take(chunk.num_bytes, began_at)
        return digest
