"""Members that hold what a plan says they hold: as reports to a controller, or as arrays."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from tests.support.executor import NUMPY_DTYPE
from weft.core.geometry.boxes import row_major_strides
from weft.core.geometry.scaling import Scaling, scale_shape
from weft.core.plans.plan import SCALE_SUFFIX, Plan
from weft.core.recipe import Op
from weft.runtime.control.held import HeldShard, HeldTable
from weft.runtime.control.messages import Join
from weft.runtime.weights import Part
from weft.transport.host import ProcessIdentity
from weft.transport.registry import place_here

PLACE, PROCESS = place_here(), ProcessIdentity.of(os.getpid())


def join(side: str, rank: int, held: list[HeldShard]) -> Join:
    return Join(side=side, rank=rank, held=HeldTable.of(held).packed(), place=PLACE, process=PROCESS, age_s=0.0)


def holding(joined: Join, shards: Iterable[HeldShard]) -> Join:
    """A member that holds other shards."""
    return msgspec.structs.replace(joined, held=HeldTable.of(list(shards)).packed())


def held(name: str, dtype: str, shape: Any, lo: Any, extent: Any, aliases: tuple[str, ...] = ()) -> HeldShard:
    strides = tuple(row_major_strides(np.array([extent]))[0].tolist())
    return HeldShard(
        name=name, aliases=aliases, dtype=dtype, shape=tuple(shape), lo=tuple(lo), extent=tuple(extent), strides=strides
    )


def trainer_joins(plan: Plan) -> dict[int, Join]:
    """Trainers as the plan has them."""
    layout = plan.trainer
    found: dict[int, list[HeldShard]] = {rank: [] for rank in range(layout.num_ranks)}
    for row, number in enumerate(layout.tensor_of.tolist()):
        tensor = layout.tensors[number]
        if tensor.name.endswith(SCALE_SUFFIX):
            continue
        lo, extent = (column[row, : len(tensor.shape)].tolist() for column in (layout.lo, layout.extent))
        for rank in layout.groups.of(layout.group_of[row]).tolist():
            found[rank].append(held(tensor.name, tensor.dtype, tensor.shape, lo, extent))
    hosts = plan.topology.host_of(plan.topology.trainer_device).tolist()
    return {rank: _on_host(hosts[rank], join("trainer", rank, shards)) for rank, shards in found.items()}


def engine_joins(plan: Plan, *, as_boxes: bool) -> dict[int, Join]:
    """Engines as the plan has them: whole tensors by its names, or boxes of checkpoint tensors as adapters report."""
    found = {
        rank: _boxes(plan, rank) if as_boxes else _tensors(plan, rank) for rank in range(plan.topology.num_engines)
    }
    hosts = plan.topology.host_of(plan.topology.engine_device).tolist()
    return {rank: _on_host(hosts[rank], join("engine", rank, shards)) for rank, shards in found.items()}


def _on_host(number: int, joined: Join) -> Join:
    """A member on a host of the plan."""
    return msgspec.structs.replace(joined, place=msgspec.structs.replace(joined.place, host=f"host {number}"))


def _rows(plan: Plan, rank: int) -> list[int]:
    engine = plan.recipe.engine
    return np.flatnonzero(engine.groups.contain(engine.group_of, np.full(len(engine.lo), rank))).tolist()


def _tensors(plan: Plan, rank: int) -> list[HeldShard]:
    tensors = [plan.recipe.engine.tensors[row] for row in _rows(plan, rank)]
    return [held(t.name, t.dtype, t.shape, (0,) * len(t.shape), t.shape) for t in tensors]


def _boxes(plan: Plan, rank: int) -> list[HeldShard]:
    recipe, seen = plan.recipe, Counter[str]()
    shapes = {tensor.name: tensor.shape for tensor in plan.trainer.tensors}
    found = []
    for row in _rows(plan, rank):
        for piece in np.flatnonzero((recipe.dst == row) & (recipe.op != Op.PAD)).tolist():
            source = recipe.sources[recipe.src[piece]]
            shape, name = shapes[source], source
            if recipe.op[piece] == Op.SCALE:
                shape, name = scale_shape(shape, recipe.scaling.get(source, Scaling.BLOCK)), f"{source}_scale_inv"
            seen[name] += 1
            names = (name, ()) if seen[name] == 1 else (f"box {seen[name]} of {name}", (name,))
            lo, extent = (column[piece, : len(shape)].tolist() for column in (recipe.src_lo, recipe.src_extent))
            found.append(held(names[0], recipe.engine.tensors[row].dtype, shape, lo, extent, names[1]))
    return found


def trainer_arrays(plan: Plan, rank: int) -> tuple[dict[str, np.ndarray], dict[str, Part]]:
    """Empty arrays for what a trainer rank holds (one box of each tensor), and which boxes they are."""
    shards = list(trainer_joins(plan)[rank].held.table)
    arrays = {shard.name: np.zeros(shard.extent, NUMPY_DTYPE[shard.dtype]) for shard in shards}
    return arrays, {shard.name: Part(shape=shard.shape, lo=shard.lo) for shard in shards}


def engine_arrays(plan: Plan, rank: int) -> dict[str, np.ndarray]:
    """Empty arrays for what an engine rank holds."""
    return {shard.name: np.zeros(shard.extent, NUMPY_DTYPE[shard.dtype]) for shard in _tensors(plan, rank)}
