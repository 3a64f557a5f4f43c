"""The patches of one version on an engine rank: whether they are valid, and where they go."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from weft.codec.memory import Bytes, memory_view
from weft.codec.patching import PatchedImage, Patcher
from weft.core.geometry.planes import Planes
from weft.errors import CodecError
from weft.runtime.control.write_reports import WriteReport
from weft.runtime.receive.landing import ArrivingChunk, ArrivingLink, PatchedLink, PatchPlace
from weft.transport.base import Memory


def arriving_patches(link: PatchedLink, sizes: Sequence[int]) -> ArrivingLink:
    """The bytes of one version's patches, from the size of each. Raises CodecError for impossible sizes."""
    is_sane = len(sizes) == len(link.chunks) and min(sizes, default=1) > 0 and sum(sizes) <= link.num_bytes
    if not is_sane or not link.has_room(sizes):
        raise CodecError(
            f"trainer {link.trainer} sent {len(sizes)} patches of {list(sizes)[:8]} bytes, expected one for each of "
            f"{len(link.chunks)} chunks, in {link.num_bytes} bytes of memory"
        )
    slot = np.array(link.slots(sizes), dtype=np.uint64)
    none = np.zeros_like(slot)
    planes = Planes(
        dst=slot,
        src=slot,
        rows=np.ones_like(slot),
        length=np.array(sizes, dtype=np.uint64),
        dst_stride=none,
        src_stride=none,
        position=slot - slot[:1],
        position_stride=none,
    )
    chunk = ArrivingChunk(num_bytes=planes.num_bytes, planes=planes)
    return ArrivingLink(trainer=link.trainer, transport=link.transport, chunks=(chunk,), is_ordered=False)


class Patches:
    """The patches of one version, complete and verified."""

    def __init__(
        self,
        version: int,
        links: Sequence[PatchedLink],
        reports: Sequence[WriteReport],
        patcher: Patcher,
        *,
        compressed: bool = False,
        bring: Callable[[int, int], Memory] | None = None,
    ) -> None:
        """`bring`: copies bytes at an address to where the patcher can read them; None: it can."""
        self._patcher, self._bring = patcher, bring
        sent = {report.peer: report.sizes for report in reports}
        self.version = version
        self._all = [
            (link.trainer, chunk, *self._open(link.trainer, chunk, at, size, compressed))
            for link in links
            for chunk, at, size in zip(link.chunks, link.slots(sent[link.trainer]), sent[link.trainer], strict=True)
        ]

    def _open(
        self, trainer: int, chunk: PatchPlace, at: int, num_bytes: int, compressed: bool
    ) -> tuple[int, int, Bytes | Memory | None]:
        """Where a Chunk's patches are, unpacked: address, bytes, and the object that keeps them alive."""
        if self._bring is not None:
            memory = self._bring(at, num_bytes)
            return memory.address, num_bytes, memory
        if not compressed:
            return at, num_bytes, None
        try:
            patches = chunk.layout.decompress(memory_view(at, num_bytes))
        except CodecError as error:
            raise CodecError(f"patch from trainer {trainer} rejected: {error}", hint=error.hint) from error
        return int(patches.ctypes.data), len(patches), patches

    def check(self, *, base: int | None) -> None:
        """Raise CodecError, naming the trainer, unless all are valid and based on what is held here."""
        problems = self._patcher.check(self._images, base=base, version=self.version)
        for (trainer, *_), error in zip(self._all, problems, strict=True):
            if error is not None:
                raise CodecError(f"patch from trainer {trainer} rejected: {error}", hint=error.hint) from error

    def apply(self) -> None:
        """Apply the changes to the weights."""
        self._patcher.apply(self._images)

    @property
    def _images(self) -> list[PatchedImage]:
        return [
            PatchedImage(layout=chunk.layout, patches=address, num_bytes=num_bytes, rows=chunk.rows)
            for _, chunk, address, num_bytes, _ in self._all
        ]
