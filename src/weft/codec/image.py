"""The image of a chunk: what one trainer sends to one engine rank at a time, elements of equal size together.

Both ends compute the same image from the rows of the plan: rows keep their order inside a section; there is a section
for each size of elements. What travels as patches is the difference between two images.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.codec import delta
from weft.codec.compress import compress, decompress
from weft.codec.delta import ImageRows
from weft.codec.memory import Bytes, memory_view
from weft.errors import CodecError
from weft.native import Column

ALIGN = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """The elements of one size."""

    width: int
    begin: int
    """First byte in the image."""
    num_elements: int
    rows: NDArray[np.int64]
    """Which of the link's rows lie here, in this order."""
    row_begin: Column
    """First byte of each row in the section."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the section."""
        return self.num_elements * self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLayout:
    """Where the rows of a link lie in its image."""

    sections: tuple[Section, ...]
    num_bytes: int
    length: Column

    @classmethod
    def of(cls, length: Column, width: Column) -> ImageLayout:
        """From the bytes of each row and of its elements."""
        sections, begin = [], 0
        for size in sorted(set(width.tolist()), reverse=True):
            rows = np.flatnonzero(width == size)
            ends = np.cumsum(length[rows])
            total = int(ends[-1])
            if size not in delta.WIDTHS or total % size:
                raise CodecError(f"rows of {total} bytes with elements of {size} bytes")
            sections.append(
                Section(width=size, begin=begin, num_elements=total // size, rows=rows, row_begin=ends - length[rows])
            )
            begin += -(-total // ALIGN) * ALIGN
        return cls(sections=tuple(sections), num_bytes=begin, length=length)

    @property
    def max_patch_bytes(self) -> int:
        """No patches of all sections are longer, compressed or not."""
        whole = sum(padded(delta.max_bytes(part.num_elements, part.width)) for part in self.sections)
        most = whole + whole // 128 + 1024 * len(self.sections)  # Zstandard adds a little to what it cannot shrink
        return -(-most // ALIGN) * ALIGN

    def addresses(self, image: int) -> Column:
        """Where each row lies in an image at some address."""
        found = np.zeros(len(self.length), dtype=np.uint64)
        for part in self.sections:
            found[part.rows] = np.uint64(image + part.begin) + part.row_begin
        return found

    def encode(self, now: int, old: int | None, out: int, capacity: int, *, base: int, version: int) -> int:
        """Patches of all sections, one after the other; returns their bytes."""
        done = 0
        for part in self.sections:
            done += padded(
                delta.encode(
                    now + part.begin,
                    None if old is None else old + part.begin,
                    width=part.width,
                    num_elements=part.num_elements,
                    out=out + done,
                    capacity=capacity - done,
                    base=base,
                    version=version,
                )
            )
        return done

    def compress(self, patches: int, num_bytes: int) -> Bytes:
        """Patches of all sections, each compressed and preceded by its length."""
        parts = []
        for part, at, size in self._patches(patches, num_bytes):
            del part
            packed = compress(memory_view(at, size))
            parts += [np.array([len(packed)], dtype="<u8").view(np.uint8), packed]
        return np.concatenate(parts)

    def decompress(self, data: Bytes) -> Bytes:
        """The patches again; raises CodecError for anything else."""
        parts, at = [], 0
        for part in self.sections:
            size = int.from_bytes(data[at : at + 8].tobytes(), "little")
            patch = decompress(data[at + 8 : at + 8 + size], width=part.width, num_elements=part.num_elements)
            parts += [patch, np.zeros(padded(len(patch)) - len(patch), dtype=np.uint8)]
            at += 8 + size
        if at != len(data):
            raise CodecError(f"{len(data)} bytes of compressed patches, of which {at} are used")
        return np.concatenate(parts)

    def _patches(self, patches: int, num_bytes: int) -> Iterator[tuple[Section, int, int]]:
        """The patch of each section: where it is and its bytes."""
        done = 0
        for part in self.sections:
            size = delta.read_header(patches + done, num_bytes - done).num_bytes
            if size > num_bytes - done:
                raise CodecError(f"a patch of {size} bytes, of which {num_bytes - done} are here")
            yield part, patches + done, size
            done += padded(size)
        if done != num_bytes:
            raise CodecError(f"{num_bytes} bytes of patches, of which {done} are used")

    def check(self, patches: int, num_bytes: int, *, base: int | None, version: int) -> None:
        """Raise CodecError unless these are sound patches of all sections."""
        for part, at, size in self._patches(patches, num_bytes):
            delta.check(at, size, width=part.width, num_elements=part.num_elements, base=base, version=version)

    def apply(self, patches: int, num_bytes: int, address: Column) -> None:
        """Apply checked patches to rows at these addresses."""
        for part, at, size in self._patches(patches, num_bytes):
            rows = ImageRows(begin=part.row_begin, address=address[part.rows], length=self.length[part.rows])
            delta.apply(at, size, width=part.width, num_elements=part.num_elements, rows=rows)


def chunk_layouts(length: Column, width: Column, num_direct: int, ends: Column) -> list[ImageLayout]:
    """The image of each chunk of a link; the first rows are not part of any."""
    borders = [num_direct, *ends.astype(np.int64).tolist()]
    return [ImageLayout.of(length[a:b], width[a:b]) for a, b in itertools.pairwise(borders)]


def padded(num_bytes: int) -> int:
    """Patches begin at multiples of eight bytes."""
    return -(-num_bytes // 8) * 8
