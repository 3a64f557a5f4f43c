"""Weights that are offloaded to host memory, and their copy on a device, from which everything is sent.

mirror = Mirror(weights, "cuda:0")
mirror.weights                              # the same shards, as they lie on the device
pieces, needs = mirror.pieces(readers)      # in the order in which they are read; how many of them each reader needs
mirror.copy(pieces[0])                      # from the host
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from weft import native
from weft.codec.conversion import Spans
from weft.core.geometry.alignment import ALIGN, aligned
from weft.core.geometry.planes import Planes, rows_as_planes
from weft.devices import CPU
from weft.errors import ConfigError
from weft.runtime.memory import own_memory
from weft.runtime.weights import Weights

log = logging.getLogger(__name__)
Int64s = NDArray[np.int64]
PIECE_BYTES = 64 << 20


class Mirror:
    """A device's copy of a member's weights."""

    def __init__(self, weights: Weights, device: str) -> None:
        """`device`: `cuda:0`; `cpu` works too."""
        if weights.device != CPU:
            raise ConfigError(f"weights on {weights.device} are not offloaded", hint="leave `through` out")
        self._keep = weights
        start, num_bytes = _merged(weights.ranges)
        sizes = aligned(num_bytes)
        self._memory = own_memory(device, max(int(sizes.sum()), ALIGN))
        begin = self._memory.address + np.cumsum(sizes) - sizes
        self.weights = replace(
            weights,
            addresses=_moved(weights, start, begin, empty=self._memory.address),
            ranges=tuple(zip(begin.tolist(), num_bytes.tolist(), strict=True)),
            keep=self,
            device=device,
            rehome=None,
        )
        self._rows = _rows(zip(start.tolist(), num_bytes.tolist(), begin.tolist(), strict=True))
        self._copy = native.copy_planes if device == CPU else _copy_to(device, weights)

    def copy(self, piece: Planes) -> int:
        """Copy a piece from the host; returns its bytes."""
        self._copy(piece)
        return piece.num_bytes

    def pieces(self, readers: Sequence[Spans]) -> tuple[list[Planes], list[int]]:
        """The copy in pieces of about PIECE_BYTES, and how many of the first ones each reader needs.

        `readers`: addresses and bytes of what they read on the device, in the order in which they want to.
        """
        read = [self._read_by(*spans) for spans in readers]
        first = np.full(len(self._rows), len(readers))
        for number in reversed(range(len(readers))):
            first[read[number]] = number
        order = np.argsort(first, kind="stable")
        length = self._rows[order, 2]
        ends = np.flatnonzero(np.diff((np.cumsum(length) - length) // PIECE_BYTES)) + 1
        piece = np.empty(len(order), dtype=np.int64)
        piece[order] = np.searchsorted(ends, np.arange(len(order)), side="right")
        rows = [each for each in np.split(self._rows[order].astype(np.uint64), ends) if len(each)]
        pieces = [rows_as_planes(src=each[:, 0], dst=each[:, 1], length=each[:, 2]) for each in rows]
        return pieces, [int(piece[rows].max(initial=-1)) + 1 for rows in read]

    def _read_by(self, address: Int64s, num_bytes: Int64s) -> Int64s:
        """Rows of the copy that hold some memory of the device."""
        begins, count = self._rows[:, 1], len(self._rows) + 1
        first = np.searchsorted(begins, address, side="right") - 1
        last = np.searchsorted(begins, address + num_bytes)
        covering = np.cumsum(np.bincount(first, minlength=count) - np.bincount(last, minlength=count))
        return np.flatnonzero(covering > 0)


def _merged(ranges: Sequence[tuple[int, int]]) -> tuple[Int64s, Int64s]:
    """Address and bytes of ranges, sorted; those that overlap become one, so that every byte is copied once."""
    start, num_bytes = np.array(sorted(ranges), dtype=np.int64).reshape(-1, 2).T
    end = np.maximum.accumulate(start + num_bytes)
    is_first = np.ones(len(start), dtype=bool)
    is_first[1:] = start[1:] >= end[:-1]
    first = np.flatnonzero(is_first)
    last = np.append(first, len(start))[1:] - 1
    return start[first], end[last] - start[first]


def _moved(weights: Weights, start: Int64s, begin: Int64s, *, empty: int) -> Int64s:
    """Where shards lie after the ranges at `start` were moved to `begin`; those without elements lie at `empty`."""
    if not len(start):
        return np.full(len(weights.addresses), empty, dtype=np.int64)
    at = np.maximum(np.searchsorted(start, weights.addresses, side="right") - 1, 0)
    return np.where(weights.table.span_bytes > 0, weights.addresses + (begin - start)[at], empty)


def _rows(ranges: Iterable[tuple[int, int, int]]) -> Int64s:
    """Ranges (from, bytes, to), cut: from, to, bytes of each row, in the order of where they go."""
    return np.array(
        [
            (start + offset, begin + offset, min(PIECE_BYTES, num_bytes - offset))
            for start, num_bytes, begin in ranges
            for offset in range(0, num_bytes, PIECE_BYTES)
        ],
        dtype=np.int64,
    ).reshape(-1, 3)


def _copy_to(device: str, weights: Weights) -> Callable[[Planes], int]:
    """One launch where the GPU can read the host's memory; otherwise one copy for every row."""
    from weft.gpu import GpuWork, is_pinned  # noqa: PLC0415 - torch and Triton only where there is a GPU

    work = GpuWork(int(device.partition(":")[2]))
    if all(is_pinned(*known) for known in weights.ranges if known[1]):
        return work.copy_planes
    log.warning("offloaded weights are not all in pinned memory: copying them to %s takes longer", device)
    return work.copy_from_host
