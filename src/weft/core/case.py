"""A transfer described in texts, as a user types it, and the plan for it.

plan = plan_case(Case(model="qwen3-0.6b", trainer="fsdp4", engine="tp2"))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from weft.config import Settings
from weft.core.assign import Policy
from weft.core.layout import Layout
from weft.core.layouts.engine_layout import engine_recipe, parse_engine
from weft.core.layouts.layout_file import is_layout_file, read_engine_file, read_trainer_file
from weft.core.layouts.trainer_layout import Gather, parse_trainer, trainer_layout
from weft.core.models.catalog import load_model
from weft.core.models.model import Model
from weft.core.planner import make_plan, parse_policy
from weft.core.plans.plan import Plan
from weft.core.recipe import Recipe
from weft.core.topology import CPU, CUDA, Cluster, Topology, load_topology, with_placement
from weft.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Everything a plan depends on."""

    model: str
    """Catalog name or path of a config.json."""
    trainer: str
    """Layout text, or the path of a .json file with explicit shards."""
    engine: str
    """Layout text, or the path of a .json file with traced pieces."""
    num_replicas: int = 1
    dtype: str = "bf16"
    """Engine precision: bf16, fp16, fp32 or fp8-block128."""
    trainer_dtype: str = ""
    """Trainer precision; empty: that of the model's config."""
    topology: str = "h100-ib400"
    placement: str = ""
    """Where engines go relative to trainers; empty: the topology's placement."""
    policy: str = "balanced"
    gather: str = "none"
    """`mesh` or `world` to plan like systems that gather first; `rank0` always gathers the world."""
    ignore: tuple[str, ...] = ()
    """Names or patterns (`visual.*`) of trainer tensors that no engine uses."""
    memory: str = CUDA
    """Where members have their weights: `cuda` or `cpu`; `cpu,cuda` for trainers and engines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """What members of a case hold, and where they are."""

    model: Model
    trainer: Layout
    recipe: Recipe
    topology: Topology


def plan_case(
    case: Case,
    *,
    model: Model | None = None,
    settings: Settings | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Plan:
    """The proven plan of a case. `model` saves loading it again."""
    trainer_memory, engine_memory = memory_kinds(case.memory)
    sides = lay_out(case, model=model, on_progress=on_progress)
    return make_plan(
        trainer=sides.trainer,
        recipe=sides.recipe,
        topology=sides.topology,
        policy=parse_policy(case.policy),
        settings=settings,
        trainer_memory=trainer_memory,
        engine_memory=engine_memory,
        model=sides.model.name,
        gathered=_gathering(case) is not Gather.NONE,
        ignore=case.ignore,
        on_progress=on_progress,
    )


def memory_kinds(text: str) -> tuple[str, str]:
    """The kinds of memory of trainers and engines."""
    kinds = text.split(",")
    if len(kinds) > 2 or not set(kinds) <= {CPU, CUDA}:
        raise ConfigError(f"unknown memory `{text}`", hint="cuda, cpu, or cpu,cuda for trainers and engines")
    return kinds[0], kinds[-1]


def lay_out(case: Case, *, model: Model | None = None, on_progress: Callable[[str], None] = lambda _: None) -> Sides:
    """Both sides of a case, not yet planned."""
    gather = _gathering(case)
    cluster = case_cluster(case)
    _check_sizes(case, cluster)
    on_progress(f"listing the tensors of {case.model}")
    model = model or load_model(case.model)
    if case.trainer_dtype:
        model = model.with_dtype(case.trainer_dtype)
    on_progress(f"laying out trainers {case.trainer}")
    trainer = _trainer(case, model, gather)
    on_progress(f"laying out engines {case.engine}")
    recipe = _recipe(case, model)
    topology = cluster.place(num_trainers=trainer.num_ranks, num_engines=recipe.engine.num_ranks)
    return Sides(model=model, trainer=trainer, recipe=recipe, topology=topology)


def case_cluster(case: Case) -> Cluster:
    """The kind of cluster a case is for."""
    cluster = load_topology(case.topology)
    return with_placement(cluster, case.placement) if case.placement else cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseRanks:
    """How many members a case has."""

    num_trainers: int
    num_engine_ranks: int
    ranks_per_engine: int


def case_ranks(case: Case) -> CaseRanks:
    """Without laying anything out, unless layouts are files."""
    if is_layout_file(case.trainer) or is_layout_file(case.engine):
        sides = lay_out(case)
        num_trainers, num_engine_ranks = sides.trainer.num_ranks, sides.recipe.engine.num_ranks
    else:
        num_trainers = parse_trainer(case.trainer).num_ranks
        num_engine_ranks = parse_engine(case.engine).num_ranks * case.num_replicas
    return CaseRanks(
        num_trainers=num_trainers,
        num_engine_ranks=num_engine_ranks,
        ranks_per_engine=num_engine_ranks // case.num_replicas,
    )


def _gathering(case: Case) -> Gather:
    return Gather.WORLD if parse_policy(case.policy) is Policy.RANK0 else _gather(case.gather)


def _check_sizes(case: Case, cluster: Cluster) -> None:
    """Refuse a case that is too large to plan, before building any of it."""
    if is_layout_file(case.trainer) or is_layout_file(case.engine):
        return
    num_engines = parse_engine(case.engine).num_ranks * case.num_replicas
    cluster.place(num_trainers=parse_trainer(case.trainer).num_ranks, num_engines=num_engines)


def _trainer(case: Case, model: Model, gather: Gather) -> Layout:
    if not is_layout_file(case.trainer):
        return trainer_layout(model, case.trainer, gather=gather)
    if gather is not Gather.NONE:
        raise ConfigError(
            f"the shards of `{case.trainer}` cannot be gathered", hint="use a layout text with `rank0` and `--gather`"
        )
    return read_trainer_file(Path(case.trainer), model)


def _recipe(case: Case, model: Model) -> Recipe:
    if is_layout_file(case.engine):
        return read_engine_file(Path(case.engine), model, num_replicas=case.num_replicas)
    return engine_recipe(model, case.engine, num_replicas=case.num_replicas, dtype=case.dtype)


def _gather(text: str) -> Gather:
    try:
        return Gather(text)
    except ValueError:
        raise ConfigError(f"unknown gather `{text}`", hint=f"use {', '.join(Gather)}") from None
