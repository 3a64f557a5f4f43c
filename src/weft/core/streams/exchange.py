"""The order in which holders of quantised matrices agree on their scales: group after group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from weft.core.geometry.boxes import volume
from weft.core.geometry.fingerprint import distinct

if TYPE_CHECKING:
    from weft.core.plans.plan import Plan

GROUP_BYTES = 64 << 20
"""Fewest bytes of one trainer's weights whose magnitudes are exchanged at once."""
MAX_GROUPS = 16
"""Every group is a search, and a message to every other holder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleGroups:
    """All matrices of a plan that are quantised, in the order they are exchanged."""

    tensors: NDArray[np.int64]
    """Numbers of trainer tensors."""
    group: NDArray[np.int64]
    """Of every trainer tensor; -1 where it is not quantised."""
    first_key: NDArray[np.int64]
    """The first block of every trainer tensor; -1 where it is not quantised."""

    @classmethod
    def of(cls, plan: Plan) -> ScaleGroups:
        """Groups of about equal size: few enough that messages cost little, small enough that work overlaps."""
        trainer = plan.trainer
        tensors = distinct(trainer.tensor_of[plan.quantized_shards], len(trainer.tensors))
        size = (volume(trainer.shapes) * trainer.itemsize)[tensors]
        group_bytes = max(GROUP_BYTES * plan.topology.num_trainers, int(size.sum()) // MAX_GROUPS, 1)
        group = np.full(len(trainer.tensors), -1, dtype=np.int64)
        group[tensors] = np.unique((np.cumsum(size) - size) // group_bytes, return_inverse=True)[1]
        sides = plan.recipe.block_sides(trainer)[tensors]
        num_blocks = volume(-(-trainer.shapes[tensors] // sides))
        first_key = np.full(len(trainer.tensors), -1, dtype=np.int64)
        first_key[tensors] = np.cumsum(num_blocks) - num_blocks
        return cls(tensors=tensors, group=group, first_key=first_key)
