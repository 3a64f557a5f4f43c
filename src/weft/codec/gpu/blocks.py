"""Blocks of sections of images, one for each program of a launch; tables of them are made once for a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton.language as tl

from weft.codec.delta import BLOCK
from weft.codec.image import Section

ELEMENTS = {1: tl.uint8, 2: tl.int16, 4: tl.int32}
"""What kernels load elements of so many bytes as."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of some sections with elements of one size, in device memory."""

    width: int
    sections: torch.Tensor
    """A row for each section: its first block, its elements, its number, and its image."""
    section_of: torch.Tensor
    """The section of every block, as a row of `sections`."""

    @classmethod
    def of(cls, parts: Sequence[tuple[int, int, Section]], device: torch.device) -> Blocks:
        """Sections with the number of each, and of its image."""
        counts = np.array([num_blocks(part) for _, _, part in parts], dtype=np.int64)
        firsts = np.cumsum(counts) - counts
        rows = [
            (first, part.num_elements, number, image)
            for first, (number, image, part) in zip(firsts.tolist(), parts, strict=True)
        ]
        columns = np.array(rows, dtype=np.int64).reshape(-1, 4), np.repeat(np.arange(len(parts)), counts)
        return cls(parts[0][2].width, *(torch.from_numpy(column).to(device) for column in columns))

    @property
    def grid(self) -> tuple[int]:
        """A program for every block."""
        return (len(self.section_of),)


def num_blocks(part: Section) -> int:
    """Blocks of a section."""
    return -(-part.num_elements // BLOCK)
