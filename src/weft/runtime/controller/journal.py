"""What a controller does, line by line, in a file that it only ever appends to: the events file.

    {"at": 1763370000.1, "controller": "5f…", "trainers": 2, "engine_ranks": 2, "mode": "shadow", …}     it started
    {"at": …, "member": "engine 0", "state": "joined", "host": "a", "device": "cuda:0", "reason": ""}    or "lost"
    {"at": …, "plan": "81…", "bytes": 1048576, "links": [[0, 0, 524288, "shm", 0.0], …], …}              in force
    {"at": …, "begun": 7}                                                                                a version
    {"at": …, "version": 7, "outcome": "committed", …}                          it has ended, see `timeline`

A restarted controller appends to the same file. `weft why`, `weft trace` and `weft dashboard` read it. Belongs to the
controller's thread.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import msgspec

from weft.errors import ConfigError

log = logging.getLogger(__name__)


class Journal:
    """The file, if one was asked for."""

    def __init__(self, path: Path | None) -> None:
        self._encode = msgspec.json.Encoder().encode
        try:
            self._file = None if path is None else path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(f"events cannot be written to `{path}`: {error}") from error

    @property
    def is_open(self) -> bool:
        """Whether lines are kept."""
        return self._file is not None

    def write(self, **facts: Any) -> None:
        """Append a line. A full disk ends the recording, not the controller."""
        if self._file is None:
            return
        try:
            self._file.write(self._encode({"at": time.time(), **facts}) + b"\n")
        except OSError as error:
            log.warning("events are no longer written: %s", error)
            self.close()

    def close(self) -> None:
        """No more lines are written."""
        file, self._file = self._file, None
        if file is not None:
            file.close()
