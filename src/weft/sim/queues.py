"""The event loop of the simulator: Chunks queue at resources and share them.

A Chunk makes *stops*. Each keeps one resource busy for some seconds: a stage of its sender, a direction of a NIC port,
a link, a host's limit. Stages work on whole Chunks, one after the other. Then the Chunk enters the network as a number
of packets. The network works cut-through: a packet reaches its next resource when the one before has begun with it, so
all resources on its way work on it together, each for its own time. A Chunk has arrived with the last of its packets.

Nothing is reserved ahead: a resource is idle only while nothing waits for it. It takes the waiting packet that is due
first; a packet is due when its stream would reach it if all streams ended together. So streams share a resource in
proportion to what they carry, and none is left over when the others are done.

A sender has a number of slots. A Chunk takes one before its first stop and gives it back when it has arrived.

A Chunk that lands in a window is drained there when it has arrived, one Chunk of a receiver at a time. A later Chunk
that takes its place enters the network when it has been, and the sender has heard of it.

    served = serve(journeys, num_slots=32, opens_s=np.zeros(num_senders))
    served.arrived_s.max()
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.core.geometry.boxes import Ints

Floats = NDArray[np.float64]
_SLOT_FREE, _LANDED, _DRAINED, _ARRIVAL, _RESOURCE_FREE = range(5)
"""Kinds of events; at the same time they are handled in this order."""


@dataclass(frozen=True, kw_only=True)
class Journeys:
    """The stops of all Chunks as columns; Chunks are numbered in the order in which their sender takes them."""

    sender: Ints
    """Of each Chunk."""
    phase: Ints
    """Of each Chunk: it starts when the phase is open."""
    due: Floats
    """Of each Chunk: the fraction of its stream before its first packet."""
    share: Floats
    """Of each Chunk: the fraction of its stream it makes up."""
    latency_s: Floats
    """Of each Chunk: from the end of its last stop to its arrival."""
    first: Ints
    """Chunk c makes stops `first[c]` to `first[c + 1]`, stages first; at least one in the network."""
    resource: Ints
    """Of each stop."""
    seconds: Floats
    """Of each stop, for the whole Chunk."""
    is_stage: NDArray[np.bool_]
    """Of each stop."""
    is_gate: NDArray[np.bool_]
    """Of each stop: whether the next phase opens only when it, and all its like in this phase, have ended."""
    num_packets: int
    """Of each Chunk."""
    drain_s: Floats
    """Of each Chunk: how long its receiver needs to drain it; 0: it does not land in a window."""
    drained_by: Ints
    """Of each Chunk: its receiver."""
    place_of: Ints
    """Of each Chunk: an earlier one whose place in the window it takes; -1: none."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """When everything happened."""

    begin_s: Floats
    """When each stop began."""
    arrived_s: Floats
    """When the last byte of each Chunk arrived."""
    drained_s: Floats
    """When each Chunk had been drained; those that need not be, when they had arrived."""


def serve(journeys: Journeys, *, num_slots: int, opens_s: Floats) -> Served:
    """Run until every Chunk has arrived. Sender s starts at `opens_s[s]`."""
    loop = _Loop(journeys, num_slots, opens_s)
    loop.run()
    return Served(
        begin_s=np.array(loop.begin_s), arrived_s=np.array(loop.end_s), drained_s=np.maximum(loop.end_s, loop.drained_s)
    )


class _Loop:
    """Events in order of time. What one causes is never earlier than itself.

    Columns are plain lists here, because every event touches single numbers.
    """

    def __init__(self, journeys: Journeys, num_slots: int, opens_s: Floats) -> None:
        num_chunks = len(journeys.sender)
        chunk_of = np.repeat(np.arange(num_chunks), np.diff(journeys.first))
        packets = np.where(journeys.is_stage, 1, journeys.num_packets)
        self._chunk_of, self._packets = chunk_of.tolist(), packets.tolist()
        self._resource, self._seconds = journeys.resource.tolist(), (journeys.seconds / packets).tolist()
        self._due, self._step = journeys.due.tolist(), (journeys.share / journeys.num_packets).tolist()
        self._first, self._is_stage = journeys.first.tolist(), journeys.is_stage.tolist()
        self._sender, self._phase = journeys.sender.tolist(), journeys.phase.tolist()
        self._latency = journeys.latency_s.tolist()
        self._is_gate = journeys.is_gate.tolist()
        self._left = (packets[journeys.first[1:] - 1]).tolist()
        """Packets of each Chunk that have not reached its last stop."""
        self.begin_s, self.end_s = [np.inf] * len(chunk_of), [0.0] * num_chunks
        num_resources = max(self._resource, default=0) + 1
        self._free_s = [0.0] * num_resources
        self._queues: list[list[tuple[float, int, int]]] = [[] for _ in range(num_resources)]
        self._events: list[tuple[float, int, int, int]] = []
        """Time, kind, which (sender, stop or resource), number of the packet."""
        self._open_s, self._slots = opens_s.tolist(), [num_slots] * len(opens_s)
        self._waiting: list[deque[int]] = [deque() for _ in opens_s]
        for chunk, sender in enumerate(self._sender):
            self._waiting[sender].append(chunk)
        self._drain_s, self._drained_by = journeys.drain_s.tolist(), journeys.drained_by.tolist()
        self._drainer_free_s = [0.0] * (int(journeys.drained_by.max(initial=0)) + 1)
        self._place_of = journeys.place_of.tolist()
        self._held: dict[int, tuple[float, int]] = {}
        """Chunk that has to be drained → since when its successor waits, and before which stop."""
        self.drained_s = [np.inf if lasts_s else 0.0 for lasts_s in self._drain_s]
        num_phases = int(journeys.phase.max(initial=0)) + 1
        self._open_phase, self._gate_s = 0, 0.0
        self._gates = np.bincount(journeys.phase[chunk_of][journeys.is_gate], minlength=num_phases).tolist()
        """Stops that must end before the phase after theirs opens."""

    def run(self) -> None:
        """Handle events until none is left."""
        events, queues = self._events, self._queues
        self._open_phases()
        while events:
            now, kind, which, packet = heapq.heappop(events)
            if kind == _ARRIVAL:
                self._arrive(now, which, packet)
            elif kind == _RESOURCE_FREE:
                _, stop, packet = heapq.heappop(queues[which])
                self._begin(now, stop, packet)
            elif kind == _LANDED:
                self._drain(now, which)
            elif kind == _DRAINED:
                self._make_room(now, which)
            else:
                self._slots[which] += 1
                self._admit(which, now)

    def _arrive(self, now: float, stop: int, packet: int) -> None:
        """Begin at once, or queue."""
        resource = self._resource[stop]
        queue = self._queues[resource]
        if not queue and self._free_s[resource] <= now:
            self._begin(now, stop, packet)
            return
        if not queue:
            heapq.heappush(self._events, (self._free_s[resource], _RESOURCE_FREE, resource, 0))
        chunk = self._chunk_of[stop]
        heapq.heappush(queue, (self._due[chunk] + packet * self._step[chunk], stop, packet))

    def _begin(self, now: float, stop: int, packet: int) -> None:
        """The stop's resource takes the packet (or, if it is a stage, the Chunk)."""
        resource, chunk = self._resource[stop], self._chunk_of[stop]
        end = self._free_s[resource] = now + self._seconds[stop]
        if self._queues[resource]:
            heapq.heappush(self._events, (end, _RESOURCE_FREE, resource, 0))
        self.begin_s[stop] = min(self.begin_s[stop], now)
        self.end_s[chunk] = max(self.end_s[chunk], end)
        following = stop + 1
        if following == self._first[chunk + 1]:
            self._left[chunk] -= 1
            if not self._left[chunk]:
                self.end_s[chunk] += self._latency[chunk]
                heapq.heappush(self._events, (self.end_s[chunk], _SLOT_FREE, self._sender[chunk], 0))
                if self._drain_s[chunk]:
                    heapq.heappush(self._events, (self.end_s[chunk], _LANDED, chunk, 0))
        elif self._is_stage[stop]:
            self._enter(end, following)
        else:
            heapq.heappush(self._events, (now, _ARRIVAL, following, packet))
        if self._is_gate[stop] and (self._is_stage[stop] or not self._left[chunk]):
            self._pass_gate(self._phase[chunk], self.end_s[chunk])

    def _drain(self, now: float, chunk: int) -> None:
        """A Chunk has landed in a window."""
        receiver = self._drained_by[chunk]
        end = self._drainer_free_s[receiver] = max(now, self._drainer_free_s[receiver]) + self._drain_s[chunk]
        heapq.heappush(self._events, (end, _DRAINED, chunk, 0))

    def _make_room(self, now: float, chunk: int) -> None:
        """A Chunk has been drained: the one that takes its place may come when its sender hears of it."""
        self.drained_s[chunk] = now
        held = self._held.pop(chunk, None)
        if held is not None:
            since, stop = held
            self._enter(max(since, now + self._latency[chunk]), stop)

    def _enter(self, now: float, stop: int) -> None:
        """A Chunk reaches a stage, or the network with all its packets, as soon as there is room for it."""
        before = self._place_of[self._chunk_of[stop]]
        if before >= 0 and not self._is_stage[stop] and self.drained_s[before] == np.inf:
            self._held[before] = now, stop
            return
        for packet in range(self._packets[stop]):
            heapq.heappush(self._events, (now, _ARRIVAL, stop, packet))

    def _admit(self, sender: int, now: float) -> None:
        """Give the sender's free slots to its next Chunks."""
        waiting, start = self._waiting[sender], max(now, self._open_s[sender])
        while waiting and self._slots[sender] and self._phase[waiting[0]] <= self._open_phase:
            self._slots[sender] -= 1
            self._enter(start, self._first[waiting.popleft()])

    def _pass_gate(self, phase: int, now: float) -> None:
        """One stop fewer that the next phase waits for."""
        self._gates[phase] -= 1
        self._gate_s = max(self._gate_s, now)
        if not self._gates[phase]:
            self._open_phases()

    def _open_phases(self) -> None:
        """Open every phase that no longer waits for anything."""
        while self._open_phase + 1 < len(self._gates) and not self._gates[self._open_phase]:
            self._open_phase += 1
        self._open_s = [max(open_s, self._gate_s) for open_s in self._open_s]
        for sender in range(len(self._open_s)):
            self._admit(sender, self._gate_s)
