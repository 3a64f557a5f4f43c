"""A saved plan between members: followed where they hold what it says, refused with every difference otherwise."""

from __future__ import annotations

import json
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from tests.support.executor import execute, random_checkpoint, same_bits
from tests.support.planned_members import engine_joins, held, holding, join, trainer_joins
from tests.support.tiny import tiny_model
from weft.config import Settings, TransferSettings
from weft.core.case import Case, plan_case
from weft.core.geometry.scaling import Scaling
from weft.core.plans import plan_file
from weft.core.plans.plan import Plan
from weft.core.topology import load_topology
from weft.core.version import CommitPolicy
from weft.errors import ConfigError, LayoutError, PlanError
from weft.runtime.compile.following import follow_plan
from weft.runtime.controller.controller import Controller
from weft.runtime.controller.planning import Planning

FAMILIES = ["qwen3", "qwen2-tied", "qwen3-moe", "deepseek", "gpt2"]


def saved(
    model="qwen3",
    *,
    trainer="hsdp2x2",
    engine="tp2",
    replicas=1,
    dtype="bf16",
    policy="round_robin",
    gather="none",
    memory="cpu",
    **settings,
):
    case = Case(
        model=model,
        trainer=trainer,
        engine=engine,
        num_replicas=replicas,
        dtype=dtype,
        policy=policy,
        gather=gather,
        memory=memory,
    )
    return plan_case(case, model=tiny_model(model), settings=Settings(**settings))


def followed(plan: Plan, trainers=None, engines=None, *, as_boxes=True, any_place=False) -> Plan:
    trainers = trainer_joins(plan) if trainers is None else trainers
    engines = engine_joins(plan, as_boxes=as_boxes) if engines is None else engines
    ranks_per_engine = len(engines) // plan.recipe.num_replicas
    return follow_plan(plan, trainers, engines, ranks_per_engine=ranks_per_engine, any_place=any_place)


@pytest.mark.parametrize("as_boxes", [True, False], ids=["boxes", "named"])
@pytest.mark.parametrize("model", FAMILIES)
@pytest.mark.parametrize("policy", ["round_robin", "balanced"])
def test_the_same_bytes_take_the_same_ways(tmp_path, model, policy, as_boxes):
    plan_file.save(saved(model, replicas=2, policy=policy), tmp_path / "a.plan")
    plan = plan_file.load(tmp_path / "a.plan")
    found = followed(plan, as_boxes=as_boxes)
    assert np.array_equal(found.pair_bytes, plan.pair_bytes)
    assert (found.policy, found.num_routes, found.topology) == (policy, plan.num_routes, plan.topology)


@pytest.mark.parametrize("as_boxes", [True, False], ids=["boxes", "named"])
def test_scales_are_followed_as_well(as_boxes):
    plan = saved("qwen3-moe", dtype="fp8-block128")
    found = followed(plan, as_boxes=as_boxes)
    assert np.array_equal(found.pair_bytes, plan.pair_bytes)
    assert found.amax_bytes == plan.amax_bytes


@pytest.mark.parametrize("dtype", ["bf16", "fp8-block128"])
def test_engine_ranks_may_report_boxes_and_others_whole_tensors(dtype):
    plan = saved("qwen3-moe", engine="tp2", dtype=dtype)
    boxes, named = (engine_joins(plan, as_boxes=as_boxes) for as_boxes in (True, False))
    found = followed(plan, None, {0: boxes[0], 1: named[1]})
    assert np.array_equal(found.pair_bytes, plan.pair_bytes)
    assert len(found.recipe.engine.tensors) > len(plan.recipe.engine.tensors), "boxes of fused tensors are apart"


def test_what_arrives_is_what_the_plan_means():
    plan = saved("qwen3-moe", engine="ep2")
    weights = random_checkpoint(plan, 0)
    expected, found = (execute(made, weights).tensors for made in (plan, followed(plan, as_boxes=False)))
    for rank, tensors in expected.items():
        assert tensors.keys() == found[rank].keys()
        assert all(same_bits(tensors[name], found[rank][name]) for name in tensors)


def test_strides_are_those_of_the_members():
    """Every second row of a larger array: the plan cannot know, and does not matter."""
    plan = saved()
    trainers = trainer_joins(plan)
    shards = [
        replace(shard, strides=tuple(2 * step if step > 1 else 1 for step in shard.strides))
        for shard in trainers[0].held.table
    ]
    sparse = {rank: holding(trainers[rank], shards) for rank in (0, 2)}  # replicas of one shard
    found = followed(plan, trainers | sparse)
    assert np.array_equal(found.pair_bytes, plan.pair_bytes)
    assert found.trainer.strides.max() == 2 * plan.trainer.strides.max()


def test_ignored_tensors_stay_ignored():
    plan = replace(saved(trainer="ddp2"), ignored=("visual.patch",))
    trainers = trainer_joins(plan)
    extra = held("visual.patch", "fp32", (4, 3, 2, 2), (0,) * 4, (4, 3, 2, 2))
    seeing = {rank: holding(j, [*j.held.table, extra]) for rank, j in trainers.items()}
    assert followed(plan, seeing).ignored == ("visual.patch",)
    with pytest.raises(LayoutError, match=r"visual\.patch: trainers have it, the plan does not"):
        followed(replace(plan, ignored=()), seeing)


def change(joins, rank, name, /, **changes):
    """One member's shard reported otherwise; None: not at all."""
    shards = [
        replace(shard, **changes) if shard.name == name else shard
        for shard in joins[rank].held.table
        if shard.name != name or changes
    ]
    return joins | {rank: holding(joins[rank], shards)}


NORM, QUERY, OUT = (
    "model.norm.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.self_attn.o_proj.weight",
)
FUSED = "model.layers.0.self_attn.qkv_proj.weight"


def differences(plan, trainers=None, engines=None, *, as_boxes=True) -> str:
    with pytest.raises(LayoutError, match="members differ from the plan") as caught:
        followed(plan, trainers, engines, as_boxes=as_boxes)
    assert "make the plan again" in caught.value.hint
    assert len(caught.value.problems) == len(set(caught.value.problems))
    return "\n".join(caught.value.problems)


def test_every_difference_of_a_trainer_is_named():
    plan = saved(trainer="fsdp2")
    trainers = trainer_joins(plan)
    trainers = {rank: holding(j, [s for s in j.held.table if s.name != NORM]) for rank, j in trainers.items()}
    for rank in trainers:
        trainers = change(trainers, rank, OUT, dtype="fp32")
    rows = [next(s for s in trainers[rank].held.table if s.name == QUERY) for rank in (0, 1)]
    trainers = change(trainers, 0, QUERY, lo=rows[1].lo)
    trainers = change(trainers, 1, QUERY, lo=rows[0].lo)
    told = differences(plan, trainers)
    assert f"{NORM}: bf16 [256] in the plan, no trainer has it" in told
    assert f"{OUT}: fp32 [256, 512] on trainers, bf16 [256, 512] in the plan" in told
    assert f"{QUERY}: the plan has [0:256, 0:256] on trainer 0, which does not hold it (and 1 more like it)" in told
    assert f"{QUERY}: trainer 1 holds [0:256, 0:256], the plan does not have it there (and 1 more like it)" in told
    assert len(told.splitlines()) == 4


def test_a_shard_that_is_missing_is_named():
    plan = saved(trainer="fsdp2")
    told = differences(plan, change(trainer_joins(plan), 1, NORM))
    assert told == f"{NORM}: the plan has [128:256] on trainer 1, which does not hold it"


def test_every_difference_of_an_engine_is_named():
    plan = saved()
    engines = engine_joins(plan, as_boxes=True)
    engines = change(engines, 1, NORM)
    engines = change(engines, 0, OUT, dtype="fp32")
    told = differences(plan, None, engines)
    assert f"{NORM}: the plan sends [0:256] as bf16 to engine rank 1, which has no place for it" in told
    assert f"{OUT}: the plan sends [0:256, 0:256] as bf16 to engine rank 0, which has no place for it" in told
    assert f"{OUT}: engine rank 0 takes [0:256, 0:256] as fp32, which the plan does not send" in told
    assert len(told.splitlines()) == 3


def test_engine_tensors_the_plan_knows_by_other_names_or_shapes_are_named():
    plan = saved()
    engines = engine_joins(plan, as_boxes=False)
    engines = change(engines, 0, FUSED, name="blocks.0.attention.qkv")
    engines = change(engines, 1, FUSED, shape=(8, 256), extent=(8, 256))
    told = differences(plan, None, engines, as_boxes=False)
    assert "blocks.0.attention.qkv: engine rank 0 takes [0:512, 0:256] as bf16" in told
    assert f"{FUSED}: engine rank 1 takes [0:8, 0:256] as bf16, which the plan does not send" in told
    assert f"{FUSED}: the plan sends {QUERY}[0:256, 0:256] as bf16 to engine rank 0, which has no place for it" in told


def test_a_global_shape_that_differs_is_named_although_the_box_is_the_same():
    plan = saved()
    engines = change(engine_joins(plan, as_boxes=True), 0, OUT, shape=(256, 1024))
    assert differences(plan, None, engines) == f"shape: {OUT} is [256, 512], the engine expects [256, 1024]"


def test_other_scales_are_named():
    plan = saved(dtype="fp8-block128")
    recipe = replace(plan.recipe, scaling={QUERY: Scaling.CHANNEL})
    told = differences(replace(plan, recipe=recipe), None, engine_joins(plan, as_boxes=True))
    assert f"{QUERY}: engines want scales by block, the plan has them by channel" in told


def test_other_numbers_of_members_are_named():
    plan = saved(trainer="ddp2")
    fewer = {0: trainer_joins(plan)[0]}
    told = differences(plan, fewer, engine_joins(plan, as_boxes=True))
    assert "trainers: 1 joined, the plan has 2" in told


def at(joins, *places):
    """Members on these hosts, and on GPUs of these numbers where one is given."""
    found = {}
    for (rank, joined), (host, *number) in zip(joins.items(), places, strict=True):
        place = msgspec.structs.replace(joined.place, host=host, device_number=number[0] if number else None)
        found[rank] = msgspec.structs.replace(joined, place=place)
    return found


@pytest.mark.parametrize(
    ("trainers", "engines", "told"),
    [
        # the names of hosts, and members without a GPU's number, are as good
        (["z", "z"], ["b", "b"], []),
        ([("z", 0), ("z", 1)], ["b", ("b", 1)], []),
        # one host instead of two
        (
            ["a", "a"],
            ["a", "a"],
            [
                "engine rank 0: on the host of trainer 0, the plan has it on another",
                "engine rank 1: on the host of trainer 0, the plan has it on another",
            ],
        ),
        # three hosts instead of two
        (["a", "a"], ["b", "c"], ["engine rank 1: not on the host of engine rank 0, where the plan has it"]),
        # crossed
        (["a", "b"], ["b", "b"], ["trainer 1: on the host of engine rank 0, the plan has it on that of trainer 0"]),
        # other GPUs, of eight
        (
            [("a", 1), ("a", 0)],
            [("b", 8), ("b", 1)],
            [
                "trainer 0: on GPU 1 of its host, the plan has it on GPU 0",
                "trainer 1: on GPU 0 of its host, the plan has it on GPU 1",
            ],
        ),
    ],
)
def test_members_that_are_elsewhere_are_named(trainers, engines, told):
    plan = saved(trainer="ddp2")
    places = [[place if isinstance(place, tuple) else (place,) for place in side] for side in (trainers, engines)]
    joins = at(trainer_joins(plan), *places[0]), at(engine_joins(plan, as_boxes=True), *places[1])
    if told:
        assert differences(plan, *joins).splitlines() == told
        with pytest.raises(LayoutError) as caught:
            followed(plan, *joins)
        assert "--any-place" in caught.value.hint
    assert np.array_equal(followed(plan, *joins, any_place=bool(told)).pair_bytes, plan.pair_bytes)


def test_the_place_that_most_members_have_is_the_right_one():
    plan = saved(trainer="ddp4")
    trainers = at(trainer_joins(plan), ("b",), ("a",), ("a",), ("a",))
    told = differences(plan, trainers, at(engine_joins(plan, as_boxes=True), ("c",), ("c",)))
    assert told == "trainer 0: not on the host of trainer 1, where the plan has it"


def test_a_plan_of_gathering_trainers_says_so():
    plan = saved(trainer="fsdp2", gather="world")
    with pytest.raises(LayoutError) as caught:
        followed(plan, trainer_joins(saved(trainer="fsdp2")))
    assert "gather" in caught.value.hint


def test_routes_that_were_cut_otherwise_are_not_followed():
    """Only somebody who alters a plan gets here: equal layouts give equal routes."""
    plan = saved()
    with pytest.raises(PlanError, match="routes, of which 0 are among"):
        followed(replace(plan, src_lo=plan.src_lo + 1))


def test_the_listing_is_bounded():
    plan = saved(trainer="ddp2")
    trainers = {rank: join("trainer", rank, []) for rank in range(2)}
    with pytest.raises(LayoutError) as caught:
        followed(plan, trainers)
    assert len(caught.value.problems) == len(plan.trainer.tensors) > 20
    assert len(str(caught.value).splitlines()) == 22


# What a controller is given


def controller(**options):
    numbers = {"num_trainers": 2, "num_engine_ranks": 2, "ranks_per_engine": 2}
    return Controller(**(numbers | options))


@pytest.mark.parametrize(
    ("options", "told", "hint"),
    [
        ({"policy": "fair"}, "unknown policy `fair`", "balanced, greedy, round_robin, rank0"),
        ({"policy": CommitPolicy.QUORUM}, "`policy` is the commit policy", "commit_policy"),
        ({"topology": "h100-ib40"}, "unknown topology `h100-ib40`", "did you mean h100-ib400"),
        ({"topology": "none.toml"}, "`none.toml` cannot be read", None),
        ({"topology": 3}, "`topology` is a int", "load_topology"),
        ({"plan": "none.plan"}, "`none.plan` cannot be read", None),
        ({"plan": 3}, "`plan` is a int", "weft.Plan"),
        ({"plan": "any.plan", "policy": "greedy"}, "a saved plan cannot be combined with", "weft plan"),
        ({"plan": "any.plan", "ignore": ["x"]}, "a saved plan cannot be combined with", "weft plan"),
        ({"any_place": True}, "`any_place` needs a saved plan", "leave it out"),
    ],
)
def test_what_is_wrong_is_said_at_start(options, told, hint):
    with pytest.raises((ConfigError, PlanError), match=told) as caught:
        controller(**options)
    assert hint is None or hint in caught.value.hint


def test_a_plan_for_other_numbers_of_members_is_refused_at_start():
    plan = saved(trainer="ddp2", replicas=2)
    with pytest.raises(
        ConfigError, match="4 engine ranks in engines of 2, the controller waits for 2 trainers"
    ) as caught:
        controller(plan=plan)
    assert caught.value.hint == "--trainers 2 --engine-ranks 4 --ranks-per-engine 2"
    controller(plan=plan, num_engine_ranks=4).close()


def test_a_plan_fixes_how_bytes_travel():
    plan = saved(trainer="ddp2", mode="in_place", window_bytes=1 << 20)
    planning = {"policy": None, "topology": None, "ignore": (), "plan": plan}
    transfer = TransferSettings(silence_s=9.0, window_bytes=1 << 20)
    assert Planning.of(**planning, transfer=transfer).transfer == replace(transfer, mode="in_place")
    with pytest.raises(ConfigError) as caught:
        Planning.of(**planning, transfer=TransferSettings(mode="patch", delta="on", window_bytes=2 << 20))
    told = "mode is patch, the plan has in_place; delta is on, the plan has off; window_bytes is 2097152, the plan has "
    assert str(caught.value) == f"settings differ from the saved plan: {told}1048576"
    assert "make the plan again" in caught.value.hint


def test_weights_in_another_kind_of_memory_are_a_difference():
    told = differences(saved(memory="cuda,cpu"), None, None)
    assert told == "trainers: weights are in cpu memory, the plan has them in cuda memory (--memory)"


def test_a_plan_or_its_file_and_a_cluster_or_its_name_are_taken(tmp_path):
    plan = saved(trainer="ddp2")
    plan_file.save(plan, tmp_path / "a.plan")
    for given in (plan, tmp_path / "a.plan", str(tmp_path / "a.plan")):
        controller(plan=given).close()
    for topology in ("gb200-nvl72", load_topology("ethernet-10g")):
        controller(topology=topology, policy="greedy").close()


@pytest.mark.parametrize("name", ["w", "ω", 'a"b', "a\\b", "a\x7fb", "a\tb", "a/b", "a\ud800b", np.str_("w")])
def test_a_digest_is_that_of_plain_json(name):
    """Long entries are encoded by another library: equal plans must keep their digests."""
    layout = {"text": "fsdp2", "num_ranks": 2, "tensors": [(name, "bf16", (8, 4)), ("v", "fp32", (1 << 40,))]}
    header = {"trainer": layout, "engine": layout, "sources": [name], "settings": {name: 1e-7}, "model": None}
    expected = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    assert plan_file._canonical(header) == expected


def test_a_plan_whose_names_are_those_of_numpy_is_the_same():
    plan = saved()
    tensors = tuple(replace(tensor, name=np.str_(tensor.name)) for tensor in plan.trainer.tensors)
    sources = tuple(map(np.str_, plan.recipe.sources))
    other = replace(plan, trainer=replace(plan.trainer, tensors=tensors), recipe=replace(plan.recipe, sources=sources))
    assert plan_file.digest(other) == plan_file.digest(plan)
