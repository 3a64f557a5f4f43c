"""A saved plan, fitted to the members that joined: its routes between what they hold, or every difference by name.

A plan names engine tensors as engines do (`qkv_proj`), members report boxes of checkpoint tensors (`q_proj`, rows 0 to
512). Both are compared as what is read from where: which trainer rank holds which box, and which box of which source,
in which precision, each engine rank takes. Memory strides, and names of fused tensors, are the members' own. Members
share hosts as in the plan.

    plan = fit_plan(plan_file.load(path), trainer=layout, recipe=recipe)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from weft.core.assign import Policy
from weft.core.geometry.boxes import Ints, pad_dims
from weft.core.geometry.fingerprint import Keys, mix, name_keys
from weft.core.geometry.scaling import SCALE_SUFFIX, Scaling
from weft.core.layout import DTYPE_BYTES, Layout, RankGroups
from weft.core.planner import make_plan
from weft.core.plans.plan import Plan
from weft.core.plans.proof import prove
from weft.core.recipe import Op, Recipe
from weft.core.topology import Seat, Topology
from weft.errors import LayoutError, PlanError

_DTYPES = tuple(DTYPE_BYTES)


def fit_plan(
    saved: Plan,
    *,
    trainer: Layout,
    recipe: Recipe,
    misplaced: tuple[str, ...] = (),
    problems: tuple[str, ...] = (),
) -> Plan:
    """The saved plan's routes between these layouts; raises a LayoutError with every difference.

    `trainer` need not be checked: shards that do not tile their tensors differ from the plan's. `misplaced` members and
    other `problems` are differences that are already known.
    """
    names = {tensor.name for tensor in trainer.tensors}
    ignored = tuple(name for name in saved.ignored if name in names)
    found = (*misplaced, *problems, *_differences(saved, trainer.without(frozenset(ignored)), recipe))
    if found:
        hint = "make the plan again for these members, or start without it"
        hint += "; it was made for trainers that gather whole tensors first" if saved.gathered else ""
        hint += "; --any-place (`any_place=True`) runs it wherever members are" if misplaced else ""
        raise LayoutError(
            f"members differ from the plan in {len(found)} point{'s' if len(found) > 1 else ''}",
            problems=found,
            hint=hint,
        )
    fitted = make_plan(
        trainer=trainer,
        recipe=recipe,
        topology=saved.topology,
        policy=Policy.RANK0,  # its choice is replaced below
        settings=saved.settings,
        trainer_memory=saved.trainer_memory,
        engine_memory=saved.engine_memory,
        model=saved.model,
        gathered=saved.gathered,
        ignore=ignored,
    )
    fitted = replace(fitted, policy=saved.policy, sender=_senders(saved, fitted))
    prove(fitted)
    return fitted


def place_problems(topology: Topology, *, trainers: Sequence[Seat], engines: Sequence[Seat]) -> Iterator[str]:
    """Members that are not where the plan has them; seats are in rank order. The names of hosts do not matter.

    Every host of the plan stands for the one most of its members are on. Members without a device number may be on any
    device of their host.
    """
    if (len(trainers), len(engines)) != (topology.num_trainers, topology.num_engines):
        return  # each number that differs is a problem of its own
    names = [f"trainer {rank}" for rank in range(len(trainers))]
    names += [f"engine rank {rank}" for rank in range(len(engines))]
    devices = np.concatenate([topology.trainer_device, topology.engine_device])
    planned, seats = topology.host_of(devices).tolist(), [*trainers, *engines]
    host_of, first_on = _hosts_of_plan(planned, [host for host, _ in seats], names)
    per_host = topology.host.devices
    for name, at, (host, number), device in zip(names, planned, seats, (devices % per_host).tolist(), strict=True):
        if host_of.get(at) == host:
            if number is not None and number % per_host != device:
                yield f"{name}: on GPU {number} of its host, the plan has it on GPU {device}"
        elif host not in first_on:
            yield f"{name}: not on the host of {first_on[host_of[at]]}, where the plan has it"
        else:
            meant = f"that of {first_on[host_of[at]]}" if at in host_of else "another"
            yield f"{name}: on the host of {first_on[host]}, the plan has it on {meant}"


def _hosts_of_plan(
    planned: Sequence[int], hosts: Sequence[str], names: Sequence[str]
) -> tuple[dict[int, str], dict[str, str]]:
    """The host that each of the plan's stands for, and the first member there that is in its place."""
    host_of: dict[int, str] = {}
    first_on: dict[str, str] = {}
    for (number, host), _ in Counter(zip(planned, hosts, strict=True)).most_common():
        if number not in host_of and host not in first_on:
            host_of[number] = host
            first_on[host] = next(name for name, *at in zip(names, planned, hosts, strict=True) if at == [number, host])
    return host_of, first_on


def _differences(saved: Plan, trainer: Layout, recipe: Recipe) -> Iterator[str]:
    yield from _number_problems(saved, trainer, recipe)
    yield from _tensor_problems(saved, trainer)
    planned, held = _shards(saved.trainer, trainer), _shards(trainer, saved.trainer)
    for row, rank, more in _only_in(planned, held):
        yield f"{planned.name(row)}: the plan has {planned.box(row)} on trainer {rank}, which does not hold it{more}"
    for row, rank, more in _only_in(held, planned):
        yield f"{held.name(row)}: trainer {rank} holds {held.box(row)}, the plan does not have it there{more}"
    planned, held = _pieces(saved.recipe, recipe), _pieces(recipe, saved.recipe)
    for row, rank, more in _only_in(planned, held):
        where = f"engine rank {rank}, which has no place for it{more}"
        yield f"{planned.name(row)}: the plan sends {planned.box(row)} to {where}"
    for row, rank, more in _only_in(held, planned):
        yield f"{held.name(row)}: engine rank {rank} takes {held.box(row)}, which the plan does not send{more}"
    yield from _scaling_problems(saved.recipe, recipe)


def _number_problems(saved: Plan, trainer: Layout, recipe: Recipe) -> Iterator[str]:
    if trainer.num_ranks != saved.trainer.num_ranks:
        yield f"trainers: {trainer.num_ranks} joined, the plan has {saved.trainer.num_ranks}"
    if recipe.engine.num_ranks != saved.recipe.engine.num_ranks:
        yield f"engine ranks: {recipe.engine.num_ranks} joined, the plan has {saved.recipe.engine.num_ranks}"
    if recipe.num_replicas != saved.recipe.num_replicas:
        yield f"engines: {recipe.num_replicas} joined, the plan has {saved.recipe.num_replicas}"


def _tensor_problems(saved: Plan, trainer: Layout) -> Iterator[str]:
    """Trainer tensors that only one side has, or that differ in shape or precision."""
    planned = {t.name: t for t in saved.trainer.tensors if not t.name.endswith(SCALE_SUFFIX)}
    held = {tensor.name: tensor for tensor in trainer.tensors}
    for name, tensor in planned.items():
        mine = held.get(name)
        if mine is None:
            yield f"{name}: {tensor.dtype} {list(tensor.shape)} in the plan, no trainer has it"
        elif (mine.dtype, mine.shape) != (tensor.dtype, tensor.shape):
            yield (
                f"{name}: {mine.dtype} {list(mine.shape)} on trainers, {tensor.dtype} {list(tensor.shape)} in the plan"
            )
    for name in held:
        if name not in planned:
            yield f"{name}: trainers have it, the plan does not"


def _scaling_problems(planned: Recipe, held: Recipe) -> Iterator[str]:
    used = set(planned.sources) & set(held.sources)
    for name in sorted(used & (set(planned.scaling) | set(held.scaling))):
        expected, found = (recipe.scaling.get(name, Scaling.BLOCK) for recipe in (planned, held))
        if expected is not found:
            yield f"{name}: engines want scales by {found}, the plan has them by {expected}"


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """Boxes that groups of ranks hold or take, as columns."""

    keys: Keys
    """Equal for equal boxes of equal tensors."""
    group_of: Ints
    groups: RankGroups
    names: tuple[str, ...]
    """Of the tensors boxes are shown under."""
    name_of: Ints
    box: Callable[[int], str]
    """A row's box as text."""

    def name(self, row: int) -> str:
        """The tensor a row is shown under."""
        return self.names[self.name_of[row]]

    def by_rank(self) -> tuple[Keys, Ints, Ints]:
        """Every row once per rank: its key there, its number, the rank."""
        row = np.repeat(np.arange(len(self.keys)), self.groups.sizes[self.group_of])
        rank = self.groups.expand(self.group_of)
        return mix(self.keys[row], rank), row, rank


def _only_in(some: _Rows, others: _Rows) -> Iterator[tuple[int, int, str]]:
    """Of each tensor with boxes that `others` do not have: the first such row, its rank, and how many more."""
    keys, row, rank = some.by_rank()
    alone = np.flatnonzero(~np.isin(keys, others.by_rank()[0]))
    number = {name: i for i, name in enumerate(dict.fromkeys(some.names))}
    same_name = np.array([number[name] for name in some.names], dtype=np.int64)[some.name_of[row[alone]]]
    _, first, count = np.unique(same_name, return_index=True, return_counts=True)
    for at, total in zip(alone[first].tolist(), count.tolist(), strict=True):
        yield int(row[at]), int(rank[at]), f" (and {total - 1} more like it)" if total > 1 else ""


def _shards(layout: Layout, other: Layout) -> _Rows:
    """Who holds what, of the tensors both sides agree on."""
    alike = {(tensor.name, tensor.dtype, tensor.shape) for tensor in other.tensors}
    names = tuple(tensor.name for tensor in layout.tensors)
    agreed = np.array([(tensor.name, tensor.dtype, tensor.shape) in alike for tensor in layout.tensors], dtype=bool)
    rows = np.flatnonzero(agreed[layout.tensor_of])
    tensor_of, lo, extent = layout.tensor_of[rows], layout.lo[rows], layout.extent[rows]

    def box(row: int) -> str:
        return _box_text(lo[row], extent[row], len(layout.tensors[tensor_of[row]].shape))

    return _Rows(
        keys=mix(name_keys(names)[tensor_of], *_as_wide(lo, extent, max(layout.num_dims, other.num_dims))),
        group_of=layout.group_of[rows],
        groups=layout.groups,
        names=names,
        name_of=tensor_of,
        box=box,
    )


def _pieces(recipe: Recipe, other: Recipe) -> _Rows:
    """What every engine rank takes: boxes of sources, in a precision. The tensors they are fused into do not matter."""
    rows = np.flatnonzero(recipe.op != Op.PAD)
    dst, src = recipe.dst[rows], recipe.src[rows]
    lo, extent, is_scale = recipe.src_lo[rows], recipe.src_extent[rows], recipe.op[rows] == Op.SCALE
    names = tuple(tensor.name for tensor in recipe.engine.tensors)
    dtype = np.array([_DTYPES.index(tensor.dtype) for tensor in recipe.engine.tensors], dtype=np.int64)[dst]
    num_dims = max(recipe.src_lo.shape[1], other.src_lo.shape[1])

    def box(row: int) -> str:
        source = recipe.sources[src[row]]
        of = "" if source == names[dst[row]] else f"scales of {source}" if is_scale[row] else source
        used = 1 + int(np.flatnonzero((lo[row] > 0) | (extent[row] > 1)).max(initial=0))
        return f"{of}{_box_text(lo[row], extent[row], used)} as {_DTYPES[dtype[row]]}"

    return _Rows(
        keys=mix(name_keys(recipe.sources)[src], dtype, is_scale, *_as_wide(lo, extent, num_dims)),
        group_of=recipe.engine.group_of[dst],
        groups=recipe.engine.groups,
        names=names,
        name_of=dst,
        box=box,
    )


def _as_wide(lo: Ints, extent: Ints, num_dims: int) -> tuple[Ints, Ints]:
    """Boxes with trailing dimensions of size one, so that tables of different widths compare."""
    return pad_dims(lo, num_dims, 0), pad_dims(extent, num_dims, 1)


def _box_text(lo: Ints, extent: Ints, num_dims: int) -> str:
    ends = zip(lo[:num_dims].tolist(), extent[:num_dims].tolist(), strict=True)
    return f"[{', '.join(f'{start}:{start + n}' for start, n in ends)}]"


def _senders(saved: Plan, fitted: Plan) -> NDArray[np.int32]:
    """The sender of each route of `fitted`: the one that sends the same box to the same rank in the saved plan."""
    num_dims = max(saved.trainer.num_dims, fitted.trainer.num_dims)
    old, new = _route_keys(saved, num_dims), _route_keys(fitted, num_dims)
    old_order, new_order = np.argsort(old, kind="stable"), np.argsort(new, kind="stable")
    if len(old) != len(new) or (old[old_order] != new[new_order]).any():
        raise PlanError(
            f"the plan has {len(old)} routes, of which {int(np.isin(old, new).sum())} are among the {len(new)} that "
            "these members need",
            hint="make the plan again: it was altered, or made by another version of weft",
        )
    sender = np.empty_like(saved.sender)
    sender[new_order] = saved.sender[old_order]
    return sender


def _route_keys(plan: Plan, num_dims: int) -> Keys:
    """A key of every route: source box, precision, receiver."""
    names = name_keys(tensor.name for tensor in plan.trainer.tensors)[plan.trainer.tensor_of[plan.shard]]
    itemsize = plan.recipe.engine.itemsize[plan.dst]
    keys = mix(names, itemsize, *_as_wide(plan.src_lo, plan.src_extent, num_dims))
    return mix(np.repeat(keys, plan.fan_out), plan.receiver)
