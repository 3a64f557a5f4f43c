"""The order in which a trainer sends its Chunks: the simulator's schedule and the runtime's program both use it.

What can be filled earlier goes first: Chunks whose scales become known in an earlier group. Inside a group the Chunks
of each stream are spread evenly over the sender's whole time, so that all its streams end together. Receivers take
turns, and senders start with different ones, so that no receiver is hit by all senders at once. In the runtime, Chunks
that replicas share leave at the turn of the first of them.

    due = due_of(begin=0, num_bytes=64, stream_bytes=256, turn=0.5)
    order = np.lexsort((due, group))
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from weft.core.geometry.boxes import Ints

Floats = NDArray[np.float64]
AnyInts = TypeVar("AnyInts", int, NDArray[np.int64])


def due_of(*, begin: Ints, num_bytes: Ints, stream_bytes: Ints | int, turn: Floats | float) -> Floats:
    """When Chunks are due, as a fraction of the sender's time: Chunks that begin at byte `begin` of their streams."""
    return np.asarray((begin + turn * num_bytes) / stream_bytes, dtype=np.float64)


def first_engine(trainer: AnyInts, *, num_trainers: int, num_engines: int) -> AnyInts:
    """The engine rank a trainer begins with: trainers start evenly spread over the engine ranks."""
    if num_trainers >= num_engines:
        return trainer * num_engines // num_trainers
    return trainer * (num_engines // num_trainers)


def turns(sender: Ints, receiver: Ints, *, num_trainers: int, num_engines: int) -> Floats:
    """Position of each link in the round of its sender, 0 to 1; a round visits the engine ranks it sends to."""
    sender, receiver = sender.astype(np.int64), receiver.astype(np.int64)
    start = first_engine(sender, num_trainers=num_trainers, num_engines=num_engines)
    visit = sender * num_engines + (receiver - start) % num_engines
    links, number = np.unique(visit, return_inverse=True)
    borders = np.searchsorted(links, np.arange(num_trainers + 1) * num_engines)
    of_sender = links // num_engines
    place = np.arange(len(links)) - borders[of_sender]
    return ((place + 0.5) / np.diff(borders)[of_sender])[number]


def turn_of(place: int, count: int) -> float:
    """The same for the link that is visited at this place of a round of so many."""
    return (place + 0.5) / count
