"""Following a saved plan: what members report, as the plan's layouts, and the plan that then runs.

Engines report boxes of checkpoint tensors (`q_proj.weight`, rows 0 to 512 of 2048), as adapters do, or whole tensors by
the names the plan gives them (`qkv_proj.weight`). For the latter, the plan knows what they are made of.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from weft.core.geometry.scaling import Scaling
from weft.core.layout import Tensor
from weft.core.layouts.box_recipe import TakenBoxes
from weft.core.plan_fit import fit_plan, place_problems
from weft.core.plans.plan import Plan
from weft.core.recipe import Op, Piece, Recipe, padding_piece
from weft.runtime.compile.matching import Matched, memory_of, seats_of, side_of, trainer_layout
from weft.runtime.control.held import HeldShard
from weft.runtime.control.messages import Join


def follow_plan(
    saved: Plan,
    trainers: Mapping[int, Join],
    engines: Mapping[int, Join],
    *,
    ranks_per_engine: int,
    any_place: bool = False,
) -> Plan:
    """The saved plan's routes between these members; raises a LayoutError with every difference.

    `any_place`: members may be on other hosts and devices than the plan says.
    """
    planned = _PlannedTensors(saved)
    reported = {rank: planned.recognise(rank, join.held.table) for rank, join in engines.items()}
    holding, taking = side_of(trainers), side_of(engines)
    matched = Matched.of(holding, taking)
    boxes = np.concatenate(
        [taking.starts[rank] + np.array(found.boxes, dtype=np.int64) for rank, found in reported.items()]
    )
    tensors, pieces = _boxes_by_rank(matched.taken(boxes), engines)
    for rank, found in reported.items():
        tensors[rank] += found.named
        pieces[rank] += found.pieces
    scaling = planned.scaling(piece for found in reported.values() for piece in found.pieces)
    recipe = Recipe.from_pieces(tensors, pieces, scaling=scaling | matched.scalings(boxes))
    at = seats_of(trainers), seats_of(engines)
    misplaced = () if any_place else tuple(place_problems(saved.topology, trainers=at[0], engines=at[1]))
    return fit_plan(
        saved,
        trainer=trainer_layout(holding, set(saved.recipe.sources), num_ranks=len(trainers), check=False),
        recipe=replace(recipe, num_replicas=len(engines) // ranks_per_engine),
        misplaced=misplaced,
        problems=(*_memory_problems(saved, trainers, engines), *matched.shape_problems(boxes).values()),
    )


def _memory_problems(saved: Plan, trainers: Mapping[int, Join], engines: Mapping[int, Join]) -> Iterator[str]:
    """Sides with their weights in another kind of memory: Chunks, and what is packed, depend on it."""
    sides = (("trainers", saved.trainer_memory, trainers), ("engine ranks", saved.engine_memory, engines))
    for side, planned, joins in sides:
        found = memory_of(joins)
        if found != planned:
            yield f"{side}: weights are in {found} memory, the plan has them in {planned} memory (--memory)"


def _boxes_by_rank(taken: TakenBoxes, ranks: Iterable[int]) -> tuple[dict[int, list[Tensor]], dict[int, list[Piece]]]:
    """Tensors that are boxes of their sources, and these boxes, by engine rank."""
    tensors: dict[int, list[Tensor]] = {rank: [] for rank in ranks}
    pieces: dict[int, list[Piece]] = {rank: [] for rank in ranks}
    for row, rank in enumerate(taken.rank.tolist()):
        tensors[rank].append(taken.tensor(row))
        pieces[rank].append(taken.piece(row))
    return tensors, pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reported:
    """What one engine rank holds."""

    boxes: list[int] = field(default_factory=list)
    """Numbers of its shards that are boxes of checkpoint tensors."""
    named: list[Tensor] = field(default_factory=list)
    """Whole tensors of the plan."""
    pieces: list[Piece] = field(default_factory=list)
    """What these tensors are made of."""


class _PlannedTensors:
    """The engine tensors of a plan, and what they are made of."""

    def __init__(self, plan: Plan) -> None:
        self._engine, self._recipe = plan.recipe.engine, plan.recipe
        self._sources = {tensor.name: tensor.shape for tensor in plan.trainer.tensors}
        self._order = np.argsort(plan.recipe.dst, kind="stable")
        self._ends = np.searchsorted(plan.recipe.dst[self._order], np.arange(len(self._engine.lo) + 1))
        self._made: dict[int, tuple[Piece, ...]] = {}

    def recognise(self, rank: int, held: Iterable[HeldShard]) -> _Reported:
        """Tell boxes of checkpoint tensors from whole tensors of the plan; empty shards are neither."""
        engine = self._engine
        mine = np.flatnonzero(engine.groups.contain(engine.group_of, np.full(len(engine.lo), rank)))
        rows = {engine.tensors[engine.tensor_of[row]].name: row for row in mine.tolist()}
        found = _Reported()
        for number, shard in enumerate(held):
            if 0 in shard.extent:
                continue
            row = rows.get(shard.name)
            if row is None or self._is_box(shard) or not self._is_whole(shard, row):
                found.boxes.append(number)
            else:
                found.named.append(Tensor(name=shard.name, dtype=shard.dtype, shape=shard.extent))
                found.pieces.extend(self._pieces(row))
        return found

    def _is_box(self, shard: HeldShard) -> bool:
        """Whether a shard is a part of the checkpoint tensor it is named after."""
        return any(self._sources.get(name) == shard.shape for name in (shard.name, *shard.aliases))

    def _is_whole(self, shard: HeldShard, row: int) -> bool:
        """Whether a shard is a whole engine tensor of the plan."""
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
        """Which elements of their sources share a scale, where that is not a block."""
        scaled = {piece.source for piece in pieces if piece.op is Op.SCALE}
        return {name: kind for name, kind in self._recipe.scaling.items() if name in scaled}
