"""What GPU benchmarks move: finite BF16 numbers that both sides derive from a tensor's name, an index and a version.

A small step changes the sign of one element in PERIOD, different ones at every step.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import torch

PERIOD, STRIDE = 100, 37
_MULTIPLIER, _VERSION_STEP = 2_654_435_761, 40_503_000_001
_PIECE = 1 << 24
"""Elements made at a time."""


def numbers(name: str, first: int, count: int, version: int, steps: int, device: torch.device) -> torch.Tensor:
    """So many elements of a tensor, counted in row-major order, in some version and after some small steps."""
    index = torch.arange(first, first + count, device=device)
    mixed = (index * _MULTIPLIER + zlib.crc32(name.encode()) + version * _VERSION_STEP) >> 13
    exponent = 120 + ((mixed >> 8) & 7)
    bits = (mixed & 0x807F) | (exponent << 7)
    if steps:
        flipped = torch.zeros(PERIOD, dtype=torch.int64, device=device)
        for step in range(1, steps + 1):
            flipped[step * STRIDE % PERIOD] ^= 0x8000
        bits ^= flipped[index % PERIOD]
    return bits.to(torch.int16).view(torch.bfloat16)


def pieces(num_elements: int) -> Iterator[tuple[int, int]]:
    """First element and count of pieces of a tensor."""
    for first in range(0, num_elements, _PIECE):
        yield first, min(_PIECE, num_elements - first)


def fill(tensor: torch.Tensor, name: str, version: int, gpu: torch.device) -> None:
    """Give a whole tensor its numbers in a version; they are made on a GPU."""
    flat = tensor.view(-1)
    for first, count in pieces(len(flat)):
        flat[first : first + count] = numbers(name, first, count, version, 0, gpu)


def change_some(tensor: torch.Tensor, step: int) -> None:
    """The next small step of a whole tensor."""
    flat = tensor.view(-1).view(torch.int16)
    flat[step * STRIDE % PERIOD :: PERIOD] ^= -0x8000


def whole(name: str, shape: tuple[int, ...], version: int, steps: int, device: torch.device) -> torch.Tensor:
    """A whole tensor."""
    size = torch.Size(shape).numel()
    return torch.cat([numbers(name, *piece, version, steps, device) for piece in pieces(size)]).view(shape)
