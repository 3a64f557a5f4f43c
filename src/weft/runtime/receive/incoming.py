"""An engine rank's side of links that carry patches: where they land, whether they are sound, where they go."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft.codec.image import ImageLayout, chunk_layouts
from weft.codec.memory import Bytes, memory_view
from weft.codec.patching import Patcher
from weft.errors import CodecError
from weft.native import Column
from weft.runtime.control.messages import Part, Source, unpack
from weft.runtime.receive.arrivals import Stream


@dataclass(frozen=True, kw_only=True)
class ChunkPlace:
    """Where the patch of one chunk lands, and where its changes belong."""

    slot: int
    layout: ImageLayout
    address: Column
    """Where each row of the image belongs."""


@dataclass(frozen=True, kw_only=True)
class Incoming:
    """What comes from one trainer as patches."""

    trainer: int
    transport: str
    chunks: tuple[ChunkPlace, ...]

    @classmethod
    def of(cls, source: Source) -> Incoming:
        """From an engine rank's part of the plan."""
        address, ends = unpack(source.address), unpack(source.chunk_ends)
        layouts = chunk_layouts(unpack(source.length), unpack(source.width), source.num_direct, ends)
        slots = itertools.accumulate((layout.max_patch_bytes for layout in layouts), initial=source.slot)
        borders = itertools.pairwise([source.num_direct, *ends.astype(np.int64).tolist()])
        return cls(
            trainer=source.trainer,
            transport=source.transport,
            chunks=tuple(
                ChunkPlace(slot=slot, layout=layout, address=address[a:b])
                for slot, layout, (a, b) in zip(slots, layouts, borders, strict=False)
            ),
        )

    def stream(self, sizes: Sequence[int]) -> Stream:
        """The bytes of one version's patches, from the bytes of each."""
        room = [chunk.layout.max_patch_bytes for chunk in self.chunks]
        if len(sizes) != len(room) or any(not 0 < size <= most for size, most in zip(sizes, room, strict=True)):
            raise CodecError(f"trainer {self.trainer} sent patches of {list(sizes)[:8]} bytes for {room[:8]}")
        address = np.array([chunk.slot for chunk in self.chunks], dtype=np.uint64)
        length = np.array(sizes, dtype=np.uint64)
        return Stream(
            trainer=self.trainer,
            transport=self.transport,
            address=address,
            position=address - address[0],
            length=length,
            ends=np.cumsum(length),
            total=int(length.sum()),
            is_ordered=False,
        )


class Patches:
    """The patches of one version, whole and verified."""

    def __init__(
        self,
        version: int,
        incoming: Sequence[Incoming],
        parts: Sequence[Part],
        patcher: Patcher,
        *,
        compressed: bool = False,
    ) -> None:
        self._patcher = patcher
        sent = {part.trainer: part.sizes for part in parts}
        self.version = version
        self._all = [
            (link.trainer, chunk, *self._open(link.trainer, chunk, size, compressed))
            for link in incoming
            for chunk, size in zip(link.chunks, sent[link.trainer], strict=True)
        ]

    @staticmethod
    def _open(trainer: int, chunk: ChunkPlace, num_bytes: int, compressed: bool) -> tuple[int, int, Bytes | None]:
        """Where a chunk's patches are, unpacked: address, bytes, and what keeps them."""
        if not compressed:
            return chunk.slot, num_bytes, None
        try:
            patches = chunk.layout.decompress(memory_view(chunk.slot, num_bytes))
        except CodecError as error:
            raise CodecError(f"trainer {trainer} sent {error}", hint=error.hint) from error
        return int(patches.ctypes.data), len(patches), patches

    def check(self, *, base: int | None) -> None:
        """Raise CodecError, naming the trainer, unless all are sound and made from what is here."""
        for trainer, chunk, address, num_bytes, _ in self._all:
            try:
                self._patcher.check(chunk.layout, address, num_bytes, base=base, version=self.version)
            except CodecError as error:
                raise CodecError(f"trainer {trainer} sent {error}", hint=error.hint) from error

    def apply(self) -> None:
        """Change the weights where they belong."""
        for _, chunk, address, num_bytes, _ in self._all:
            self._patcher.apply(chunk.layout, address, num_bytes, chunk.address)
