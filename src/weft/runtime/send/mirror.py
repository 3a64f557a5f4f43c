"""Weights that are offloaded to host memory, and their copy on a device, from which everything is sent.

mirror = Mirror(weights, "cuda:0")
mirror.weights                              # the same shards, as they lie on the device
mirror.copy(0)                              # the first piece, from the host
mirror.pieces_until(address)                # how many pieces must be there before memory up to an address is
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from weft import native
from weft.core.geometry.alignment import ALIGN, aligned
from weft.core.geometry.planes import Planes, rows_as_planes
from weft.devices import CPU
from weft.errors import ConfigError
from weft.runtime.memory import own_memory
from weft.runtime.weights import Held, Weights

log = logging.getLogger(__name__)
PIECE_BYTES = 64 << 20


class Mirror:
    """A device's copy of a member's weights, in pieces of about PIECE_BYTES."""

    def __init__(self, weights: Weights, device: str) -> None:
        """`device`: `cuda:0`; `cpu` works too."""
        if weights.device != CPU:
            raise ConfigError(f"weights on {weights.device} are not offloaded", hint="leave `through` out")
        self._keep = weights
        sizes = [aligned(num_bytes) for _, num_bytes in weights.ranges]
        self._memory = own_memory(device, max(sum(sizes), ALIGN))
        begins = (self._memory.address + np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)).tolist()
        self._ranges = [
            (start, num_bytes, begin) for (start, num_bytes), begin in zip(weights.ranges, begins, strict=True)
        ]
        self.weights = Weights(
            held=tuple(replace(held, address=self._moved(held)) for held in weights.held),
            ranges=tuple((begin, num_bytes) for _, num_bytes, begin in self._ranges),
            keep=self,
            device=device,
        )
        self._pieces = _pieces(self._ranges)
        self._ends = [int((piece.dst + piece.length).max()) for piece in self._pieces]
        self._copy = native.copy_planes if device == CPU else _copy_to(device, weights)

    def _moved(self, held: Held) -> int:
        """Where a shard lies on the device."""
        if not held.span_bytes:
            return self._memory.address
        start, _, begin = next(r for r in self._ranges if r[0] <= held.address < r[0] + r[1])
        return begin + held.address - start

    @property
    def num_pieces(self) -> int:
        """Pieces of the copy."""
        return len(self._pieces)

    def copy(self, number: int) -> int:
        """Copy a piece from the host; returns its bytes."""
        piece = self._pieces[number]
        self._copy(piece)
        return piece.num_bytes

    def pieces_until(self, address: int) -> int:
        """How many of the first pieces hold everything before an address of the device."""
        return min(int(np.searchsorted(self._ends, address)) + 1, len(self._ends))


def _pieces(ranges: Sequence[tuple[int, int, int]]) -> list[Planes]:
    """Copies of ranges (from, bytes, to), cut and put together into pieces of about PIECE_BYTES."""
    rows = np.array(
        [
            (start + offset, begin + offset, min(PIECE_BYTES, num_bytes - offset))
            for start, num_bytes, begin in ranges
            for offset in range(0, num_bytes, PIECE_BYTES)
        ],
        dtype=np.uint64,
    ).reshape(-1, 3)
    number = (np.cumsum(rows[:, 2]) - rows[:, 2]) // np.uint64(PIECE_BYTES)
    pieces = np.split(rows, np.flatnonzero(np.diff(number)) + 1)
    return [rows_as_planes(src=p[:, 0], dst=p[:, 1], length=p[:, 2]) for p in pieces if len(p)]


def _copy_to(device: str, weights: Weights) -> Callable[[Planes], int]:
    """One launch where the GPU can read the host's memory; otherwise one copy for every row."""
    from weft.gpu import GpuWork, is_pinned  # noqa: PLC0415 - torch and Triton only where there is a GPU

    work = GpuWork(int(device.partition(":")[2]))
    if all(is_pinned(*known) for known in weights.ranges if known[1]):
        return work.copy_planes
    log.warning("offloaded weights are not all in pinned memory: copying them to %s takes longer", device)
    return work.copy_from_host
