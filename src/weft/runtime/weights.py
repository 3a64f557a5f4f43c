"""Weights: the shards a member holds and the memory behind them.

weights = Weights.from_arrays({"w": array})                                            # whole tensors
weights = Weights.from_arrays({"w": array}, parts={"w": Part(shape=(8192, 64), lo=(2048, 0))})   # a shard each
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import mul
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.core.layout import DTYPE_BYTES, Tensor
from weft.devices import CPU
from weft.errors import LayoutError
from weft.runtime.control.held import HeldColumns, HeldTable
from weft.transport.base import Memory

Int64s = NDArray[np.int64]
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


@dataclass(frozen=True, eq=False)
class Weights:
    """All shards of one member; keeps their memory alive.

    >>> weights = Weights.from_arrays({"w": np.zeros((8, 4), np.float32)})
    >>> [(held.tensor.name, held.extent) for held in weights.held]
    [('w', (8, 4))]
    """

    table: HeldTable
    """The shards, as columns."""
    addresses: Int64s
    """Where each of them begins."""
    ranges: tuple[tuple[int, int], ...]
    """The memory behind the shards: address and bytes. Shards that touch inside one allocation share a range, so that
    transports can write them in one piece."""
    keep: Any = None
    device: str = CPU
    rehome: Callable[[Allocate], Weights] | None = None
    """Moves the weights into other memory without their owner noticing; None if that is not possible."""

    @classmethod
    def of(
        cls,
        held: Sequence[Held],
        ranges: tuple[tuple[int, int], ...],
        *,
        keep: Any = None,
        device: str = CPU,
        rehome: Callable[[Allocate], Weights] | None = None,
    ) -> Weights:
        """Weights from a description of every shard."""
        addresses = np.fromiter((shard.address for shard in held), dtype=np.int64, count=len(held))
        return cls(_table(held), addresses, ranges, keep, device, rehome)

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]], *, parts: Mapping[str, Part] | None = None) -> Weights:
        """Weights in NumPy arrays; `parts` says which box of its tensor an array is, where it is not the whole."""
        kinds, part_of = _ArrayKinds(), (parts or {}).get
        number = np.fromiter((kinds.number(name, array, part_of(name)) for name, array in arrays.items()), np.int64)
        addresses = np.fromiter((array.ctypes.data for array in arrays.values()), np.int64, len(arrays))
        table = replace(_table(kinds.known).take(number), names=list(arrays))
        ranges = sorted(set(zip(addresses.tolist(), table.span_bytes.tolist(), strict=True)))
        return cls(table, addresses, tuple(ranges), keep=dict(arrays))

    @cached_property
    def held(self) -> tuple[Held, ...]:
        """Every shard."""
        return tuple(
            Held(
                tensor=Tensor(name=shard.name, dtype=shard.dtype, shape=shard.shape),
                aliases=shard.aliases,
                lo=shard.lo,
                extent=shard.extent,
                strides=shard.strides,
                address=address,
            )
            for shard, address in zip(self.table, self.addresses.tolist(), strict=True)
        )

    @property
    def shards(self) -> HeldColumns:
        """The shards, as reported to the controller."""
        return self.table.packed()

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards, without gaps."""
        return int(self.table.num_bytes.sum())


def _table(held: Sequence[Held]) -> HeldTable:
    return HeldTable.of_lists(
        names=[shard.tensor.name for shard in held],
        aliases={number: shard.aliases for number, shard in enumerate(held) if shard.aliases},
        dtypes=[shard.tensor.dtype for shard in held],
        shape=[shard.tensor.shape for shard in held],
        lo=[shard.lo for shard in held],
        extent=[shard.extent for shard in held],
        strides=[shard.strides for shard in held],
    )


class _ArrayKinds:
    """Describes arrays; those that are alike except for their names and addresses are described once."""

    def __init__(self) -> None:
        self.known: list[Held] = []
        self._numbers: dict[tuple[Any, ...], int] = {}

    def number(self, name: str, array: NDArray[Any], part: Part | None) -> int:
        """The kind of an array, as a number in `known`."""
        shape, lo = (array.shape, (0,) * array.ndim) if part is None else (tuple(part.shape), tuple(part.lo))
        kind = array.dtype, array.shape, array.strides, shape, lo
        number = self._numbers.get(kind)
        if number is None:
            dtype, strides = _dtype_and_strides(name, array)
            number = self._numbers[kind] = len(self.known)
            tensor = Tensor(name=name, dtype=dtype, shape=shape)
            self.known.append(Held(tensor=tensor, lo=lo, extent=array.shape, strides=strides, address=0))
        return number


def _dtype_and_strides(name: str, array: NDArray[Any]) -> tuple[str, tuple[int, ...]]:
    """Weft's name for an array's dtype, and its strides in elements."""
    if array.dtype.name not in _DTYPES:
        raise LayoutError(f"`{name}` is {array.dtype.name}", hint=f"use one of {', '.join(_DTYPES)}")
    size = array.dtype.itemsize
    strides = array.strides if array.size else (size,) * array.ndim  # NumPy's mean nothing where there is nothing
    if any(stride % size or stride < size for stride in strides):
        raise LayoutError(f"`{name}` has strides {strides}", hint="use an array with positive strides")
    return _DTYPES[array.dtype.name], tuple(stride // size for stride in strides)
