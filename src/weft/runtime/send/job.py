"""One version on its way out of a trainer: the links it takes, and its progress so far."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from weft.codec.memory import Floats
from weft.errors import WeftError
from weft.runtime.control.messages import Go, tag_of
from weft.runtime.send.outgoing import Outgoing
from weft.runtime.send.pipeline import Flow
from weft.transport.base import Batch, Ticket, WriteResult
from weft.transport.mapped import DirectBatch

Parcel = Batch | DirectBatch
"""Something that is written to one engine rank."""

LEFT_S = 5.0
"""A write to an engine rank that was left out is given up, and with it the version, if it takes longer."""


class StagedPatch(NamedTuple):
    """The patch of a chunk."""

    at: int
    """Where it goes in the memory for patches."""
    src: int
    """Where it is here."""
    num_bytes: int


@dataclass(slots=True)
class Link:
    """The way to one engine rank, or why there is none."""

    engine: int
    transport: str
    peer: str = ""
    obstacle: str = ""
    direct: list[Parcel] = field(default_factory=list)
    """What goes straight from the weights: all at once, or some with every chunk, so that neither waits."""
    chunks: list[dict[int, Parcel]] = field(default_factory=list)
    """What each chunk writes when it is sent whole, by its number: one for each of the alternating images."""
    patches: int = 0
    """Where patches go, one after the other."""
    needs: list[int] = field(default_factory=list)
    """With a window: bytes the engine rank must have drained before each chunk may be written."""

    @property
    def has_window(self) -> bool:
        """Whether chunks wait for credits."""
        return bool(self.needs)

    @property
    def has_chunks(self) -> bool:
        """Whether anything is converted on the way."""
        return any(self.chunks)


@dataclass(slots=True)
class Sent:
    """The progress of one version on one link."""

    num_bytes: int = 0
    digest: int = 0
    sizes: dict[int, int] = field(default_factory=dict)
    """Bytes of the patch of each chunk, by its number."""
    loss: str = ""
    needs_whole: bool = False
    """Whether patches do not suffice, or are not possible."""
    began_at: float = 0.0
    ended_at: float = 0.0
    """When the first write was posted, and when the last had ended; 0: none was."""

    def count(self, ticket: Ticket, done: WriteResult) -> None:
        """A write has ended."""
        self.num_bytes += done.num_bytes
        self.digest += done.digest
        self.began_at = min(self.began_at or ticket.began_at, ticket.began_at)
        self.ended_at = max(self.ended_at, ticket.ended_at)

    @property
    def seconds(self) -> float:
        """From the first post to the end of the last write."""
        return max(self.ended_at - self.began_at, 0.0)

    @property
    def sizes_in_order(self) -> tuple[int, ...]:
        """Sizes in the order in which receivers count chunks."""
        return tuple(self.sizes[number] for number in sorted(self.sizes))


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk and the links it goes out on."""

    outgoing: Outgoing
    number: int
    links: tuple[Link, ...]


class Job:
    """One version on its way out; `stop` gives it up."""

    def __init__(
        self,
        go: Go,
        deadline: float,
        *,
        member: str,
        on_released: Callable[[], None],
        left_out: Mapping[int, float] | None = None,
    ) -> None:
        """`left_out`: engine ranks that nothing is written to any more, since when; grows meanwhile."""
        self.go, self.deadline, self.on_released = go, deadline, on_released
        self.left_out = {} if left_out is None else left_out
        self.flow = Flow(deadline, member=member)
        self.tickets: list[Ticket] = []
        """Writes that were started."""
        self.agreed: dict[int, Floats] = {}
        """Magnitudes of the cut blocks of each group, as agreed between all holders."""
        self.magnitude_bytes = 0
        """Bytes of magnitudes sent to other trainers."""
        self.peak_staging_bytes = 0
        self._lock = threading.Lock()
        self.has_written = False
        """Whether anything was written without a ticket: converted straight into an engine's memory."""
        self.num_writes = 0
        """One-sided writes that were started, over transports that take descriptors."""

    @property
    def tag(self) -> int:
        """The tag its bytes are counted under."""
        return tag_of(self.go.version, whole=self.go.whole)

    def waits_until(self, engine: int) -> float:
        """How long a write is waited for: not for long if its engine rank no longer takes part."""
        left_at = self.left_out.get(engine)
        return self.deadline if left_at is None else min(self.deadline, left_at + LEFT_S)

    def posted(self, tickets: list[Ticket], num_writes: int) -> None:
        """Writes were started, on any thread."""
        with self._lock:
            self.tickets += tickets
            self.num_writes += num_writes

    def agree(self, group: int, values: Floats) -> None:
        """All holders of a group know its magnitudes."""
        self.agreed[group] = values
        self.flow.changed()

    def stop(self, error: WeftError) -> None:
        """Give the version up."""
        self.flow.stop(error)
        self.cancel()

    def cancel(self) -> None:
        """Stop writing."""
        for ticket in list(self.tickets):
            ticket.cancel()
