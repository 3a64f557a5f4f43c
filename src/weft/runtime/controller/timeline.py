"""What happened in each version, as the controller heard and told it: one JSON line for every version that has ended.

    {"version": 7, "at": 1763370000.1, "outcome": "committed", "reason": "", "seconds": 0.31,
     "moments": [[0.0, "Want", "trainer 0"], [0.001, "Expect", "engine 0"], …],
     "writes": [[0, 0, 1048576, 0.2], …], "stages": {"trainer 0": {"convert": 0.1, "write": 0.2}}}

Moments are seconds since the first trainer wanted the version; writes are trainer, engine rank, bytes, seconds. `weft
why` reads it. Belongs to the controller's thread.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from weft.errors import ConfigError
from weft.runtime.control.member_id import MemberId
from weft.runtime.control.messages import Decide, Written

log = logging.getLogger(__name__)
MAX_VERSIONS = 64
"""Versions that are remembered, under way and ended: members that lie must not fill the memory."""


@dataclass(slots=True)
class _Version:
    """One version under way."""

    began: float
    moments: list[tuple[float, str, str]] = field(default_factory=list)
    writes: list[tuple[int, int, int, float]] = field(default_factory=list)
    stages: dict[str, dict[str, float]] = field(default_factory=dict)

    def note(self, member: MemberId, message: Any) -> None:
        """A message came or went."""
        self.moments.append((round(time.monotonic() - self.began, 6), type(message).__name__, str(member)))
        if isinstance(message, Written):
            self.writes += [(part.trainer, part.engine, part.num_bytes, part.seconds) for part in message.parts]
            self.stages[str(member)] = message.stages


class Timelines:
    """Versions under way, and the file that those that have ended are appended to; without a file, nothing is kept."""

    def __init__(self, path: Path | None) -> None:
        self._versions: dict[int, _Version] = {}
        self._ended: dict[int, None] = {}
        """Versions that have ended lately: what is said of them afterwards does not count."""
        self._encode = msgspec.json.Encoder().encode
        try:
            self._file = None if path is None else path.open("ab")
        except OSError as error:
            raise ConfigError(f"events cannot be written to `{path}`: {error}") from error

    def heard(self, member: MemberId, message: Any) -> None:
        """A member said something."""
        self._note(member, message)

    def told(self, member: MemberId, message: Any) -> None:
        """A member was told something. Trainers are told last what became of a version."""
        version = self._note(member, message)
        if isinstance(message, Decide) and member.side == "trainer" and version is not None:
            self._end(message, version)

    def _note(self, member: MemberId, message: Any) -> _Version | None:
        number = getattr(message, "version", None)
        if self._file is None or not isinstance(number, int) or number in self._ended:
            return None
        version = self._versions.setdefault(number, _Version(began=time.monotonic()))
        _forget_oldest(self._versions)
        version.note(member, message)
        return version

    def _end(self, decision: Decide, version: _Version) -> None:
        del self._versions[decision.version]
        self._ended[decision.version] = None
        _forget_oldest(self._ended)
        self._write(
            {
                "version": decision.version,
                "at": time.time(),
                "outcome": "committed" if decision.commit else "aborted",
                "reason": decision.reason,
                "seconds": round(time.monotonic() - version.began, 6),
                "moments": version.moments,
                "writes": version.writes,
                "stages": version.stages,
            }
        )

    def _write(self, record: dict[str, Any]) -> None:
        """A full disk ends the recording, not the controller."""
        assert self._file is not None
        try:
            self._file.write(self._encode(record) + b"\n")
            self._file.flush()
        except OSError as error:
            log.warning("events are no longer written: %s", error)
            self.close()

    def close(self) -> None:
        """No more versions are recorded."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


def _forget_oldest(versions: dict[int, Any]) -> None:
    while len(versions) > MAX_VERSIONS:
        del versions[next(iter(versions))]
