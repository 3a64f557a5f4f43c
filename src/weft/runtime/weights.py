"""Weights: the shards a member holds and the memory behind them.

weights = Weights.from_arrays({"w": array})                                            # whole tensors
weights = Weights.from_arrays({"w": array}, parts={"w": Part(shape=(8192, 64), lo=(2048, 0))})   # a shard each
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.core.layout import DTYPE_BYTES, Tensor
from weft.devices import CPU
from weft.errors import LayoutError
from weft.runtime.control.messages import HeldShard
from weft.transport.base import Memory

_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float8_e4m3fn": "fp8_e4m3"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Which box of a tensor an array is: the tensor's whole shape, and where the array begins in it.

    A fused parameter is several boxes of other tensors; each says of which, how large, and where it lies.
    """

    shape: tuple[int, ...]
    lo: tuple[int, ...]
    source: str = ""
    """The tensor, where it is not called like the parameter."""
    extent: tuple[int, ...] | None = None
    """Size of the box, where it is not the whole parameter."""
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
        reach = sum((n - 1) * stride for n, stride in zip(self.extent, self.strides, strict=True))
        return (reach + 1) * DTYPE_BYTES[self.tensor.dtype]


Allocate = Callable[[int], Memory]


@dataclass(frozen=True, slots=True)
class Weights:
    """All shards of one member; keeps their memory alive."""

    held: tuple[Held, ...]
    ranges: tuple[tuple[int, int], ...]
    """The memory behind the shards: address and bytes. Shards that touch inside one allocation share a range, so that
    transports can write them in one piece."""
    keep: Any = None
    device: str = CPU
    rehome: Callable[[Allocate], Weights] | None = None
    """Moves the weights into other memory without their owner noticing; None where that is not possible."""

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]], *, parts: Mapping[str, Part] | None = None) -> Weights:
        """Weights in NumPy arrays; `parts` says which box of its tensor an array is, where it is not the whole."""
        held = []
        for name, array in arrays.items():
            if array.dtype.name not in _DTYPES:
                raise LayoutError(f"`{name}` is {array.dtype.name}", hint=f"use one of {', '.join(_DTYPES)}")
            part = (parts or {}).get(name, Part(shape=array.shape, lo=(0,) * array.ndim))
            size = array.dtype.itemsize
            if any(stride % size or stride < size for stride in array.strides):
                raise LayoutError(f"`{name}` has strides {array.strides}", hint="use an array with positive strides")
            held.append(
                Held(
                    tensor=Tensor(name=name, dtype=_DTYPES[array.dtype.name], shape=part.shape),
                    lo=part.lo,
                    extent=array.shape,
                    strides=tuple(stride // size for stride in array.strides),
                    address=int(np.asarray(array).ctypes.data),
                )
            )
        ranges = tuple(sorted({(shard.address, shard.span_bytes) for shard in held}))
        return cls(tuple(held), ranges, keep=dict(arrays))

    @property
    def shards(self) -> list[HeldShard]:
        """The shards, as the controller gets to know them."""
        return [
            HeldShard(
                name=held.tensor.name,
                aliases=held.aliases,
                dtype=held.tensor.dtype,
                shape=held.tensor.shape,
                lo=held.lo,
                extent=held.extent,
                strides=held.strides,
            )
            for held in self.held
        ]

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards, without gaps."""
        return sum(int(np.prod(held.extent)) * DTYPE_BYTES[held.tensor.dtype] for held in self.held)
