"""Making, checking and applying patches of images where they lie: in CPU or GPU memory.

On a GPU one launch works on many images, and the host waits once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from weft.codec import delta
from weft.codec.conversion import ChunkFill
from weft.codec.delta import ImageRows
from weft.codec.image import ImageLayout, padded
from weft.core.geometry.planes import Planes
from weft.devices import CPU
from weft.errors import CodecError

Sizes = Callable[[], list[int]]
"""Waits until patches are made; returns the bytes of each image's."""


class ImagePair(NamedTuple):
    """Two images, and where their patches go."""

    layout: ImageLayout
    now: int
    old: int | None
    """None: an anchor, which needs no base."""
    out: int
    capacity: int


class PatchedImage(NamedTuple):
    """The patches of an image, and what they change."""

    layout: ImageLayout
    patches: int
    num_bytes: int
    rows: Sequence[ImageRows]
    """Where the bytes of each section are."""


class KeptChunk(NamedTuple):
    """A Chunk of weights that are copied unchanged, and its image."""

    layout: ImageLayout
    planes: Planes
    """Where the weights are; destinations are relative to the beginning of the image."""
    image: int


class KeptImage(Protocol):
    """What engines hold: one image, which is brought up to date by the pass that makes the patches."""

    def begin(self) -> None:
        """Begin a version: what the image is now can be restored."""

    def update(self, chunks: Sequence[int], outs: Sequence[int], *, base: int, version: int) -> Sizes:
        """Bring Chunks up to date with the weights, and make their patches; or start to."""

    def restore(self) -> bool:
        """Undo what has changed since `begin`; False if there were too many changes, and the image is not valid."""


class Patcher(Protocol):
    """Patches on one device. Addresses are in its memory."""

    @property
    def batch_bytes(self) -> int:
        """How many bytes of images to work on at a time, at least; 0: one image after the other."""

    def encode(self, images: Sequence[ImagePair], *, base: int, version: int) -> Sizes:
        """Make the patches of images, or start to."""

    def kept_image(
        self, layouts: Sequence[ImageLayout], fills: Sequence[ChunkFill], images: Sequence[int], *, undo_bytes: int
    ) -> KeptImage | None:
        """Keep one image of Chunks, at these addresses, and an undo list; None where two have to alternate."""

    def check(self, images: Sequence[PatchedImage], *, base: int | None, version: int) -> list[CodecError | None]:
        """What is wrong with the patches of each image; None where they are valid patches of version `base`."""

    def apply(self, images: Sequence[PatchedImage]) -> None:
        """Apply checked patches."""


class CpuPatcher:
    """Patches of CPU memory."""

    batch_bytes = 0

    def encode(self, images: Sequence[ImagePair], *, base: int, version: int) -> Sizes:
        """See ImageLayout."""
        sizes = [
            layout.encode(now, old, out, capacity, base=base, version=version)
            for layout, now, old, out, capacity in images
        ]
        return lambda: sizes

    def kept_image(
        self, layouts: Sequence[ImageLayout], fills: Sequence[ChunkFill], images: Sequence[int], *, undo_bytes: int
    ) -> None:
        """Two images alternate."""

    def check(self, images: Sequence[PatchedImage], *, base: int | None, version: int) -> list[CodecError | None]:
        """See ImageLayout."""
        found: list[CodecError | None] = []
        for image in images:
            try:
                image.layout.check(image.patches, image.num_bytes, base=base, version=version)
                found.append(None)
            except CodecError as error:
                found.append(error)
        return found

    def apply(self, images: Sequence[PatchedImage]) -> None:
        """See ImageLayout."""
        for image in images:
            image.layout.apply(image.patches, image.num_bytes, image.rows)


def check_room(layout: ImageLayout, capacity: int) -> None:
    """Raise CodecError if the patches of an image may be too large for their place."""
    most = sum(padded(delta.max_bytes(part.num_elements, part.width)) for part in layout.sections)
    if most > capacity:
        raise CodecError(f"patches of {most} bytes may not fit into {capacity}")


def patcher_for(device: str) -> Patcher:
    """The patcher of a device's memory."""
    if device == CPU:
        return CpuPatcher()
    from weft.codec.gpu.patcher import GpuPatcher  # noqa: PLC0415 - torch and Triton only where there is a GPU
    from weft.gpu import GpuWork  # noqa: PLC0415 - the same

    return GpuPatcher(GpuWork(int(device.partition(":")[2])))
