"""FP8 engines in storms: numbers of a version, and the codes and scales they become.

Four sets of numbers take turns, times a power of two that goes through seven: neighbours differ in codes and in scales,
and every version is compared with what quantising whole tensors gives. Trainers are cut inside blocks, so that they
have to agree on scales.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tests.process.storm.contents import Difference
from tests.process.storm.settings import ROW, StormSettings
from weft.core.geometry.scaling import QUANT_BLOCK
from weft.runtime.weights import Part

NUM_SETS, NUM_POWERS = 4, 7
OFF_BLOCKS = 40
"""Rows by which the borders of trainers miss those of blocks."""
Floats = NDArray[np.float32]
Arrays = dict[str, NDArray[Any]]


class TrainerNumbers:
    """Some rows of every tensor, in FP32."""

    def __init__(self, settings: StormSettings, rank: int) -> None:
        step, count = settings.rows // settings.num_trainers, settings.num_trainers
        borders = [0, *(step * number + OFF_BLOCKS for number in range(1, count)), settings.rows]
        first, last = borders[rank : rank + 2]
        self._numbers = {name: [numbers[first:last] for numbers in sets] for name, sets in _numbers(settings).items()}
        whole = (settings.rows, ROW)
        self.parts = {name: Part(shape=whole, lo=(first, 0)) for name in self._numbers}

    def empty(self) -> Arrays:
        """Arrays of zeros."""
        return {name: np.zeros_like(sets[0]) for name, sets in self._numbers.items()}

    def fill(self, arrays: Arrays, version: int) -> None:
        """Make arrays a version."""
        for name, sets in self._numbers.items():
            np.multiply(sets[version % NUM_SETS], _power(version), out=arrays[name])


class EngineNumbers:
    """Some columns of every tensor: codes and scales."""

    def __init__(self, settings: StormSettings, rank: int) -> None:
        step = ROW // settings.ranks_per_engine
        first = rank % settings.ranks_per_engine * step
        self._made: dict[str, list[NDArray[Any]]] = {}
        self.parts = {}
        for name, sets in _numbers(settings).items():
            for kind, side, which in (("", 1, 0), ("_scale_inv", QUANT_BLOCK, 1)):
                columns = slice(first // side, (first + step) // side)
                made = [quantized(numbers)[which] for numbers in sets]
                self._made[name + kind] = [np.ascontiguousarray(each[:, columns]) for each in made]
                self.parts[name + kind] = Part(shape=made[0].shape, lo=(0, columns.start))

    def empty(self) -> Arrays:
        """Arrays of zeros."""
        return {name: np.zeros_like(made[0]) for name, made in self._made.items()}

    def difference(self, arrays: Arrays, version: int | None) -> Difference | None:
        """Where arrays are not a version (None: not zeros), if anywhere."""
        wrong = {name: _bits(arrays[name]) != _bits(self._expected(name, version)) for name in self._made}
        found = [(name, mask) for name, mask in wrong.items() if mask.any()]
        if not found:
            return None
        total = sum(int(np.count_nonzero(mask)) for _, mask in found)
        return Difference(total, found[0][0], int(np.flatnonzero(found[0][1])[0]), len(found))

    def _expected(self, name: str, version: int | None) -> NDArray[Any]:
        if version is None:
            return np.zeros_like(self._made[name][0])
        made = self._made[name][version % NUM_SETS]
        return made * _power(version) if made.dtype == np.float32 else made


def _power(version: int) -> np.float32:
    return np.float32(2.0 ** (version % NUM_POWERS - 3))


def _numbers(settings: StormSettings) -> dict[str, list[Floats]]:
    """All sets of every tensor. Rows differ in size, so that a part of a block does not know its scale."""
    made: dict[str, list[Floats]] = {}
    for number in range(settings.num_tensors):
        chance = np.random.default_rng(number)
        size = np.exp(chance.standard_normal((settings.rows, 1), dtype=np.float32))
        shape = (settings.rows, ROW)
        made[f"layer{number}"] = [chance.standard_normal(shape, dtype=np.float32) * size for _ in range(NUM_SETS)]
    return made


def quantized(numbers: Floats) -> tuple[NDArray[Any], Floats]:
    """Codes and scales of a whole matrix, as weft/codec/fp8.py defines them."""
    rows, columns = (size // QUANT_BLOCK for size in numbers.shape)
    blocks = np.abs(numbers).reshape(rows, QUANT_BLOCK, columns, QUANT_BLOCK)
    scale = np.maximum(blocks.max(axis=(1, 3)), np.float32(1e-10)) / np.float32(448)
    factor = (np.float32(1) / scale).repeat(QUANT_BLOCK, 0).repeat(QUANT_BLOCK, 1)
    return np.clip(numbers * factor, -448, 448).astype(ml_dtypes.float8_e4m3fn), scale


def _bits(array: NDArray[Any]) -> NDArray[Any]:
    return array.view(np.uint32 if array.itemsize == 4 else np.uint8)
