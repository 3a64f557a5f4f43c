"""Which trainers may still write into the memory an engine rank has offered.

Memory is offered to *incarnations* of trainers. It is reused only when each of them has joined the present round, which
it does only while it is not writing, or provably can no longer write: the controller saw it stop, its process has
ended, or closing the transport cuts it off. The engine remembers this itself, so a restarted controller, which knows
nothing of earlier writers, makes no difference.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from weft.errors import TransportError
from weft.runtime.control.messages import Offered, Writer
from weft.transport.host import process_has_ended
from weft.transport.registry import Place, is_cut_by_closing


class Exposure:
    """The writers one engine rank has offered its memory to, and whose end is not known."""

    def __init__(self, here: Place) -> None:
        """`here`: the place of the engine rank."""
        self._here = here
        self._writers: dict[tuple[int, int], Writer] = {}
        self._newest: dict[int, int] = {}
        self._revoked: set[int] = set()

    def offer(self, writers: Iterable[Writer]) -> None:
        """These may be told to write from now on."""
        for writer in writers:
            self._writers[writer.rank, writer.incarnation] = writer
            self._newest[writer.rank] = max(self._newest.get(writer.rank, 0), writer.incarnation)

    def revoke(self, incarnations: Collection[int]) -> None:
        """These may write without being told to: nothing they report about themselves counts."""
        self._revoked |= {key[1] for key in self._writers} & set(incarnations)

    def forget_all(self) -> None:
        """What they were offered is out of their reach."""
        self._writers, self._revoked = {}, set()

    @property
    def newest(self) -> list[Offered]:
        """The newest incarnation of each trainer, for a controller that was restarted."""
        return [Offered(rank=rank, incarnation=number) for rank, number in sorted(self._newest.items())]

    def unsettled(self, present: Iterable[Writer], settled: Collection[int]) -> tuple[Writer, ...]:
        """Writers that could still be writing, when `present` are the trainers of a new round."""
        joined = {(writer.rank, writer.incarnation) for writer in present}
        self._writers = {
            key: writer
            for key, writer in self._writers.items()
            if (key not in joined and key[1] not in settled) or key[1] in self._revoked
        }
        return self.alive()

    def alive(self) -> tuple[Writer, ...]:
        """Writers whose end is not known; what was closed because of revoked ones must be made again in any case."""
        self._writers = {
            key: writer
            for key, writer in self._writers.items()
            if key[1] in self._revoked or not has_ended(writer, self._here)
        }
        return tuple(self._writers.values())

    def beyond_reach(self, writers: Iterable[Writer], *, moved: bool) -> tuple[Writer, ...]:
        """Writers that closing transports does not keep out of the live weights; `moved`: these get new memory."""
        by_moving = {"shm"} if moved else set()
        return tuple(
            writer
            for writer in writers
            if not is_cut_by_closing(writer.transport, writer.place, self._here) and writer.transport not in by_moving
        )


def has_ended(writer: Writer, here: Place) -> bool:
    """Whether a writer's process is known to be gone; processes of other hosts never are."""
    if (writer.place.host, writer.place.container) != (here.host, here.container):
        return False
    try:
        return process_has_ended(writer.process)
    except TransportError:  # it cannot be looked at: no descriptor is free, or it did not say who it is
        return False


def named(writers: Sequence[Writer]) -> str:
    """Writers by name, for messages."""
    return ", ".join(f"trainer {writer.rank} (process {writer.process.pid})" for writer in writers)
