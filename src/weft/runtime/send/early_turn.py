"""The turn of a version that this trainer has not published yet: another trainer asked for it.

turn = EarlyTurn()
turn.keep(go, time.monotonic())     # on the control thread
turn.take(version=7)                # when version 7 is published: the turn, if it is this version's or an earlier one's
turn.withdraw(version=7)            # when version 7 was decided without this trainer
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from weft.runtime.control.messages import Go


class WriteTurn(NamedTuple):
    """A version may be written."""

    go: Go
    since: float
    """A time of `time.monotonic`."""


class EarlyTurn:
    """At most one turn; several threads use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: WriteTurn | None = None

    @property
    def version(self) -> int | None:
        """Whose turn it is, if it is any."""
        kept = self._kept
        return None if kept is None else kept.go.version

    def keep(self, go: Go, since: float) -> None:
        """A version's turn has come."""
        with self._lock:
            self._kept = WriteTurn(go, since)

    def take(self, version: int) -> WriteTurn | None:
        """A version was published: the turn that is now over, its own or that of a version that was passed over."""
        with self._lock:
            if self._kept is None or version < self._kept.go.version:
                return None
            kept, self._kept = self._kept, None
        return kept

    def withdraw(self, version: int) -> bool:
        """A version is decided; returns whether it was its turn."""
        with self._lock:
            is_kept = self._kept is not None and self._kept.go.version == version
            if is_kept:
                self._kept = None
        return is_kept

    def clear(self) -> None:
        """The controller that gave it is gone."""
        with self._lock:
            self._kept = None
