"""Patches of images in GPU memory: the same bytes as weft.codec.image produces.

An image has a section for each size of elements, at most three. Every call queues a few launches for the sections of
all images; a caller that needs the result waits for the device once. Tables are kept for all versions of a plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from weft.codec import delta
from weft.codec.conversion import ChunkFill
from weft.codec.delta import HEADER_BYTES, NO_BASE
from weft.codec.gpu import apply_kernels, patch_kernels
from weft.codec.gpu.apply_kernels import DeviceRows
from weft.codec.gpu.blocks import Blocks, num_blocks
from weft.codec.gpu.kept_image import GpuKeptImage
from weft.codec.gpu.kept_pieces import is_copied
from weft.codec.image import ImageLayout, Section, padded
from weft.codec.patching import ImagePair, KeptChunk, PatchedImage, Sizes, check_room
from weft.errors import CodecError
from weft.gpu import GpuWork

ALIGN = 16
"""Images that begin at multiples of this are read faster."""
Layouts = tuple[ImageLayout, ...]


class _Tables:
    """What depends on the layouts of some images only, in device memory."""

    def __init__(self, layouts: Layouts, work: GpuWork) -> None:
        self.count = sum(len(layout.sections) for layout in layouts)
        self.parts: list[list[tuple[int, int, Section]]] = []
        """Sections that one launch works on, with the number of each, and of its image: those of one size and turn."""
        self.image_of: list[int] = []
        alike: dict[tuple[int, int], list[tuple[int, int, Section]]] = defaultdict(list)
        firsts, words = [], []
        for image, layout in enumerate(layouts):
            firsts.append((len(self.image_of), len(layout.sections)))
            for turn, part in enumerate(layout.sections):
                alike[turn, part.width].append((len(self.image_of), image, part))
                self.image_of.append(image)
                words.append(apply_kernels.section_words(part.width, part.num_elements))
        self.parts = [alike[key] for key in sorted(alike)]
        self.blocks = [Blocks.of(parts, work.device) for parts in self.parts]
        self.images = work.upload(np.array(firsts, dtype=np.int64).reshape(-1, 2))
        self.words = work.upload(np.array(words, dtype=np.int64).reshape(-1, 3))


class GpuPatcher:
    """Patches on one GPU, on a stream of their own."""

    batch_bytes = 1 << 30

    def __init__(self, work: GpuWork) -> None:
        self._work = work
        self._tables: dict[Layouts, _Tables] = {}
        self._sections: dict[tuple[ImagePair, ...], list[tuple[torch.Tensor, bool]]] = {}
        """Sections of images to compare, for each launch, and whether all are aligned."""
        self._rows: tuple[Sequence[PatchedImage], list[DeviceRows]] = ((), [])
        """Images that were patched last, and where their sections are."""
        self._dense: dict[Section, torch.Tensor] = {}
        """Tables of anchors."""

    def encode(self, images: Sequence[ImagePair], *, base: int, version: int) -> Sizes:
        """Patches of all sections of each image, one after the other."""
        if any(image.old is None for image in images):
            sizes = [self._anchor(image, version) for image in images]
            return lambda: sizes
        tables = self._tables_of([image.layout for image in images])
        with self._work.queue():
            state = torch.zeros(len(images), 2, dtype=torch.int64, device=self._work.device)
            for blocks, (sections, is_aligned) in zip(tables.blocks, self._sections_of(images, tables), strict=True):
                patch_kernels.encode(blocks, sections, state, base=base, version=version, is_aligned=is_aligned)
            found, done = self._work.fetch(state), self._work.marker()

        def wait() -> list[int]:
            done.synchronize()
            sizes: list[int] = found[:, 0].tolist()
            return sizes

        return wait

    def _sections_of(self, images: Sequence[ImagePair], tables: _Tables) -> list[tuple[torch.Tensor, bool]]:
        """Where the sections of images are; the same as in the last version but one, whose images alternate."""
        key = tuple(images)
        if key not in self._sections:
            for image in images:
                check_room(image.layout, image.capacity)
            rows = [_section_rows(images, parts) for parts in tables.parts]
            self._sections[key] = [(self._work.upload(each), not (each[:, 2:4] % ALIGN).any()) for each in rows]
        return self._sections[key]

    def kept_image(
        self, layouts: Sequence[ImageLayout], fills: Sequence[ChunkFill], images: Sequence[int], *, undo_bytes: int
    ) -> GpuKeptImage | None:
        """One image, unless something is converted."""
        if not all(is_copied(layout, fill) for layout, fill in zip(layouts, fills, strict=True)):
            return None
        planes = [fill.planes for fill in fills]
        chunks = [KeptChunk(*chunk) for chunk in zip(layouts, planes, images, strict=True)]
        return GpuKeptImage(self._work, chunks, undo_bytes=undo_bytes)

    def _anchor(self, image: ImagePair, version: int) -> int:
        """All blocks dense: headers, tables, and the bytes verbatim."""
        check_room(image.layout, image.capacity)
        done, room = 0, self._work.view(image.out, image.capacity)
        with self._work.stream():
            for part in image.layout.sections:
                begin = delta.first_record(part.num_elements)
                size = begin + -(-part.num_bytes // 4) * 4
                out = room[done : done + size]
                header = delta.header_bytes(part.width, part.num_elements, size, NO_BASE, version)
                out[:HEADER_BYTES] = self._work.upload(header)
                out[HEADER_BYTES:begin] = self._dense_table(part)
                out[begin : begin + part.num_bytes] = self._work.view(image.now + part.begin, part.num_bytes)
                out[begin + part.num_bytes :] = 0
                done += padded(size)
        return done

    def _dense_table(self, part: Section) -> torch.Tensor:
        if part not in self._dense:
            self._dense[part] = self._work.upload(delta.dense_table(part.num_elements, part.width))
        return self._dense[part]

    def check(self, images: Sequence[PatchedImage], *, base: int | None, version: int) -> list[CodecError | None]:
        """What is wrong with the patches of each image."""
        tables = self._tables_of([image.layout for image in images])
        with self._work.queue():
            places = self._places(images)
            opened, ends = apply_kernels.open_patches(tables.images, places, tables.words)
            flags = torch.zeros(2 * tables.count, dtype=torch.int64, device=self._work.device)
            for blocks in tables.blocks:
                apply_kernels.check(blocks, places, opened, flags)
            found = torch.cat([opened, flags, ends]).cpu().numpy()  # waits for the stream
        headers = found[: 6 * tables.count].reshape(-1, 6)
        marks = found[6 * tables.count : 8 * tables.count].reshape(-1, 2)
        ends_at = found[8 * tables.count :]
        if _is_valid(images, headers, ends_at, marks, base, version):
            return [None] * len(images)
        image_of = np.array(tables.image_of, dtype=np.int64)
        return [
            _problem(image, headers[image_of == number], int(end), marks[image_of == number], base, version)
            for number, (image, end) in enumerate(zip(images, ends_at.tolist(), strict=True))
        ]

    def apply(self, images: Sequence[PatchedImage]) -> None:
        """Apply checked patches to rows of device memory."""
        tables = self._tables_of([image.layout for image in images])
        all_rows = self._device_rows(images, tables)
        with self._work.queue():
            places = self._places(images)
            opened, ends = apply_kernels.open_patches(tables.images, places, tables.words)
            for blocks, rows in zip(tables.blocks, all_rows, strict=True):
                apply_kernels.apply(blocks, places, opened, rows)
            found = torch.cat([opened, ends]).cpu().numpy()  # waits for the stream
        begins, image_of = found[: -len(images) : 6], np.array(tables.image_of, dtype=np.int64)
        for number, (image, end) in enumerate(zip(images, found[-len(images) :].tolist(), strict=True)):
            _check_places(image, begins[image_of == number], end)

    def _places(self, images: Sequence[PatchedImage]) -> torch.Tensor:
        """Where the patches of each image are, and their bytes."""
        return self._work.upload(np.array([image[1:3] for image in images], dtype=np.int64).reshape(-1, 2))

    def _tables_of(self, layouts: Sequence[ImageLayout]) -> _Tables:
        key = tuple(layouts)
        if key not in self._tables:
            self._tables[key] = _Tables(key, self._work)
        return self._tables[key]

    def _device_rows(self, images: Sequence[PatchedImage], tables: _Tables) -> list[DeviceRows]:
        """Rows of all sections, for each launch; the same as the last time, in all versions of a plan."""
        known, rows = self._rows
        if len(known) != len(images) or any(a.rows is not b.rows for a, b in zip(known, images, strict=True)):
            numbers = [
                [(part, images[image].rows[images[image].layout.sections.index(part)]) for _, image, part in parts]
                for parts in tables.parts
            ]
            rows = [DeviceRows.of(sections, self._work.device) for sections in numbers]
            self._rows = tuple(images), rows
        return rows


def _section_rows(images: Sequence[ImagePair], parts: Sequence[tuple[int, int, Section]]) -> NDArray[np.int64]:
    """Rows of `patch_kernels.encode` for some sections of images."""
    counts = np.array([num_blocks(part) for _, _, part in parts], dtype=np.int64)
    rows = [
        (first, part.num_elements, images[n].now + part.begin, (images[n].old or 0) + part.begin, images[n].out, n)
        for first, (_, n, part) in zip((np.cumsum(counts) - counts).tolist(), parts, strict=True)
    ]
    return np.array(rows, dtype=np.int64).reshape(-1, 6)


def _is_valid(
    images: Sequence[PatchedImage],
    opened: NDArray[np.int64],
    ends: NDArray[np.int64],
    marks: NDArray[np.int64],
    base: int | None,
    version: int,
) -> bool:
    """Whether all patches are; if not, `_problem` says which, and why."""
    needs_none = opened[:, 4] == np.array([NO_BASE], dtype=np.uint64).view(np.int64)
    fits = needs_none | (opened[:, 4] == (-1 if base is None else base))
    is_valid = (opened[:, 0] >= 0) & (opened[:, 5] == version) & fits & (marks[:, 0] == 0)
    is_valid &= ~(needs_none & (marks[:, 1] != 0))
    return bool(is_valid.all()) and ends.tolist() == [image.num_bytes for image in images]


def _problem(
    image: PatchedImage,
    opened: NDArray[np.int64],
    end: int,
    marks: NDArray[np.int64],
    base: int | None,
    version: int,
) -> CodecError | None:
    """What is wrong with the patches of an image."""
    try:
        _check_places(image, opened[:, 0], end)
        for words, (is_bad, is_sparse) in zip(opened, marks.tolist(), strict=True):
            header = delta.read_header(int(np.ascontiguousarray(words[1:]).ctypes.data), HEADER_BYTES)
            header.check_versions(base=base, version=version)
            if is_bad:
                raise CodecError("patch is damaged: a record lies outside it, or its counts do not add up")
            if header.base == NO_BASE and is_sparse:
                raise CodecError("patch is damaged: it needs a base but names none")
    except CodecError as error:
        return error
    return None


def _check_places(image: PatchedImage, begins: NDArray[np.int64], end: int) -> None:
    """Raise CodecError unless there is a patch of every section, and nothing after them."""
    for part, begin in zip(image.layout.sections, begins.tolist(), strict=True):
        if begin < 0:
            raise CodecError(
                f"no valid patch of {part.num_elements} elements of {part.width} bytes in {image.num_bytes} bytes"
            )
    if end != image.num_bytes:
        raise CodecError(f"patches have {image.num_bytes} bytes, of which only {end} are used")
