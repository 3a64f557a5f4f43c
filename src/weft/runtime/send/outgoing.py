"""What a trainer sends in Chunks to one engine rank, or alike to several: how they are filled, and what engines hold.

A Chunk is an image of some boxes in the engine's layout and precision. Where versions are kept (patches, staging) every
Chunk has memory of its own; with patches two images take turns: the second one becomes what the engines hold when the
version is committed, and is written over when it is not.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from weft.codec.conversion import Converter
from weft.codec.memory import memory_view
from weft.codec.patching import Patcher
from weft.config import CompressionPolicy, DeltaPolicy, StagingPolicy, TransferSettings
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
        self.ends = [fill.source_end for fill in self._fills]
        """Behind the last byte of the weights a Chunk reads."""
        self.groups = stream.chunks.group[stream.num_straight :].tolist()
        """The last group of matrices whose scales a Chunk needs; -1: none."""
        sizes = [layout.num_bytes for layout in self.layouts]
        self._begins = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64).tolist()
        self.images = [allocate(self._begins[-1]) for _ in range(self._num_images)]
        patches = [layout.max_patch_bytes for layout in self.layouts]
        self.patch_begins = np.concatenate([[0], np.cumsum(patches)]).astype(np.int64).tolist()
        """Where the patch of each Chunk goes in the memory of the engine."""
        self._now = 0
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
        """Whether Chunks have memory of their own, so that the weights are free as soon as these are filled."""
        return bool(self.images)

    def address(self, chunk: int) -> int:
        """Where a Chunk that is kept lies."""
        return self.images[self._now].address + self._begins[chunk]

    def fill(self, chunk: int, address: int) -> int:
        """Make a Chunk of the weights; returns its bytes."""
        self._converter.fill(self._fills[chunk], address)
        return self.layouts[chunk].num_bytes

    def begin(self, version: int, engines_hold: set[int | None]) -> None:
        """A new version. Its patches are made from what the engines hold, if they hold one version that is known here;
        anchors where they do not, or where one is due."""
        self._filled = version
        self._since_anchor += 1
        known = engines_hold == {self._held} and self._held is not None
        if known and self._since_anchor < self._settings.anchor_every:
            self._base = self._held
        else:
            self._base, self._since_anchor = None, 0

    def encode(self, chunk: int, out: int) -> int:
        """The patch of a Chunk; returns its bytes."""
        layout, now = self.layouts[chunk], self.address(chunk)
        old = None if self._base is None else self.images[1 - self._now].address + self._begins[chunk]
        assert self._filled is not None
        num_bytes = self._patcher.encode(
            layout, now, old, out, layout.max_patch_bytes, base=self._base or 0, version=self._filled
        )
        if self._settings.compression is CompressionPolicy.NONE:
            return num_bytes
        packed = layout.compress(out, num_bytes)
        memory_view(out, len(packed))[:] = packed
        return len(packed)

    def committed(self, version: int) -> None:
        """The engines hold what was filled last."""
        if self._filled == version:
            self._held, self._filled = version, None
            self._now = (1 - self._now) if len(self.images) > 1 else 0
