"""From what members report to a plan: which trainer tensor every engine tensor is made of, and how.

Engine tensors take the boxes of equally named trainer tensors. Where precisions differ they are cast; an engine tensor
`X` in FP8 is quantised from `X`, and its scales go to `X_scale_inv` or `X_scale`, whose shape says which elements share
one: [⌈n/128⌉, ⌈k/128⌉] for blocks, [n, 1] or [n] for rows, [1] for the whole matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from weft.config import Settings
from weft.core.assign import Policy
from weft.core.layout import Layout, Shard, Tensor
from weft.core.plan import Plan
from weft.core.planner import make_plan
from weft.core.recipe import Op, Piece, Recipe, ignored_tensors
from weft.core.scaling import Scaling, scale_shape
from weft.core.topology import Cluster, Seat, place_members
from weft.errors import LayoutError
from weft.runtime.control.messages import HeldShard, Join

FP8 = "fp8_e4m3"
QUANTIZABLE = ("bf16", "fp32")
SCALE_ENDINGS = ("_scale_inv", "_scale")


def plan_members(
    trainers: Mapping[int, Join],
    engines: Mapping[int, Join],
    cluster: Cluster,
    *,
    ranks_per_engine: int,
    policy: Policy = Policy.BALANCED,
    ignore: Sequence[str] = (),
    settings: Settings | None = None,
) -> Plan:
    """The plan between the members that joined, where they are in a cluster of this kind.

    `ignore` are trainer tensors no engine has, by name or pattern.
    """
    matched = Matched.of(trainers, engines)
    recipe = _recipe(engines, matched, num_replicas=len(engines) // ranks_per_engine)
    trainer = trainer_layout(trainers, matched.wanted)
    ignored = ignored_tensors(trainer, ignore)
    _check_shapes(matched.shape_problems(engines), recipe, trainer, ignored)
    topology = place_members(cluster, trainers=_seats(trainers), engines=_seats(engines))
    return make_plan(
        trainer=trainer, recipe=recipe, topology=topology, policy=policy, ignore=ignored, settings=settings
    )


def _seats(joins: Mapping[int, Join]) -> list[Seat]:
    """Host and device of every rank of one side."""
    return [(joins[rank].place.host, joins[rank].place.device_number) for rank in sorted(joins)]


def _check_shapes(wrong: Mapping[str, str], recipe: Recipe, trainer: Layout, ignored: tuple[str, ...]) -> None:
    """Raise if shapes are wrong, together with everything else that is."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    """Which trainer tensor each engine tensor comes from."""

    sources: dict[str, str]
    """Engine tensor → trainer tensor, by name."""
    tensors: dict[str, Tensor]
    """Trainer tensors, under all their names."""
    scales: dict[str, str]
    """Engine tensors that hold scales → the engine tensor they belong to."""

    @classmethod
    def of(cls, trainers: Mapping[int, Join], engines: Mapping[int, Join]) -> Matched:
        """Match what members report, by name."""
        tensors = {
            name: Tensor(name=name, dtype=held.dtype, shape=held.shape)
            for join in trainers.values()
            for held in join.held
            for name in (held.name, *held.aliases)
        }
        held_by_engines = {held.name: held for join in engines.values() for held in join.held}
        sources = {
            held.name: next((name for name in (held.name, *held.aliases) if name in tensors), held.name)
            for held in held_by_engines.values()
        }
        quantized = {
            held.name
            for join in engines.values()
            for held in join.held
            if held.dtype == FP8 and _dtype(tensors, sources[held.name]) != FP8
        }
        scales = {
            name: weight for name, weight in _scales_of(held_by_engines) if weight in quantized and name not in tensors
        }
        matched = cls(
            sources=sources | {name: sources[weight] for name, weight in scales.items()}, tensors=tensors, scales=scales
        )
        matched._check_quantized(quantized)
        return matched

    @property
    def wanted(self) -> set[str]:
        """Names of trainer tensors that are asked for."""
        return set(self.sources.values())

    def shape_problems(self, engines: Mapping[int, Join]) -> dict[str, str]:
        """Tensors of which engines expect another shape; one that took a part of a larger tensor has another model."""
        problems = {}
        for join in engines.values():
            for held in join.held:
                source = self.tensors.get(self.sources[held.name])
                if source is not None and held.name not in self.scales and held.shape != source.shape:
                    what = f"is {list(source.shape)}, the engine expects {list(held.shape)}"
                    problems[source.name] = f"shape: {source.name} {what}"
        return problems

    def _check_quantized(self, quantized: set[str]) -> None:
        """What FP8 needs, by tensor."""
        problems = []
        scaled = {self.sources[weight] for weight in self.scales.values()}
        for name in sorted(quantized):
            source = self.tensors.get(self.sources[name])
            if source is None:
                continue  # reported with all that is missing
            if source.dtype not in QUANTIZABLE or len(source.shape) != 2:
                problems.append(f"{name}: cannot be quantised from {source.dtype} {list(source.shape)}")
            if self.sources[name] not in scaled:
                problems.append(f"{name}: has no scales ({name}_scale_inv or {name}_scale)")
        if problems:
            hint = "matrices of bf16 or fp32 are quantised, and need their scales"
            raise LayoutError("the engine wants FP8", problems=tuple(problems), hint=hint)

    def op(self, held: HeldShard) -> Op:
        """How an engine tensor is made."""
        if held.name in self.scales:
            return Op.SCALE
        dtype = _dtype(self.tensors, self.sources[held.name])
        if dtype == held.dtype or (dtype == "" and held.name not in self.scales.values()):
            return Op.COPY  # what is missing is reported with everything else that is
        return Op.QUANTIZE if held.dtype == FP8 else Op.CAST

    def scaling(self, held: HeldShard) -> Scaling:
        """Which elements share one of these scales."""
        shape = self.tensors[self.sources[held.name]].shape
        for kind in Scaling:
            expected = scale_shape(shape, kind)
            if held.shape in (expected, expected[:1]) and (expected[1:] == (1,) or held.shape == expected):
                return kind
        raise LayoutError(
            f"`{held.name}` has the shape {list(held.shape)} for a weight of {list(shape)}",
            hint="[⌈n/128⌉, ⌈k/128⌉] for blocks, [n, 1] or [n] for rows, [1] for all",
        )


def _dtype(tensors: Mapping[str, Tensor], name: str) -> str:
    return tensors[name].dtype if name in tensors else ""


def _scales_of(held: Mapping[str, HeldShard]) -> Iterator[tuple[str, str]]:
    """Names that could be scales, with the weight they would belong to."""
    for name in held:
        for ending in SCALE_ENDINGS:
            if name.endswith(ending) and name.removesuffix(ending) in held:
                yield name, name.removesuffix(ending)


def _names(held: HeldShard, wanted: set[str]) -> list[str]:
    """The names under which a trainer's shard is asked for; its own where none is."""
    return [name for name in (held.name, *held.aliases) if name in wanted] or [held.name]


def trainer_layout(trainers: Mapping[int, Join], wanted: set[str], *, check: bool = True) -> Layout:
    """What trainers hold, tied tensors under the names that are wanted."""
    tensors: dict[str, Tensor] = {}
    shards = []
    _check_agreement(trainers)
    for rank, join in trainers.items():
        for held in join.held:
            for name in _names(held, wanted):
                tensors.setdefault(name, Tensor(name=name, dtype=held.dtype, shape=held.shape))
                shards.append(Shard(tensor=name, rank=rank, lo=held.lo, extent=held.extent, strides=held.strides))
    return Layout.from_shards(list(tensors.values()), shards, num_ranks=len(trainers), check=check)


def _check_agreement(trainers: Mapping[int, Join]) -> None:
    """Raise, naming those that differ from most others, unless all trainers hold parts of the same tensors."""
    kinds: dict[str, dict[tuple[str, tuple[int, ...]], set[int]]] = {}
    for rank, join in trainers.items():
        for held in join.held:
            kinds.setdefault(held.name, {}).setdefault((held.dtype, held.shape), set()).add(rank)
    problems, culprits = [], set()
    for name, found in kinds.items():
        if len(found) > 1:
            (dtype, shape), _ = max(found.items(), key=lambda item: (len(item[1]), -min(item[1])))
            for kind, ranks in found.items():
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


def _recipe(engines: Mapping[int, Join], matched: Matched, *, num_replicas: int) -> Recipe:
    filled = {rank: [held for held in join.held if 0 not in held.extent] for rank, join in engines.items()}
    tensors = {rank: engine_tensors(shards) for rank, shards in filled.items()}
    pieces = {rank: [piece_of(held, matched) for held in shards] for rank, shards in filled.items()}
    recipe = Recipe.from_pieces(tensors, pieces, scaling=scalings(engines, matched))
    return replace(recipe, num_replicas=num_replicas)


def engine_tensors(held: Sequence[HeldShard]) -> list[Tensor]:
    """The tensors of one engine rank: every box it holds is one."""
    return [Tensor(name=shard.name, dtype=shard.dtype, shape=shard.extent) for shard in held]


def scalings(engines: Mapping[int, Join], matched: Matched) -> dict[str, Scaling]:
    """Which elements of each source share a scale; the same on all engines."""
    found: dict[str, tuple[Scaling, HeldShard]] = {}
    for join in engines.values():
        for held in join.held:
            source = matched.sources[held.name]
            if held.name not in matched.scales or source not in matched.tensors:
                continue  # what is missing is reported with everything else that is
            kind = matched.scaling(held)
            known, other = found.setdefault(source, (kind, held))
            if known is not kind:
                raise LayoutError(
                    f"`{source}` is wanted with scales of {list(other.shape)} (`{other.name}`) and of "
                    f"{list(held.shape)} (`{held.name}`)",
                    hint="let all engines share scales in the same way: blocks, rows, or whole tensors",
                )
    return {source: kind for source, (kind, _) in found.items() if kind is not Scaling.BLOCK}


def piece_of(held: HeldShard, matched: Matched) -> Piece:
    """An engine tensor is one box of its source."""
    op = matched.op(held)
    is_vector = op is Op.SCALE and len(held.shape) == 1  # scales of rows, or of everything, without a second dimension
    return Piece(
        dst=held.name,
        source=matched.sources[held.name],
        dst_lo=(0,) * len(held.lo),
        extent=held.extent,
        src_lo=(*held.lo, 0) if is_vector else held.lo,
        axes=(0,) if is_vector else None,
        op=op,
    )
