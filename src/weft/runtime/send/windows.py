"""Chunks on their way into the windows of engine ranks, which drain them and return credits."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

from weft.errors import TransferTimeout
from weft.runtime.send.job import Job, Link, Parcel, Sent
from weft.runtime.send.posting import Posted, post_all, wait_all
from weft.runtime.send.program import SendProgram

CREDIT_S = 0.00003
"""How long to wait between looks at credits."""


class Windows:
    """Chunks that wait for room in the windows of engine ranks, each for its own.

    consumes      chunks, in the order of each link; credits, which engine ranks return when they have drained a chunk
    produces      writes, and their results
    waits for     credits, on the thread of stage `write`         unblocked by   engines, a failed version, the deadline
    """

    def __init__(self, sending: SendProgram, job: Job, sent: dict[int, Sent]) -> None:
        self._of, self._job, self._sent = sending, job, sent
        self._waiting: dict[int, deque[tuple[Link, int, Parcel]]] = {}
        """Chunks of each engine rank that have no room yet."""
        self._posted: dict[tuple[int, int], Posted] = {}
        self._lock = threading.Lock()

    def post(self, link: Link, chunk: int, parcel: Parcel) -> None:
        """Write a chunk as soon as there is room for it."""
        with self._lock:
            self._waiting.setdefault(link.engine, deque()).append((link, chunk, parcel))
        self._pump()

    def _pump(self) -> None:
        """Start writing what has room now."""
        with self._lock:
            for engine, waiting in self._waiting.items():
                while waiting and self._has_room(*waiting[0][:2]):
                    link, chunk, parcel = waiting.popleft()
                    self._posted[engine, chunk] = post_all(self._of, self._job, [(link, parcel)], self._sent)

    def _has_room(self, link: Link, chunk: int) -> bool:
        if self._sent[link.engine].loss or not link.needs[chunk]:
            return True
        drained = self._of.transports[link.transport].arrived(self._job.tag, writer=link.engine)
        return drained >= link.needs[chunk]

    def wait(self, links: Sequence[Link], chunk: int) -> int:
        """Wait until a chunk was written to all of these; returns the bytes written."""
        num_bytes = 0
        for link in links:
            if link.engine not in self._sent or self._sent[link.engine].loss:
                continue
            while not self._is_written(link.engine, chunk):
                self._pump()
                self._job.flow.check()
                if time.monotonic() > self._job.deadline:
                    raise TransferTimeout(f"engine {link.engine} did not make room for chunk {chunk} in time")
                time.sleep(CREDIT_S)
            num_bytes += wait_all(self._job, self._posted.pop((link.engine, chunk)), self._sent)
        return num_bytes

    def _is_written(self, engine: int, chunk: int) -> bool:
        posted = self._posted.get((engine, chunk))
        return posted is not None and all(ticket.done for _, ticket in posted)
