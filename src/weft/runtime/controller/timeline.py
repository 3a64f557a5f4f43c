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
from dataclasses import dataclass, field
from typing import Any

from weft.runtime.control.member_id import MemberId
from weft.runtime.control.messages import Committed, Decide, Written
from weft.runtime.controller.journal import Journal

MAX_VERSIONS = 64
"""Versions that are remembered, under way and ended: members that lie must not fill the memory."""
Transfers = list[tuple[int, int, int, float]]


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

    def note(self, member: MemberId, message: Any) -> None:
        """A message came or went."""
        self.moments.append((round(time.monotonic() - self.began, 6), type(message).__name__, str(member)))
        if isinstance(message, Written):
            self.writes |= {
                (part.trainer, part.engine): (part.num_bytes, _sane(part.seconds)) for part in message.parts
            }
            self.stages[str(member)] = {stage: _sane(seconds) for stage, seconds in message.stages.items()}
        elif isinstance(message, Committed):
            self.arrivals += [
                (part.trainer, member.rank, part.num_bytes, _sane(part.seconds)) for part in message.arrivals
            ]
            self.pauses[str(member)] = _sane(message.pause_s)


class Timelines:
    """Versions under way; those that have ended are in the journal. Without a journal, nothing is kept."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._versions: dict[int, _Version] = {}
        self._ended: dict[int, None] = {}
        """Versions that have ended lately: what is said of them afterwards does not count."""

    def heard(self, member: MemberId, message: Any) -> None:
        """A member said something."""
        self._note(member, message)

    def told(self, member: MemberId, message: Any) -> None:
        """A member was told something. Trainers are told last what became of a version."""
        version = self._note(member, message)
        if isinstance(message, Decide) and member.side == "trainer" and version is not None:
            self._end(message, version)

    def _note(self, member: MemberId, message: Any) -> _Version | None:
        if not self._journal.is_open:
            return None
        number = getattr(message, "version", None)
        if not isinstance(number, int) or number in self._ended:
            return None
        version = self._versions.get(number)
        if version is None:
            version = self._versions[number] = _Version(began=time.monotonic())
            _forget_oldest(self._versions)
            self._journal.write(begun=number)
        version.note(member, message)
        return version

    def _end(self, decision: Decide, version: _Version) -> None:
        del self._versions[decision.version]
        self._ended[decision.version] = None
        _forget_oldest(self._ended)
        self._journal.write(
            version=decision.version,
            outcome="committed" if decision.commit else "aborted",
            reason=decision.reason,
            seconds=round(time.monotonic() - version.began, 6),
            moments=version.moments,
            writes=[(*link, *written) for link, written in version.writes.items()],
            arrivals=version.arrivals,
            stages=version.stages,
            pauses=version.pauses,
        )


def _sane(seconds: float) -> float:
    """What is said is written down before it is checked: JSON knows no infinity."""
    return seconds if math.isfinite(seconds) else 0.0


def _forget_oldest(versions: dict[int, Any]) -> None:
    while len(versions) > MAX_VERSIONS:
        del versions[next(iter(versions))]
