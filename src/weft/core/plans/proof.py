"""The proof that a plan writes every destination byte exactly once, with the right bytes, from a rank that has them.

`prove(plan)` looks only at the plan's columns, not at how they were made, so it also checks plans that were loaded
or altered. A plan that fails is never run.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from weft.core.geometry import boxes
from weft.core.geometry.boxes import Ints
from weft.core.geometry.scaling import SCALE_SUFFIX
from weft.core.plans.plan import Plan, piece_sources
from weft.core.recipe import Op, to_destination_dims, to_source_dims
from weft.errors import LayoutError, PlanError


def prove(plan: Plan) -> None:
    """Raise a PlanError that names the tensors concerned, unless the plan is exact."""
    sources = frozenset(plan.recipe.sources)
    names = (tensor.name for tensor in plan.trainer.tensors)
    virtual = [name for name in names if name.endswith(SCALE_SUFFIX) and name not in sources]
    try:
        plan.recipe.check_sources(plan.trainer, ignore=[*virtual, *plan.ignored])
    except LayoutError as error:
        raise PlanError(str(error), hint=error.hint) from error
    _prove_columns(plan)
    _prove_sources(plan)
    _prove_senders(plan)
    _prove_cover(plan)


def _prove_columns(plan: Plan) -> None:
    """Column lengths and references fit together."""
    num_rows, recipe = plan.num_rows, plan.recipe
    columns = (plan.shard, plan.dst_lo, plan.src_lo, plan.extent, plan.first[1:])
    if any(len(column) != num_rows for column in columns):
        raise PlanError("the plan's columns have different lengths")
    _refuse(plan, (plan.piece < 0) | (plan.piece >= len(recipe.dst)), "refer to a piece that does not exist", None)
    _refuse(
        plan,
        (plan.shard < 0) | (plan.shard >= len(plan.trainer.lo)),
        "read a shard that does not exist",
        None,
    )
    _refuse(plan, (plan.extent < 1).any(axis=1), "are empty", plan.dst)
    fan_out = recipe.engine.groups.sizes[recipe.engine.group_of[plan.dst]]
    if plan.first[0] != 0 or plan.first[-1] != len(plan.sender):
        raise PlanError("the plan's routes do not add up", hint="the plan was cut or altered")
    _refuse(plan, plan.fan_out != fan_out, "do not have one sender for each engine rank", plan.dst)


def _prove_sources(plan: Plan) -> None:
    """Each route moves the bytes its piece asks for, out of a box its shard holds."""
    recipe, trainer = plan.recipe, plan.trainer
    piece, shard = plan.piece, plan.shard
    axes = recipe.axes[piece]
    inside = plan.dst_lo - recipe.dst_lo[piece]
    past = inside + plan.extent > recipe.extent[piece]
    _refuse(plan, ((inside < 0) | past).any(axis=1), "write outside their piece", plan.dst)
    shift = plan.src_lo - recipe.src_lo[piece]
    walked = to_source_dims(np.full_like(axes, 2), axes) == 2
    stray = np.where(walked, 0, shift).any(axis=1)
    _refuse(plan, stray, "read bytes their piece does not ask for", plan.dst)
    offset = to_destination_dims(shift, axes, 0)
    _refuse(
        plan,
        (np.where(axes >= 0, inside, 0) != offset).any(axis=1),
        "read bytes their piece does not ask for",
        plan.dst,
    )
    end = plan.src_lo + plan.src_extent
    held = (plan.src_lo >= trainer.lo[shard]) & (end <= trainer.lo[shard] + trainer.extent[shard])
    _refuse(plan, ~held.all(axis=1), "read outside the shard of their sender", plan.dst)
    wanted = piece_sources(recipe, trainer)[piece]
    _refuse(plan, trainer.tensor_of[shard] != wanted, "read a shard of another tensor", plan.dst)


def _prove_senders(plan: Plan) -> None:
    """Every sender is one of the ranks that hold the shard."""
    groups = plan.trainer.groups
    num_ranks = plan.trainer.num_ranks
    if len(plan.sender) and not (plan.sender.min() >= 0 and plan.sender.max() < num_ranks):
        raise PlanError(f"the plan names a sender outside 0…{num_ranks - 1}")
    group = np.repeat(plan.trainer.group_of[plan.shard], plan.fan_out)
    wrong = ~groups.contain(group, plan.sender)
    if wrong.any():
        row = int(np.searchsorted(plan.first, np.flatnonzero(wrong)[0], side="right") - 1)
        name = plan.trainer.tensors[plan.trainer.tensor_of[plan.shard[row]]].name
        raise PlanError(f"trainer rank {int(plan.sender[wrong][0])} would send a part of `{name}` it does not hold")


def _prove_cover(plan: Plan) -> None:
    """Routes and declared padding tile every engine tensor."""
    recipe = plan.recipe
    padding = np.flatnonzero(recipe.op == Op.PAD)
    owner = np.concatenate([plan.dst, recipe.dst[padding]])
    lo = np.concatenate([plan.dst_lo, recipe.dst_lo[padding]])
    extent = np.concatenate([plan.extent, recipe.extent[padding]])
    defects = boxes.cover_defects(owner, lo, extent, recipe.engine.shapes)
    if defects:
        worst = [
            f"`{recipe.engine.tensors[row].name}` ({_defect(surplus)})" for row, surplus in list(defects.items())[:5]
        ]
        more = f" and {len(defects) - 5} more" if len(defects) > 5 else ""
        raise PlanError(f"the plan does not write every byte exactly once: {', '.join(worst)}{more}")


def _defect(surplus: int) -> str:
    if surplus == 0:
        return "bytes are written twice and others never"
    return f"{surplus} elements too many" if surplus > 0 else f"{-surplus} elements never written"


def _refuse(plan: Plan, wrong: Any, what: str, dst: Ints | None) -> None:
    """Raise if any route is `wrong`, naming the first engine tensor concerned."""
    if not wrong.any():
        return
    names = "" if dst is None else f": `{plan.recipe.engine.tensors[dst[np.flatnonzero(wrong)[0]]].name}`"
    raise PlanError(f"{int(wrong.sum())} routes {what}{names}")
