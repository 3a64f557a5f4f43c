"""Chunks on their way into the windows of engine ranks, which drain them and return credits."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

from weft.errors import TransferTimeout
from weft.runtime.send.job import Job, Link, Parcel, Sent
from weft.runtime.send.posting import Posted, post_all, takes, wait_all
from weft.runtime.send.program import SendProgram

CREDIT_S, LONGEST_CREDIT_S = 0.00003, 0.0005
"""How long to wait between looks at credits: longer and longer while none comes."""


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

    def _pump(self) -> bool:
        """Start writing what has room now; returns whether there was any."""
        has_posted = False
        with self._lock:
            for engine, waiting in self._waiting.items():
                while waiting and self._has_room(*waiting[0][:2]):
                    link, chunk, parcel = waiting.popleft()
                    self._posted[engine, chunk] = post_all(self._of, self._job, [(link, parcel)], self._sent)
                    has_posted = True
        return has_posted

    def _has_room(self, link: Link, chunk: int) -> bool:
        if not takes(self._job, self._sent, link.engine) or not link.needs[chunk]:
            return True
        drained = self._of.transports[link.transport].arrived(self._job.tag, writer=link.engine)
        return drained >= link.needs[chunk]

    def wait(self, links: Sequence[Link], chunk: int) -> int:
        """Wait until a chunk was written to all of these; returns the bytes written."""
        num_bytes = 0
        for link in links:
            if takes(self._job, self._sent, link.engine):
                self._wait_for(link.engine, chunk)
            with self._lock:  # it may be being posted on another thread
                posted = self._posted.pop((link.engine, chunk), [])
            num_bytes += wait_all(self._job, posted, self._sent)
        return num_bytes

    def _wait_for(self, engine: int, chunk: int) -> None:
        """Until a chunk is written, or is all that is left to wait for."""
        look_s = CREDIT_S
        while not self._is_written(engine, chunk):
            if self._pump():
                look_s = CREDIT_S
            if self._is_last(engine, chunk):
                return
            self._job.flow.check()
            if time.monotonic() > self._job.deadline:
                raise TransferTimeout(f"engine {engine} did not make room for chunk {chunk} in time")
            time.sleep(look_s)
            look_s = min(2 * look_s, LONGEST_CREDIT_S)

    def _is_written(self, engine: int, chunk: int) -> bool:
        posted = self._posted.get((engine, chunk))
        return posted is not None and all(ticket.done for _, ticket in posted)

    def _is_last(self, engine: int, chunk: int) -> bool:
        """Whether a chunk is being written and no other one waits for room."""
        with self._lock:
            return (engine, chunk) in self._posted and not any(self._waiting.values())
