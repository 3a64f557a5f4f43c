"""Following one version as it lands: what has arrived from each trainer, and its digest.

Bytes of one trainer are counted in the order of its rows, so a receiver can digest the first ones while the rest is on
its way. What is wrong is known by trainer.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft.config import DigestPolicy
from weft.devices import DeviceWork
from weft.errors import IntegrityError
from weft.runtime.control.messages import Part, Source, unpack
from weft.runtime.transports import OpenTransports
from weft.transport.base import Column, joined_rows

STEP_BYTES = 64 << 20
"""Most bytes digested before the control channel is looked at again (CPU memory)."""
_MASK = (1 << 64) - 1


@dataclass(frozen=True, kw_only=True)
class Stream:
    """What comes from one trainer, in every version."""

    trainer: int
    transport: str
    address: Column
    position: Column
    length: Column
    ends: Column
    total: int
    is_ordered: bool = True
    """Whether bytes are counted in the order of the rows; otherwise nothing is known before all are here."""

    @classmethod
    def of(cls, source: Source) -> Stream:
        """From an engine rank's part of the plan."""
        address, position, length = unpack(source.address), unpack(source.position), unpack(source.length)
        first, length = joined_rows(length, moving=(address, position))
        ends = np.cumsum(length)
        return cls(
            trainer=source.trainer,
            transport=source.transport,
            address=address[first],
            position=position[first],
            length=length,
            ends=ends,
            total=int(ends[-1]),
            is_ordered=not source.chunk_ends,
        )

    def rows(self, begin: int, end: int) -> tuple[Column, Column, Column]:
        """The rows of bytes `begin` to `end`, the first and the last one cut."""
        if begin == 0 and end == self.total:
            return self.address, self.position, self.length
        first = int(np.searchsorted(self.ends, begin, side="right"))
        last = int(np.searchsorted(self.ends, end, side="left"))
        address, position, length = (c[first : last + 1].copy() for c in (self.address, self.position, self.length))
        skip = np.uint64(begin - (int(self.ends[first]) - int(self.length[first])))
        address[0] += skip
        position[0] += skip
        length[0] -= skip
        length[-1] -= np.uint64(int(self.ends[last]) - end)
        return address, position, length


@dataclass(slots=True)
class _Progress:
    """How far one trainer's bytes have come in."""

    stream: Stream
    done: int = 0
    digest: int = 0


def spare_core() -> bool:
    """Whether a processor core is idle, as far as the kernel tells: digesting early must not slow those who write."""
    try:
        with open("/proc/loadavg") as file:
            num_running = int(file.read().split()[3].partition("/")[0])
    except (OSError, ValueError, IndexError):
        return True
    return num_running <= len(os.sched_getaffinity(0))


class Arrivals:
    """One version on its way to one engine rank."""

    def __init__(
        self,
        version: int,
        streams: Sequence[Stream],
        transports: OpenTransports,
        work: DeviceWork,
        digest: DigestPolicy,
        *,
        step_bytes: int = STEP_BYTES,
    ) -> None:
        self.version = version
        self._step_bytes = step_bytes
        self._transports, self._work, self._digest = transports, work, digest
        self._progress = [_Progress(stream) for stream in streams]

    @property
    def num_bytes(self) -> int:
        """Bytes that have arrived and were digested."""
        return sum(progress.done for progress in self._progress)

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole version."""
        return sum(progress.stream.total for progress in self._progress)

    @property
    def is_whole(self) -> bool:
        """Whether all bytes are here."""
        return all(progress.done >= progress.stream.total for progress in self._progress)

    def follow(self) -> bool:
        """Take in some of what has landed since; returns whether there was anything."""
        moved = False
        for progress in self._progress:
            stream = progress.stream
            landed = self._transports[stream.transport].arrived(self.version + 1, writer=stream.trainer)
            if landed < stream.total and not stream.is_ordered:
                continue
            landed = min(landed, progress.done + self._step_bytes, stream.total)
            if landed <= progress.done:
                continue
            if self._digest is DigestPolicy.ON:
                progress.digest += self._work.digest(*stream.rows(progress.done, landed))
            progress.done = landed
            moved = True
        return moved

    def check(self, parts: Sequence[Part]) -> None:
        """Compare with what trainers say they sent; raises IntegrityError naming those that differ."""
        sent = {part.trainer: part for part in parts}
        wrong = []
        for progress in self._progress:
            trainer, total, found = progress.stream.trainer, progress.stream.total, progress.digest & _MASK
            part = sent.get(trainer)
            if part is None or part.num_bytes != total:
                wrong.append(f"trainer {trainer} sent {part.num_bytes if part else 0} of {total} bytes")
            elif self._digest is DigestPolicy.ON and part.digest != found:
                wrong.append(f"trainer {trainer} sent digest {part.digest:#x}, but {found:#x} arrived")
        if wrong:
            raise IntegrityError(f"version {self.version}: {'; '.join(wrong)}")
