"""The version that is being written, or waits to be committed everywhere: which member has done what."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from weft.core.version import Decision
from weft.runtime.control.messages import Go
from weft.runtime.control.write_reports import WriteReports
from weft.runtime.controller.written_links import WrittenLinks


@dataclass(slots=True)
class Transfer:
    """One version under way."""

    version: int
    began: float
    deadline: float
    engines: set[int]
    """Engine ranks that take part."""
    unpaused: set[int]
    """Engine ranks that must pause before any trainer may write."""
    pause_deadline: float
    waiting: set[int] = field(default_factory=set)
    """Trainers that were not told to write yet."""
    writers: set[int] = field(default_factory=set)
    """Trainers that were told to write and have not reported back, whether or not they have begun."""
    finished: set[int] = field(default_factory=set)
    """Trainers that have written all they owe."""
    num_met: int = 0
    """Trainers that report exactly what they owe."""
    reported: list[tuple[int, WriteReports]] = field(default_factory=list)
    """What trainers have written: rank, and its links."""
    magnitude_bytes: int = 0
    """Bytes trainers exchanged to agree on FP8 scales."""
    whole: set[int] = field(default_factory=set)
    """Engine ranks for which patches do not suffice: they get the version whole, in a second round."""
    is_second_round: bool = False
    dropped: set[int] = field(default_factory=set)
    """Engine ranks that were lost or failed, or belong to an engine of which one did."""
    go: Go | None = None
    """What trainers are told when they may write; made when the first one is, and again when takers are lost."""
    told: set[int] = field(default_factory=set)
    """Engine ranks that trainers were told to write to."""
    has_bytes: bool = False
    """Whether any byte of it was written, or may have been by a writer that was lost."""
    is_decided: bool = False
    decided_at: float = 0.0
    is_commit: bool = False
    aborted: Decision | None = None
    """An abort that engines have not heard of, because writers have not yet said whether they wrote anything."""
    abort_deadline: float = 0.0
    _links: tuple[list[tuple[int, WriteReports]], int, WrittenLinks] | None = None
    """What `links` was last, and for which reports."""

    def begin_second_round(self, *, deadline: float, pauses: bool) -> None:
        """All trainers write once more, to the engine ranks that need the version whole; those may have to pause."""
        self.is_second_round, self.deadline, self.go = True, deadline, None
        self.whole &= self.engines - self.dropped
        self.reported = [(trainer, reports.without(self.whole)) for trainer, reports in self.reported]
        self.waiting, self.finished = self.finished, set()
        if pauses:
            self.unpaused, self.told, self.has_bytes = set(self.whole), set(), False

    def drop(self, ranks: Iterable[int]) -> None:
        """Engine ranks no longer take part: they are not waited for, and no trainer is told to write to them."""
        self.dropped.update(ranks)
        self.go = None
        self.unpaused -= self.dropped

    @property
    def asked(self) -> set[int]:
        """Engine ranks that were to be written to when this round began."""
        return self.whole if self.is_second_round else self.engines

    @property
    def takers(self) -> set[int]:
        """Those that still take part."""
        return self.asked - self.dropped

    @property
    def links(self) -> WrittenLinks:
        """All that was written."""
        if self._links is None or self._links[0] is not self.reported or self._links[1] != len(self.reported):
            self._links = self.reported, len(self.reported), WrittenLinks.of(self.reported)
        return self._links[2]

    def lateness(self, *, num_trainers: int, version_s: float) -> str:
        """What a version that is late waits for."""
        waits = [f"engine {rank} to pause" for rank in sorted(self.unpaused)]
        waits += [f"trainer {rank} to write" for rank in sorted(set(range(num_trainers)) - self.finished)]
        late = f"version {self.version} was not ready everywhere after {version_s:.1f} s"
        return f"{late}, waiting for {', '.join(waits) or 'engines to verify it'}"

    def is_sent_whole(self, owed: NDArray[np.int64]) -> bool:
        """Whether writers report every byte of a matrix [trainer, engine] as sent, to those that take part."""
        sent, links = np.zeros_like(owed), self.links
        sent[links.trainer, links.engine] = links.num_bytes
        engines = sorted(self.engines)
        return bool((sent[:, engines] == owed[:, engines]).all())
