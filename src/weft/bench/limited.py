"""A link of limited rate between two processes of this machine."""

from __future__ import annotations

import threading
import time
from typing import Any

from weft.transport.base import Batch
from weft.transport.shm import ShmTransport


class LimitedShm(ShmTransport):
    """Shared memory behind a link of limited rate."""

    def __init__(self, member: str, *, writer: int, bytes_per_s: float) -> None:
        super().__init__(member, writer=writer)
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self._waiting = threading.Event()

    def _write_chunk(self, peer: Any, chunk: Batch) -> int:
        began = time.monotonic()
        digest = super()._write_chunk(peer, chunk)
        self._free_at = max(self._free_at, began) + chunk.num_bytes / self._bytes_per_s
        self._waiting.wait(max(self._free_at - time.monotonic(), 0.0))
        return digest
