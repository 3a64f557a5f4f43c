"""Making, checking and applying patches of an image where it lies: in CPU or GPU memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from weft.codec.delta import ImageRows
from weft.codec.image import ImageLayout
from weft.devices import CPU


class Patcher(Protocol):
    """Patches on one device. Addresses are in its memory."""

    def encode(
        self, layout: ImageLayout, now: int, old: int | None, out: int, capacity: int, *, base: int, version: int
    ) -> int:
        """The patches from an old image, or an anchor, to a new one; returns their bytes."""

    def check(self, layout: ImageLayout, patches: int, num_bytes: int, *, base: int | None, version: int) -> None:
        """Raise CodecError unless these are valid patches of version `base`."""

    def apply(self, layout: ImageLayout, patches: int, num_bytes: int, rows: Sequence[ImageRows]) -> None:
        """Apply checked patches to the rows of each section."""


class CpuPatcher:
    """Patches of CPU memory."""

    def encode(
        self, layout: ImageLayout, now: int, old: int | None, out: int, capacity: int, *, base: int, version: int
    ) -> int:
        """See ImageLayout."""
        return layout.encode(now, old, out, capacity, base=base, version=version)

    def check(self, layout: ImageLayout, patches: int, num_bytes: int, *, base: int | None, version: int) -> None:
        """See ImageLayout."""
        layout.check(patches, num_bytes, base=base, version=version)

    def apply(self, layout: ImageLayout, patches: int, num_bytes: int, rows: Sequence[ImageRows]) -> None:
        """See ImageLayout."""
        layout.apply(patches, num_bytes, rows)


def patcher_for(device: str) -> Patcher:
    """The patcher of a device's memory."""
    if device == CPU:
        return CpuPatcher()
    from weft.codec.patching_gpu import GpuPatcher  # noqa: PLC0415 - torch and Triton only where there is a GPU
    from weft.gpu import GpuWork  # noqa: PLC0415 - the same

    return GpuPatcher(GpuWork(int(device.partition(":")[2])))
