"""From the plan to each member's part of it: pure functions."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from weft.codec.image import chunk_layouts
from weft.config import DeltaPolicy, StagingPolicy, TransferSettings
from weft.core.layout import DTYPE_BYTES
from weft.core.plan import Plan
from weft.errors import PlanError
from weft.runtime.compile.grids import Groups, trainer_grids
from weft.runtime.compile.link_rows import LinkRows, Places, PlanTables, link_rows
from weft.runtime.control.messages import Join, Opened, ReceivePlan, SendPlan, Source, Target, pack

ALIGN = 256
"""Shards begin at multiples of this in an engine rank's digest space."""


class Parts:
    """Every member's part of one plan."""

    def __init__(
        self,
        plan: Plan,
        digest: str,
        joins: tuple[Mapping[int, Join], Mapping[int, Join]],
        opened: tuple[Mapping[int, Opened], Mapping[int, Opened]],
        transports: Mapping[tuple[int, int], str],
        settings: TransferSettings,
    ) -> None:
        self._plan, self._digest, self._transports, self._settings = plan, digest, transports, settings
        self._trainers, self._engines = joins
        self._from, self._to = opened
        self._groups = Groups.of(plan)
        self._shards = {
            trainer: _shard_addresses(plan, trainer, join, self._from[trainer])
            for trainer, join in self._trainers.items()
        }
        self._grids = {
            trainer: trainer_grids(plan, self._groups, trainer, address) for trainer, address in self._shards.items()
        }
        self._destinations = {
            engine: _destinations(plan, engine, join, self._to[engine]) for engine, join in self._engines.items()
        }
        self._tables = PlanTables.of(plan)
        self._routes = np.argsort(plan.pair, kind="stable")
        self._sorted_pairs = plan.pair[self._routes]
        self._rows = {
            (int(trainer), int(engine)): self._make_rows(int(trainer), int(engine))
            for trainer, engine in zip(*np.nonzero(plan.pair_bytes), strict=True)
        }
        self._slots = self._make_slots()

    @property
    def holders(self) -> dict[int, frozenset[int]]:
        """For each group of quantised matrices, the trainers that hold some of it."""
        held = {trainer: {grid.group for grid in grids.values()} for trainer, grids in self._grids.items()}
        groups = set().union(*held.values())
        return {group: frozenset(t for t, mine in held.items() if group in mine) for group in groups}

    def _make_slots(self) -> dict[tuple[int, int], int]:
        """Where each trainer's patches land on each engine rank that has memory for them."""
        slots = {}
        used: dict[int, int] = {}
        for (trainer, engine), rows in sorted(self._rows.items()):
            opened = self._to[engine]
            if not opened.patch_bytes:
                continue
            begin = used.get(engine, 0)
            slots[trainer, engine] = opened.patch_address + begin
            chunks = chunk_layouts(rows.length, rows.width, rows.num_direct, rows.chunk_ends)
            room = sum(chunk.max_patch_bytes for chunk in chunks)
            used[engine] = begin + -(-room // ALIGN) * ALIGN
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
        return SendPlan(
            plan_digest=self._digest,
            targets=[self._target(trainer, engine) for engine in ordered],
            grids=list(self._grids[trainer].values()),
        )

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
            num_direct=rows.num_direct,
            chunk_ends=pack(rows.chunk_ends),
            boxes=pack(rows.boxes.reshape(-1)),
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
                num_direct=rows.num_direct,
                chunk_ends=pack(rows.chunk_ends),
            )
            for (trainer, e), rows in self._rows.items()
            if e == engine
        ]
        return ReceivePlan(plan_digest=self._digest, sources=sources)

    def _make_rows(self, trainer: int, engine: int) -> LinkRows:
        plan, settings = self._plan, self._settings
        pair = trainer * plan.topology.num_engines + engine
        first, last = np.searchsorted(self._sorted_pairs, [pair, pair + 1])
        rows = np.searchsorted(plan.first, self._routes[first:last], side="right") - 1
        address, position = self._destinations[engine]
        grid = np.full(len(plan.trainer.tensors), -1, dtype=np.int64)
        grid[list(self._grids[trainer])] = np.arange(len(self._grids[trainer]))
        places = Places(
            tables=self._tables,
            shard=self._shards[trainer],
            dst=address,
            position=position,
            grid=grid,
            group=self._groups.group,
        )
        is_imaged = settings.delta is DeltaPolicy.ON or settings.staging is StagingPolicy.CPU
        chunk_bytes = settings.chunk_bytes_on(self._engines[engine].place.device)
        return link_rows(plan, rows, places, is_imaged=is_imaged, chunk_bytes=chunk_bytes)


def _shard_addresses(plan: Plan, trainer: int, join: Join, opened: Opened) -> NDArray[np.int64]:
    """Where each shard row lies in one trainer's memory; zero where it does not hold it."""
    where = {
        (name, held.lo, held.extent): address
        for held, address in zip(join.held, opened.addresses, strict=True)
        for name in (held.name, *held.aliases)
    }
    layout = plan.trainer
    addresses = np.zeros(len(layout.lo), dtype=np.int64)
    mine = layout.groups.contain(layout.group_of, np.full(len(layout.lo), trainer))
    for row in np.flatnonzero(mine).tolist():
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
