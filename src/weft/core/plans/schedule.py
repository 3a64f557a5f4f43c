"""Order and size of Chunks: what every sender writes when, under its staging budget.

All routes of one (sender, receiver) pair form a stream, cut into Chunks (`weft.core.streams.plan_streams`), which are
sent in the order of `weft.core.streams.send_order`. A sender holds at most `num_slots` Chunks that are packed or
converted but not yet written.

    schedule = make_schedule(plan)
    schedule.of(sender=3)          # row numbers of this sender's chunks, in order
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from weft.core.geometry.boxes import Ints
from weft.core.plans.plan import Plan
from weft.core.streams.plan_streams import PlanChunks, plan_chunks
from weft.core.streams.send_order import due_of, turns
from weft.core.streams.stream import Path


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Chunks as columns, sorted by sender and then by the order in which it sends them."""

    sender: NDArray[np.int64]
    receiver: NDArray[np.int64]
    num_bytes: NDArray[np.int64]
    stream_offset: NDArray[np.int64]
    """First byte of the chunk in its pair's stream."""
    num_writes: NDArray[np.float64]
    """Write operations."""
    packed_bytes: NDArray[np.float64]
    """Bytes of it that pass through a slot: all or none."""
    phase: NDArray[np.int64]
    """Chunks of a later phase wait for the earlier ones; weft itself has a single phase."""
    before: NDArray[np.float64]
    """Fraction of its stream before the chunk, 0 to 1."""
    share: NDArray[np.float64]
    """Fraction of its stream that the chunk makes up."""
    turn: NDArray[np.float64]
    """Fraction of its sender's round before its receiver, 0 to 1."""
    starts: NDArray[np.int64]
    """Sender s has chunks `starts[s]` to `starts[s + 1]`."""
    num_slots: int

    @property
    def num_chunks(self) -> int:
        """Chunks of all senders."""
        return len(self.sender)

    def only(self, chunks: NDArray[np.bool_]) -> Schedule:
        """Some of the chunks."""
        starts = np.concatenate([[0], np.cumsum(chunks)])[self.starts]
        columns = {name: value[chunks] for name, value in vars(self).items() if name not in ("starts", "num_slots")}
        return replace(self, **columns, starts=starts)

    def of(self, sender: int) -> range:
        """Row numbers of one sender's chunks."""
        return range(int(self.starts[sender]), int(self.starts[sender + 1]))


def make_schedule(plan: Plan, *, phase_of_row: Ints | None = None, chunk_bytes: int = 0) -> Schedule:
    """Cut and order a plan's bytes. `phase_of_row` splits the update into phases that follow each other.

    `chunk_bytes`: smallest size of a full Chunk, to have fewer of them; the plan's own Chunks by default.
    """
    chunks, topology = plan.chunks, plan.topology
    if phase_of_row is not None or chunk_bytes:
        chunks = plan_chunks(plan, plan.links.coarser(chunk_bytes), phase_of_row=phase_of_row)
    size = _stream_bytes(chunks, plan)
    turn = turns(chunks.sender, chunks.receiver, num_trainers=topology.num_trainers, num_engines=topology.num_engines)
    due = due_of(begin=chunks.offset, num_bytes=chunks.room, stream_bytes=size, turn=turn)
    order = np.lexsort((due, chunks.group, chunks.phase, chunks.sender))
    sender = chunks.sender[order]
    return Schedule(
        sender=sender,
        receiver=chunks.receiver[order],
        num_bytes=chunks.num_bytes[order],
        stream_offset=chunks.offset[order],
        num_writes=chunks.num_writes[order].astype(np.float64),
        packed_bytes=np.where(chunks.path == Path.PACKED, chunks.num_bytes, 0)[order].astype(np.float64),
        phase=chunks.phase[order],
        before=(chunks.offset / size)[order],
        share=(chunks.room / size)[order],
        turn=turn[order],
        starts=np.searchsorted(sender, np.arange(topology.num_trainers + 1)),
        num_slots=_num_slots(plan, chunks),
    )


def _num_slots(plan: Plan, chunks: PlanChunks) -> int:
    """How many of the largest Chunks a sender may hold; two of those that were made larger than its memory."""
    return max(plan.settings.staging_bytes_on(plan.trainer_memory) // int(chunks.room.max(initial=1)), 2)


def _stream_bytes(chunks: PlanChunks, plan: Plan) -> NDArray[np.float64]:
    """Bytes of the stream each Chunk belongs to."""
    num_pairs = plan.topology.num_trainers * plan.topology.num_engines
    stream = chunks.phase * num_pairs + chunks.sender * plan.topology.num_engines + chunks.receiver
    _, number = np.unique(stream, return_inverse=True)
    return np.asarray(np.bincount(number, weights=chunks.room)[number], dtype=np.float64)
