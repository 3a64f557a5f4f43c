"""The member whose work is measured, with real memory, and the others of its case, of which only the names exist."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from itertools import product
from math import prod
from typing import Any

import numpy as np
import torch

from weft.bench.slice.link import STANDS_FOR
from weft.config import TransferSettings
from weft.core.layout import DTYPE_BYTES, Layout
from weft.core.layouts.engine_boxes import held_rows
from weft.core.plans.plan import Plan
from weft.devices import CPU
from weft.runtime.compile.member_plans import MemberPlans
from weft.runtime.control.messages import Join
from weft.runtime.weights import Held, Weights
from weft.transport.host import ProcessIdentity
from weft.transport.registry import Place


def layout_weights(layout: Layout, rank: int, device: str, *, is_pinned: bool = False) -> Weights:
    """One rank's shards, each in memory of its own, which is not initialised. `is_pinned`: for CPU memory."""
    rows = np.flatnonzero(held_rows(layout, rank))
    held, tensors = [], []
    columns = (layout.tensor_of[rows], layout.lo[rows], layout.extent[rows])
    for number, lo, extent in zip(*(column.tolist() for column in columns), strict=True):
        tensor = layout.tensors[number]
        dims = len(tensor.shape)
        size = max(prod(extent[:dims]) * DTYPE_BYTES[tensor.dtype], 1)
        tensors.append(torch.empty(size, dtype=torch.uint8, device=device, pin_memory=is_pinned))
        held.append(
            Held(
                tensor=tensor,
                lo=tuple(lo[:dims]),
                extent=tuple(extent[:dims]),
                strides=tuple(prod(extent[dim + 1 : dims]) for dim in range(dims)),
                address=tensors[-1].data_ptr(),
            )
        )
    ranges = tuple((tensor.data_ptr(), tensor.numel()) for tensor in tensors)
    return Weights.of(held, ranges, keep=tensors, device=device)


def bytes_at(address: int, num_bytes: int, device: str) -> torch.Tensor:
    """Memory of a device as a tensor of bytes."""
    if device == CPU:
        return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)
    from weft.gpu import GpuWork  # noqa: PLC0415 - Triton only where there is a GPU

    return GpuWork(int(device.partition(":")[2])).view(address, num_bytes)


def member_plans(
    plan: Plan,
    settings: TransferSettings,
    device: str,
    *,
    trainers: Mapping[int, Weights],
    engines: Mapping[int, Weights],
) -> MemberPlans:
    """Parts of the plan for members whose weights are given; all others count as holding nothing."""
    num_trainers, num_engines = plan.topology.num_trainers, plan.topology.num_engines
    nothing = Weights.of((), ())
    joins = (
        {rank: _join("trainer", rank, trainers.get(rank, nothing), device) for rank in range(num_trainers)},
        {rank: _join("engine", rank, engines.get(rank, nothing), device) for rank in range(num_engines)},
    )
    transports = dict.fromkeys(product(range(num_trainers), range(num_engines)), STANDS_FOR)
    return MemberPlans(plan, "slice", joins, transports, settings)


def _join(side: Any, rank: int, weights: Weights, device: str) -> Join:
    place = Place(host=f"{side} {rank}", container="slice", user=os.getuid(), device=device, installed=(STANDS_FOR,))
    return Join(
        side=side, rank=rank, held=weights.shards, place=place, process=ProcessIdentity.of(os.getpid()), age_s=0.0
    )
