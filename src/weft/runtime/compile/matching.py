"""From what members report to a plan: which trainer tensor every engine tensor is made from, and how.

Engine tensors take the boxes of trainer tensors of the same name. Where precisions differ they are cast; an engine
tensor `X` in FP8 is quantised from `X`, and its scales go to `X_scale_inv` or `X_scale`, whose shape says which
elements share one: [⌈n/128⌉, ⌈k/128⌉] for blocks, [n, 1] or [n] for rows, [1] for the whole matrix.

Members report columns, and columns become the plan: only names and errors are handled one by one.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from weft.config import Settings
from weft.core.assign import Policy
from weft.core.geometry.boxes import pad_dims
from weft.core.geometry.fingerprint import by_appearance
from weft.core.geometry.scaling import Scaling, block_sides_of
from weft.core.layout import Layout, tensors_of
from weft.core.layouts.box_recipe import TakenBoxes, recipe_of_boxes
from weft.core.planner import make_plan
from weft.core.plans.plan import Plan
from weft.core.recipe import Op, Recipe, ignored_tensors
from weft.core.topology import Cluster, Seat, place_members, with_cards
from weft.devices import memory_kind
from weft.errors import LayoutError
from weft.runtime.compile.sides import Side
from weft.runtime.control.messages import Join

FP8 = "fp8_e4m3"
QUANTIZABLE = ("bf16", "fp32")
SCALE_ENDINGS = ("_scale_inv", "_scale")
MAX_CARDS = 64
"""Hosts that show more RDMA cards show virtual ones."""
Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]


def plan_members(
    trainers: Mapping[int, Join],
    engines: Mapping[int, Join],
    cluster: Cluster,
    *,
    ranks_per_engine: int,
    policy: Policy = Policy.BALANCED,
    ignore: Sequence[str] = (),
    settings: Settings | None = None,
    speeds: Mapping[str, float] | None = None,
) -> Plan:
    """The plan between the members that joined, placed in a cluster of this kind.

    `ignore` are trainer tensors no engine has, by name or pattern. `speeds`: hosts that carry only a fraction of what
    they report.
    """
    holding, taking = side_of(trainers), side_of(engines)
    matched = Matched.of(holding, taking)
    recipe = _recipe(matched, num_ranks=len(engines), num_replicas=len(engines) // ranks_per_engine)
    trainer = trainer_layout(holding, matched.wanted, num_ranks=len(trainers))
    ignored = ignored_tensors(trainer, ignore)
    _check_shapes(matched.shape_problems(np.arange(len(taking.held))), recipe, trainer, ignored)
    topology = place_members(
        cluster,
        trainers=seats_of(trainers),
        engines=seats_of(engines),
        speeds=host_speeds([*trainers.values(), *engines.values()], speeds or {}),
    )
    return make_plan(
        trainer=trainer,
        recipe=recipe,
        topology=topology,
        policy=policy,
        ignore=ignored,
        settings=settings,
        trainer_memory=memory_of(trainers),
        engine_memory=memory_of(engines),
    )


def memory_of(joins: Mapping[int, Join]) -> str:
    """Kind of memory in which one side, or its lowest rank if its members differ, has its weights."""
    return memory_kind(joins[min(joins)].place.device)


def side_of(joins: Mapping[int, Join]) -> Side:
    """What the members of one side hold."""
    return Side.of({rank: join.held.table for rank, join in joins.items()})


def seats_of(joins: Mapping[int, Join]) -> list[Seat]:
    """Host and device of every rank of one side."""
    return [(joins[rank].place.host, joins[rank].place.device_number) for rank in sorted(joins)]


def host_speeds(joins: Sequence[Join], measured: Mapping[str, float]) -> dict[str, float]:
    """What the NICs of each host carry, as a fraction of what those of the fastest do.

    Hosts that report less than others are slower in proportion; those that report nothing count as the fastest.
    `measured`: what hosts were found to carry of what they report, for some of them.
    """
    reported = {join.place.host: join.place.nic_gbps for join in joins if join.place.nic_gbps > 0}
    fastest = max(reported.values(), default=1.0)
    hosts = (join.place.host for join in joins)
    return {host: measured.get(host, 1.0) * reported.get(host, fastest) / fastest for host in hosts}


def reported_cluster(usual: Cluster, joins: Sequence[Join]) -> Cluster:
    """Hosts like these, with the network cards of the fastest host that reports any.

    RDMA cards of that host are alike, and devices share them in order; Ethernet cards are one card of all its devices.
    """
    reported = {join.place.host: join.place for join in joins if join.place.nic_gbps > 0}
    if not reported:
        return usual
    fastest = max(reported.values(), key=lambda place: place.nic_gbps)
    num_cards = min(max(len(fastest.nics), 1), MAX_CARDS)
    found = with_cards(usual, [fastest.nic_gbps / num_cards] * num_cards)
    return usual if found == usual else replace(found, name=f"{usual.name}, network cards as reported")


def _check_shapes(wrong: Mapping[str, str], recipe: Recipe, trainer: Layout, ignored: tuple[str, ...]) -> None:
    """Raise if shapes are wrong, with everything else that is wrong."""
    if not wrong:
        return
    problems = list(wrong.values())
    try:
        recipe.check_sources(trainer, ignore=ignored)
    except LayoutError as error:
        problems += [problem for problem in error.problems if not problem.startswith("shape: ")]
    raise LayoutError(
        f"trainer and engine do not agree on {len(problems)} tensors",
        problems=tuple(problems),
        hint="check that both sides have the same config",
    )


def _recipe(matched: Matched, *, num_ranks: int, num_replicas: int) -> Recipe:
    taken = matched.taken(np.flatnonzero(matched.taking.held.is_filled))
    scaling = matched.scalings(np.arange(len(matched.taking.held)))
    return recipe_of_boxes(taken, num_ranks=num_ranks, num_replicas=num_replicas, scaling=scaling)


@dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    """Which trainer tensor each engine tensor comes from. Arrays have one entry for each shard of an engine rank."""

    holding: Side
    taking: Side
    sources: tuple[str, ...]
    """Distinct names of the trainer tensors that are requested."""
    source: Int64s
    """Numbers in `sources`."""
    row: Int64s
    """A shard of its source among the trainers' shards; -1: no trainer has it."""
    is_scale: Bools
    """Whether it holds scales of its source."""
    has_scales: Bools
    """Whether it is quantised, and its scales are taken as well."""

    @classmethod
    def of(cls, holding: Side, taking: Side) -> Matched:
        """Match what members report, by name."""
        rows = holding.rows_by_name()
        source_of = _equal_names(taking, rows)
        row = _looked_up(source_of.values(), rows)[taking.name]
        is_quantized = _is_dtype(taking, FP8) & ~_is_dtype(holding, FP8, row)
        quantized = {taking.names[number]: row for number, row in _first_rows(taking.name, row, is_quantized)}
        scales = {name: weight for name, weight in _scales_of(taking.names, quantized) if name not in rows}
        source_of |= {name: source_of[weight] for name, weight in scales.items()}
        number = {name: i for i, name in enumerate(dict.fromkeys(source_of.values()))}
        source = _looked_up(source_of.values(), number)[taking.name]
        matched = cls(
            holding=holding,
            taking=taking,
            sources=tuple(number),
            source=source,
            row=_looked_up(number, rows)[source],
            is_scale=_is_among(taking, set(scales)),
            has_scales=_is_among(taking, set(scales.values())),
        )
        scaled = {source_of[weight] for weight in scales.values()}
        matched._check_quantized(quantized, unscaled={name for name in quantized if source_of[name] not in scaled})
        return matched

    @property
    def wanted(self) -> set[str]:
        """Names of the trainer tensors that are requested."""
        return set(self.sources)

    def shape_problems(self, shards: Int64s) -> dict[str, str]:
        """Tensors that engines expect in another shape; one that took part of a larger tensor has another model."""
        shards = shards[((self.row >= 0) & ~self.is_scale)[shards]]
        mine, theirs = self.taking.held, self.holding.held
        width, row = max(mine.shape.shape[1], theirs.shape.shape[1]), self.row[shards]
        differs = (pad_dims(mine.shape, width, 1)[shards] != pad_dims(theirs.shape, width, 1)[row]).any(axis=1)
        differs |= mine.num_dims[shards] != theirs.num_dims[row]
        problems = {}
        for shard in shards[differs].tolist():
            name, expected = self.sources[self.source[shard]], self.taking.shape(shard)
            problems[name] = f"shape: {name} is {self.holding.shape(self.row[shard])}, the engine expects {expected}"
        return problems

    def _check_quantized(self, quantized: Mapping[str, int], *, unscaled: set[str]) -> None:
        """What FP8 needs, by tensor. `quantized`: engine tensors with a shard of their sources."""
        held = self.holding.held
        can_be = np.array([dtype in QUANTIZABLE for dtype in held.dtypes] or [False])[held.dtype] & (held.num_dims == 2)
        problems = []
        for name in sorted(quantized):
            row = quantized[name]
            if row < 0:
                continue  # reported with everything that is missing
            if not can_be[row]:
                dtype, shape = self.holding.dtype_name(row), self.holding.shape(row)
                problems.append(f"{name}: cannot be quantised from {dtype} {shape}")
            if name in unscaled:
                problems.append(f"{name}: has no scales ({name}_scale_inv or {name}_scale)")
        if problems:
            hint = "only bf16 and fp32 matrices are quantised, and each needs its scales"
            raise LayoutError("these tensors cannot be quantised to FP8", problems=tuple(problems), hint=hint)

    @property
    def op(self) -> Int64s:
        """How each engine tensor is made. Missing sources are reported later, all together."""
        holding, taking = self.holding, self.taking
        known = {dtype: number for number, dtype in enumerate((*holding.held.dtypes, *taking.held.dtypes))}
        mine, theirs = (
            np.array([known[dtype] for dtype in side.held.dtypes] or [0], dtype=np.int64)[side.held.dtype]
            for side in (taking, holding)
        )
        is_same = np.where(self.row < 0, ~self.has_scales, mine == np.append(theirs, -1)[self.row])
        changed = np.where(_is_dtype(taking, FP8), Op.QUANTIZE, Op.CAST)
        return np.where(self.is_scale, Op.SCALE, np.where(is_same, Op.COPY, changed)).astype(np.int64)

    def taken(self, shards: Int64s) -> TakenBoxes:
        """Engine tensors as boxes of their sources."""
        held, op = self.taking.held, self.op[shards]
        num_dims = held.num_dims[shards]
        is_vector = (op == Op.SCALE) & (num_dims == 1)  # scales of rows or of the whole, without a second dimension
        width = max(held.lo.shape[1], 2)
        return TakenBoxes(
            names=self.taking.names,
            sources=self.sources,
            dtypes=held.dtypes,
            rank=self.taking.rank[shards],
            name=self.taking.name[shards],
            source=self.source[shards],
            dtype=held.dtype[shards],
            num_dims=num_dims,
            extent=pad_dims(held.extent, width, 1)[shards],
            src_lo=pad_dims(held.lo, width, 0)[shards],
            src_dims=num_dims + is_vector,
            op=op,
        )

    def scalings(self, shards: Int64s) -> dict[str, Scaling]:
        """Which elements of each source share a scale, where that is not a block; the same on all engines."""
        shards = shards[(self.is_scale & (self.row >= 0))[shards]]
        if not len(shards):
            return {}
        kind = self._scaling(shards)
        first, number = by_appearance(self.source[shards])
        for at in np.flatnonzero(kind != kind[first][number])[:1].tolist():
            one, other = (int(shards[i]) for i in (first[number[at]], at))
            raise LayoutError(
                f"`{self.sources[self.source[other]]}` is wanted with scales of {self.taking.shape(one)} "
                f"(`{self.taking.held.names[one]}`) and of {self.taking.shape(other)} "
                f"(`{self.taking.held.names[other]}`)",
                hint="use the same kind of scales on all engines: blocks, rows or whole tensors",
            )
        kinds = list(Scaling)
        special = first[kind[first] != kinds.index(Scaling.BLOCK)]
        return {self.sources[self.source[shards[at]]]: kinds[kind[at]] for at in special.tolist()}

    def _scaling(self, shards: Int64s) -> Int64s:
        """Which elements share each of these scales, as numbers in the order of `Scaling`."""
        held, width = self.taking.held, max(self.taking.held.shape.shape[1], 2)
        shape, num_dims = pad_dims(held.shape, width, 1)[shards, :2], held.num_dims[shards]
        weight = self.holding.held.shape[self.row[shards], :2]  # of matrices: only these are quantised
        kind = np.full(len(shards), -1, dtype=np.int64)
        for number in reversed(range(len(Scaling))):
            sides = block_sides_of(weight, np.full(len(shards), 2), np.full(len(shards), number))
            expected = -(-weight // sides)
            fits = (shape == expected).all(axis=1) & ((num_dims == 2) | ((num_dims == 1) & (expected[:, 1] == 1)))
            kind[fits] = number
        for at in np.flatnonzero(kind < 0)[:1].tolist():
            shard = int(shards[at])
            raise LayoutError(
                f"`{held.names[shard]}` has the shape {self.taking.shape(shard)} for a weight of "
                f"{self.holding.shape(self.row[shard])}",
                hint="[⌈n/128⌉, ⌈k/128⌉] for blocks, [n, 1] or [n] for rows, [1] for the whole matrix",
            )
        return kind


def _equal_names(taking: Side, rows: Mapping[str, int]) -> dict[str, str]:
    """The trainer tensor each engine tensor is named after, under any of its names; its own name if there is none."""
    sources = dict(zip(taking.names, taking.names, strict=True))
    for shard, aliases in taking.held.aliases.items():
        name = taking.held.names[shard]
        sources[name] = next((known for known in (name, *aliases) if known in rows), name)
    return sources


def _looked_up(names: Collection[str], numbers: Mapping[str, int]) -> Int64s:
    """The number of each name; -1 if it has none."""
    return np.fromiter(map(numbers.get, names, repeat(-1)), dtype=np.int64, count=len(names))


def _is_among(side: Side, names: Container[str]) -> Bools:
    """Whether each shard has one of these names."""
    return np.fromiter(map(names.__contains__, side.names), dtype=bool, count=len(side.names))[side.name]


def _first_rows(name: Int64s, row: Int64s, chosen: Bools) -> Iterator[tuple[int, int]]:
    """Numbers of names of chosen shards, with the row of one of them."""
    some = np.flatnonzero(chosen)
    numbers, first = np.unique(name[some], return_index=True)
    return zip(numbers.tolist(), row[some[first]].tolist(), strict=True)


def _is_dtype(side: Side, dtype: str, rows: Int64s | None = None) -> Bools:
    """Whether shards are of a dtype; those of row -1 are not."""
    is_it = np.array([known == dtype for known in side.held.dtypes] or [False])[side.held.dtype]
    return is_it if rows is None else np.append(is_it, False)[rows]


def _scales_of(names: Sequence[str], quantized: Container[str]) -> Iterator[tuple[str, str]]:
    """Names that could be scales, with the quantised weight they would belong to."""
    for name in names:
        if name.endswith(SCALE_ENDINGS):
            for ending in SCALE_ENDINGS:
                if name.endswith(ending) and name.removesuffix(ending) in quantized:
                    yield name, name.removesuffix(ending)


def trainer_layout(trainers: Side, wanted: set[str], *, num_ranks: int, check: bool = True) -> Layout:
    """What trainers hold, tied tensors under the names that are wanted."""
    _check_agreement(trainers)
    held = trainers.held
    row, name, names = _wanted_names(trainers, wanted)
    first, tensor_of = by_appearance(name)
    described = row[first]
    tensor_names = (names[number] for number in name[first].tolist())
    columns = (held.dtype[described], held.num_dims[described], held.shape[described])
    return Layout.from_boxes(
        tensors_of(tensor_names, held.dtypes, *columns),
        tensor_of=tensor_of,
        rank=trainers.rank[row],
        lo=held.lo[row],
        extent=held.extent[row],
        strides=held.strides[row],
        num_ranks=num_ranks,
        check=check,
    )


def _wanted_names(trainers: Side, wanted: set[str]) -> tuple[Int64s, Int64s, list[str]]:
    """Shards under the requested names, or under their own if none is: shard and number of its name, and names.

    Only shards with aliases can have several.
    """
    held, names = trainers.held, list(trainers.names)
    if not held.aliases:
        return np.arange(len(held)), trainers.name, names
    number = {name: i for i, name in enumerate(names)}
    found = {
        shard: [known for known in (held.names[shard], *aliases) if known in wanted] or [held.names[shard]]
        for shard, aliases in held.aliases.items()
    }
    repeats = np.ones(len(held), dtype=np.int64)
    repeats[list(found)] = [len(mine) for mine in found.values()]
    row = np.repeat(np.arange(len(held)), repeats)
    name, starts = trainers.name[row], np.cumsum(repeats) - repeats
    for shard, mine in found.items():
        for i, known in enumerate(mine):
            if known not in number:
                number[known] = len(names)
                names.append(known)
            name[starts[shard] + i] = number[known]
    return row, name, names


def _check_agreement(trainers: Side) -> None:
    """Raise, naming the trainers that differ from the majority, unless all hold parts of the same tensors."""
    held = trainers.held
    kinds = np.concatenate([held.dtype[:, None], held.num_dims[:, None], held.shape], axis=1)
    first, number = by_appearance(trainers.name)
    differs = (kinds != kinds[first][number]).any(axis=1)
    found: dict[str, dict[tuple[str, tuple[int, ...]], set[int]]] = {}
    for shard in np.flatnonzero(np.isin(trainers.name, trainers.name[differs])).tolist():
        kind = trainers.dtype_name(shard), tuple(trainers.shape(shard))
        found.setdefault(held.names[shard], {}).setdefault(kind, set()).add(int(trainers.rank[shard]))
    problems, culprits = [], set()
    for name, by_kind in found.items():
        (dtype, shape), _ = max(by_kind.items(), key=lambda item: (len(item[1]), -min(item[1])))
        for kind, ranks in by_kind.items():
            if kind != (dtype, shape):
                culprits |= ranks
                who = ", ".join(map(str, sorted(ranks)))
                problems.append(
                    f"{name}: {kind[0]} {list(kind[1])} on trainer {who}, {dtype} {list(shape)} on the others"
                )
    if problems:
        members = tuple(f"trainer {rank}" for rank in sorted(culprits))
        raise LayoutError(
            f"{', '.join(members)} differs from the other trainers", problems=tuple(problems), members=members
        )
