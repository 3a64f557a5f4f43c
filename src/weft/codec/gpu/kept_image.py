"""What engines hold, kept on a GPU as one image, which is brought up to date by the pass that makes the patches.

Only for weights that are copied unchanged: they are compared where they are. `restore` undoes a version that was not
committed. Tables are kept for all versions of a plan.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from weft.codec.delta import BLOCK
from weft.codec.gpu import kept_kernels, patch_kernels
from weft.codec.gpu.blocks import num_blocks
from weft.codec.gpu.kept_pieces import BlockSources, block_sources
from weft.codec.gpu.patch_kernels import KeptBlocks
from weft.codec.image import Section
from weft.codec.patching import KeptChunk, Sizes, check_room
from weft.gpu import GpuWork

Int64s = NDArray[np.int64]
MAX_UNDO_BYTES = 4 << 32
"""Entries of the undo list are 32-bit multiples of four bytes."""
Patched = tuple[int, int, Section]
"""A Chunk's position in a batch, its number, and one of its sections."""


class _Launch:
    """Sections of one width of some Chunks, each after the section before it in its Chunk."""

    def __init__(self, width: int, table: torch.Tensor, blocks: list[KeptBlocks]) -> None:
        self.width, self.table, self.blocks = width, table, blocks


class GpuKeptImage:
    """One image of Chunks, at most one version ahead of what was committed."""

    def __init__(self, work: GpuWork, chunks: Sequence[KeptChunk], *, undo_bytes: int) -> None:
        self._work, self._chunks = work, chunks
        self._first_entry: dict[tuple[int, Section], int] = {}
        """Of each section's blocks."""
        self._images: list[tuple[int, torch.Tensor]] = []
        """For each width: where the blocks begin in the image, in the order of their entries."""
        self._number_blocks()
        count = sum(len(images) for _, images in self._images)
        self._entries = torch.zeros(count, dtype=torch.int64, device=work.device)
        self._undo = work.allocate(min(undo_bytes, MAX_UNDO_BYTES))
        self._used = torch.zeros(1, dtype=torch.int64, device=work.device)
        self._batches: dict[tuple[tuple[int, ...], tuple[int, ...]], list[_Launch]] = {}

    def _number_blocks(self) -> None:
        sections = [
            (part.width, number, part) for number, chunk in enumerate(self._chunks) for part in chunk.layout.sections
        ]
        count = 0
        for width in sorted({width for width, _, _ in sections}):
            begins = []
            for _, number, part in (each for each in sections if each[0] == width):
                self._first_entry[number, part] = count
                count += num_blocks(part)
                begin = self._chunks[number].image + part.begin
                begins.append(begin + np.arange(num_blocks(part), dtype=np.int64) * BLOCK * width)
            self._images.append((width, self._work.upload(np.concatenate(begins))))

    def begin(self) -> None:
        """Begin a version: what the image is now can be restored."""
        with self._work.queue():
            self._entries.zero_()
            self._used.zero_()

    def restore(self) -> bool:
        """Undo what has changed since `begin`; False if there were too many changes, and the image is not valid."""
        with self._work.stream():
            first = 0
            for width, images in self._images:
                entries = self._entries[first : first + len(images)]
                kept_kernels.restore(width, images, entries, self._undo)
                first += len(images)
            used = self._used.cpu()
        return int(used) <= len(self._undo)

    def update(self, chunks: Sequence[int], outs: Sequence[int], *, base: int, version: int) -> Sizes:
        """Bring Chunks up to date, and make their patches; or start to."""
        launches = self._launches(chunks, outs)
        with self._work.queue():
            state = torch.zeros(len(chunks), 2, dtype=torch.int64, device=self._work.device)
            for launch in launches:
                for blocks in launch.blocks:
                    patch_kernels.update(blocks, launch.table, state, self._entries, self._undo, self._used)
                patch_kernels.finish(launch.width, launch.table, state, base=base, version=version)
            found, done = self._work.fetch(state), self._work.marker()

        def wait() -> list[int]:
            done.synchronize()
            sizes: list[int] = found[:, 0].tolist()
            return sizes

        return wait

    def _launches(self, chunks: Sequence[int], outs: Sequence[int]) -> list[_Launch]:
        key = tuple(chunks), tuple(outs)
        if key not in self._batches:
            for number in chunks:
                layout = self._chunks[number].layout
                check_room(layout, layout.max_patch_bytes)
            self._batches[key] = [self._launch(parts, outs) for parts in self._in_turn(chunks)]
        return self._batches[key]

    def _in_turn(self, chunks: Sequence[int]) -> list[list[Patched]]:
        """Sections that are worked on together: the first ones of all Chunks, by width, then the second ones."""
        alike: dict[tuple[int, int], list[Patched]] = {}
        for position, number in enumerate(chunks):
            for turn, part in enumerate(self._chunks[number].layout.sections):
                alike.setdefault((turn, part.width), []).append((position, number, part))
        return [alike[key] for key in sorted(alike)]

    def _launch(self, parts: Sequence[Patched], outs: Sequence[int]) -> _Launch:
        width = parts[0][2].width
        rows = []
        for position, number, part in parts:
            image = self._chunks[number].image + part.begin
            rows.append((0, part.num_elements, self._first_entry[number, part], image, outs[position], position))
        found = [
            block_sources(self._chunks[number].planes, part, self._chunks[number].image + part.begin)
            for _, number, part in parts
        ]
        blocks = [made for made in (self._direct(width, found), self._gathered(width, found)) if len(made.blocks)]
        return _Launch(width, self._work.upload(np.array(rows, dtype=np.int64)), blocks)

    def _direct(self, width: int, found: Sequence[BlockSources]) -> KeptBlocks:
        """Blocks that lie in one piece in the weights."""
        columns = [(each.direct[:, 0] << 32) | row for row, each in enumerate(found)]
        sources = np.concatenate([each.direct[:, 1] for each in found])
        return KeptBlocks(width, self._work.upload(np.concatenate(columns)), self._work.upload(sources), None)

    def _gathered(self, width: int, found: Sequence[BlockSources]) -> KeptBlocks:
        """All others."""
        columns = [(each.gathered[:, 0] << 32) | row for row, each in enumerate(found)]
        counts = np.array([len(each.pieces) for each in found])
        firsts = (np.cumsum(counts) - counts).tolist()
        sources = [
            (each.gathered[:, 1] + first) | (each.gathered[:, 2] << 32)
            for each, first in zip(found, firsts, strict=True)
        ]
        tables = (np.concatenate(table) for table in (columns, sources, [each.pieces for each in found]))
        return KeptBlocks(width, *(self._work.upload(table) for table in tables))
