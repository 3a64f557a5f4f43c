"""Patches of a version, from their arrival until they are handed to the mode.

consumes      patches that have landed, and the version they change
produces      patches that were checked, handed to the mode
waits for     its own thread: opening and applying patches may take longer than a heartbeat
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from functools import partial

from weft.codec.patching import patcher_for
from weft.devices import CPU
from weft.errors import TransferTimeout
from weft.runtime.control.write_reports import WriteReport
from weft.runtime.memory import brought
from weft.runtime.receive.incoming import Patches, arriving_patches
from weft.runtime.receive.landing import ArrivingLink, PatchedLink
from weft.runtime.receive.modes import Mode


class PatchIntake:
    """The patches of one version at a time."""

    def __init__(self, member: str, device: str) -> None:
        self._member, self._device = member, device
        self._patcher, self._is_brought = patcher_for(device), False
        self._links: list[PatchedLink] = []
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"weft-{member}-patch")
        self._taking: Future[None] | None = None

    def plan(self, links: Sequence[PatchedLink], *, from_host: bool = False, stays_there: bool = False) -> None:
        """Where patches of all trainers will land.

        `from_host`: in host memory, though the weights are on a GPU. `stays_there`: what they change is there, too.
        """
        self._links = list(links)
        self._patcher = patcher_for(CPU if from_host and stays_there else self._device)
        self._is_brought = from_host and not stays_there

    def arriving(self, reports: Sequence[WriteReport]) -> list[ArrivingLink]:
        """What is in flight; the sizes of patches are known once they were sent."""
        sent = {report.peer: report.sizes for report in reports}
        return [arriving_patches(link, sent.get(link.trainer, [])) for link in self._links]

    def end_old(self, timeout_s: float) -> None:
        """Wait for work on a version that was given up meanwhile."""
        if self._taking is not None:
            if wait_for_futures([self._taking], timeout_s).not_done:
                raise TransferTimeout(f"{self._member} is still busy with the patches of a version that was given up")
            self._taking = None

    def took(
        self, version: int, reports: Sequence[WriteReport], mode: Mode, base: int | None, *, compressed: bool
    ) -> bool:
        """Whether the other thread has processed the patches. Raises its error."""
        if self._taking is None:
            self._taking = self._worker.submit(self._take, version, reports, mode, base, compressed)
        if not self._taking.done():
            return False
        taken, self._taking = self._taking, None
        taken.result()
        return True

    def _take(
        self, version: int, reports: Sequence[WriteReport], mode: Mode, base: int | None, compressed: bool
    ) -> None:
        """Check the patches, and hand them to the mode."""
        bring = partial(brought, self._device) if self._is_brought else None
        patches = Patches(version, self._links, reports, self._patcher, compressed=compressed, bring=bring)
        patches.check(base=base)
        mode.take(patches, base)

    def close(self) -> None:
        """Stop the thread."""
        self._worker.shutdown(wait=True)
