"""From what members report to a plan, and from the plan to each member's part of it: pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from weft.codec import delta
from weft.codec.image import ImageLayout
from weft.core.layout import DTYPE_BYTES, Layout, Shard, Tensor
from weft.core.plan import Plan
from weft.core.planner import make_plan
from weft.core.recipe import Op, Piece, Recipe
from weft.core.runs import route_runs
from weft.core.topology import Cluster
from weft.errors import LayoutError, PlanError
from weft.runtime.messages import HeldShard, Join, Opened, ReceivePlan, SendPlan, Source, Target, pack
from weft.transport.base import Column

ALIGN = 256
"""Shards begin at multiples of this in an engine rank's digest space."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What one trainer writes to one engine rank, as columns."""

    src: Column
    dst: Column
    length: Column
    position: Column
    width: Column


def plan_members(
    trainers: Mapping[int, Join], engines: Mapping[int, Join], cluster: Cluster, *, ranks_per_engine: int
) -> Plan:
    """The plan between the members that joined; engine tensors take the boxes of equally named trainer tensors."""
    wanted = {held.name for join in engines.values() for held in join.held}
    offered = {name for join in trainers.values() for held in join.held for name in (held.name, *held.aliases)}
    sources = {
        held.name: next((name for name in (held.name, *held.aliases) if name in offered), held.name)
        for join in engines.values()
        for held in join.held
    }
    layout = _trainer_layout(trainers, wanted | set(sources.values()))
    recipe = _recipe(engines, sources, num_replicas=len(engines) // ranks_per_engine)
    topology = cluster.place(num_trainers=len(trainers), num_engines=len(engines))
    plan = make_plan(trainer=layout, recipe=recipe, topology=topology)
    if not np.isin(plan.recipe.op, (Op.COPY, Op.PAD)).all():
        raise PlanError(
            "the engine's precision differs from the trainer's", hint="hold weights of one dtype on both sides"
        )
    return plan


def _names(held: HeldShard, wanted: set[str]) -> list[str]:
    """The names under which a trainer's shard is asked for; its own where none is."""
    return [name for name in (held.name, *held.aliases) if name in wanted] or [held.name]


def _trainer_layout(trainers: Mapping[int, Join], wanted: set[str]) -> Layout:
    tensors: dict[str, Tensor] = {}
    shards = []
    for rank, join in trainers.items():
        for held in join.held:
            for name in _names(held, wanted):
                tensor = Tensor(name=name, dtype=held.dtype, shape=held.shape)
                if tensors.setdefault(name, tensor) != tensor:
                    raise LayoutError(
                        f"trainer {rank} has `{name}` as {held.dtype} {list(held.shape)}, others as "
                        f"{tensors[name].dtype} {list(tensors[name].shape)}"
                    )
                shards.append(Shard(tensor=name, rank=rank, lo=held.lo, extent=held.extent, strides=held.strides))
    return Layout.from_shards(list(tensors.values()), shards, num_ranks=len(trainers))


def _recipe(engines: Mapping[int, Join], sources: Mapping[str, str], *, num_replicas: int) -> Recipe:
    tensors = {
        rank: [Tensor(name=held.name, dtype=held.dtype, shape=held.extent) for held in join.held]
        for rank, join in engines.items()
    }
    pieces = {
        rank: [
            Piece(
                dst=held.name,
                source=sources[held.name],
                dst_lo=(0,) * len(held.lo),
                extent=held.extent,
                src_lo=held.lo,
            )
            for held in join.held
        ]
        for rank, join in engines.items()
    }
    return replace(Recipe.from_pieces(tensors, pieces), num_replicas=num_replicas)


class Parts:
    """Every member's part of one plan."""

    def __init__(
        self,
        plan: Plan,
        digest: str,
        joins: tuple[Mapping[int, Join], Mapping[int, Join]],
        opened: tuple[Mapping[int, Opened], Mapping[int, Opened]],
        transports: Mapping[tuple[int, int], str],
    ) -> None:
        self._plan, self._digest, self._transports = plan, digest, transports
        self._trainers, self._engines = joins
        self._from, self._to = opened
        self._rows = {
            (int(trainer), int(engine)): self._make_rows(int(trainer), int(engine))
            for trainer, engine in zip(*np.nonzero(plan.pair_bytes), strict=True)
        }
        self._slots = self._make_slots()

    def _make_slots(self) -> dict[tuple[int, int], int]:
        """Where each trainer's patches land on each engine rank that has memory for them."""
        slots = {}
        used: dict[int, int] = {}
        for (trainer, engine), rows in sorted(self._rows.items()):
            opened = self._to[engine]
            if not opened.patch_bytes:
                continue
            layout = ImageLayout.of(rows.length, rows.width)
            if any(delta.max_bytes(part.num_elements, part.width) > delta.MAX_BYTES for part in layout.sections):
                raise PlanError(
                    f"trainer {trainer} sends {layout.num_bytes} bytes to engine {engine}: too many for a patch",
                    hint=f"at most {delta.MAX_BYTES} on one link with delta; use more ranks, or turn delta off",
                )
            begin = used.get(engine, 0)
            slots[trainer, engine] = opened.patch_address + begin
            used[engine] = begin + -(-layout.max_patch_bytes // ALIGN) * ALIGN
            if used[engine] > opened.patch_bytes:
                raise PlanError(
                    f"engine {engine} has {opened.patch_bytes} bytes for patches, {used[engine]} are needed"
                )
        return slots

    def send_plan(self, trainer: int) -> SendPlan:
        """The rows one trainer writes. It begins with the engine rank of its own number, so that all are busy."""
        engines = sorted(engine for t, engine in self._rows if t == trainer)
        first = trainer % max(len(self._engines), 1)
        ordered = [e for e in engines if e >= first] + [e for e in engines if e < first]
        return SendPlan(plan_digest=self._digest, targets=[self._target(trainer, engine) for engine in ordered])

    def _target(self, trainer: int, engine: int) -> Target:
        rows = self._rows[trainer, engine]
        return Target(
            engine=engine,
            offer=self._to[engine].offers[self._transports[trainer, engine]],
            src=pack(rows.src),
            dst=pack(rows.dst),
            length=pack(rows.length),
            position=pack(rows.position),
            width=pack(rows.width),
            slot=self._slots.get((trainer, engine), 0),
        )

    def receive_plan(self, engine: int) -> ReceivePlan:
        """What one engine rank gets from every trainer."""
        sources = [
            Source(
                trainer=trainer,
                transport=self._transports[trainer, engine],
                address=pack(rows.dst),
                position=pack(rows.position),
                length=pack(rows.length),
                width=pack(rows.width),
                slot=self._slots.get((trainer, e), 0),
            )
            for (trainer, e), rows in self._rows.items()
            if e == engine
        ]
        return ReceivePlan(plan_digest=self._digest, sources=sources)

    def _make_rows(self, trainer: int, engine: int) -> Rows:
        plan = self._plan
        routes = np.flatnonzero(plan.pair == trainer * plan.topology.num_engines + engine)
        runs = route_runs(plan, np.searchsorted(plan.first, routes, side="right") - 1)
        shard_address = _shard_addresses(plan, self._trainers[trainer], self._from[trainer])
        address, position = _destinations(plan, engine, self._engines[engine], self._to[engine])
        order = np.argsort(shard_address[runs.shard] + runs.src_offset, kind="stable")
        columns = (
            shard_address[runs.shard] + runs.src_offset,
            address[runs.dst] + runs.dst_offset,
            runs.num_bytes,
            position[runs.dst] + runs.dst_offset,
            plan.recipe.engine.itemsize[runs.dst],
        )
        src, dst, length, where, width = (column[order].astype(np.uint64) for column in columns)
        return Rows(src=src, dst=dst, length=length, position=where, width=width)


def _shard_addresses(plan: Plan, join: Join, opened: Opened) -> NDArray[np.int64]:
    """Where each shard row lies in one trainer's memory; zero where it does not hold it."""
    where = {
        (name, held.lo, held.extent): address
        for held, address in zip(join.held, opened.addresses, strict=True)
        for name in (held.name, *held.aliases)
    }
    layout = plan.trainer
    addresses = np.zeros(len(layout.lo), dtype=np.int64)
    for row in range(len(layout.lo)):
        tensor = layout.tensors[layout.tensor_of[row]]
        num_dims = len(tensor.shape)
        lo, extent = (tuple(int(x) for x in column[row][:num_dims]) for column in (layout.lo, layout.extent))
        addresses[row] = where.get((tensor.name, lo, extent), 0)
    return addresses


def _destinations(plan: Plan, engine: int, join: Join, opened: Opened) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where each engine row lies on one engine rank: its address, and its place in the rank's digest space."""
    sizes = [-(-int(np.prod(held.extent)) * DTYPE_BYTES[held.dtype] // ALIGN) * ALIGN for held in join.held]
    places = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64).tolist()
    where = {
        held.name: (address, place) for held, address, place in zip(join.held, opened.addresses, places, strict=False)
    }
    layout = plan.recipe.engine
    mine = layout.groups.contain(layout.group_of, np.full(len(layout.lo), engine))
    found = [
        where[layout.tensors[layout.tensor_of[row]].name] if mine[row] else (0, 0) for row in range(len(layout.lo))
    ]
    address, position = np.array(found, dtype=np.int64).reshape(-1, 2).T
    return address, position
