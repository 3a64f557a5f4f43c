"""For real architectures in miniature: running the plan equals loading the full checkpoint, bit for bit."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.executor import execute, random_checkpoint, same_bits
from tests.support.reference_engine import ReferenceEngine
from tests.support.tiny import CONFIGS, tiny_model
from weft.config import Settings
from weft.core.assign import Policy
from weft.core.layouts.engine_layout import engine_recipe, parse_engine
from weft.core.layouts.trainer_layout import Gather, trainer_layout
from weft.core.planner import make_plan
from weft.core.topology import load_topology, with_placement
from weft.errors import LayoutError

DENSE_TRAINERS = [
    "ddp2",
    "fsdp3",
    "fsdp8",
    "hsdp2x3",
    "tp2",
    "tp2.pp2",
    "fsdp3.tp2",
    "pp2.fsdp4",
    "tp4.cp2.dp2",
]
MOE_TRAINERS = ["ep2.fsdp3", "fsdp3.ep2/hsdp2x3", "pp2.ep4.fsdp2", "tp2.pp2.ep4", "ep4.ddp2", *DENSE_TRAINERS]
ENGINES = ["tp1", "tp2", "tp4", "dp2", "pp2.tp2"]
MOE_ENGINES = ["ep2", "ep4", "tp2.ep2", "tp2.dp2.ep4", "tp4.ep2", "pp2.ep2", *ENGINES]


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, str, str, int, str, str, Policy, Gather]:
    name = draw(st.sampled_from(sorted(CONFIGS)))
    moe = tiny_model(name).num_experts > 0
    trainer = draw(st.sampled_from(MOE_TRAINERS if moe else DENSE_TRAINERS))
    engine = draw(st.sampled_from(MOE_ENGINES if moe else ENGINES))
    replicas = draw(st.integers(1, 3))
    dtype = draw(st.sampled_from(["bf16", "fp32", "fp16", "fp8-block128"]))
    trainer_dtype = draw(st.sampled_from(["bf16", "fp32"]))
    return (
        name,
        trainer,
        engine,
        replicas,
        dtype,
        trainer_dtype,
        draw(st.sampled_from(Policy)),
        draw(st.sampled_from(Gather)),
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    case=cases(),
    seed=st.integers(0, 2**32 - 1),
    packed=st.booleans(),
    min_write_bytes=st.sampled_from([1, 4096, 1 << 18]),
)
def test_plan_equals_full_load(case, seed, packed, min_write_bytes):
    name, trainer_text, engine_text, replicas, dtype, trainer_dtype, policy, gather = case
    model = tiny_model(name).with_dtype(trainer_dtype)
    try:
        recipe = engine_recipe(model, engine_text, num_replicas=replicas, dtype=dtype)
    except LayoutError as error:
        assert "cuts FP8 blocks" in str(error)
        return
    layout = trainer_layout(model, trainer_text, gather=gather)
    cluster = with_placement(load_topology("h100-ib400"), "packed" if packed else "separate")
    topology = cluster.place(num_trainers=layout.num_ranks, num_engines=recipe.engine.num_ranks)
    limits = Settings(min_write_bytes=min_write_bytes)
    plan = make_plan(trainer=layout, recipe=recipe, topology=topology, policy=policy, settings=limits)

    checkpoint = random_checkpoint(plan, seed)
    done = execute(plan, checkpoint)
    mesh = parse_engine(engine_text)
    for rank in range(recipe.engine.num_ranks):
        stage, inside = divmod(rank % mesh.num_ranks, mesh.stage_size)
        expected = ReferenceEngine(
            model, checkpoint, tp=mesh.tp, ep=mesh.ep, ranks=mesh.stage_size, rank=inside, dtype=dtype
        ).load()
        if mesh.pp == 1:
            assert set(done.tensors[rank]) == set(expected)
        for tensor, value in done.tensors[rank].items():
            assert same_bits(value, expected[tensor]), f"{tensor} on engine rank {rank} (stage {stage})"
            written = done.writes[rank][tensor]
            assert written.max() == 1
            if "embed" not in tensor and "lm_head" not in tensor and "wte" not in tensor:
                assert written.min() == 1


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_every_engine_tensor_is_somewhere_in_a_pipeline(name):
    model = tiny_model(name)
    whole = engine_recipe(model, "tp1")
    staged = engine_recipe(model, "pp2.tp1")
    assert {t.name for t in whole.engine.tensors} == {t.name for t in staged.engine.tensors}


@pytest.mark.parametrize("dtype", ["bf16", "fp8-block128"])
@pytest.mark.parametrize("engine", ["tp1", "tp2"])
def test_rows_that_are_cut_among_holders_arrive_whole(engine, dtype):
    model = tiny_model("qwen3")
    layout, recipe = trainer_layout(model, "ddp3"), engine_recipe(model, engine, dtype=dtype)
    topology = load_topology("h100-ib400").place(num_trainers=3, num_engines=recipe.engine.num_ranks)
    cut, uncut = (
        make_plan(
            trainer=layout,
            recipe=recipe,
            topology=topology,
            policy=policy,
            settings=Settings(min_write_bytes=1),
        )
        for policy in (Policy.BALANCED, Policy.RANK0)
    )
    assert cut.num_rows > uncut.num_rows
    checkpoint = random_checkpoint(cut, seed=3)
    found, wanted = execute(cut, checkpoint).tensors, execute(uncut, checkpoint).tensors
    for rank, tensors in wanted.items():
        assert all(same_bits(found[rank][name], tensors[name]) for name in tensors)
