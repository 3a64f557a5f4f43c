"""A saved plan between members that joined: what they report, as the plan's layouts, and the plan that then runs.

Engines report boxes of checkpoint tensors (`q_proj.weight`, rows 0 to 512 of 2048), as adapters do, or whole tensors by
the names the plan gives them (`qkv_proj.weight`). Of the latter the plan knows what they are made of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from weft.core.plan import Plan
from weft.core.plan_fit import fit_plan
from weft.core.recipe import Op, Piece, Recipe, padding_piece
from weft.core.scaling import Scaling
from weft.runtime.compile.matching import Matched, engine_tensors, piece_of, scalings, trainer_layout
from weft.runtime.control.messages import HeldShard, Join


def follow_plan(
    saved: Plan, trainers: Mapping[int, Join], engines: Mapping[int, Join], *, ranks_per_engine: int
) -> Plan:
    """The saved plan's routes between these members; raises a LayoutError with every difference."""
    planned = _PlannedTensors(saved)
    reported = {rank: planned.recognise(rank, join.held) for rank, join in engines.items()}
    boxed = {rank: msgspec.structs.replace(engines[rank], held=found.boxes) for rank, found in reported.items()}
    matched = Matched.of(trainers, engines)
    pieces = {
        rank: [*(piece_of(held, matched) for held in found.boxes), *found.pieces] for rank, found in reported.items()
    }
    tensors = {rank: engine_tensors([*found.boxes, *found.named]) for rank, found in reported.items()}
    scaling = planned.scaling(piece for found in reported.values() for piece in found.pieces)
    recipe = Recipe.from_pieces(tensors, pieces, scaling=scaling | scalings(boxed, matched))
    return fit_plan(
        saved,
        trainer=trainer_layout(trainers, set(saved.recipe.sources), check=False),
        recipe=replace(recipe, num_replicas=len(engines) // ranks_per_engine),
        problems=tuple(matched.shape_problems(boxed).values()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reported:
    """What one engine rank holds."""

    boxes: list[HeldShard] = field(default_factory=list)
    """Boxes of checkpoint tensors."""
    named: list[HeldShard] = field(default_factory=list)
    """Whole tensors of the plan's."""
    pieces: list[Piece] = field(default_factory=list)
    """What those are made of."""


class _PlannedTensors:
    """The engine tensors of a plan, and what they are made of."""

    def __init__(self, plan: Plan) -> None:
        self._engine, self._recipe = plan.recipe.engine, plan.recipe
        self._sources = {tensor.name: tensor.shape for tensor in plan.trainer.tensors}
        self._order = np.argsort(plan.recipe.dst, kind="stable")
        self._ends = np.searchsorted(plan.recipe.dst[self._order], np.arange(len(self._engine.lo) + 1))
        self._made: dict[int, tuple[Piece, ...]] = {}

    def recognise(self, rank: int, held: Iterable[HeldShard]) -> _Reported:
        """Tell boxes of checkpoint tensors from whole tensors of the plan's; empty shards are neither."""
        engine = self._engine
        mine = np.flatnonzero(engine.groups.contain(engine.group_of, np.full(len(engine.lo), rank)))
        rows = {engine.tensors[engine.tensor_of[row]].name: row for row in mine.tolist()}
        found = _Reported()
        for shard in held:
            if 0 in shard.extent:
                continue
            row = rows.get(shard.name)
            if row is None or self._is_box(shard) or not self._is_whole(shard, row):
                found.boxes.append(shard)
            else:
                found.named.append(shard)
                found.pieces.extend(self._pieces(row))
        return found

    def _is_box(self, shard: HeldShard) -> bool:
        """Whether a shard is a part of the checkpoint tensor it is named after."""
        return any(self._sources.get(name) == shard.shape for name in (shard.name, *shard.aliases))

    def _is_whole(self, shard: HeldShard, row: int) -> bool:
        """Whether a shard is all of an engine tensor of the plan's."""
        return shard.shape == shard.extent == self._engine.tensors[self._engine.tensor_of[row]].shape

    def _pieces(self, row: int) -> tuple[Piece, ...]:
        """The pieces of an engine tensor."""
        if row not in self._made:
            numbers = self._order[self._ends[row] : self._ends[row + 1]]
            self._made[row] = tuple(self._piece(int(number)) for number in numbers)
        return self._made[row]

    def _piece(self, number: int) -> Piece:
        recipe = self._recipe
        tensor = self._engine.tensors[recipe.dst[number]]
        columns = (recipe.dst_lo, recipe.extent, recipe.axes)
        dst_lo, extent, axes = (tuple(column[number, : len(tensor.shape)].tolist()) for column in columns)
        op = Op(int(recipe.op[number]))
        if op is Op.PAD:
            return padding_piece(tensor.name, dst_lo, extent)
        source = recipe.sources[recipe.src[number]]
        src_lo = tuple(recipe.src_lo[number, : len(self._sources[source])].tolist())
        return Piece(dst=tensor.name, source=source, dst_lo=dst_lo, extent=extent, src_lo=src_lo, axes=axes, op=op)

    def scaling(self, pieces: Iterable[Piece]) -> dict[str, Scaling]:
        """Which elements of their sources share a scale, as far as that is not a block."""
        scaled = {piece.source for piece in pieces if piece.op is Op.SCALE}
        return {name: kind for name, kind in self._recipe.scaling.items() if name in scaled}
