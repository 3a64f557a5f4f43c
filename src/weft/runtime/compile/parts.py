"""From the plan to each member's part of it: pure functions.

A part is made in two steps. Sizes of landing areas follow from the plan alone, so engines reserve memory before
anything is written; addresses follow from what members answer when they have opened their transports.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from weft.config import DeltaPolicy, ReceiverMode, TransferSettings
from weft.core.carriage import Carriage
from weft.core.exchange import Groups
from weft.core.layout import DTYPE_BYTES
from weft.core.plan import Plan
from weft.core.recipe import Op
from weft.core.row_boxes import RowBoxes
from weft.errors import PlanError
from weft.runtime.compile.columns import squeeze
from weft.runtime.compile.grids import TrainerGrids, trainer_grids
from weft.runtime.compile.link_boxes import LinkBoxes, PlanBoxes, held_numbers
from weft.runtime.compile.link_stream import LinkStream
from weft.runtime.compile.links import member_links
from weft.runtime.control.messages import HeldShard, Join, Opened, ReceivePlan, SendPlan, Source, Target, unpack
from weft.transport.base import Endpoint

ALIGN = 256
"""Shards begin at multiples of this in an engine rank's digest space, streams and patches in their memory."""
Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """The memory of an engine rank that trainers write."""

    is_live: bool
    """Its live weights."""
    landing_bytes: int
    """A landing area, or a window in front of the live weights."""
    patch_bytes: int


class Parts:
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
        devices = {engine: join.place.device for engine, join in self._engines.items()}
        self.links = member_links(plan, transports, devices, settings)
        groups, rows = Groups.of(plan), plan.row_boxes
        _check_quantized(plan, rows)
        boxes = PlanBoxes(plan, rows)
        shards = {t: held_numbers(plan.trainer, t, _held_keys(join.held)) for t, join in self._trainers.items()}
        tensors = {e: held_numbers(plan.recipe.engine, e, _engine_keys(join.held)) for e, join in self._engines.items()}
        self._grids = {t: trainer_grids(plan, groups, t, shards[t]) for t in self._trainers}
        grid_numbers = {t: _grid_numbers(plan, grids) for t, grids in self._grids.items()}
        self._boxes = {
            (t, e): boxes.link(t, e, shard=shards[t], tensor=tensors[e], grid=grid_numbers[t])
            for t, e in zip(*(side.tolist() for side in np.nonzero(plan.pair_bytes)), strict=True)
        }
        self._encoded = {link: boxes.encode() for link, boxes in self._boxes.items()}
        self._places = {e: digest_places(join.held) for e, join in self._engines.items()}
        self._streams, self._patches = self._lay_out()

    def _lay_out(self) -> tuple[dict[tuple[int, int], int], dict[tuple[int, int], int]]:
        """Where each link's stream and patches begin in the memory of its engine rank."""
        streams, patches = {}, {}
        self._landing_bytes = dict.fromkeys(self._engines, 0)
        self._patch_bytes = dict.fromkeys(self._engines, 0)
        sizes = cache(self._sizes)
        self._wire_bytes = {}
        for link in sorted(self._boxes):
            engine = link[1]
            landing, patch, self._wire_bytes[link] = sizes(self._encoded[link], self.links.carriage(*link))
            streams[link], patches[link] = self._landing_bytes[engine], self._patch_bytes[engine]
            self._landing_bytes[engine] += -(-landing // ALIGN) * ALIGN
            self._patch_bytes[engine] += -(-patch // ALIGN) * ALIGN
        return streams, patches

    def _sizes(self, encoded: bytes, carriage: Carriage) -> tuple[int, int, int]:
        """Bytes a link needs in the landing area and for its patches, and what it carries in a whole version."""
        stream = LinkStream(LinkBoxes.decode(encoded), carriage)
        landing = stream.num_bytes if carriage.lands_in_stream else stream.window_bytes
        is_delta = self._settings.delta is DeltaPolicy.ON
        patch = sum(image.max_patch_bytes for image in stream.images()) if is_delta else 0
        return landing, patch, int(stream.chunk_wire_bytes.sum())

    @property
    def has_windows(self) -> bool:
        """Whether engines drain something into their live weights."""
        return any(self._landing_bytes.values()) and self._settings.mode is ReceiverMode.IN_PLACE

    @property
    def holders(self) -> dict[int, frozenset[int]]:
        """For each group of quantised matrices, the trainers that hold some of it."""
        groups = frozenset().union(*(grids.groups for grids in self._grids.values()))
        return {group: frozenset(t for t, grids in self._grids.items() if group in grids.groups) for group in groups}

    @property
    def wire_bytes(self) -> dict[tuple[int, int], int]:
        """What each link carries in a version that is sent whole."""
        return self._wire_bytes

    def opening(self, engine: int) -> Opening:
        """The memory an engine rank has to open."""
        is_delta = self._settings.delta is DeltaPolicy.ON
        is_live = self._settings.mode is ReceiverMode.IN_PLACE and not is_delta
        return Opening(
            is_live=is_live, landing_bytes=self._landing_bytes[engine], patch_bytes=self._patch_bytes[engine]
        )

    def send_plan(self, trainer: int, opened: Mapping[int, Opened]) -> SendPlan:
        """What one trainer writes. It begins with the engine rank of its own number, so that all are busy."""
        engines = sorted(engine for t, engine in self._boxes if t == trainer)
        first = trainer % max(len(self._engines), 1)
        ordered = [e for e in engines if e >= first] + [e for e in engines if e < first]
        return SendPlan(
            plan_digest=self._digest,
            targets=[self._target(trainer, engine, opened[engine]) for engine in ordered],
            grids=self._grids[trainer].encode(),
        )

    def _target(self, trainer: int, engine: int, opened: Opened) -> Target:
        link = trainer, engine
        tensors = self._boxes[link].tensors
        places = {"position": self._places[engine][tensors]}
        if opened.live:
            places["address"] = unpack(opened.live).astype(np.int64)[tensors]
        return Target(
            engine=engine,
            offer=opened.offers[self._transports[link]],
            carriage=self.links.carriage(trainer, engine),
            boxes=self._encoded[link],
            places=squeeze(places),
            stream=opened.landing + self._streams[link] if opened.landing else 0,
            patches=opened.patches + self._patches[link] if opened.patches else 0,
        )

    def receive_plan(self, engine: int, opened: Mapping[int, Opened]) -> ReceivePlan:
        """What one engine rank gets from every trainer; `opened`: what these have."""
        sources = [
            Source(
                trainer=trainer,
                transport=self._transports[trainer, e],
                carriage=self.links.carriage(trainer, e),
                boxes=self._encoded[trainer, e],
                stream=self._streams[trainer, e],
                patches=self._patches[trainer, e],
                endpoint=self._endpoint(trainer, e, opened[trainer]),
            )
            for trainer, e in self._boxes
            if e == engine
        ]
        return ReceivePlan(plan_digest=self._digest, sources=sources)

    def _endpoint(self, trainer: int, engine: int, opened: Opened) -> Endpoint | None:
        """Where an engine rank returns credits to."""
        if not self.links.carriage(trainer, engine).num_slots:
            return None
        return opened.offers[self._transports[trainer, engine]].endpoint


def digest_places(held: list[HeldShard]) -> Int64s:
    """Where each shard of an engine rank lies in its digest space."""
    sizes = [int(np.prod(shard.extent)) * DTYPE_BYTES[shard.dtype] for shard in held]
    aligned = -(-np.array(sizes, dtype=np.int64) // ALIGN) * ALIGN
    return np.cumsum(aligned) - aligned


def _held_keys(held: list[HeldShard]) -> dict[tuple[str, tuple[int, ...], tuple[int, ...]], int]:
    """A trainer's shards, under all their names."""
    return {
        (name, shard.lo, shard.extent): number
        for number, shard in enumerate(held)
        for name in (shard.name, *shard.aliases)
    }


def _engine_keys(held: list[HeldShard]) -> dict[tuple[str, tuple[int, ...], tuple[int, ...]], int]:
    """An engine rank's shards; each is a tensor of its own in the plan."""
    return {(shard.name, (0,) * len(shard.extent), shard.extent): number for number, shard in enumerate(held)}


def _grid_numbers(plan: Plan, grids: TrainerGrids) -> Int64s:
    """The trainer's number of the grid of each trainer tensor; -1 where it has none."""
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
            hint="let trainers hold it in the order of the checkpoint, or engines in the trainer's precision",
        )
