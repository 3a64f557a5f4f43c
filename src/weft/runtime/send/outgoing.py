"""Chunks a trainer sends to one engine rank, or identically to several: how they are filled, and what engines hold.

A Chunk is an image of some boxes in the engine's layout and precision. Where versions are kept (patches, staging) every
Chunk has memory of its own; with patches two images alternate: the second one becomes what the engines hold when the
version is committed, and is overwritten when it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from weft.codec.conversion import ChunkFill, Converter, Spans, Wait
from weft.codec.image import PATCH_ALIGN
from weft.codec.memory import memory_view
from weft.codec.patching import ImagePair, Patcher, Sizes
from weft.config import CompressionPolicy, DeltaPolicy, StagingPolicy, TransferSettings
from weft.core.geometry.alignment import aligned
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
        self._fills = stream.fills(source)
        self.groups = stream.chunks.group[stream.num_straight :].tolist()
        """The last group of matrices whose scales a Chunk needs; -1: none."""
        sizes = [layout.num_bytes for layout in self.layouts]
        self._begins = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64).tolist()
        self.images = [allocate(self._begins[-1]) for _ in range(self._num_images)]
        self.is_straight = False
        """Whether Chunks are converted straight into the memory of an engine rank."""
        self.now = 0
        """The image that is filled."""
        self._patch_bytes, self._patch_room = 0, 0
        self._held: int | None = None
        self._filled: int | None = None
        self._base: int | None = None
        self._since_anchor = 0

    @property
    def _num_images(self) -> int:
        if self._settings.delta is DeltaPolicy.ON:
            return 2
        return 1 if self._settings.staging is StagingPolicy.CPU else 0

    @property
    def is_kept(self) -> bool:
        """Whether Chunks have memory of their own, so that the weights are free as soon as all Chunks are filled."""
        return bool(self.images)

    def source_spans(self, chunk: int) -> Spans:
        """The weights a Chunk reads."""
        return self._fills[chunk].source_spans

    def address(self, chunk: int, image: int) -> int:
        """Where a Chunk that is kept lies in an image."""
        return self.images[image].address + self._begins[chunk]

    def go_straight(self, fills: Sequence[ChunkFill]) -> None:
        """Convert Chunks to where `fills` says, in the memory of an engine rank."""
        self._fills, self.is_straight = list(fills), True

    def fill(self, chunks: Sequence[int], addresses: Sequence[int]) -> Wait | None:
        """Make Chunks from the weights, or start to: the returned function waits until they are done."""
        places = [0] * len(chunks) if self.is_straight else addresses
        return self._converter.fill([self._fills[chunk] for chunk in chunks], places)

    def begin(self, version: int, engines_hold: Mapping[int, int | None], *, patch_room: int) -> set[int]:
        """Begin a version; returns the engine ranks that get patches: those that hold the version that is kept here.

        All others need it whole, and so do all of them when an anchor is due.
        """
        self._filled, self._patch_bytes, self._patch_room = version, 0, patch_room
        self._since_anchor += 1
        patched = {engine for engine, held in engines_hold.items() if held is not None and held == self._held}
        if self._since_anchor >= self._settings.anchor_every:
            patched = set()
        self._base = self._held if patched else None
        return patched

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
