"""Chunks a trainer sends to one engine rank, or identically to several: how they are filled, and what engines hold.

A Chunk is an image of some boxes in the engine's layout and precision. Where versions are kept (patches, staging) every
Chunk has memory of its own. With patches two images alternate: the second one becomes what the engines hold when the
version is committed, and is overwritten when it is not. On a GPU one image is enough for weights that are copied
unchanged: it is compared with the weights themselves, brought up to date in the same pass, and restored when the
version is not committed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from weft.codec.conversion import ChunkFill, Converter, Spans, Wait, all_spans
from weft.codec.image import PATCH_ALIGN
from weft.codec.memory import memory_view
from weft.codec.patching import ImagePair, KeptImage, Patcher, Sizes
from weft.config import CompressionPolicy, DeltaPolicy, StagingPolicy, TransferSettings
from weft.core.geometry.alignment import aligned
from weft.core.streams.landing_areas import patch_room
from weft.runtime.compile.link_stream import LinkStream
from weft.transport.base import Memory


class Outgoing:
    """The packed Chunks of one or several links that carry the same bytes."""

    def __init__(
        self,
        stream: LinkStream,
        source: NDArray[np.int64],
        settings: TransferSettings,
        converter: Converter,
        patcher: Patcher,
        allocate: Callable[[int], Memory],
    ) -> None:
        """`source`: addresses of the trainer's shards."""
        self._settings, self._converter, self._patcher = settings, converter, patcher
        self.layouts = stream.images()
        self.fills = stream.fills(source)
        """How each Chunk is filled."""
        self.groups = stream.chunks.group[stream.num_straight :].tolist()
        """The last group of matrices whose scales a Chunk needs; -1: none."""
        sizes = [layout.num_bytes for layout in self.layouts]
        self._begins = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64).tolist()
        num_bytes = self._begins[-1]
        is_delta = settings.delta is DeltaPolicy.ON
        is_kept = is_delta or settings.staging is StagingPolicy.CPU
        self.images = [allocate(num_bytes)] if is_kept else []
        self._kept = self._kept_image() if is_delta else None
        if is_delta and self._kept is None:
            self.images.append(allocate(num_bytes))
        self.is_straight = False
        """Whether Chunks are converted straight into the memory of an engine rank."""
        self.now = 0
        """The image that is filled."""
        self._patch_bytes, self._patch_room = 0, 0
        self._held: int | None = None
        self._filled: int | None = None
        self._base: int | None = None
        self._since_anchor = 0

    def _kept_image(self) -> KeptImage | None:
        """The only image, if it can be compared with the weights; patches that engines have room for can be undone."""
        room = patch_room(np.array(self._begins[-1:]), min(2 * self._settings.patch_share, 1.0))
        images = [self.address(chunk, 0) for chunk in range(len(self.layouts))]
        return self._patcher.kept_image(self.layouts, self.fills, images, undo_bytes=int(room[0]))

    @property
    def is_kept(self) -> bool:
        """Whether Chunks have memory of their own, so that the weights are free as soon as all Chunks are filled."""
        return bool(self.images)

    def source_spans(self, chunk: int) -> Spans:
        """The weights a Chunk reads, be it only to find magnitudes. The converter must expect all Chunks by now."""
        fill = self.fills[chunk]
        return all_spans([fill.source_spans, self._converter.searched_spans(fill)])

    def address(self, chunk: int, image: int) -> int:
        """Where a Chunk that is kept lies in an image."""
        return self.images[image].address + self._begins[chunk]

    def go_straight(self, fills: Sequence[ChunkFill]) -> None:
        """Convert Chunks to where `fills` says, in the memory of an engine rank."""
        self.fills, self.is_straight = list(fills), True

    def fill(self, chunks: Sequence[int], addresses: Sequence[int]) -> Wait | None:
        """Make Chunks from the weights, or start to: the returned function waits until they are done.

        A kept image is not touched before it is compared with the weights.
        """
        if self.reads_weights:
            return None
        places = [0] * len(chunks) if self.is_straight else addresses
        return self._converter.fill([self.fills[chunk] for chunk in chunks], places)

    def begin(self, version: int, engines_hold: Mapping[int, int | None], *, patch_room: int) -> set[int]:
        """Begin a version; returns the engine ranks that get patches: those that hold the version that is kept here.

        All others need it whole, and so do all of them when an anchor is due.
        """
        self._begin_kept()
        self._filled, self._patch_bytes, self._patch_room = version, 0, patch_room
        self._since_anchor += 1
        patched = {engine for engine, held in engines_hold.items() if held is not None and held == self._held}
        if self._since_anchor >= self._settings.anchor_every:
            patched = set()
        self._base = self._held if patched else None
        return patched

    def _begin_kept(self) -> None:
        """Return to what the engines hold, if the last version was not committed."""
        if self._kept is None or self._held is None:
            return
        if self._filled is not None and not self._kept.restore():
            self._held = None
            return
        self._kept.begin()

    @property
    def reads_weights(self) -> bool:
        """Whether Chunks are compared with the weights, not filled first: also for those that need it whole."""
        return self._kept is not None and self._held is not None

    @property
    def is_compared(self) -> bool:
        """Whether patches of Chunks are made, be it only to keep what the engines hold."""
        return self.is_patched or self.reads_weights

    @property
    def is_patched(self) -> bool:
        """Whether patches are made, and have fitted so far."""
        return self._base is not None

    def reserve(self, num_bytes: int) -> int | None:
        """Where a patch goes in the memory for patches; None, and no more are made, if it does not fit."""
        at = self._patch_bytes
        if self._base is None or at + num_bytes > self._patch_room:
            self._base = None
            return None
        self._patch_bytes += aligned(num_bytes, PATCH_ALIGN)
        return at

    @property
    def batch_bytes(self) -> int:
        """How many bytes of Chunks to make patches of at a time, at least."""
        return self._patcher.batch_bytes

    def encode(self, chunks: Sequence[int], outs: Sequence[int]) -> Sizes:
        """Make the patches of some Chunks, or start to; compressed ones are made when this returns."""
        assert self._filled is not None
        if self._kept is not None:
            return self._kept.update(chunks, outs, base=self._base or 0, version=self._filled)
        images = [
            ImagePair(
                layout=self.layouts[chunk],
                now=self.address(chunk, self.now),
                old=self.address(chunk, 1 - self.now),
                out=out,
                capacity=self.layouts[chunk].max_patch_bytes,
            )
            for chunk, out in zip(chunks, outs, strict=True)
        ]
        sizes = self._patcher.encode(images, base=self._base or 0, version=self._filled)
        if self._settings.compression is CompressionPolicy.NONE:
            return sizes
        packed = [_compressed(image, size) for image, size in zip(images, sizes(), strict=True)]
        return lambda: packed

    def committed(self, version: int) -> None:
        """The engines hold what was filled last."""
        if self._filled == version:
            if self._base is None:
                self._since_anchor = 0
            self._held, self._filled = version, None
            self.now = (1 - self.now) if len(self.images) > 1 else 0


def _compressed(image: ImagePair, num_bytes: int) -> int:
    """Compress the patches of an image where they are; returns their bytes."""
    packed = image.layout.compress(image.out, num_bytes)
    memory_view(image.out, len(packed))[:] = packed
    return len(packed)
