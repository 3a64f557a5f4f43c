"""The observation point in a trainer's writes. It says when a version's first bytes are about to be written, and may
stop or end the process exactly there. What is written, and where, is not changed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from tests.support.processes import stop_here
from weft.transport.cma import CmaTransport
from weft.transport.nixl import NixlTransport
from weft.transport.shm import ShmTransport

WRITES = (
    (ShmTransport, "_copy"),
    (ShmTransport, "_copy_planes"),
    (ShmTransport, "_write_chunk"),
    (CmaTransport, "_write_chunk"),
)
POSTS = ((NixlTransport, "_begin"),)
STOP, END = "stop", "end"


class WriteGate:
    """Wraps what puts bytes into other processes; one for a trainer process."""

    def __init__(self, tell: Callable[..., None]) -> None:
        self._tell = tell
        self._version = -1
        self._is_first = False
        self._action = ""
        for owner, name in (*WRITES, *POSTS):
            self._wrap(owner, name)

    def expect(self, version: int, action: str = "") -> None:
        """A version will be written; at its first bytes: report, then stop or end the process, if that is asked for."""
        self._version, self._action, self._is_first = version, action, True

    def _wrap(self, owner: Any, name: str) -> None:
        write = getattr(owner, name)

        def observed(*args: Any, **options: Any) -> Any:
            version, stopped = self._pass()
            try:
                return write(*args, **options)
            finally:
                if stopped:
                    self._tell("wrote_late", version)

        setattr(owner, name, observed)

    def _pass(self) -> tuple[int, bool]:
        """Before a write; returns its version and whether the process was stopped here."""
        if not self._is_first:
            return self._version, False
        self._is_first, version, action = False, self._version, self._action
        self._tell("writing", version)
        if action == END:
            os.kill(os.getpid(), signal.SIGKILL)
        if action == STOP:
            stop_here()
        return version, action == STOP
