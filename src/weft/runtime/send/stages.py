"""How a version leaves a trainer.

What is the same on both sides and worth a write of its own is posted straight from the weights. Everything else passes
through stages that overlap:

    h2d         copies a piece of offloaded weights to the device they are sent from
    amax        finds the largest magnitudes of a group of matrices, for the other holders   (FP8)
    convert     makes a chunk in the engine's layout and precision
    delta       starts to make its difference from what the engines hold                     (patches)
    post        starts writing it, one-sided, to all engine ranks that take it
    write       waits until it has landed
"""

from __future__ import annotations

import bisect
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from weft.codec.conversion import Wait
from weft.codec.memory import Floats
from weft.codec.patching import Sizes
from weft.config import DeltaPolicy
from weft.runtime.send.job import Chunk, Job, Link, Parcel, Sent, StagedPatch
from weft.runtime.send.pipeline import Flow, Stage, run
from weft.runtime.send.posting import post_all, takes, wait_all
from weft.runtime.send.program import SendProgram
from weft.runtime.send.windows import Windows
from weft.transport.base import Ticket

NONE = np.zeros(0, dtype=np.float32)
RunStages = Callable[[Flow, Sequence[Stage]], None]
Tell = Callable[[int, Floats], None]
"""Takes the magnitudes this trainer found in a group's cut blocks; `Job.agree` is called when all holders agree."""


def send_version(program: SendProgram, job: Job, tell: Tell, run_stages: RunStages = run) -> dict[int, Sent]:
    """Write a version to every engine rank that takes part; one that cannot be reached does not stop the others."""
    wanted = [link for link in program.links if link.engine in job.go.engines]
    sent = {link.engine: Sent(loss=link.obstacle) for link in wanted}
    first = [link for link in wanted if not link.has_chunks or link.has_window]
    whole = [(link, batch) for link in first for batch in link.direct]
    if whole and program.mirror is not None:
        run_stages(job.flow, [h2d_stage(program)])
        job.on_released()
    posted = post_all(program, job, whole, sent)
    numbers = [n for n, chunk in enumerate(program.chunks) if any(link.engine in sent for link in chunk.links)]
    if numbers or program.groups:  # others may need the magnitudes of what this trainer holds but does not send
        _begin_version(program, job, numbers, sent)
        is_read = any(link.direct for link in wanted)
        stages = VersionStages(program, job, numbers, sent, tell)
        try:
            run_stages(job.flow, stages.all(releases=not is_read))
        finally:
            stages.settle()
        job.peak_staging_bytes = program.room.peak_bytes
    wait_all(job, posted, sent)
    if program.settings.delta is DeltaPolicy.ON:
        for chunk in (program.chunks[n] for n in numbers if not program.chunks[n].outgoing.is_patched):
            for link in chunk.links:
                if link.engine in sent:
                    sent[link.engine].needs_whole = True
    return sent


def send_whole(program: SendProgram, job: Job, run_stages: RunStages = run) -> dict[int, Sent]:
    """Write whole, from the kept copy, a version that was sent as patches, or should have been."""
    sent = {link.engine: Sent(loss=link.obstacle) for link in program.links if link.engine in job.go.engines}
    numbers = [n for n, chunk in enumerate(program.chunks) if any(link.engine in sent for link in chunk.links)]
    if numbers:
        run_stages(job.flow, VersionStages(program, job, numbers, sent, job.agree).writing())
    return sent


def h2d_stage(program: SendProgram, at_end: Callable[[], None] = lambda: None) -> Stage:
    """Copies offloaded weights to the device, piece by piece."""
    mirror = program.mirror
    assert mirror is not None

    def copy(number: int) -> int:
        num_bytes = mirror.copy(program.pieces[number])
        if number + 1 == len(program.pieces):
            at_end()
        return num_bytes

    return Stage("h2d", len(program.pieces), copy)


def _begin_version(program: SendProgram, job: Job, numbers: list[int], sent: dict[int, Sent]) -> None:
    """Tell the kept Chunks what each engine rank holds; ranks that do not hold the base need the version whole."""
    holds = dict(zip(job.go.engines, job.go.holds, strict=True))
    for chunk in {id(program.chunks[n].outgoing): program.chunks[n] for n in numbers}.values():
        takers = {link.engine: holds[link.engine] for link in chunk.links if link.engine in sent}
        patched = chunk.outgoing.begin(job.go.version, takers, patch_room=program.patch_room(takers))
        for engine in takers:
            sent[engine].needs_whole |= engine not in patched and program.settings.delta is DeltaPolicy.ON
    program.room.empty()
    program.room.skip_to(numbers[0] if numbers else 0)


class _Begun(NamedTuple):
    """Chunks that are being filled."""

    at: float
    num_bytes: int
    wait: Wait | None


class _Encoded(NamedTuple):
    """Patches that are being made."""

    at: float
    staged: list[int]
    """Where the patch of each chunk is."""
    sizes: Sizes


class VersionStages:
    """Stages of one version; items are the chunks it consists of."""

    def __init__(self, program: SendProgram, job: Job, chunks: list[int], sent: dict[int, Sent], tell: Tell) -> None:
        self._program, self._job, self._numbers, self._sent, self._tell = program, job, chunks, sent, tell
        self._is_delta = program.settings.delta is DeltaPolicy.ON and not job.go.whole
        self._num_scaled = 0
        """Groups whose scales are made: the first of the program's."""
        self._begun: dict[int, _Begun] = {}
        """Batches that are being filled."""
        self._num_filled, self._filled_at = 0, 0.0
        """How many are filled, and when the last one was."""
        self._posted: dict[int, tuple[list[tuple[int, Ticket]], float]] = {}
        self._batches = divided(program, chunks) if self._is_delta else [[item] for item in range(len(chunks))]
        """Items that are filled, encoded, posted and waited for together."""
        self._encoded: dict[int, _Encoded] = {}
        """Batches whose patches are being made."""
        self._num_encoded, self._encoded_at = 0, 0.0
        """How many batches have their patches, and when the last one had."""
        self._patches: dict[int, StagedPatch] = {}
        """Items that are sent as patches."""
        self._last_end = 0.0
        self._releases = False
        self._reading: set[str] = set()
        """Stages that still read the weights."""
        self._lock = threading.Lock()
        self._windows = Windows(program, job, sent)

    def all(self, *, releases: bool) -> list[Stage]:
        """All stages in order. `releases`: whether the weights may change once all chunks are converted."""
        flow, count = self._job.flow, len(self._batches)
        self._releases = releases or self._program.mirror is not None
        stages: list[Stage] = []
        if self._program.mirror is not None and not self._has_all():
            self._reading = {"h2d"}
            stages.append(h2d_stage(self._program, lambda: self._has_read("h2d")))
        if self._program.groups:
            stages.append(Stage("amax", len(self._program.groups), self._find_amax, self._can_find_amax))
        if not count:
            return stages
        if self._program.mirror is None:
            self._reading = {"convert", *(stage.name for stage in stages)}
            if self._is_delta and any(self._program.chunks[n].outgoing.reads_weights for n in self._numbers):
                self._reading.add("delta")
        stages.append(Stage("convert", count, self._convert, self._can_convert, is_recorded=False))
        if self._is_delta:
            stages.append(Stage("delta", count, self._encode, self._can_encode, is_recorded=False))
        stages.append(Stage("post", count, self._post, self._can_post, is_recorded=False))
        stages.append(Stage("write", count, self._finish, flow.after("post"), is_recorded=False))
        return stages

    def writing(self) -> list[Stage]:
        """The stages of chunks that are kept."""
        count = len(self._batches)
        return [
            Stage("post", count, self._post, is_recorded=False),
            Stage("write", count, self._finish, self._job.flow.after("post"), is_recorded=False),
        ]

    def _chunk(self, item: int) -> Chunk:
        return self._program.chunks[self._numbers[item]]

    def _is_there(self, num_pieces: int) -> bool:
        """Whether the first pieces of offloaded weights are on the device."""
        return not num_pieces or self._job.flow.after("h2d")(num_pieces - 1)

    def _can_find_amax(self, item: int) -> bool:
        return self._is_there(self._program.group_pieces[item])

    def _find_amax(self, item: int) -> int:
        """Find a group's magnitudes and send those that others need."""
        group, converter = self._program.groups[item], self._program.converter
        values = converter.find_amax(group)
        if len(values):
            self._tell(group, values)
        if item + 1 == len(self._program.groups):
            self._has_read("amax")
        return values.nbytes

    def _has_read(self, stage: str) -> None:
        """A stage no longer reads the weights; when none does, they may change."""
        with self._lock:
            self._reading.discard(stage)
            if self._releases and not self._reading:
                self._job.on_released()

    def _groups(self, item: int) -> list[int]:
        """Groups whose scales a chunk needs and that are not in use yet; earlier ones of its stream need no others."""
        chunk, groups = self._chunk(item), self._program.groups
        return groups[self._num_scaled : bisect.bisect_right(groups, chunk.outgoing.groups[chunk.number])]

    def _is_agreed(self, group: int) -> bool:
        """Whether the magnitudes of a group are known; those of unshared matrices are this trainer's own."""
        if len(self._program.converter.cut[group]):
            return group in self._job.agreed
        return self._job.flow.after("amax")(self._program.groups.index(group))

    def _can_convert(self, batch: int) -> bool:
        items, program = self._batches[batch], self._program
        if not all(self._is_agreed(group) for group in self._groups(items[-1])):
            return False
        if not self._is_there(max(program.chunk_pieces[self._numbers[item]] for item in items)):
            return False
        return self._chunk(items[0]).outgoing.is_kept or program.room.is_free(self._numbers[items[-1]])

    def _convert(self, batch: int) -> int:
        items = self._batches[batch]
        for group in self._groups(items[-1]):
            self._program.converter.agree(group, self._job.agreed.get(group, NONE))
            self._num_scaled += 1
        if not self._chunk(items[0]).outgoing.is_kept:
            for item in items:
                self._program.room.enter(self._numbers[item])
        begun = self._begun[batch] = self._fill(items)
        if begun.wait is None:  # they are done
            self._has_filled(batch)
        return begun.num_bytes

    def _fill(self, items: Sequence[int]) -> _Begun:
        """Make chunks; those that go straight into an engine rank's memory only if that rank takes part."""
        now, outgoing = time.monotonic(), self._chunk(items[0]).outgoing
        if outgoing.is_straight:
            if not self._is_sent(self._chunk(items[0]).links[0], items[0]):
                return _Begun(now, 0, None)
            self._job.has_written = True
        numbers = [self._chunk(item).number for item in items]
        wait = outgoing.fill(numbers, [self._program.place(self._numbers[item]) for item in items])
        return _Begun(now, sum(outgoing.layouts[number].num_bytes for number in numbers), wait)

    def _has_filled(self, batch: int) -> None:
        """Wait until chunks are filled, in whichever stage needs them first: the next ones are started meanwhile."""
        begun = self._begun.pop(batch, None)
        if begun is None:
            return
        if begun.wait is not None:
            begun.wait()
        with self._lock:  # skipped chunks are done at once, on another thread than those that are waited for
            end, start = time.monotonic(), max(begun.at, self._filled_at)
            self._filled_at = end
            self._num_filled += 1
            is_last = self._num_filled == len(self._batches)
        self._job.flow.span("convert", start, end, begun.num_bytes)
        if is_last:
            self._has_read("convert")

    def settle(self) -> None:
        """Wait for what was started but is not needed after a failure: it still reads the weights, and their images."""
        for batch in list(self._begun):
            with contextlib.suppress(Exception):  # the first error is the one that counts
                self._has_filled(batch)
        for batch in list(self._encoded):
            with contextlib.suppress(Exception):
                self._has_encoded(batch)

    def _can_encode(self, batch: int) -> bool:
        last = self._batches[batch][-1]
        return self._job.flow.after("convert")(batch) and self._program.room.is_free(self._numbers[last])

    def _encode(self, batch: int) -> int:
        items = self._batches[batch]
        self._has_filled(batch)
        for item in items:
            self._program.room.enter(self._numbers[item])
        outgoing = self._chunk(items[0]).outgoing
        if outgoing.is_compared:
            now, staged = time.monotonic(), [self._program.staged(self._numbers[item]) for item in items]
            sizes = outgoing.encode([self._chunk(item).number for item in items], staged)
            self._encoded[batch] = _Encoded(now, staged, sizes)
        return 0

    def _has_encoded(self, batch: int) -> None:
        """Wait until patches are made, and give each its place; the next ones are started meanwhile."""
        encoded = self._encoded.pop(batch, None)
        if encoded is not None:
            self._take_patches(batch, encoded)
        self._num_encoded += 1
        if self._num_encoded == len(self._batches):
            self._has_read("delta")

    def _take_patches(self, batch: int, encoded: _Encoded) -> None:
        sizes, items = encoded.sizes(), self._batches[batch]
        end, start = time.monotonic(), max(encoded.at, self._encoded_at)
        self._encoded_at = end
        self._job.flow.span("delta", start, end, sum(sizes))
        for item, src, num_bytes in zip(items, encoded.staged, sizes, strict=True):
            at = self._chunk(item).outgoing.reserve(num_bytes)
            if at is not None:
                self._patches[item] = StagedPatch(at, src, num_bytes)

    def _can_post(self, batch: int) -> bool:
        before, last = "delta" if self._is_delta else "convert", self._batches[batch][-1]
        return self._is_there(self._program.beside_pieces[self._numbers[last]]) and self._job.flow.after(before)(batch)

    def _has_all(self) -> bool:
        return self._is_there(len(self._program.pieces))

    def _post(self, batch: int) -> int:
        """Start writing chunks to every engine rank that takes them."""
        items = self._batches[batch]
        chunk, numbers = self._chunk(items[0]), [self._chunk(item).number for item in items]
        self._has_filled(batch)
        self._has_encoded(batch)
        links = [link for link in chunk.links if any(self._is_sent(link, each) for each in items)]
        parcels = [(link, self._parcel(link, items)) for link in links]
        at_once = [(link, parcel) for link, parcel in parcels if not self._waits(link)]
        beside = [(link, link.direct[n]) for link, _ in at_once for n in numbers if n < len(link.direct)]
        posted = post_all(self._program, self._job, at_once, self._sent)
        posted += post_all(self._program, self._job, beside, self._sent)
        self._posted[batch] = posted, time.monotonic()
        for link, parcel in parcels:
            if self._waits(link):
                self._windows.post(link, chunk.number, parcel)
        return 0

    def _is_sent(self, link: Link, item: int) -> bool:
        """Whether anything is written to an engine rank."""
        if not takes(self._job, self._sent, link.engine):
            return False
        return not self._is_delta or (item in self._patches and not self._sent[link.engine].needs_whole)

    def _waits(self, link: Link) -> bool:
        """Whether chunks wait for room in a window; patches have room of their own."""
        return link.has_window and not self._is_delta

    def _parcel(self, link: Link, items: Sequence[int]) -> Parcel:
        chunk = self._chunk(items[0])
        if not self._is_delta:
            return link.chunks[chunk.outgoing.now][chunk.number]
        patches = {self._chunk(item).number: self._patches[item] for item in items if item in self._patches}
        self._sent[link.engine].sizes.update({number: patch.num_bytes for number, patch in patches.items()})
        return self._program.patch_batch(link, list(patches.values()))

    def _finish(self, batch: int) -> int:
        """Wait until chunks were written everywhere; their memory is free then."""
        item = self._batches[batch][-1]
        chunk = self._chunk(item)
        posted, began = self._posted.pop(batch)
        num_bytes = wait_all(self._job, posted, self._sent)
        num_bytes += self._windows.wait([link for link in chunk.links if self._waits(link)], chunk.number)
        end = time.monotonic()
        self._job.flow.span("write", max(began, self._last_end), end, num_bytes)
        self._last_end = end
        if self._is_delta or not chunk.outgoing.is_kept:
            for each in self._batches[batch]:
                self._program.room.leave(self._numbers[each])
        if item + 1 < len(self._numbers):
            self._program.room.skip_to(self._numbers[item + 1])
        return num_bytes


def divided(program: SendProgram, numbers: Sequence[int]) -> list[list[int]]:
    """Chunks whose patches are made together: of one stream, and so few that the next ones find room meanwhile."""
    room = program.room
    batches: list[list[int]] = []
    first, num_bytes, num_staged = -1, 0, 0
    for item, number in enumerate(numbers):
        outgoing = program.chunks[number].outgoing
        num_staged += room.sizes[number]
        fits = room.can_join(number, first) and 3 * num_staged <= room.capacity
        is_same = bool(batches) and outgoing is program.chunks[first].outgoing
        if is_same and fits and num_bytes < outgoing.batch_bytes:
            batches[-1].append(item)
        else:
            batches.append([item])
            first, num_bytes, num_staged = number, 0, room.sizes[number]
        num_bytes += outgoing.layouts[program.chunks[number].number].num_bytes
    return batches
