"""What happened in each version, as the controller heard and told it: a line of the journal when it has ended.

    {"version": 7, "at": 1763370000.1, "outcome": "committed", "reason": "", "seconds": 0.31,
     "moments": [[0.0, "Want", "trainer 0"], [0.001, "Expect", "engine 0"], …],
     "writes": [[0, 0, 1048576, 0.2], …], "arrivals": [[0, 0, 1048576, 0.19], …],
     "stages": {"trainer 0": {"convert": 0.1, "write": 0.2}}, "pauses": {"engine 0": 0.003}}

Moments are seconds since the first trainer wanted the version. Writes and arrivals are the two ends of each link:
trainer, engine rank, bytes, seconds. Belongs to the controller's thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from weft.runtime.control.member_id import MemberId
from weft.runtime.control.messages import Committed, Decide, Written
from weft.runtime.controller.journal import Journal

MAX_VERSIONS = 64
"""Versions that are remembered, under way and ended: members that lie must not fill the memory."""
Transfers = list[tuple[int, int, int, float]]
PUBLISHED = "Published"
"""The moment at which a trainer published a version that it had been told to write before; not a message."""


@dataclass(slots=True)
class _Version:
    """One version under way."""

    began: float
    moments: list[tuple[float, str, str]] = field(default_factory=list)
    writes: dict[tuple[int, int], tuple[int, float]] = field(default_factory=dict)
    """What was written from a trainer to an engine rank; in the last round, where patches did not suffice."""
    arrivals: Transfers = field(default_factory=list)
    stages: dict[str, dict[str, float]] = field(default_factory=dict)
    pauses: dict[str, float] = field(default_factory=dict)

    def note(self, at: float, member: MemberId, message: Any) -> None:
        """A message came or went."""
        self.moments.append((round(at - self.began, 6), type(message).__name__, str(member)))
        if isinstance(message, Written):
            self._note_published(member, _sane(message.late_s))
            self.writes |= {(member.rank, each.peer): (each.num_bytes, _sane(each.seconds)) for each in message.reports}
            self.stages[str(member)] = {stage: _sane(seconds) for stage, seconds in message.stages.items()}
        elif isinstance(message, Committed):
            self.arrivals += [
                (part.trainer, member.rank, part.num_bytes, _sane(part.seconds)) for part in message.arrivals
            ]
            self.pauses[str(member)] = _sane(message.pause_s)

    def _note_published(self, member: MemberId, late_s: float) -> None:
        """When a trainer published a version that it had been told to write before."""
        if late_s <= 0:
            return
        told = next((at for at, kind, to in reversed(self.moments) if kind == "Go" and to == str(member)), None)
        if told is not None:
            self.moments.append((round(told + late_s, 6), PUBLISHED, str(member)))

    def line(self, decision: Decide, ended: float) -> dict[str, Any]:
        """What the journal keeps of it."""
        return {
            "version": decision.version,
            "outcome": "committed" if decision.commit else "aborted",
            "reason": decision.reason,
            "seconds": round(ended - self.began, 6),
            "moments": self.moments,
            "writes": [(*link, *written) for link, written in self.writes.items()],
            "arrivals": self.arrivals,
            "stages": self.stages,
            "pauses": self.pauses,
        }


class Timelines:
    """Versions under way; those that have ended are in the journal. Without a journal, nothing is kept.

    Members wait while the controller hears and tells: messages are only put aside then, and looked at by the journal.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._versions: dict[int, _Version] = {}
        self._ended: dict[int, None] = {}
        """Versions that have ended lately: what is said of them afterwards does not count."""

    def heard(self, member: MemberId, message: Any) -> None:
        """A member said something."""
        if not self._journal.is_open:
            return
        self._journal.add(partial(self._lines, time.monotonic(), member, message, is_end=False), is_urgent=False)

    def told(self, member: MemberId, message: Any) -> None:
        """A member was told something. Trainers are told last what became of a version."""
        if not self._journal.is_open:
            return
        is_end = isinstance(message, Decide) and member.side == "trainer"
        self._journal.add(partial(self._lines, time.monotonic(), member, message, is_end=is_end), is_urgent=is_end)

    def _lines(self, at: float, member: MemberId, message: Any, *, is_end: bool) -> Iterator[dict[str, Any]]:
        """Lines that a message gives: its version has begun, or has ended."""
        number = getattr(message, "version", None)
        if not isinstance(number, int) or number in self._ended:
            return
        version = self._versions.get(number)
        if version is None:
            version = self._versions[number] = _Version(began=at)
            _forget_oldest(self._versions)
            yield {"begun": number}
        version.note(at, member, message)
        if is_end:
            del self._versions[number]
            self._ended[number] = None
            _forget_oldest(self._ended)
            yield version.line(message, at)


def _sane(seconds: float) -> float:
    """What is said is written down before it is checked: JSON knows no infinity."""
    return seconds if math.isfinite(seconds) else 0.0


def _forget_oldest(versions: dict[int, Any]) -> None:
    while len(versions) > MAX_VERSIONS:
        del versions[next(iter(versions))]
