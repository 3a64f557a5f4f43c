"""The weights of a version, derived from its number alone; fast enough to be compared after every commit.

Element i of a tensor is `noise(i) + PHASE * w`, in 32-bit words, where w is the last version that changed it. Every
element changes in every version, or, for patches, those with `i % 32 == w % 32`; every seventh time all, which is more
than there is room for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.process.storm.settings import ROW, StormSettings
from weft.runtime.weights import Part

PERIOD = 32
ALL_EVERY = 7
PHASE = 0x9E3779B9
Words = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Difference:
    """Where an array is not the version it should be."""

    num_wrong: int
    name: str
    first: int
    """Number of the first wrong element of that tensor's part."""
    num_tensors: int


class Contents:
    """One rank's part of the weights: some rows of every tensor, or some columns."""

    def __init__(self, settings: StormSettings, rows: slice, columns: slice) -> None:
        self._is_sparse = settings.is_sparse
        self.shape = (rows.stop - rows.start, columns.stop - columns.start)
        index = np.arange(settings.rows * ROW, dtype=np.uint32).reshape(settings.rows, ROW)[rows, columns]
        self._noise = {
            f"layer{number}": _noise(index + np.uint32(number * settings.rows * ROW))
            for number in range(settings.num_tensors)
        }
        whole = (settings.rows, ROW)
        self.parts = {name: Part(shape=whole, lo=(rows.start, columns.start)) for name in self._noise}

    def empty(self) -> dict[str, NDArray[np.float32]]:
        """Arrays of zeros."""
        return {name: np.zeros(self.shape, dtype=np.float32) for name in self._noise}

    def fill(self, arrays: dict[str, NDArray[np.float32]], version: int) -> None:
        """Make arrays a version."""
        phase = self._phase(version)
        for name, noise in self._noise.items():
            np.add(_by_period(noise), phase, out=_by_period(arrays[name].view(np.uint32)))

    def difference(self, arrays: dict[str, NDArray[np.float32]], version: int | None) -> Difference | None:
        """Where arrays are not a version (None: not zeros), if anywhere."""
        wrong = [(name, self._wrong(arrays[name], name, version)) for name in self._noise]
        found = [(name, mask) for name, mask in wrong if mask is not None]
        if not found:
            return None
        name, mask = found[0]
        total = sum(int(np.count_nonzero(part)) for _, part in found)
        return Difference(total, name, int(np.flatnonzero(mask)[0]), len(found))

    def _wrong(self, array: NDArray[np.float32], name: str, version: int | None) -> NDArray[np.bool_] | None:
        words = array.view(np.uint32)
        if version is None:
            return words.ravel() != 0 if words.any() else None
        wrong = _by_period(words) != _by_period(self._noise[name]) + self._phase(version)
        return wrong.ravel() if wrong.any() else None

    def _phase(self, version: int) -> Words:
        classes = np.arange(PERIOD, dtype=np.int64)
        changed = np.maximum(version - (version - classes) % PERIOD, version - version % ALL_EVERY)
        if not self._is_sparse:
            changed[:] = version
        return ((changed + PERIOD) * PHASE & 0xFFFFFFFF).astype(np.uint32)


def _noise(index: Words) -> Words:
    """Words without a pattern, so that a row in the wrong place is noticed."""
    mixed = index * np.uint32(0x85EBCA6B)
    mixed ^= mixed >> np.uint32(13)
    return np.ascontiguousarray(mixed * np.uint32(0xC2B2AE35))


def _by_period(words: Words) -> Words:
    return words.reshape(-1, PERIOD)


def of_trainer(settings: StormSettings, rank: int) -> Contents:
    """Trainers are cut along rows."""
    step = settings.rows // settings.num_trainers
    return Contents(settings, slice(rank * step, (rank + 1) * step), slice(0, ROW))


def of_engine(settings: StormSettings, rank: int) -> Contents:
    """Engines hold everything; the ranks of one are cut along columns."""
    step, number = ROW // settings.ranks_per_engine, rank % settings.ranks_per_engine
    return Contents(settings, slice(0, settings.rows), slice(number * step, (number + 1) * step))
