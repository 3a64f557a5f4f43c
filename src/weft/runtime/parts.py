"""From what members report to a plan, and from the plan to each member's part of it: pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from weft.core.layout import Layout, Shard, Tensor
from weft.core.plan import Plan
from weft.core.planner import make_plan
from weft.core.recipe import Op, Piece, Recipe
from weft.core.runs import route_runs
from weft.core.topology import Cluster
from weft.errors import LayoutError, PlanError
from weft.runtime.messages import Join, ReceivePlan, SendPlan, Target, pack


def plan_members(
    trainers: Mapping[int, Join], engines: Mapping[int, Join], cluster: Cluster, *, ranks_per_engine: int
) -> Plan:
    """The plan between the members that joined; engine tensors take the boxes of equally named trainer tensors."""
    layout = _trainer_layout(trainers)
    recipe = _recipe(engines, num_replicas=len(engines) // ranks_per_engine)
    topology = cluster.place(num_trainers=len(trainers), num_engines=len(engines))
    plan = make_plan(trainer=layout, recipe=recipe, topology=topology)
    if not np.isin(plan.recipe.op, (Op.COPY, Op.PAD)).all():
        raise PlanError(
            "the engine's precision differs from the trainer's", hint="hold weights of one dtype on both sides"
        )
    return plan


def _trainer_layout(trainers: Mapping[int, Join]) -> Layout:
    tensors: dict[str, Tensor] = {}
    shards = []
    for rank, join in trainers.items():
        for held in join.held:
            tensor = Tensor(name=held.name, dtype=held.dtype, shape=held.shape)
            if tensors.setdefault(held.name, tensor) != tensor:
                raise LayoutError(
                    f"trainer {rank} has `{held.name}` as {held.dtype} {list(held.shape)}, others as "
                    f"{tensors[held.name].dtype} {list(tensors[held.name].shape)}"
                )
            shards.append(Shard(tensor=held.name, rank=rank, lo=held.lo, extent=held.extent, strides=held.strides))
    return Layout.from_shards(list(tensors.values()), shards, num_ranks=len(trainers))


def _recipe(engines: Mapping[int, Join], *, num_replicas: int) -> Recipe:
    tensors = {
        rank: [Tensor(name=held.name, dtype=held.dtype, shape=held.extent) for held in join.held]
        for rank, join in engines.items()
    }
    pieces = {
        rank: [
            Piece(dst=held.name, source=held.name, dst_lo=(0,) * len(held.lo), extent=held.extent, src_lo=held.lo)
            for held in join.held
        ]
        for rank, join in engines.items()
    }
    return replace(Recipe.from_pieces(tensors, pieces), num_replicas=num_replicas)


def send_plan(
    plan: Plan, digest: str, trainer: int, trainers: Mapping[int, Join], engines: Mapping[int, Join]
) -> SendPlan:
    """The rows one trainer writes, for every engine rank it writes to."""
    shard_address = _shard_addresses(plan, trainer, trainers[trainer])
    targets = []
    for engine in np.flatnonzero(plan.pair_bytes[trainer]):
        join = engines[int(engine)]
        routes = np.flatnonzero(plan.pair == trainer * plan.topology.num_engines + engine)
        runs = route_runs(plan, np.searchsorted(plan.first, routes, side="right") - 1)
        staging = _staging_addresses(plan, int(engine), join)
        dst = staging[runs.dst] + runs.dst_offset
        targets.append(
            Target(
                engine=int(engine),
                endpoint=join.endpoint,
                descriptors=join.descriptors,
                src=pack((shard_address[runs.shard] + runs.src_offset).astype(np.uint64)),
                dst=pack(dst.astype(np.uint64)),
                length=pack(runs.num_bytes.astype(np.uint64)),
                position=pack((dst - join.descriptors[0].address).astype(np.uint64)),
            )
        )
    return SendPlan(plan_digest=digest, targets=targets)


def receive_plan(plan: Plan, digest: str, engine: int) -> ReceivePlan:
    """What one engine rank is owed for every version."""
    return ReceivePlan(plan_digest=digest, num_bytes=int(plan.rx_bytes[engine]))


def _shard_addresses(plan: Plan, trainer: int, join: Join) -> NDArray[np.int64]:
    """Where each shard row lies in one trainer's memory; zero where it does not hold it."""
    where = {(held.name, held.lo, held.extent): held.address for held in join.held}
    layout = plan.trainer
    addresses = np.zeros(len(layout.lo), dtype=np.int64)
    for row in range(len(layout.lo)):
        tensor = layout.tensors[layout.tensor_of[row]]
        num_dims = len(tensor.shape)
        lo, extent = (tuple(int(x) for x in column[row][:num_dims]) for column in (layout.lo, layout.extent))
        addresses[row] = where.get((tensor.name, lo, extent), 0)
    return addresses


def _staging_addresses(plan: Plan, engine: int, join: Join) -> NDArray[np.int64]:
    """Where each engine row is staged on one engine rank; zero where it has none."""
    where = {held.name: held.address for held in join.held}
    layout = plan.recipe.engine
    mine = layout.groups.contain(layout.group_of, np.full(len(layout.lo), engine))
    return np.array(
        [where[layout.tensors[layout.tensor_of[row]].name] if mine[row] else 0 for row in range(len(layout.lo))],
        dtype=np.int64,
    )
