"""Order and size of Chunks: what every sender writes when, under its staging budget.

All routes of one (sender, receiver) pair form a stream of bytes, in plan order. The stream is cut into Chunks of
at most `chunk_bytes`. A sender spreads the Chunks of each stream evenly over its whole time, so that all its streams
end together; receivers take turns, and senders start with different receivers, so that no receiver is hit by all
senders at once. A sender holds at most `num_slots` Chunks that are packed or converted but not yet written.

    schedule = make_schedule(plan)
    schedule.of(sender=3)          # row numbers of this sender's chunks, in order
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.core.boxes import Ints
from weft.core.plan import Path, Plan


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Chunks as columns, sorted by sender and then by the order in which it sends them."""

    sender: NDArray[np.int64]
    receiver: NDArray[np.int64]
    num_bytes: NDArray[np.int64]
    stream_offset: NDArray[np.int64]
    """First byte of the chunk in its pair's stream."""
    num_writes: NDArray[np.float64]
    """Share of the pair's write operations."""
    packed_bytes: NDArray[np.float64]
    """Share of the pair's bytes that pass through a slot."""
    phase: NDArray[np.int64]
    """Chunks of a later phase wait for the earlier ones; weft itself has a single phase."""
    before: NDArray[np.float64]
    """Which part of its stream goes before the chunk, 0 to 1."""
    share: NDArray[np.float64]
    """Which part of its stream the chunk is."""
    turn: NDArray[np.float64]
    """Which part of a round of its sender goes before its receiver, 0 to 1."""
    starts: NDArray[np.int64]
    """Sender s has chunks `starts[s]` to `starts[s + 1]`."""
    num_slots: int

    @property
    def num_chunks(self) -> int:
        """Chunks of all senders."""
        return len(self.sender)

    def of(self, sender: int) -> range:
        """Row numbers of one sender's chunks."""
        return range(int(self.starts[sender]), int(self.starts[sender + 1]))


def make_schedule(plan: Plan, *, phase_of_row: Ints | None = None) -> Schedule:
    """Cut and order a plan's bytes. `phase_of_row` splits the update into phases that follow each other."""
    num_pairs = plan.topology.num_trainers * plan.topology.num_engines
    phase = np.zeros(plan.num_rows, dtype=np.int64) if phase_of_row is None else phase_of_row
    stream = np.repeat(phase, plan.fan_out) * num_pairs + plan.pair
    row_bytes = np.repeat(plan.row_bytes, plan.fan_out)
    packed = np.repeat(np.where(plan.path == Path.PACKED, plan.row_bytes, 0), plan.fan_out)
    total = np.bincount(stream, weights=row_bytes)
    used = np.flatnonzero(total)
    size = total[used].astype(np.int64)
    packed_share = np.bincount(stream, weights=packed)[used] / size
    writes = _stream_writes(plan, used % num_pairs, size)

    chunk_bytes = plan.settings.chunk_bytes
    num_chunks = -(-size // chunk_bytes)
    stream_row = np.repeat(np.arange(len(used)), num_chunks)
    nth = np.arange(len(stream_row)) - np.repeat(np.cumsum(num_chunks) - num_chunks, num_chunks)
    offset = nth * chunk_bytes
    num_bytes = np.minimum(chunk_bytes, size[stream_row] - offset)
    pair = used[stream_row] % num_pairs
    sender, receiver = np.divmod(pair, plan.topology.num_engines)
    chunk_phase = used[stream_row] // num_pairs
    turn = _turns(sender, receiver, plan)
    before, share = offset / size[stream_row], num_bytes / size[stream_row]
    order = np.lexsort((before + turn * share, chunk_phase, sender))
    return Schedule(
        sender=sender[order],
        receiver=receiver[order],
        num_bytes=num_bytes[order],
        stream_offset=offset[order],
        num_writes=(np.maximum(writes[stream_row] * share, 1))[order],
        packed_bytes=(packed_share[stream_row] * num_bytes)[order],
        phase=chunk_phase[order],
        before=before[order],
        share=share[order],
        turn=turn[order],
        starts=np.searchsorted(sender[order], np.arange(plan.topology.num_trainers + 1)),
        num_slots=max(plan.settings.max_staging_bytes // chunk_bytes, 1),
    )


def _stream_writes(plan: Plan, pair: Ints, size: Ints) -> NDArray[np.float64]:
    """Writes of each stream: its share of the pair's."""
    pair_bytes, pair_writes = plan.pair_bytes.ravel(), plan.pair_writes.ravel()
    return np.asarray(pair_writes[pair] * (size / pair_bytes[pair]))


def _turns(sender: Ints, receiver: Ints, plan: Plan) -> NDArray[np.float64]:
    """Position of a receiver in its sender's round, 0 to 1: senders start evenly spread over the receivers."""
    num_engines, num_trainers = plan.topology.num_engines, plan.topology.num_trainers
    start = (
        sender * num_engines // num_trainers if num_trainers >= num_engines else sender * (num_engines // num_trainers)
    )
    return np.asarray(((receiver - start) % num_engines + 0.5) / num_engines)
