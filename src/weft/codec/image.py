"""The image of a Chunk: what one trainer sends to one engine rank at a time, elements of equal size together.

Both ends compile the same image from the plan (`weft.runtime.compile.link_stream`): a section for each element size. A
patch is the difference between two images.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from weft.codec import delta
from weft.codec.compress import compress, decompress
from weft.codec.delta import ImageRows
from weft.codec.memory import Bytes, memory_view
from weft.errors import CodecError

PATCH_ALIGN = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """All elements of one size."""

    width: int
    begin: int
    """First byte in the image."""
    num_elements: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the section."""
        return self.num_elements * self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLayout:
    """The sections of an image."""

    sections: tuple[Section, ...]
    num_bytes: int

    @property
    def max_patch_bytes(self) -> int:
        """The largest size of the patches of all sections, compressed or not."""
        whole = sum(padded(delta.max_bytes(part.num_elements, part.width)) for part in self.sections)
        most = whole + whole // 128 + 1024 * len(self.sections)  # Zstandard adds a little to incompressible data
        return -(-most // PATCH_ALIGN) * PATCH_ALIGN

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
        """The original patches; raises CodecError for anything else."""
        parts, at = [], 0
        for part in self.sections:
            size = int.from_bytes(data[at : at + 8].tobytes(), "little")
            patch = decompress(data[at + 8 : at + 8 + size], width=part.width, num_elements=part.num_elements)
            parts += [patch, np.zeros(padded(len(patch)) - len(patch), dtype=np.uint8)]
            at += 8 + size
        if at != len(data):
            raise CodecError(f"compressed patches have {len(data)} bytes, of which only {at} are used")
        return np.concatenate(parts)

    def _patches(self, patches: int, num_bytes: int) -> Iterator[tuple[Section, int, int]]:
        """The patch of each section: where it is and its bytes."""
        done = 0
        for part in self.sections:
            size = delta.read_header(patches + done, num_bytes - done).num_bytes
            if size > num_bytes - done:
                raise CodecError(f"patch has {size} bytes, of which only {num_bytes - done} are present")
            yield part, patches + done, size
            done += padded(size)
        if done != num_bytes:
            raise CodecError(f"patches have {num_bytes} bytes, of which only {done} are used")

    def check(self, patches: int, num_bytes: int, *, base: int | None, version: int) -> None:
        """Raise CodecError unless these are valid patches of all sections."""
        for part, at, size in self._patches(patches, num_bytes):
            delta.check(at, size, width=part.width, num_elements=part.num_elements, base=base, version=version)

    def apply(self, patches: int, num_bytes: int, rows: Sequence[ImageRows]) -> None:
        """Apply checked patches; `rows` says where the bytes of each section are."""
        for (part, at, size), where in zip(self._patches(patches, num_bytes), rows, strict=True):
            delta.apply(at, size, width=part.width, num_elements=part.num_elements, rows=where)

    def contiguous(self, address: int) -> tuple[ImageRows, ...]:
        """Where the sections are in a contiguous image."""
        return tuple(ImageRows.contiguous(address + part.begin, part.num_bytes) for part in self.sections)


def padded(num_bytes: int) -> int:
    """Patches begin at multiples of eight bytes."""
    return -(-num_bytes // 8) * 8
