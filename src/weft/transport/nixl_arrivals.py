"""What writers announce through NIXL: notes of bytes that have landed, which may overtake each other."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec


class _Arrival(msgspec.Struct, frozen=True):
    writer: int
    tag: int
    num_bytes: int
    at: int
    """Bytes written or credited under this tag before."""


@dataclass
class _Arrived:
    """What one writer has announced under a tag."""

    prefix: int = 0
    """Bytes without a gap, from the first one on."""
    beyond: dict[int, int] = field(default_factory=dict)

    def add(self, at: int, num_bytes: int) -> None:
        """Add bytes that begin at an offset."""
        self.beyond[at] = num_bytes
        while (size := self.beyond.pop(self.prefix, None)) is not None and size > 0:
            self.prefix += size


@dataclass
class Announcer:
    """Makes the notes for one peer: it knows the bytes posted to it under the newest tag."""

    tag: int = 0
    num_bytes: int = 0

    def note(self, writer: int, tag: int, num_bytes: int) -> bytes:
        """The announcement of the next bytes."""
        if tag != self.tag:
            self.tag, self.num_bytes = tag, 0
        note = _Arrival(writer, tag, num_bytes, self.num_bytes)
        self.num_bytes += num_bytes
        return msgspec.msgpack.encode(note)


class Announcements:
    """Counts announcements. Only each writer's newest tag is kept, so nothing grows with the number of versions."""

    def __init__(self) -> None:
        self._arrived: dict[int, tuple[int, _Arrived]] = {}
        """Writer → its newest tag, and what it has announced under it."""

    def count(self, note: bytes) -> None:
        """Count a note; what is not from a weft member is ignored."""
        try:
            arrival = msgspec.msgpack.decode(note, type=_Arrival)
        except msgspec.DecodeError:
            return
        tag, arrived = self._arrived.get(arrival.writer, (-1, _Arrived()))
        if arrival.tag < tag:
            return  # of an earlier version, through another card
        if arrival.tag > tag:
            tag, arrived = arrival.tag, _Arrived()
            self._arrived[arrival.writer] = tag, arrived
        arrived.add(arrival.at, arrival.num_bytes)

    def num_bytes(self, tag: int, writer: int) -> int:
        """Bytes of a writer without a gap, in the order it posted them."""
        newest, arrived = self._arrived.get(writer, (-1, _Arrived()))
        return arrived.prefix if newest == tag else 0
