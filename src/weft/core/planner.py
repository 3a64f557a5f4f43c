"""From two layouts to a proven plan.

1. Every piece of the recipe is intersected with the shards of its source: rows of boxes (vectorised, in blocks).
2. A policy chooses who sends each row to each engine rank (`assign`); for `balanced`, large rows are cut before.
3. The result is proven to write every destination byte exactly once (`proof`) and compared with a lower bound
   of direct sends (`bound`).

    plan = make_plan(trainer=layout, recipe=recipe, topology=topology)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from weft.config import Settings
from weft.core.assign import Demand, Policy, choose_senders
from weft.core.geometry import boxes
from weft.core.geometry.boxes import Ints
from weft.core.geometry.fingerprint import distinct
from weft.core.geometry.scaling import QUANT_BLOCK
from weft.core.layout import Layout, tensors_of
from weft.core.plans.plan import Plan, piece_sources, route_boxes, scale_name
from weft.core.plans.proof import prove
from weft.core.recipe import Op, Recipe, ignored_tensors, to_destination_dims, to_source_dims, widen
from weft.core.topology import CUDA, Topology
from weft.errors import ConfigError, LayoutError, PlanError

MAX_ROUTES = 200_000_000
"""Largest plan weft makes; Kimi-K2 over 256 → 128 ranks has 26 million routes."""
ROWS_PER_SENDER = 32
"""Policy `balanced` cuts rows that are larger than this part of what a sender sends on average."""
SMALL_WRITE = 256 << 10
"""Rows are not cut among senders below four of these, where settings do not define a small write."""
CANDIDATES_PER_BLOCK = 2_000_000
"""Piece-shard pairs intersected at once: bounds the memory of planning."""


def make_plan(
    *,
    trainer: Layout,
    recipe: Recipe,
    topology: Topology,
    policy: Policy | str = Policy.BALANCED,
    settings: Settings | None = None,
    trainer_memory: str = CUDA,
    engine_memory: str = CUDA,
    model: str = "",
    gathered: bool = False,
    ignore: Sequence[str] = (),
    on_progress: Callable[[str], None] = lambda _: None,
) -> Plan:
    """The routing plan; raises if the two sides do not fit, never returns an unproven plan.

    `ignore` are names or patterns (`visual.*`) of trainer tensors that no engine uses; they are not part of the plan.
    `trainer_memory` and `engine_memory`: where they have their weights, `cuda` or `cpu`.

    >>> import weft
    >>> w = weft.Tensor(name="w", dtype="bf16", shape=(8, 4))
    >>> halves = [weft.Shard(tensor="w", rank=rank, lo=(4 * rank, 0), extent=(4, 4)) for rank in (0, 1)]
    >>> whole = weft.Piece(dst="w", source="w", dst_lo=(0, 0), extent=(8, 4), src_lo=(0, 0))
    >>> topology = weft.load_topology("h100-ib400").place(num_trainers=2, num_engines=1)
    >>> recipe = Recipe.from_pieces({0: [w]}, {0: [whole]})
    >>> plan = make_plan(trainer=Layout.from_shards([w], halves), recipe=recipe, topology=topology)
    >>> plan.num_routes
    2
    """
    _check_types(trainer=trainer, recipe=recipe, topology=topology, settings=settings or Settings())
    chosen, settings = parse_policy(policy), settings or Settings()
    on_progress("checking layouts")
    ignored = ignored_tensors(trainer, ignore)
    sources = _checked_sources(trainer, recipe, topology, ignored)
    on_progress("intersecting pieces with shards")
    piece, shard = _candidates(recipe, sources)
    piece, shard, dst_lo, src_lo, extent = _intersect(recipe, sources, piece, shard)
    if chosen is Policy.BALANCED:
        most = _most_row_bytes(recipe, topology, settings, piece, extent)
        piece, shard, dst_lo, src_lo, extent = _cut_large(recipe, sources, most, piece, shard, dst_lo, src_lo, extent)
    on_progress(f"choosing senders ({chosen})")
    demand = _demand(recipe, sources, topology, piece, shard, extent)
    plan = Plan(
        model=model,
        policy=chosen.value,
        trainer=sources,
        recipe=recipe,
        topology=topology,
        settings=settings,
        trainer_memory=trainer_memory,
        engine_memory=engine_memory,
        piece=piece,
        shard=shard,
        dst_lo=dst_lo,
        src_lo=src_lo,
        extent=extent,
        first=demand.first,
        sender=choose_senders(demand, chosen),
        gathered=gathered,
        ignored=ignored,
    )
    on_progress("proving exact cover")
    prove(plan)
    return plan


_KINDS: dict[str, type] = {"trainer": Layout, "recipe": Recipe, "topology": Topology, "settings": Settings}


def _check_types(**given: object) -> None:
    for name, value in given.items():
        kind = _KINDS[name]
        if not isinstance(value, kind):
            hint = "load_topology(…).place(num_trainers=…, num_engines=…) gives one" if kind is Topology else None
            raise ConfigError(f"`{name}` is a {type(value).__name__}, expected a {kind.__name__}", hint=hint)


def _checked_sources(trainer: Layout, recipe: Recipe, topology: Topology, ignored: tuple[str, ...]) -> Layout:
    """The trainer layout with scales, as wide as the recipe, once both sides are known to fit."""
    if topology.num_trainers != trainer.num_ranks or topology.num_engines != recipe.engine.num_ranks:
        raise PlanError(
            f"the topology has {topology.num_trainers} trainers and {topology.num_engines} engine ranks, "
            f"the layouts {trainer.num_ranks} and {recipe.engine.num_ranks}"
        )
    trainer.check()
    recipe.check_sources(trainer, ignore=ignored)
    sources = with_scales(trainer.without(frozenset(ignored)), recipe)
    return widen(sources, max(sources.num_dims, recipe.engine.num_dims))


def _demand(recipe: Recipe, sources: Layout, topology: Topology, piece: Ints, shard: Ints, extent: Ints) -> Demand:
    """What must be sent, for the policies."""
    engine, dst = recipe.engine, recipe.dst[piece]
    _check_number(int(engine.groups.sizes[engine.group_of[dst]].sum()), "routes")
    return Demand(
        row_bytes=boxes.volume(extent) * engine.itemsize[dst],
        holder_group=sources.group_of[shard],
        receiver_group=engine.group_of[dst],
        holders=sources.groups,
        receivers=engine.groups,
        topology=topology,
        num_replicas=recipe.num_replicas,
    )


def _check_number(number: int, what: str) -> None:
    if number > MAX_ROUTES:
        raise PlanError(
            f"the plan would have {number} {what}", hint=f"at most {MAX_ROUTES}: use fewer ranks, replicas or shards"
        )


def parse_policy(policy: Policy | str) -> Policy:
    """A policy by name."""
    try:
        return Policy(policy)
    except ValueError:
        raise ConfigError(f"unknown policy `{policy}`", hint=f"policies: {', '.join(Policy)}") from None


def with_scales(trainer: Layout, recipe: Recipe) -> Layout:
    """The layout with the block scales of quantised tensors as tensors of their own.

    A scale belongs to the shard that holds the first element of its block: after the holders of a cut block have
    agreed on its maximum, that one sends it.
    """
    wanted = {recipe.sources[i] for i in distinct(recipe.src[recipe.op == Op.SCALE], len(recipe.sources)).tolist()}
    if not wanted:
        return trainer
    taken = sorted(name for name in wanted if scale_name(name) in trainer.numbers)
    if taken:
        problems = tuple(f"{scale_name(name)}: reserved for the scales of {name}" for name in taken)
        raise LayoutError("trainer tensors have reserved names", problems=problems, hint="give them other names")
    scaled = np.flatnonzero(np.fromiter((tensor.name in wanted for tensor in trainer.tensors), dtype=bool))
    number = np.full(len(trainer.tensors), -1, dtype=np.int32)
    number[scaled] = len(trainer.tensors) + np.arange(len(scaled))
    block_sides = recipe.block_sides(trainer)
    shapes = -(-trainer.shapes[scaled] // block_sides[scaled])
    scale_names = (scale_name(trainer.tensors[i].name) for i in scaled.tolist())
    scales = tensors_of(scale_names, ("fp32",), np.zeros_like(scaled), trainer.tensor_dims[scaled], shapes)
    rows = np.flatnonzero(number[trainer.tensor_of] >= 0)
    sides = block_sides[trainer.tensor_of[rows]]
    lo = -(-trainer.lo[rows] // sides)
    extent = -(-(trainer.lo[rows] + trainer.extent[rows]) // sides) - lo
    held = (extent > 0).all(axis=1)
    rows, lo, extent = rows[held], lo[held], extent[held]
    return replace(
        trainer,
        tensors=(*trainer.tensors, *scales),
        tensor_of=np.concatenate([trainer.tensor_of, number[trainer.tensor_of[rows]]]),
        group_of=np.concatenate([trainer.group_of, trainer.group_of[rows]]),
        lo=np.concatenate([trainer.lo, lo]),
        extent=np.concatenate([trainer.extent, extent]),
        strides=np.concatenate([trainer.strides, boxes.row_major_strides(extent)]),
    )


def _candidates(recipe: Recipe, sources: Layout) -> tuple[Ints, Ints]:
    """All (piece, shard) pairs of equal source tensor."""
    order = np.argsort(sources.tensor_of, kind="stable").astype(np.int32)
    num_shards = np.bincount(sources.tensor_of, minlength=len(sources.tensors))
    starts = np.cumsum(num_shards) - num_shards
    tensor = piece_sources(recipe, sources)
    count = np.append(num_shards, 0)[tensor]  # -1, padding, has none
    _check_number(int(count.sum()), "pairs of a piece and a shard")
    piece = np.repeat(np.arange(len(tensor), dtype=np.int32), count)
    within = np.arange(len(piece)) - np.repeat(np.cumsum(count) - count, count)
    return piece, order[np.repeat(np.append(starts, 0)[tensor], count) + within]


def _intersect(recipe: Recipe, sources: Layout, piece: Ints, shard: Ints) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """The pairs that overlap, with their boxes as 32-bit columns."""
    blocks = []
    for start in range(0, max(len(piece), 1), CANDIDATES_PER_BLOCK):
        some = slice(start, start + CANDIDATES_PER_BLOCK)
        dst_lo, src_lo, extent, overlaps = route_boxes(recipe, sources, piece[some], shard[some])
        columns = (piece[some], shard[some], dst_lo, src_lo, extent)
        blocks.append(tuple(column[overlaps].astype(np.int32) for column in columns))
    joined = [np.concatenate(columns) for columns in zip(*blocks, strict=True)]
    return joined[0], joined[1], joined[2], joined[3], joined[4]


def _most_row_bytes(recipe: Recipe, topology: Topology, settings: Settings, piece: Ints, extent: Ints) -> float:
    """Limit for rows that several senders may share: small compared with what one sender sends."""
    engine, dst = recipe.engine, recipe.dst[piece]
    num_copies = engine.groups.sizes[engine.group_of[dst]]
    total = float((boxes.volume(extent) * engine.itemsize[dst] * num_copies).sum())
    return max(total / (topology.num_trainers * ROWS_PER_SENDER), 4.0 * (settings.min_write_bytes or SMALL_WRITE))


def _cut_large(
    recipe: Recipe, sources: Layout, most: float, piece: Ints, shard: Ints, dst_lo: Ints, src_lo: Ints, extent: Ints
) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Cut larger rows that several ranks hold, along their first long dimension, between blocks that share a scale."""
    row_bytes = boxes.volume(extent) * recipe.engine.itemsize[recipe.dst[piece]]
    is_large = (sources.groups.sizes[sources.group_of[shard]] > 1) & (row_bytes > most)
    if not is_large.any():
        return piece, shard, dst_lo, src_lo, extent
    axes = recipe.axes[piece]
    src_extent = to_source_dims(extent, axes)
    dim = np.argmax(src_extent >= 2 * QUANT_BLOCK, axis=1)
    row = np.arange(len(piece))
    lo, length = src_lo[row, dim], src_extent[row, dim]
    is_large &= length >= 2 * QUANT_BLOCK
    num_blocks = -(-(lo + length) // QUANT_BLOCK) - lo // QUANT_BLOCK
    num_parts = np.where(is_large, np.minimum(np.ceil(row_bytes / most), num_blocks), 1).astype(np.int64)
    row = np.repeat(row, num_parts)
    nth = np.arange(len(row)) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)
    first_block, end = lo[row] // QUANT_BLOCK, lo[row] + length[row]
    begins = (first_block + nth * num_blocks[row] // num_parts[row]) * QUANT_BLOCK
    ends = (first_block + (nth + 1) * num_blocks[row] // num_parts[row]) * QUANT_BLOCK
    begins = np.where(is_large[row], np.maximum(begins, lo[row]), lo[row])
    ends = np.where(is_large[row], np.minimum(ends, end), end)
    part = np.arange(len(row))
    part_lo, part_extent = src_lo[row], src_extent[row]
    part_lo[part, dim[row]], part_extent[part, dim[row]] = begins, ends - begins
    moved = to_destination_dims(part_lo - src_lo[row], axes[row], 0)
    part_dst_lo = (dst_lo[row] + moved).astype(np.int32)
    return piece[row], shard[row], part_dst_lo, part_lo, to_destination_dims(part_extent, axes[row], 1)
