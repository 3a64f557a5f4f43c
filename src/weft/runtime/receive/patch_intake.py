"""An engine rank's side of versions that come as patches: from their arrival to the weights.

consumes      patches that have landed, and the version the weights are
produces      changed weights: in staging memory (shadow), where they live (in place), or there at commit (patch)
waits for     its own thread: opening and applying patches may take longer than a beat
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass

from weft.codec.patching import patcher_for
from weft.config import ReceiverMode
from weft.core.planes import Planes
from weft.devices import device_work
from weft.errors import IntegrityError, TransferTimeout
from weft.runtime.control.messages import Part
from weft.runtime.receive.incoming import Patches, arriving_patches
from weft.runtime.receive.landing import ArrivingLink, PatchedLink


@dataclass(frozen=True, kw_only=True)
class PatchTarget:
    """What patches are applied to."""

    mode: ReceiverMode
    base: int | None
    """The version the weights are; None where they are torn, or not known."""
    steps: tuple[Planes, ...]
    """How staged weights become visible (mode `shadow`)."""
    compressed: bool


class PatchIntake:
    """The patches of one version at a time."""

    def __init__(self, member: str, device: str) -> None:
        self._member = member
        self._work, self._patcher = device_work(device), patcher_for(device)
        self._links: list[PatchedLink] = []
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"weft-{member}-patch")
        self._taking: Future[None] | None = None
        self._checked: Patches | None = None
        """Patches that wait for a commit (mode `patch`)."""
        self._staged: int | None = None
        """The version in staging memory (mode `shadow`)."""

    def plan(self, links: Sequence[PatchedLink]) -> None:
        """Where patches of all trainers will land. What is staged lies as the plan before wanted it."""
        self._links = list(links)
        self._staged = None

    def arriving(self, parts: Sequence[Part]) -> list[ArrivingLink]:
        """What is on its way; how long patches are is known when they were sent."""
        sent = {part.trainer: part.sizes for part in parts}
        return [arriving_patches(link, sent.get(link.trainer, [])) for link in self._links]

    def end_old(self, timeout_s: float) -> None:
        """Wait for work on a version that was given up meanwhile."""
        if self._taking is not None:
            if wait_for_futures([self._taking], timeout_s).not_done:
                raise TransferTimeout(f"{self._member} is still busy with the patches of a version that was given up")
            self._taking = None

    def took(self, version: int, parts: Sequence[Part], target: PatchTarget) -> bool:
        """Whether patches were dealt with, by the other thread. Raises its error."""
        if self._taking is None:
            self._taking = self._worker.submit(self._take, version, parts, target)
        if not self._taking.done():
            return False
        taken, self._taking = self._taking, None
        taken.result()
        return True

    def _take(self, version: int, parts: Sequence[Part], target: PatchTarget) -> None:
        """Look whether patches fit, and apply them where the engine does not look."""
        patches = Patches(version, self._links, parts, self._patcher, compressed=target.compressed)
        patches.check(base=target.base)
        match target.mode:
            case ReceiverMode.PATCH:
                self._checked = patches
            case ReceiverMode.SHADOW:
                if self._staged != target.base or target.base is None:  # an aborted version, or a new memory
                    for step in reversed(target.steps):
                        self._work.copy_planes(step.back)
                self._staged = version
                patches.apply()
            case ReceiverMode.IN_PLACE:
                patches.apply()

    def checked(self, version: int) -> Patches:
        """The patches that `commit` should apply now (mode `patch`)."""
        patches, self._checked = self._checked, None
        if patches is None or patches.version != version:
            raise IntegrityError(f"{self._member} has no patch to version {version}")
        return patches

    def drop(self, version: int) -> None:
        """The version was aborted."""
        if self._checked is not None and self._checked.version == version:
            self._checked = None

    def has_staged(self, version: int) -> None:
        """Staging memory holds a version that came whole."""
        self._staged = version

    def forget_staged(self) -> None:
        """Staging memory is another one now, or is being written."""
        self._staged = None

    def close(self) -> None:
        """End the thread."""
        self._worker.shutdown(wait=True)
        self._checked = None
