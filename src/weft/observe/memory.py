"""Memory of processes: the peak of this one, and of several together."""

from __future__ import annotations

import os
import re
import resource
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self

LOOK_S = 0.5


def peak_rss_bytes() -> int:
    """Peak memory of this process since it started its program.

    `getrusage` would include the process that started it, if that was larger.
    """
    try:
        found = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), flags=re.MULTILINE)
    except OSError:
        found = None
    return int(found[1]) * 1024 if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class PeakMemory:
    """The most that this process and others had together at one moment."""

    def __init__(self, others: Callable[[], Iterable[int]]) -> None:
        """`others`: the processes to look at, asked before every look."""
        self._others, self._over = others, threading.Event()
        self.peak_bytes = 0
        self._thread = threading.Thread(target=self._watch, name="weft-memory", daemon=True)

    def _watch(self) -> None:
        while True:
            present = sum(map(_rss_bytes, [os.getpid(), *self._others()]))
            self.peak_bytes = max(self.peak_bytes, present)
            if self._over.wait(LOOK_S):
                return

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._thread.join()


def _rss_bytes(process: int) -> int:
    """What a process has in memory now; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError, ValueError):
        return 0
