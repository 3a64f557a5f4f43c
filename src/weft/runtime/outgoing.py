"""A trainer's side of one link where bytes change on their way: the image it sends, and what the engine holds.

The image is a copy of the link's bytes in the engine's layout. A version is packed into it; a patch is the difference
to the image the engine has committed. Two images take turns: the second one becomes what the engine holds when the
version is committed, and is written over when it is not.
"""

from __future__ import annotations

from weft.codec.delta import memory_view
from weft.codec.image import ImageLayout
from weft.devices import DeviceWork
from weft.errors import TransferTimeout
from weft.native import Column
from weft.transport.base import Memory, ordinary_memory


class Outgoing:
    """The images of one link, and the patch on its way."""

    def __init__(
        self, layout: ImageLayout, src: Column, work: DeviceWork, *, anchor_every: int, compressed: bool = False
    ) -> None:
        self._layout, self._src, self._work, self._compressed = layout, src, work, compressed
        self._anchor_every = anchor_every
        self._images = [ordinary_memory(layout.num_bytes) for _ in range(2)]
        self._rows = [layout.addresses(image.address) for image in self._images]
        self._now = 0
        self._held: int | None = None
        self._packed: int | None = None
        self._since_anchor = 0
        self.patch: Memory = ordinary_memory(layout.max_patch_bytes)

    @property
    def memory_bytes(self) -> int:
        """Memory the link needs beside the weights."""
        return 2 * self._layout.num_bytes + self.patch.num_bytes

    def pack(self, version: int) -> None:
        """Copy the weights; they may change afterwards."""
        self._work.copy(self._rows[self._now], self._src, self._layout.length)
        self._packed = version

    def encode(self, version: int, *, engine_holds: int | None) -> int:
        """The patch from what the engine holds to the packed version; an anchor where that is not known or is due."""
        if self._packed != version:
            raise TransferTimeout(f"version {version} was not packed")
        old = None
        self._since_anchor += 1
        if engine_holds is not None and engine_holds == self._held and self._since_anchor < self._anchor_every:
            old = self._images[1 - self._now].address
        else:
            self._since_anchor = 0
        where, capacity = self.patch.address, self.patch.num_bytes
        now = self._images[self._now].address
        num_bytes = self._layout.encode(now, old, where, capacity, base=self._held or 0, version=version)
        if not self._compressed:
            return num_bytes
        packed = self._layout.compress(where, num_bytes)
        memory_view(where, len(packed))[:] = packed
        return len(packed)

    def committed(self, version: int) -> None:
        """The engine holds what was packed last."""
        if self._packed == version:
            self._held, self._packed = version, None
            self._now = 1 - self._now
