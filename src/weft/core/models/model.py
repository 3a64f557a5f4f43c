"""A model as planning sees it: tensors with the attributes that parallelism needs.

`ModelTensor` says how a checkpoint tensor may be divided; `Model` is the list of them. The catalog makes these
from a `config.json`; trainer and engine layouts divide them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from weft.core.geometry.splits import chunk, even_split
from weft.core.layout import Tensor
from weft.errors import ConfigError

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(lo, extent)"""

FIRST_STAGE, LAST_STAGE = -1, -2
"""`layer` of tensors before the first and after the last transformer layer."""


class Split(enum.Enum):
    """How tensor parallelism may cut a tensor."""

    NONE = "none"
    COLUMN = "column"
    """Along the output dimension (0)."""
    ROW = "row"
    """Along the input dimension (1)."""
    VOCAB = "vocab"
    """Along dimension 0, padded to equal parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTensor:
    """A checkpoint tensor and how it may be divided."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    layer: int
    split: Split = Split.NONE
    num_units: int = 1
    """Indivisible units along the split dimension: heads, rows."""
    unit: str = "rows"
    """What a unit is, for messages: `attention heads`."""
    expert: int = -1
    quantized: bool = False
    """Whether FP8 checkpoints of this family store it in FP8."""
    num_fused: int = 1
    """Parts fused one after the other along the split dimension in the checkpoint itself (GPT-2's c_attn: 3)."""
    transposed: bool = False
    """Stored [in, out], as GPT-2's Conv1D does."""
    keeps_dtype: bool = False
    """Stays in its own precision on both sides, such as the router's FP32 correction bias."""
    engine_dtype: str = ""
    """Precision in which engines hold it, whatever their own is; `plain`: their own, but never FP8."""
    policy: bool = True
    """Part of what an RL trainer updates and an engine serves; draft layers and stored scales are not."""

    @property
    def split_dim(self) -> int:
        """The dimension `split` refers to."""
        return int((self.split is Split.ROW) != self.transposed) if len(self.shape) > 1 else 0

    @property
    def num_elements(self) -> int:
        """Size in elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    def tensor(self) -> Tensor:
        """The tensor without the parallelism attributes."""
        return Tensor(name=self.name, dtype=self.dtype, shape=self.shape)

    def divides_into(self, num_parts: int) -> bool:
        """Whether tensor parallelism of this size is possible; KV heads may repeat on several parts."""
        if self.split not in (Split.COLUMN, Split.ROW):
            return True
        repeats = self.unit == "KV heads" and num_parts % self.num_units == 0
        return self.num_units % num_parts == 0 or repeats

    def part_boxes(self, num_parts: int, part: int) -> list[Box]:
        """What one tensor-parallel part holds: one box, or one per fused part of a fused tensor."""
        if self.split is Split.NONE or num_parts == 1:
            return [((0,) * len(self.shape), self.shape)]
        size = self.shape[self.split_dim]
        if self.split is Split.VOCAB:
            return [self.cut(*chunk(size, num_parts, part))]
        fused = size // self.num_fused
        rows_per_unit = fused // self.num_units
        length = max(self.num_units // num_parts, 1) * rows_per_unit
        start = part * self.num_units // num_parts * rows_per_unit
        return [self.cut(i * fused + start, length) for i in range(self.num_fused)]

    def cut(self, start: int, length: int) -> Box:
        """The box of some rows along the split dimension."""
        lo, extent = [0] * len(self.shape), list(self.shape)
        lo[self.split_dim], extent[self.split_dim] = start, length
        return tuple(lo), tuple(extent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model: its config and the exact tensor list of its checkpoint."""

    name: str
    family: str
    config: Mapping[str, Any]
    tensors: tuple[ModelTensor, ...]
    num_layers: int
    num_experts: int
    tied: bool

    @property
    def policy_tensors(self) -> tuple[ModelTensor, ...]:
        """The tensors an RL trainer updates: no draft layers, no stored scales."""
        return tuple(tensor for tensor in self.tensors if tensor.policy)

    @property
    def num_params(self) -> int:
        """Elements of all policy tensors."""
        return sum(tensor.num_elements for tensor in self.policy_tensors)

    def with_dtype(self, dtype: str) -> Model:
        """The same model with its weights stored in another precision (FP32 masters, FP16)."""
        if dtype not in ("bf16", "fp16", "fp32"):
            raise ConfigError(f"unknown trainer dtype `{dtype}`", hint="use bf16, fp16 or fp32")
        changed = (t if t.keeps_dtype else replace(t, dtype=dtype) for t in self.tensors)
        return replace(self, tensors=tuple(changed))

    def stages_of(self, tensor: ModelTensor, num_stages: int) -> tuple[int, ...]:
        """The pipeline stages that hold a tensor; a tied embedding is on the first and on the last."""
        last = num_stages - 1
        if tensor.layer == FIRST_STAGE:
            both = self.tied and tensor.split is Split.VOCAB and last > 0
            return (0, last) if both else (0,)
        if tensor.layer == LAST_STAGE:
            return (last,)
        step, longer = divmod(self.num_layers, num_stages)
        boundary = longer * (step + 1)
        if tensor.layer < boundary:
            return (tensor.layer // (step + 1),)
        return (longer + (tensor.layer - boundary) // step,)


def expert_range(num_experts: int, num_parts: int, part: int) -> range:
    """The experts of one expert-parallel part; sizes differ by at most one."""
    start, length = even_split(num_experts, num_parts, part)
    return range(start, start + length)
