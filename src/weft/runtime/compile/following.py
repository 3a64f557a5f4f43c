"""Following a saved plan: what members report, as the plan's layouts, and the plan that then runs.

Engines report boxes of checkpoint tensors (`q_proj.weight`, rows 0 to 512 of 2048), as adapters do, or whole tensors by
the names the plan gives them (`qkv_proj.weight`). For the latter, the plan knows what they are made of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, count, repeat

import numpy as np
from numpy.typing import NDArray

from weft.core.geometry.boxes import Ints, pad_dims
from weft.core.geometry.fingerprint import by_appearance, distinct, distinct_rows
from weft.core.geometry.scaling import Scaling
from weft.core.layout import Layout, tensors_of
from weft.core.layouts.box_recipe import unchecked_recipe, whole_tensors
from weft.core.plan_fit import fit_plan, place_problems
from weft.core.plans.plan import Plan
from weft.core.recipe import Op, Recipe
from weft.runtime.compile.matching import Matched, memory_of, seats_of, side_of, trainer_layout
from weft.runtime.compile.sides import Side
from weft.runtime.control.held import HeldTable
from weft.runtime.control.messages import Join

Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]


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
    holding, taking = side_of(trainers), side_of(engines)
    row, is_filled = planned.recognise(taking), taking.held.is_filled
    boxes, named = np.flatnonzero(is_filled & (row < 0)), np.flatnonzero(is_filled & (row >= 0))
    matched = Matched.of(holding, taking)
    recipes: list[Recipe] = []
    num_ranks, scaling = 1 + max(engines), matched.scalings(boxes)
    if len(boxes) or not len(named):
        recipes.append(unchecked_recipe(matched.taken(boxes), num_ranks=num_ranks))
    if len(named):
        recipes.append(planned.recipe(taking, named, row[named], num_ranks=num_ranks))
        scaling = planned.scaling(recipes[-1]) | scaling
    recipe = recipes[0] if len(recipes) == 1 else _together(recipes)
    recipe.check_cover()
    recipe.check_scales()
    at = seats_of(trainers), seats_of(engines)
    misplaced = () if any_place else tuple(place_problems(saved.topology, trainers=at[0], engines=at[1]))
    return fit_plan(
        saved,
        trainer=trainer_layout(holding, set(saved.recipe.sources), num_ranks=len(trainers), check=False),
        recipe=replace(recipe.with_scaling(scaling), num_replicas=len(engines) // ranks_per_engine),
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


class _PlannedTensors:
    """The engine tensors of a plan, and what they are made of."""

    def __init__(self, plan: Plan) -> None:
        self._engine, self._recipe, self._trainer = plan.recipe.engine, plan.recipe, plan.trainer
        self._order = np.argsort(plan.recipe.dst, kind="stable")
        self._ends = np.searchsorted(plan.recipe.dst[self._order], np.arange(len(self._engine.lo) + 1))

    def recognise(self, taking: Side) -> Int64s:
        """The row of the plan's engine layout that each shard is; -1 for boxes of checkpoint tensors."""
        engine, held = self._engine, taking.held
        row = np.full(len(held), -1, dtype=np.int64)
        ends = [*taking.starts.values(), len(held)][1:]
        for (rank, start), end in zip(taking.starts.items(), ends, strict=True):
            mine = np.flatnonzero(engine.groups.contain(engine.group_of, np.full(len(engine.lo), rank))).tolist()
            names = (engine.tensors[number].name for number in engine.tensor_of[mine].tolist())
            rows = dict(zip(names, mine, strict=True))
            row[start:end] = np.fromiter(map(rows.get, held.names[start:end], repeat(-1)), np.int64, end - start)
        tensor = np.append(engine.tensor_of, -1)[row]
        is_whole = _has_shape(held, engine, tensor) & (held.extent == held.shape).all(axis=1)
        return np.where(is_whole & ~self._is_box(held), row, -1)

    def _is_box(self, held: HeldTable) -> Bools:
        """Whether a shard is a part of the checkpoint tensor it is named after, under any of its names."""
        numbers = self._trainer.numbers
        is_box = _has_shape(held, self._trainer, np.fromiter(map(numbers.get, held.names, repeat(-1)), np.int64))
        for shard, aliases in held.aliases.items():
            known = [self._trainer.tensors[numbers[alias]].shape for alias in aliases if alias in numbers]
            is_box[shard] |= held[shard].shape in known
        return is_box

    def recipe(self, taking: Side, shards: Int64s, row: Int64s, *, num_ranks: int) -> Recipe:
        """What these shards are made of, each of which is a row of the plan's engine layout; not checked."""
        held, planned = taking.held, self._recipe
        _, same = distinct_rows(np.stack([row, held.dtype[shards]], axis=1))
        first, number = by_appearance(same)
        order, described = np.argsort(number, kind="stable"), shards[first]
        names = (held.names[shard] for shard in described.tolist())
        columns = (held.dtype[described], held.num_dims[described], held.shape[described])
        tensors, extent = tensors_of(names, held.dtypes, *columns), self._engine.extent[row[first]]
        end, num_pieces = self._ends[row[first] + 1], np.diff(self._ends)[row[first]]
        dst = np.repeat(np.arange(len(first), dtype=np.int32), num_pieces)
        piece = self._order[np.arange(len(dst)) + np.repeat(end - np.cumsum(num_pieces), num_pieces)]
        used = distinct(planned.src[piece][planned.op[piece] != Op.PAD], len(planned.sources))
        source = np.full(len(planned.sources) + 1, -1, dtype=np.int32)
        source[used] = np.arange(len(used))
        sources = tuple(planned.sources[number] for number in used.tolist())
        dims = [len(self._trainer.tensors[self._trainer.numbers[name]].shape) for name in sources]
        return Recipe(
            engine=whole_tensors(tensors, extent, number[order], taking.rank[shards][order], num_ranks=num_ranks),
            sources=sources,
            dst=dst,
            src=source[planned.src[piece]],
            op=planned.op[piece],
            dst_lo=planned.dst_lo[piece],
            extent=planned.extent[piece],
            src_lo=planned.src_lo[piece],
            axes=planned.axes[piece],
            src_dims=np.array([*dims, 0], dtype=np.int8)[source[planned.src[piece]]],
        )

    def scaling(self, recipe: Recipe) -> dict[str, Scaling]:
        """Which elements of the sources of such a recipe share a scale, where that is not a block."""
        scaled = {recipe.sources[number] for number in np.unique(recipe.src[recipe.op == Op.SCALE]).tolist()}
        return {name: kind for name, kind in self._recipe.scaling.items() if name in scaled}


def _has_shape(held: HeldTable, layout: Layout, tensor: Int64s) -> Bools:
    """Whether shards belong to tensors of the same shape as these; not where that is -1."""
    width = max(held.shape.shape[1], layout.num_dims)
    is_same = (pad_dims(held.shape, width, 1) == pad_dims(layout.shapes, width, 1)[tensor]).all(axis=1)
    return np.asarray((tensor >= 0) & is_same & (held.num_dims == layout.tensor_dims[tensor]))


def _together(recipes: Sequence[Recipe]) -> Recipe:
    """One recipe of the tensors of several; not checked."""
    engines, width = [recipe.engine for recipe in recipes], max(recipe.engine.num_dims for recipe in recipes)
    numbers = dict(zip(dict.fromkeys(chain.from_iterable(recipe.sources for recipe in recipes)), count()))
    starts = np.cumsum([0, *(len(engine.lo) for engine in engines)]).tolist()
    sizes = [engine.groups.sizes[engine.group_of] for engine in engines]
    tensor = np.repeat(np.arange(starts[-1]), np.concatenate(sizes))
    rank = np.concatenate([engine.groups.expand(engine.group_of) for engine in engines])
    tensors = tuple(chain.from_iterable(engine.tensors for engine in engines))

    def column(name: str, fill: int | None = None) -> Ints:
        of = [getattr(recipe, name) for recipe in recipes]
        return np.concatenate(of if fill is None else [pad_dims(each, width, fill) for each in of])

    extent = np.concatenate([pad_dims(engine.extent, width, 1) for engine in engines])
    source_of = [np.array([*map(numbers.__getitem__, recipe.sources), -1], dtype=np.int32) for recipe in recipes]
    return Recipe(
        engine=whole_tensors(tensors, extent, tensor, rank, num_ranks=engines[0].num_ranks),
        sources=tuple(numbers),
        dst=np.concatenate([recipe.dst + np.int32(start) for recipe, start in zip(recipes, starts, strict=False)]),
        src=np.concatenate([of[recipe.src] for recipe, of in zip(recipes, source_of, strict=True)]),
        op=column("op"),
        dst_lo=column("dst_lo", 0),
        extent=column("extent", 1),
        src_lo=column("src_lo", 0),
        axes=column("axes", -1),
        src_dims=column("src_dims"),
    )
