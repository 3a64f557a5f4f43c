"""Following one version as it lands: what has arrived from each trainer, and its digest.

Bytes of one trainer are counted in the order of its Chunks, so a receiver can digest the first ones while the rest is
still in flight. Errors are attributed to the trainer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from weft.config import DigestPolicy
from weft.devices import DeviceWork
from weft.errors import IntegrityError
from weft.runtime.control.messages import ArrivalReport
from weft.runtime.control.write_reports import WriteReport
from weft.runtime.receive.landing import ArrivingChunk, ArrivingLink
from weft.runtime.transports import OpenTransports

_MASK = (1 << 64) - 1
NUM_BATCHES = 8
"""Parts of a version, at most, that are digested at once on a GPU: every launch, and every wait, takes its time."""


@dataclass(slots=True)
class _Progress:
    """How much of one trainer's bytes has arrived."""

    link: ArrivingLink
    chunk: int = 0
    """Chunks that were processed."""
    done: int = 0
    digest: int = 0
    began: float = 0.0
    """When its first Chunk was found; 0: not yet."""
    ended: float = 0.0
    """When its last Chunk so far was processed."""

    @property
    def is_whole(self) -> bool:
        """Whether all bytes have arrived."""
        return self.chunk == len(self.link.chunks)

    @property
    def next_bytes(self) -> int:
        """How many bytes must have landed before the next Chunk can be processed."""
        return self.done + self.link.chunks[self.chunk].num_bytes if self.link.is_ordered else self.link.total


def spare_core() -> bool:
    """Whether a CPU core is idle, according to the kernel: digesting early must not slow the writers down."""
    try:
        with open("/proc/loadavg") as file:
            num_running = int(file.read().split()[3].partition("/")[0])
    except (OSError, ValueError, IndexError):
        return True
    return num_running <= len(os.sched_getaffinity(0))


class Arrivals:
    """One version in transit to one engine rank."""

    def __init__(
        self,
        version: int,
        links: Sequence[ArrivingLink],
        transports: OpenTransports,
        work: DeviceWork,
        digest: DigestPolicy,
        *,
        tag: int,
        is_on_gpu: bool = False,
    ) -> None:
        """`tag`: the tag its bytes are counted under."""
        self.version, self._tag, self._is_on_gpu = version, tag, is_on_gpu
        self._transports, self._work, self._digest = transports, work, digest
        self._progress = [_Progress(link) for link in links]

    @property
    def num_bytes(self) -> int:
        """Bytes that have arrived and have been digested."""
        return sum(progress.done for progress in self._progress)

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole version."""
        return sum(progress.link.total for progress in self._progress)

    @property
    def digest(self) -> int:
        """Digest of what was processed so far."""
        return sum(progress.digest for progress in self._progress) & _MASK

    @property
    def is_whole(self) -> bool:
        """Whether all bytes have arrived."""
        return all(progress.is_whole for progress in self._progress)

    def follow(self) -> bool:
        """Process, from every trainer, the next Chunk that has landed; returns whether there was any."""
        moved = False
        complete = []
        for progress in self._progress:
            link = progress.link
            if progress.is_whole:
                continue
            landed = self._transports[link.transport].arrived(self._tag, writer=link.trainer)
            if landed < progress.next_bytes:
                continue
            progress.began = progress.began or time.monotonic()
            if landed >= link.total and self._is_one_pass(progress):
                complete.append(progress)
                continue
            self._take_next(progress)
            progress.ended = time.monotonic()
            moved = True
        if self._is_worth_a_launch(complete):
            self._take_all(complete)
            moved = True
        return moved

    def _take_next(self, progress: _Progress) -> None:
        """The next Chunk of a link has landed."""
        link, chunk = progress.link, progress.link.chunks[progress.chunk]
        progress.digest += self._take(chunk)
        progress.done += chunk.num_bytes
        progress.chunk += 1
        if chunk.is_drained:
            self._transports[link.transport].credit(f"trainer {link.trainer}", self._tag, chunk.num_bytes)

    def _is_one_pass(self, progress: _Progress) -> bool:
        """Whether all of a link is digested by one launch: on a GPU, when nothing of it was processed before."""
        is_new = progress.chunk == 0 and not progress.link.has_window
        return is_new and self._is_on_gpu and self._digest is DigestPolicy.ON

    def _is_worth_a_launch(self, complete: Sequence[_Progress]) -> bool:
        """Whether enough has arrived, or nothing else will."""
        num_bytes = sum(progress.link.total for progress in complete)
        num_missing = sum(not progress.is_whole for progress in self._progress) - len(complete)
        return bool(complete) and (num_bytes * NUM_BATCHES >= self.total_bytes or not num_missing)

    def _take_all(self, complete: Sequence[_Progress]) -> None:
        digests = self._work.digest_each([progress.link.planes for progress in complete])
        for progress, digest in zip(complete, digests, strict=True):
            progress.digest, progress.ended = digest, time.monotonic()
            progress.done, progress.chunk = progress.link.total, len(progress.link.chunks)

    @property
    def uses_device(self) -> bool:
        """Whether writers' own copies keep this GPU busy, so that digesting early would only slow them down."""
        return self._is_on_gpu and all(progress.link.transport == "cuda_ipc" for progress in self._progress)

    def _take(self, chunk: ArrivingChunk) -> int:
        """Digest a Chunk, if required, and drain it, if it lies in a window; returns the digest."""
        is_digested = self._digest is DigestPolicy.ON
        if not chunk.is_drained:
            return self._work.digest_planes(chunk.planes) if is_digested else 0
        if is_digested:
            return self._work.copy_digest_planes(chunk.planes)[0]
        self._work.copy_planes(chunk.planes)
        return 0

    @property
    def will_be_awaited(self) -> bool:
        """Whether some trainer has, sooner or later, to wait until Chunks are drained."""
        return any(not each.is_whole and each.link.num_awaited > 0 for each in self._progress)

    @property
    def is_awaited(self) -> bool:
        """Whether some trainer cannot go on before the next of its Chunks is drained."""
        return any(not each.is_whole and each.link.frees_room(each.chunk) for each in self._progress)

    def reports(self) -> list[ArrivalReport]:
        """What came from each trainer."""
        return [
            ArrivalReport(trainer=each.link.trainer, num_bytes=each.done, seconds=round(each.ended - each.began, 6))
            for each in self._progress
        ]

    def check(self, reports: Sequence[WriteReport]) -> None:
        """Compare with what trainers report as sent; raises IntegrityError naming those that differ."""
        sent = {report.peer: report for report in reports}
        wrong = []
        for progress in self._progress:
            trainer, total, found = progress.link.trainer, progress.link.total, progress.digest & _MASK
            report = sent.get(trainer)
            if report is None or report.num_bytes != total:
                wrong.append(f"trainer {trainer} sent {report.num_bytes if report else 0} of {total} bytes")
            elif self._digest is DigestPolicy.ON and report.digest != found:
                wrong.append(f"trainer {trainer} sent digest {report.digest:#x}, but {found:#x} arrived")
        if wrong:
            raise IntegrityError(f"version {self.version}: {'; '.join(wrong)}")
