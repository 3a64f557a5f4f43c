"""From the plan to each member's part of it: pure functions.

A part is made in two steps. Sizes of landing areas follow from the plan alone, so engines reserve memory before
anything is written; addresses follow from the members' answers when they have opened their transports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from weft.config import DeltaPolicy, ReceiverMode, TransferSettings
from weft.core.geometry.alignment import aligned
from weft.core.plans.plan import Plan
from weft.core.recipe import Op
from weft.core.streams.exchange import ScaleGroups
from weft.core.streams.landing_areas import landing_room, patch_room
from weft.core.streams.pair_links import PairLinks, Wiring
from weft.core.streams.plan_streams import plan_chunks
from weft.core.streams.row_boxes import RowBoxes
from weft.core.streams.send_order import first_engine
from weft.devices import CPU, memory_kind
from weft.errors import PlanError
from weft.runtime.compile.grids import TrainerGrids, trainer_grids
from weft.runtime.compile.holding import LayoutRows, RowNumbers
from weft.runtime.compile.link_boxes import PlanBoxes
from weft.runtime.compile.sharing import Neighbours
from weft.runtime.control.columns import squeeze
from weft.runtime.control.held import HeldTable
from weft.runtime.control.messages import (
    EngineTarget,
    Holder,
    Join,
    Opened,
    ReceivePlan,
    SendPlan,
    TrainerSource,
    unpack,
)
from weft.runtime.control.write_reports import WriteReport, WriteReports
from weft.transport.base import Endpoint

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """The memory of an engine rank that trainers write."""

    is_live: bool
    """Its live weights."""
    landing_bytes: int
    """A landing area, or a window in front of the live weights."""
    patch_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Owed:
    """What a trainer writes to each engine rank in a version that is sent whole."""

    by_engine: Mapping[int, int]
    reports: WriteReports
    """The same, as the trainer should report it."""

    @classmethod
    def of(cls, engines: Sequence[int], sizes: Sequence[int]) -> Self:
        """Bytes for each engine rank."""
        reports = WriteReports.of(WriteReport(engine, size, 0) for engine, size in zip(engines, sizes, strict=True))
        return cls(by_engine=dict(zip(engines, sizes, strict=True)), reports=reports)

    def is_met_by(self, reports: WriteReports) -> bool:
        """Whether all of it was written, and nothing else."""
        return reports.peers == self.reports.peers and reports.num_bytes == self.reports.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTable:
    """The boxes of one link."""

    encoded: bytes
    """A table of weft.runtime.compile.link_boxes.LinkBoxes."""
    tensors: Int64s
    """Numbers of the engine rank's tensors in it."""


class MemberPlans:
    """Every member's part of one plan."""

    def __init__(
        self,
        plan: Plan,
        digest: str,
        joins: tuple[Mapping[int, Join], Mapping[int, Join]],
        transports: Mapping[tuple[int, int], str],
        settings: TransferSettings,
    ) -> None:
        self._plan, self._digest, self._transports, self._settings = plan, digest, transports, settings
        self._trainers, self._engines = joins
        wiring = Wiring.of(transports, *map(memory_kinds, joins))
        self.through_host = wiring.passes_host
        """Whether transports move host memory, also between members with weights on GPUs."""
        self.links = PairLinks.of(plan, wiring)
        groups, rows = ScaleGroups.of(plan), plan.row_boxes
        _check_quantized(plan, rows)
        self._boxes = PlanBoxes(plan, rows)
        self._shards = _trainer_shards(plan, self._trainers)
        self._tensors = _engine_tensors(plan, self._engines)
        self._grids = {t: trainer_grids(plan, groups, t, self._shards[t]) for t in self._trainers}
        self._neighbours = Neighbours.of(plan, groups)
        self._grid_numbers = {t: _grid_numbers(plan, grids) for t, grids in self._grids.items()}
        self._places = {e: digest_places(join.held.table) for e, join in self._engines.items()}
        self._tables: dict[tuple[int, int], LinkTable] = {}
        self._owed: dict[int, Owed] = {}
        self._linked = plan.pair_bytes > 0
        """Pairs that are linked."""
        chunks = plan_chunks(plan, self.links)
        self.wire_bytes = chunks.pair_sum(chunks.num_bytes, self._linked.shape)
        """Bytes each link carries in a version that is sent whole: a matrix [trainer, engine]."""
        self.num_writes = int(chunks.num_writes.sum())
        """One-sided writes of such a version."""
        landing = landing_room(self.links, chunks)
        self._landing_bytes, self._streams = landing.sum(axis=0), np.cumsum(landing, axis=0) - landing
        is_delta = settings.delta is DeltaPolicy.ON
        self._patch_room = patch_room(self.wire_bytes, settings.patch_share) * is_delta
        self._patches = np.cumsum(self._patch_room, axis=0) - self._patch_room

    def _table(self, trainer: int, engine: int) -> LinkTable:
        """The boxes of one link, made once: both ends get them, and get them again when a member returns."""
        link = trainer, engine
        if link not in self._tables:
            boxes = self._boxes.link(
                trainer,
                engine,
                shard=self._shards[trainer],
                tensor=self._tensors[engine],
                grid=self._grid_numbers[trainer],
            )
            self._tables[link] = LinkTable(encoded=boxes.encode(), tensors=boxes.tensors)
        return self._tables[link]

    def is_for(self, join: Join) -> bool:
        """Whether a member that joins holds the weights, in the place, that this was made for."""
        joins = self._trainers if join.side == "trainer" else self._engines
        known = joins[join.rank]
        return (known.held, known.place) == (join.held, join.place)

    @cached_property
    def engine_hosts(self) -> frozenset[str]:
        """Hosts with engine ranks."""
        return frozenset(join.place.host for join in self._engines.values())

    @property
    def has_windows(self) -> bool:
        """Whether engines drain something into their live weights."""
        return bool(self._landing_bytes.any()) and self._settings.mode is not ReceiverMode.SHADOW

    def asking(self, trainer: int) -> list[int] | None:
        """Trainers that connect to this one to exchange magnitudes; None if it takes no part."""
        asking = self._neighbours.clients_of(trainer)
        return asking if asking or self._neighbours.servers_of(trainer) else None

    def owed(self, trainer: int) -> Owed:
        """What a trainer writes to each engine rank in a version that is sent whole."""
        if trainer not in self._owed:
            engines = np.flatnonzero(self._linked[trainer])
            self._owed[trainer] = Owed.of(engines.tolist(), self.wire_bytes[trainer, engines].tolist())
        return self._owed[trainer]

    def opening(self, engine: int) -> Opening:
        """The memory an engine rank has to open."""
        is_delta = self._settings.delta is DeltaPolicy.ON
        is_behind_host = self.through_host and self._engines[engine].place.device != CPU
        is_live = self._settings.mode is ReceiverMode.IN_PLACE and not is_delta and not is_behind_host
        landing, patches = int(self._landing_bytes[engine]), int(self._patch_room[:, engine].sum())
        return Opening(is_live=is_live, landing_bytes=landing, patch_bytes=patches)

    def send_plan(self, trainer: int, engines: Mapping[int, Opened], trainers: Mapping[int, Opened]) -> SendPlan:
        """What one trainer writes, in the order of its round.

        `engines` and `trainers`: what they have opened. Nothing is written to engine ranks that have not.
        """
        linked = [engine for engine in np.flatnonzero(self._linked[trainer]).tolist() if engine in engines]
        topology = self._plan.topology
        first = first_engine(trainer, num_trainers=topology.num_trainers, num_engines=topology.num_engines)
        ordered = [e for e in linked if e >= first] + [e for e in linked if e < first]
        servers = {holder: trainers[holder].magnitudes for holder in self._neighbours.servers_of(trainer)}
        grids = self._grids[trainer]
        roles = self._neighbours.roles(self._plan.trainer.groups, trainer, grids.tensors)
        return SendPlan(
            plan_digest=self._digest,
            targets=[self._target(trainer, engine, engines[engine]) for engine in ordered],
            grids=grids.encode(),
            roles=squeeze({"role": roles}),
            round=trainers[trainer].round,
            holders=[Holder(trainer=holder, server=server) for holder, server in servers.items() if server is not None],
        )

    def _target(self, trainer: int, engine: int, opened: Opened) -> EngineTarget:
        link = trainer, engine
        table = self._table(trainer, engine)
        places = {"position": self._places[engine][table.tensors]}
        if opened.live:
            places["address"] = unpack(opened.live).astype(np.int64)[table.tensors]
        return EngineTarget(
            engine=engine,
            offer=opened.offers[self._transports[link]],
            carriage=self.links.carriage(trainer, engine),
            boxes=table.encoded,
            places=squeeze(places),
            is_live=bool(opened.live),
            stream=opened.landing + int(self._streams[link]) if opened.landing else 0,
            patches=opened.patches + int(self._patches[link]) if opened.patches else 0,
            patch_bytes=int(self._patch_room[link]),
        )

    def receive_plan(self, engine: int, opened: Mapping[int, Opened]) -> ReceivePlan:
        """What one engine rank gets from every trainer; `opened`: what the trainers have opened."""
        sources = [
            TrainerSource(
                trainer=trainer,
                transport=self._transports[trainer, engine],
                carriage=self.links.carriage(trainer, engine),
                boxes=self._table(trainer, engine).encoded,
                stream=int(self._streams[trainer, engine]),
                patches=int(self._patches[trainer, engine]),
                patch_bytes=int(self._patch_room[trainer, engine]),
                endpoint=self._endpoint(trainer, engine, opened[trainer]),
            )
            for trainer in np.flatnonzero(self._linked[:, engine]).tolist()
        ]
        return ReceivePlan(plan_digest=self._digest, sources=sources)

    def _endpoint(self, trainer: int, engine: int, opened: Opened) -> Endpoint | None:
        """Where an engine rank returns credits to."""
        if not self.links.carriage(trainer, engine).num_slots:
            return None
        return opened.offers[self._transports[trainer, engine]].endpoint


def memory_kinds(joins: Mapping[int, Join]) -> list[str]:
    """Kinds of memory the members of one side have their weights in, by rank."""
    return [memory_kind(joins[rank].place.device) for rank in sorted(joins)]


def digest_places(held: HeldTable) -> Int64s:
    """Position of each shard of an engine rank in its digest space."""
    size = aligned(held.num_bytes)
    return np.cumsum(size) - size


def _trainer_shards(plan: Plan, trainers: Mapping[int, Join]) -> dict[int, RowNumbers]:
    """The rows of the trainer layout that each trainer holds, and the numbers of its shards."""
    rows = LayoutRows(plan.trainer)
    tables = {rank: join.held.table for rank, join in trainers.items()}
    return {rank: rows.numbers(rank, held, held.lo) for rank, held in tables.items()}


def _engine_tensors(plan: Plan, engines: Mapping[int, Join]) -> dict[int, RowNumbers]:
    """The same for engine ranks, whose shards are tensors of their own in the plan."""
    rows = LayoutRows(plan.recipe.engine)
    tables = {rank: join.held.table for rank, join in engines.items()}
    return {rank: rows.numbers(rank, held, np.zeros_like(held.lo)) for rank, held in tables.items()}


def _grid_numbers(plan: Plan, grids: TrainerGrids) -> Int64s:
    """The trainer's number for the grid of each trainer tensor; -1 if it has none."""
    numbers = np.full(len(plan.trainer.tensors), -1, dtype=np.int64)
    numbers[grids.tensors] = np.arange(len(grids.tensors))
    return numbers


def _check_quantized(plan: Plan, rows: RowBoxes) -> None:
    """What is quantised is read in whole runs of columns."""
    wrong = (rows.op == Op.QUANTIZE) & (rows.src_strides[:, -1] != 1) & (rows.extent[:, -1] > 1)
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        name = plan.recipe.engine.tensors[plan.recipe.engine.tensor_of[plan.dst[row]]].name
        raise PlanError(
            f"`{name}` is quantised from a transposed matrix",
            hint="hold it in checkpoint order on the trainers, or in the trainer's precision on the engines",
        )
