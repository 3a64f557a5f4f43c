"""What a controller does, line by line, in a file that it only ever appends to: the events file.

    {"at": 1763370000.1, "controller": "5f…", "trainers": 2, "engine_ranks": 2, "mode": "shadow", …}     it started
    {"at": …, "member": "engine 0", "state": "joined", "host": "a", "device": "cuda:0", "reason": ""}    or "lost"
    {"at": …, "plan": "81…", "bytes": 1048576, "links": [[0, 0, 524288, "shm", 0.0], …], …}              in force
    {"at": …, "begun": 7}                                                                                a version
    {"at": …, "version": 7, "outcome": "committed", …}                          it has ended, see `timeline`

Lines reach the file when no message waits for an answer, those of a version when it has ended. A restarted controller
appends to the same file. `weft why`, `weft trace` and `weft dashboard` read it. Belongs to the controller's thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from weft.errors import ConfigError

log = logging.getLogger(__name__)

PATIENCE_S = 0.1
"""How long entries that are not urgent may wait."""
Lines = Iterable[dict[str, Any]]


class Journal:
    """The file, if one was asked for."""

    def __init__(self, path: Path | None) -> None:
        self._encode = msgspec.json.Encoder().encode
        self._waiting: list[tuple[float, Callable[[], Lines]]] = []
        """When each entry was added, and what makes its lines."""
        self._is_urgent = False
        try:
            self._file = None if path is None else path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(f"events cannot be written to `{path}`: {error}") from error

    @property
    def is_open(self) -> bool:
        """Whether lines are kept."""
        return self._file is not None

    def write(self, **facts: Any) -> None:
        """Add a line."""
        self.add(lambda: (facts,), is_urgent=True)

    def add(self, make: Callable[[], Lines], *, is_urgent: bool) -> None:
        """Add lines that are made when they are written."""
        if self._file is not None:
            self._waiting.append((time.time(), make))
            self._is_urgent |= is_urgent

    def write_due(self) -> None:
        """Write what was added, if it is urgent or has waited for long."""
        if self._is_urgent or (self._waiting and time.time() > self._waiting[0][0] + PATIENCE_S):
            self._write_waiting()

    def _write_waiting(self) -> None:
        """A full disk ends the recording, not the controller."""
        entries, self._waiting, self._is_urgent = self._waiting, [], False
        lines = b"".join(self._made(at, make) for at, make in entries)
        if self._file is None or not lines:
            return
        try:
            self._file.write(lines)
        except OSError as error:
            log.warning("events are no longer written: %s", error)
            self.close()

    def _made(self, at: float, make: Callable[[], Lines]) -> bytes:
        """An entry's lines. One that triggers a bug is left out, and does not stop the controller."""
        try:
            return b"".join(self._encode({"at": at, **line}) + b"\n" for line in make())
        except Exception:
            log.exception("internal error while recording an event")
            return b""

    def close(self) -> None:
        """Write what was added, and no more lines."""
        self._write_waiting()
        file, self._file = self._file, None
        if file is not None:
            file.close()
