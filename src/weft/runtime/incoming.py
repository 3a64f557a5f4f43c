"""An engine rank's side of links that carry patches: where they land, whether they are sound, where they go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft.codec.delta import Bytes, memory_view
from weft.codec.image import ImageLayout
from weft.errors import CodecError
from weft.native import Column
from weft.runtime.arrivals import Stream
from weft.runtime.messages import Part, Source, unpack


@dataclass(frozen=True, kw_only=True)
class Incoming:
    """What comes from one trainer as patches."""

    trainer: int
    transport: str
    slot: int
    """Where its patches land."""
    capacity: int
    layout: ImageLayout
    address: Column
    """Where each row of the image belongs."""

    @classmethod
    def of(cls, source: Source) -> Incoming:
        """From an engine rank's part of the plan."""
        layout = ImageLayout.of(unpack(source.length), unpack(source.width))
        return cls(
            trainer=source.trainer,
            transport=source.transport,
            slot=source.slot,
            capacity=layout.max_patch_bytes,
            layout=layout,
            address=unpack(source.address),
        )

    def stream(self, num_bytes: int) -> Stream:
        """The bytes of one version's patches."""
        if not 0 < num_bytes <= self.capacity:
            raise CodecError(f"trainer {self.trainer} sent {num_bytes} bytes of patches for {self.capacity}")
        address, position, length = (np.array([n], dtype=np.uint64) for n in (self.slot, 0, num_bytes))
        return Stream(
            trainer=self.trainer,
            transport=self.transport,
            address=address,
            position=position,
            length=length,
            ends=length,
            total=num_bytes,
        )


class Patches:
    """The patches of one version, whole and verified."""

    def __init__(
        self, version: int, incoming: Sequence[Incoming], parts: Sequence[Part], *, compressed: bool = False
    ) -> None:
        sent = {part.trainer: part.num_bytes for part in parts}
        self.version = version
        self._all = [(link, *self._open(link, sent[link.trainer], compressed)) for link in incoming]

    @staticmethod
    def _open(link: Incoming, num_bytes: int, compressed: bool) -> tuple[int, int, Bytes | None]:
        """Where a link's patches are, unpacked: address, bytes, and what keeps them."""
        if not compressed:
            return link.slot, num_bytes, None
        try:
            patches = link.layout.decompress(memory_view(link.slot, num_bytes))
        except CodecError as error:
            raise CodecError(f"trainer {link.trainer} sent {error}", hint=error.hint) from error
        return int(patches.ctypes.data), len(patches), patches

    def check(self, *, base: int | None) -> None:
        """Raise CodecError, naming the trainer, unless all are sound and made from what is here."""
        for link, address, num_bytes, _ in self._all:
            try:
                link.layout.check(address, num_bytes, base=base, version=self.version)
            except CodecError as error:
                raise CodecError(f"trainer {link.trainer} sent {error}", hint=error.hint) from error

    def apply(self) -> None:
        """Change the weights where they belong."""
        for link, address, num_bytes, _ in self._all:
            link.layout.apply(address, num_bytes, link.address)
