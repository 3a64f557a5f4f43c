"""Runs a plan with plain memory copies: every rank's memory is a real flat buffer, every route a strided copy.

Also counts how often each destination element is written, so that "exactly once" is observed, not believed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from weft.core.geometry.scaling import Scaling, block_sides
from weft.core.layout import Tensor
from weft.core.plans.plan import Plan
from weft.core.recipe import Op

NUMPY_DTYPE = {
    "fp32": np.dtype(np.float32),
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
}
BLOCK = 128
Array = NDArray[Any]


def random_checkpoint(plan: Plan, seed: int) -> dict[str, Array]:
    """Full trainer tensors, by name, without the virtual scales."""
    rng = np.random.default_rng(seed)
    return {
        tensor.name: rng.standard_normal(tensor.shape).astype(NUMPY_DTYPE[tensor.dtype])
        for tensor in plan.trainer.tensors
        if not tensor.name.endswith("::scale")
    }


def block_scales(weight: Array, sides: tuple[int, int] = (BLOCK, BLOCK)) -> NDArray[np.float32]:
    """amax / 448 of every block of a matrix, of 128×128 elements or other sides."""
    rows, columns = (-(-size // side) for size, side in zip(weight.shape, sides, strict=True))
    padded = np.zeros((rows * sides[0], columns * sides[1]), dtype=np.float32)
    padded[: weight.shape[0], : weight.shape[1]] = np.abs(weight.astype(np.float32))
    amax = padded.reshape(rows, sides[0], columns, sides[1]).max(axis=(1, 3))
    return (np.where(amax == 0, 1, amax) / np.float32(448)).astype(np.float32)


def quantize(
    weight: Array,
    scales: NDArray[np.float32],
    row: int = 0,
    column: int = 0,
    sides: tuple[int, int] = (BLOCK, BLOCK),
) -> Array:
    """FP8 values of a part of a weight that starts at (row, column), with the scales of the whole."""
    rows = (row + np.arange(weight.shape[0])) // sides[0]
    columns = (column + np.arange(weight.shape[1])) // sides[1]
    return (weight.astype(np.float32) / scales[rows][:, columns]).astype(ml_dtypes.float8_e4m3fn)


@dataclass
class Executed:
    """Engine memory after the plan ran: by engine rank and tensor name."""

    tensors: dict[int, dict[str, Array]]
    writes: dict[int, dict[str, NDArray[np.int64]]]


def execute(plan: Plan, checkpoint: dict[str, Array]) -> Executed:
    """Run every route of a plan."""
    full = dict(checkpoint)
    virtual = {tensor.name for tensor in plan.trainer.tensors if tensor.name.endswith("::scale")}
    quantized = [tensor for tensor in plan.trainer.tensors if f"{tensor.name}::scale" in virtual]
    scales = {tensor.name: block_scales(checkpoint[tensor.name], _sides(plan, tensor)) for tensor in quantized}
    full |= {f"{name}::scale": scale for name, scale in scales.items()}
    memory = _trainer_memory(plan, full)
    done = _engine_memory(plan)
    for row in range(plan.num_rows):
        shard = int(plan.shard[row])
        source_name = plan.trainer.tensors[plan.trainer.tensor_of[shard]].name
        engine_tensor = plan.recipe.engine.tensors[plan.dst[row]]
        routes = slice(plan.first[row], plan.first[row + 1])
        for sender, receiver in zip(plan.sender[routes], plan.receiver[routes], strict=True):
            local = memory[int(sender), shard]
            start = plan.src_lo[row] - plan.trainer.lo[shard]
            view = local[tuple(slice(a, a + n) for a, n in zip(start, plan.src_extent[row], strict=True))]
            value = _convert(plan, row, view, scales.get(source_name))
            axes = [int(axis) for axis in plan.recipe.axes[plan.piece[row]] if axis >= 0]
            rest = [axis for axis in range(view.ndim) if axis not in axes]
            value = value.transpose([*axes, *rest]).reshape(plan.extent[row])
            box = tuple(slice(a, a + n) for a, n in zip(plan.dst_lo[row], plan.extent[row], strict=True))
            done.tensors[int(receiver)][engine_tensor.name][box] = value
            done.writes[int(receiver)][engine_tensor.name][box] += 1
    return _squeezed(plan, done)


def _sides(plan: Plan, tensor: Tensor) -> tuple[int, int]:
    """Sides of the blocks of a matrix that share a scale."""
    height, width = block_sides(tensor.shape, plan.recipe.scaling.get(tensor.name, Scaling.BLOCK))
    return height, width


def _convert(plan: Plan, row: int, view: Array, scales: NDArray[np.float32] | None) -> Array:
    op = Op(int(plan.recipe.op[plan.piece[row]]))
    if op is Op.QUANTIZE:
        assert scales is not None
        flat = view.reshape(view.shape[0], view.shape[1])
        tensor = plan.trainer.tensors[plan.trainer.tensor_of[plan.shard[row]]]
        top, left = (int(at) for at in plan.src_lo[row][:2])
        return quantize(flat, scales, top, left, _sides(plan, tensor)).reshape(view.shape)
    if op is Op.CAST:
        return view.astype(NUMPY_DTYPE[plan.recipe.engine.tensors[plan.dst[row]].dtype])
    return view


def _trainer_memory(plan: Plan, full: dict[str, Array]) -> dict[tuple[int, int], Array]:
    """For each (rank, shard row): a strided view into a flat buffer of that rank, filled with the shard."""
    layout = plan.trainer
    return {
        (int(rank), shard): shard_memory(plan, full, shard)[1]
        for shard in range(len(layout.lo))
        for rank in layout.groups.of(int(layout.group_of[shard]))
    }


def shard_memory(plan: Plan, full: dict[str, Array], shard: int) -> tuple[Array, Array]:
    """A flat buffer that holds one shard as its strides say, and the strided view of the shard in it."""
    layout = plan.trainer
    source = full[layout.tensors[layout.tensor_of[shard]].name]
    source = source.reshape(source.shape + (1,) * (layout.num_dims - source.ndim))
    extent, strides = layout.extent[shard], layout.strides[shard]
    flat = np.zeros(int(((extent - 1) * strides).sum()) + 1, dtype=source.dtype)
    view = np.lib.stride_tricks.as_strided(flat, tuple(extent), tuple(strides * source.dtype.itemsize))
    view[...] = source[tuple(slice(a, a + n) for a, n in zip(layout.lo[shard], extent, strict=True))]
    return flat, view


def _engine_memory(plan: Plan) -> Executed:
    engine = plan.recipe.engine
    done = Executed(tensors={r: {} for r in range(engine.num_ranks)}, writes={r: {} for r in range(engine.num_ranks)})
    for i, tensor in enumerate(engine.tensors):
        shape = tuple(engine.extent[i])
        for rank in engine.groups.of(int(engine.group_of[i])):
            done.tensors[int(rank)][tensor.name] = np.zeros(shape, dtype=NUMPY_DTYPE[tensor.dtype])
            done.writes[int(rank)][tensor.name] = np.zeros(shape, dtype=np.int64)
    return done


def _squeezed(plan: Plan, done: Executed) -> Executed:
    """Drop the trailing dimensions that only make columns equally wide."""
    engine = plan.recipe.engine
    for i, tensor in enumerate(engine.tensors):
        for rank in engine.groups.of(int(engine.group_of[i])):
            for table in (done.tensors, done.writes):
                table[int(rank)][tensor.name] = table[int(rank)][tensor.name].reshape(tensor.shape)
    return done


def same_bits(a: Array, b: Array) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == np.ascontiguousarray(b).tobytes()
