"""The memory of an engine rank that trainers write: room for every link, in bytes, before anything runs.

room = landing_room(plan.links, plan.chunks)        # a matrix [trainer, engine]
room.sum(axis=0)                                    # what each engine rank has to reserve
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from weft.core.geometry.alignment import aligned
from weft.core.geometry.boxes import Ints
from weft.core.streams.pair_links import PairLinks
from weft.core.streams.plan_streams import PlanChunks
from weft.core.streams.stream import Path

Int64s = NDArray[np.int64]
SMALLEST_PATCH_ROOM = 64 << 10
"""Per link: patches of few elements are mostly headers."""


def landing_room(links: PairLinks, chunks: PlanChunks) -> Int64s:
    """What each link needs: its stream in mode `shadow`, otherwise its part of the window."""
    shape = links.is_mapped.shape
    if links.lands_in_stream:
        return aligned(chunks.pair_sum(chunks.room, shape))
    packed = chunks.path == Path.PACKED
    largest = np.zeros(shape, dtype=np.int64)
    np.maximum.at(largest, (chunks.sender[packed], chunks.receiver[packed]), chunks.room[packed])
    return np.minimum(links.num_slots, chunks.pair_sum(packed, shape)) * aligned(largest)


def patch_room(wire_bytes: Ints, share: float) -> Int64s:
    """Room for patches, for links that carry so many bytes in a version that is sent whole."""
    room = np.maximum((wire_bytes * share).astype(np.int64), SMALLEST_PATCH_ROOM)
    return np.where(wire_bytes > 0, aligned(room), 0)
