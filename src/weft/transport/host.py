"""Processes of one host: recognising them, and noticing when they are gone.

Process IDs are reused and mean different processes in different containers, so a process is recognised by its ID, its
start time and the boot it belongs to, and held by a pidfd from then on.
"""

from __future__ import annotations

import os
import select
from pathlib import Path

import msgspec

from weft.errors import PeerLost, TransportError, TransportUnavailable

CELL_BYTES = 16
"""Arrival cells of one target: {tag, bytes}, one for each possible writer."""


class ProcessIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """One process, for as long as it lives."""

    pid: int
    start_ticks: int
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        """The identity of a living process of this host."""
        stat = Path(f"/proc/{pid}/stat").read_text()
        return cls(pid=pid, start_ticks=int(stat.rpartition(")")[2].split()[19]), boot_id=boot_id())


def boot_id() -> str:
    """Identifies this boot of this host."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class LivingProcess:
    """A peer process that was recognised; `check` raises PeerLost once it has ended."""

    def __init__(self, identity: ProcessIdentity, member: str) -> None:
        if identity.boot_id != boot_id():
            raise TransportUnavailable(f"{member} is on another host", hint="use the nixl transport between hosts")
        self.member = member
        try:
            self._pidfd = os.pidfd_open(identity.pid)
        except ProcessLookupError:
            raise PeerLost(f"{member} (process {identity.pid}) is gone") from None
        except (OverflowError, OSError) as error:
            raise TransportError(f"process {identity.pid} of {member} cannot be opened: {error}") from error
        try:
            now = ProcessIdentity.of(identity.pid)
        except OSError:
            now = None
        if now != identity:
            os.close(self._pidfd)
            raise PeerLost(f"{member} (process {identity.pid}) is gone; its ID now belongs to another process")
        self.pid = identity.pid

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone."""
        poller = select.poll()  # select() fails for descriptors above 1,023
        poller.register(self._pidfd, select.POLLIN)
        return bool(poller.poll(0))

    def check(self) -> None:
        """Raise PeerLost if the process has ended."""
        if self.has_ended:
            raise PeerLost(f"{self.member} (process {self.pid}) has ended")

    def close(self) -> None:
        """Let go of the process."""
        os.close(self._pidfd)


def process_has_ended(identity: ProcessIdentity) -> bool:
    """Whether a process of this host and container has ended, so that it can never write again."""
    try:
        process = LivingProcess(identity, "")
    except PeerLost:
        return True
    try:
        return process.has_ended
    finally:
        process.close()
