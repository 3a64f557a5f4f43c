"""Weights: the shards a member holds and the memory behind them.

weights = Weights.from_arrays({"w": array})                                            # whole tensors
weights = Weights.from_arrays({"w": array}, parts={"w": Part(shape=(8192, 64), lo=(2048, 0))})   # a shard each
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import mul
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.core.layout import DTYPE_BYTES, Tensor, coordinate_column
from weft.devices import CPU
from weft.errors import LayoutError
from weft.runtime.control.held import HeldColumns, HeldTable
from weft.transport.base import Memory

_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float8_e4m3fn": "fp8_e4m3"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Which box of a tensor an array is: the tensor's whole shape, and where the array begins in it.

    A fused parameter is several boxes of other tensors; each says of which tensor, how large, and where it lies.

    >>> rows = np.zeros((2, 4), np.float32)                      # the last two of eight rows
    >>> weights = Weights.from_arrays({"w": rows}, parts={"w": Part(shape=(8, 4), lo=(6, 0))})
    """

    shape: tuple[int, ...]
    lo: tuple[int, ...]
    source: str = ""
    """The tensor, if its name differs from the parameter's."""
    extent: tuple[int, ...] | None = None
    """Size of the box, if it is not the whole parameter."""
    at: tuple[int, ...] | None = None
    """Where in the parameter the box begins, if not at its beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One shard and where it lies in this process."""

    tensor: Tensor
    aliases: tuple[str, ...] = ()
    """Other names of the same memory: tied weights."""
    lo: tuple[int, ...]
    extent: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements."""
    address: int

    @property
    def span_bytes(self) -> int:
        """Bytes from the first to the last element, gaps included."""
        if 0 in self.extent:
            return 0
        reach = sum(map(mul, self.extent, self.strides)) - sum(self.strides)
        return (reach + 1) * DTYPE_BYTES[self.tensor.dtype]


Allocate = Callable[[int], Memory]


@dataclass(frozen=True)
class Weights:
    """All shards of one member; keeps their memory alive.

    >>> weights = Weights.from_arrays({"w": np.zeros((8, 4), np.float32)})
    >>> [(held.tensor.name, held.extent) for held in weights.held]
    [('w', (8, 4))]
    """

    held: tuple[Held, ...]
    ranges: tuple[tuple[int, int], ...]
    """The memory behind the shards: address and bytes. Shards that touch inside one allocation share a range, so that
    transports can write them in one piece."""
    keep: Any = None
    device: str = CPU
    rehome: Callable[[Allocate], Weights] | None = None
    """Moves the weights into other memory without their owner noticing; None if that is not possible."""

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]], *, parts: Mapping[str, Part] | None = None) -> Weights:
        """Weights in NumPy arrays; `parts` says which box of its tensor an array is, where it is not the whole."""
        kinds = _ArrayKinds()
        held = tuple(kinds.held(name, array, (parts or {}).get(name)) for name, array in arrays.items())
        ranges = tuple(sorted({(shard.address, shard.span_bytes) for shard in held}))
        return cls(held, ranges, keep=dict(arrays))

    @cached_property
    def addresses(self) -> NDArray[np.int64]:
        """Where each shard begins."""
        return np.fromiter((held.address for held in self.held), dtype=np.int64, count=len(self.held))

    @cached_property
    def table(self) -> HeldTable:
        """The shards as columns."""
        held = self.held
        dtypes = {dtype: number for number, dtype in enumerate(dict.fromkeys(shard.tensor.dtype for shard in held))}
        num_dims = np.array([len(shard.extent) for shard in held], dtype=np.int64)
        width = int(num_dims.max(initial=1))
        return HeldTable(
            names=[shard.tensor.name for shard in held],
            aliases={number: shard.aliases for number, shard in enumerate(held) if shard.aliases},
            dtypes=tuple(dtypes),
            dtype=np.array([dtypes[shard.tensor.dtype] for shard in held], dtype=np.int64),
            num_dims=num_dims,
            shape=coordinate_column([shard.tensor.shape for shard in held], width, fill=1),
            lo=coordinate_column([shard.lo for shard in held], width, fill=0),
            extent=coordinate_column([shard.extent for shard in held], width, fill=1),
            strides=coordinate_column([shard.strides for shard in held], width, fill=1),
        )

    @property
    def shards(self) -> HeldColumns:
        """The shards, as reported to the controller."""
        return self.table.packed()

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards, without gaps."""
        return int(self.table.num_bytes.sum())


class _ArrayKinds:
    """Describes arrays; what arrays of one kind share is computed once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[str, tuple[int, ...]]] = {}

    def held(self, name: str, array: NDArray[Any], part: Part | None) -> Held:
        """An array as a shard."""
        kind = array.dtype, array.shape, array.strides
        if kind not in self._known:
            self._known[kind] = _dtype_and_strides(name, array)
        dtype, strides = self._known[kind]
        shape, lo = (array.shape, (0,) * array.ndim) if part is None else (part.shape, part.lo)
        return Held(
            tensor=Tensor(name=name, dtype=dtype, shape=shape),
            lo=lo,
            extent=array.shape,
            strides=strides,
            address=array.ctypes.data,
        )


def _dtype_and_strides(name: str, array: NDArray[Any]) -> tuple[str, tuple[int, ...]]:
    """Weft's name for an array's dtype, and its strides in elements."""
    if array.dtype.name not in _DTYPES:
        raise LayoutError(f"`{name}` is {array.dtype.name}", hint=f"use one of {', '.join(_DTYPES)}")
    size = array.dtype.itemsize
    if any(stride % size or stride < size for stride in array.strides):
        raise LayoutError(f"`{name}` has strides {array.strides}", hint="use an array with positive strides")
    return _DTYPES[array.dtype.name], tuple(stride // size for stride in array.strides)
