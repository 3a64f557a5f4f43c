"""How versions reach the live weights of an engine rank: one strategy for each mode.

shadow      land beside the live weights, patches are applied there; a commit copies
in_place    land in the live weights, or pass through a window, while the engine stands still
patch       patches wait beside the live weights and a commit applies them; whole versions are in place
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

from weft.config import ReceiverMode
from weft.core.geometry.planes import Planes
from weft.devices import DeviceWork
from weft.errors import IntegrityError
from weft.runtime.control.messages import Open
from weft.runtime.receive.incoming import Patches
from weft.runtime.receive.reachable import ReachableMemory


class Mode(abc.ABC):
    """What differs between modes."""

    def __init__(self, work: DeviceWork) -> None:
        self._work = work
        self._steps: tuple[Planes, ...] = ()

    def plan(self, steps: Sequence[Planes]) -> None:
        """The steps that make a staged version visible, in order, from now on."""
        self._steps = tuple(steps)

    def reserve(self, memory: ReachableMemory, opening: Open) -> bool:
        """Prepare the memory that trainers write; False if only the engine's thread may do that."""
        memory.land_in_live(window_bytes=opening.landing_bytes)
        return True

    @abc.abstractmethod
    def is_in_place(self, *, whole: bool) -> bool:
        """Whether a version changes the live weights before it is decided; `whole`: instead of patches."""

    @abc.abstractmethod
    def forget(self) -> None:
        """What is staged is no longer valid: it was aborted, is overwritten, or its memory is given up."""

    @abc.abstractmethod
    def take(self, patches: Patches, base: int | None) -> None:
        """Valid patches of the version `base` have arrived. Not called on the engine's thread."""

    def make_visible(self, version: int, *, whole: bool) -> None:
        """On the engine's thread: make a decided version visible."""
        raise IntegrityError(f"version {version} is visible before it is decided in this mode")


class Shadow(Mode):
    """Versions lie beside the live weights until they are committed."""

    def __init__(self, work: DeviceWork) -> None:
        super().__init__(work)
        self._staged: int | None = None
        """The version in staging memory."""

    def plan(self, steps: Sequence[Planes]) -> None:
        """What is staged is laid out for the previous plan."""
        super().plan(steps)
        self._staged = None

    def reserve(self, memory: ReachableMemory, opening: Open) -> bool:
        """A second copy."""
        memory.stage(opening.landing_bytes)
        return True

    def is_in_place(self, *, whole: bool) -> bool:
        """Never."""
        return False

    def forget(self) -> None:
        """The copy is made again for the next patches."""
        self._staged = None

    def take(self, patches: Patches, base: int | None) -> None:
        """Apply them to the copy; after an aborted version, or in new memory, first make it from the live weights."""
        if self._staged != base or base is None:
            for step in reversed(self._steps):
                self._work.copy_planes(step.back)
        self._staged = patches.version
        patches.apply()

    def make_visible(self, version: int, *, whole: bool) -> None:
        """Copy the version to where it belongs."""
        for step in self._steps:
            self._work.copy_planes(step)
        if whole:
            self._staged = version


class InPlace(Mode):
    """Versions are written while the engine stands still."""

    def reserve(self, memory: ReachableMemory, opening: Open) -> bool:
        """The live weights themselves, unless versions come as patches."""
        return super().reserve(memory, opening) if opening.patch_bytes else False

    def is_in_place(self, *, whole: bool) -> bool:
        """Always."""
        return True

    def forget(self) -> None:
        """Nothing is staged."""

    def take(self, patches: Patches, base: int | None) -> None:
        """Apply them at once."""
        patches.apply()


class Patch(Mode):
    """Patches wait for the commit."""

    def __init__(self, work: DeviceWork) -> None:
        super().__init__(work)
        self._checked: Patches | None = None

    def is_in_place(self, *, whole: bool) -> bool:
        """Versions that are sent whole are."""
        return whole

    def forget(self) -> None:
        """Drop patches that were not committed."""
        self._checked = None

    def take(self, patches: Patches, base: int | None) -> None:
        """Keep them."""
        self._checked = patches

    def make_visible(self, version: int, *, whole: bool) -> None:
        """Apply the patches."""
        patches, self._checked = self._checked, None
        if patches is None or patches.version != version:
            raise IntegrityError(f"no patch to version {version} is held")
        patches.apply()


MODES: dict[ReceiverMode, type[Mode]] = {
    ReceiverMode.SHADOW: Shadow,
    ReceiverMode.IN_PLACE: InPlace,
    ReceiverMode.PATCH: Patch,
}
