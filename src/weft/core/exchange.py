"""The order in which holders of quantised matrices agree on their scales: group after group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from weft.core.scaling import Scaling, scale_shape

if TYPE_CHECKING:
    from weft.core.plan import Plan

GROUP_BYTES = 64 << 20
"""Weights of one trainer whose magnitudes are exchanged at once, at least."""
MAX_GROUPS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleGroups:
    """All matrices of a plan that are quantised, in the order they are exchanged."""

    tensors: NDArray[np.int64]
    """Numbers of trainer tensors."""
    group: NDArray[np.int64]
    """Of every trainer tensor; -1 where it is not quantised."""
    first_key: dict[int, int]
    """Trainer tensor → the first of its blocks."""

    @classmethod
    def of(cls, plan: Plan) -> ScaleGroups:
        """Groups of about equal size, so few that messages do not matter and so small that work overlaps."""
        tensors = np.unique(plan.trainer.tensor_of[plan.quantized_shards]).astype(np.int64)
        described = [plan.trainer.tensors[number] for number in tensors.tolist()]
        size = np.array([tensor.num_bytes for tensor in described], dtype=np.int64)
        group_bytes = max(GROUP_BYTES * plan.topology.num_trainers, int(size.sum()) // MAX_GROUPS, 1)
        group = np.full(len(plan.trainer.tensors), -1, dtype=np.int64)
        group[tensors] = np.unique((np.cumsum(size) - size) // group_bytes, return_inverse=True)[1]
        shapes = {(tensor.shape, plan.recipe.scaling.get(tensor.name, Scaling.BLOCK)) for tensor in described}
        blocks = {key: int(np.prod(scale_shape(*key))) for key in shapes}
        count = [blocks[tensor.shape, plan.recipe.scaling.get(tensor.name, Scaling.BLOCK)] for tensor in described]
        first = np.concatenate([[0], np.cumsum(count)]).astype(np.int64)
        return cls(tensors=tensors, group=group, first_key=dict(zip(tensors.tolist(), first.tolist(), strict=False)))
