"""The Chunks of a plan: what every trainer writes to every engine rank, in how many operations.

How a box travels depends on its link (`weft.core.streams.pair_links`). Planner, simulator and runtime count with these
functions, and cut with those of `weft.core.streams.stream`, which also cut what really runs.

    chunks = plan_chunks(plan, plan.links)
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from weft.core.geometry.boxes import Ints, row_major_strides
from weft.core.geometry.planes import num_runs
from weft.core.recipe import Op
from weft.core.streams.pair_links import PairLinks
from weft.core.streams.row_boxes import RowBoxes
from weft.core.streams.stream import Path, StreamBoxes, cut_streams, paths_of, written_whole

if TYPE_CHECKING:
    from weft.core.plans.plan import Plan

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChunks:
    """Chunks of all streams of a plan, sorted by sender."""

    sender: Int64s
    receiver: Int64s
    phase: Int64s
    path: Int64s
    group: Int64s
    """The last group of scales any of its boxes waits for; -1: none."""
    num_bytes: Int64s
    """Bytes that travel."""
    payload: Int64s
    """Bytes of weights among them."""
    room: Int64s
    """Bytes of the stream, with its gaps: what they take in a landing area."""
    offset: Int64s
    """First byte in the stream."""
    num_writes: Int64s
    """Operations; one for what a mapped link carries."""

    def pair_sum(self, values: Ints, shape: tuple[int, int]) -> Int64s:
        """Values of all Chunks, summed in a matrix [trainer, engine]."""
        pair = self.sender * shape[1] + self.receiver
        summed = np.bincount(pair, weights=values, minlength=shape[0] * shape[1])
        return summed.astype(np.int64).reshape(shape)


def plan_chunks(plan: Plan, links: PairLinks, *, phase_of_row: Ints | None = None) -> PlanChunks:
    """All Chunks of a plan. `phase_of_row` splits the update into phases that follow each other."""
    rows = plan.row_boxes
    run_bytes = rows.run_bytes(lands_in_stream=links.lands_in_stream)
    num_engines = plan.topology.num_engines
    order = np.argsort(plan.pair, kind="stable")
    route_row = np.repeat(np.arange(plan.num_rows), plan.fan_out)[order]
    receiver = plan.pair[order] % num_engines
    borders = np.searchsorted(plan.pair[order], np.arange(plan.topology.num_trainers + 1) * num_engines)
    found = []
    for sender in range(plan.topology.num_trainers):
        mine = slice(borders[sender], borders[sender + 1])
        row, to = route_row[mine], receiver[mine]
        phase = np.zeros_like(row) if phase_of_row is None else phase_of_row[row]
        if len(row):
            found.append(_sender_chunks(rows, run_bytes, links, sender, row, to, phase * num_engines + to))
    names = [field.name for field in fields(PlanChunks)]
    none = np.zeros(0, dtype=np.int64)
    joined = {name: np.concatenate([none, *(part[name] for part in found)]) for name in names}
    return PlanChunks(**joined)


def _sender_chunks(
    rows: RowBoxes, run_bytes: Int64s, links: PairLinks, sender: int, row: Int64s, receiver: Int64s, stream: Int64s
) -> dict[str, Int64s]:
    """The Chunks of one sender's streams, as columns of PlanChunks."""
    path = paths_of(
        is_copy=(rows.op[row] == Op.COPY) & (not links.is_kept),
        run_bytes=run_bytes[row],
        is_mapped=links.is_mapped[sender, receiver],
        min_run_bytes=links.min_run_bytes[sender, receiver],
    )
    boxes = StreamBoxes(
        stream=stream,
        extent=rows.extent[row],
        width=rows.width[row],
        path=path,
        group=rows.group[row],
        place=rows.place[row],
    )
    units, chunks = cut_streams(boxes, chunk_bytes=links.chunk_bytes[sender, receiver])
    unit_row = row[units.box]
    compact = row_major_strides(units.extent)
    landed = compact if links.lands_in_stream else rows.dst_strides[unit_row]
    is_packed = chunks.path == Path.PACKED
    source = np.where(is_packed[units.chunk][:, None], compact, rows.src_strides[unit_row])
    runs = np.bincount(units.chunk, weights=num_runs(units.extent, source, landed), minlength=len(chunks))
    num_engines = links.is_mapped.shape[1]
    to = chunks.stream % num_engines
    is_mapped, num_slots = links.is_mapped[sender, to], links.num_slots[sender, to]
    is_whole = written_whole(
        chunks.path, is_mapped=is_mapped, num_slots=num_slots, lands_in_stream=links.lands_in_stream
    )
    return {
        "sender": np.full(len(chunks), sender),
        "receiver": to,
        "phase": chunks.stream // num_engines,
        "path": chunks.path,
        "group": chunks.group,
        "num_bytes": np.where(is_whole, chunks.num_bytes, chunks.payload),
        "payload": chunks.payload,
        "room": chunks.num_bytes,
        "offset": chunks.begin,
        "num_writes": np.where(is_whole | is_mapped, 1, runs).astype(np.int64),
    }
