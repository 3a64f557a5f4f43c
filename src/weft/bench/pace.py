"""Keeping to the rate of a link that is not there."""

from __future__ import annotations

import threading
import time


class Pace:
    """A link of a given rate: bytes that are passed to it are through when `take` returns."""

    def __init__(self, bytes_per_s: float) -> None:
        """`bytes_per_s`: `inf` for a link that is as fast as the memory behind it."""
        self.bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self._waiting = threading.Event()

    def take(self, num_bytes: int, began_at: float) -> None:
        """Wait until bytes that set out at a time of `time.monotonic()` are through."""
        self._free_at = max(self._free_at, began_at) + num_bytes / self.bytes_per_s
        self._waiting.wait(max(self._free_at - time.monotonic(), 0.0))
