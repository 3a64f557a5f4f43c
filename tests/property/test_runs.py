"""Runs are what memory copies do: executing a plan run by run on real memory equals loading the whole checkpoint."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.executor import NUMPY_DTYPE, random_checkpoint, same_bits, shard_memory
from tests.support.reference_engine import ReferenceEngine
from tests.support.tiny import CONFIGS, tiny_model
from weft import native
from weft.core.engine_layout import engine_recipe, parse_engine
from weft.core.planner import make_plan
from weft.core.runs import expand_runs, route_runs
from weft.core.topology import load_topology
from weft.core.trainer_layout import trainer_layout


@given(data=st.data())
def test_runs_cover_a_box_in_order_and_are_as_long_as_they_can_be(data):
    extent = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    strides = []
    for _ in range(2):
        order = data.draw(st.permutations(range(len(extent))))
        pitch, made = 1, [0] * len(extent)
        for dim in order:
            made[dim] = pitch
            pitch *= extent[dim] + data.draw(st.integers(0, 1))
        strides.append(made)
    a, b = (np.array([s]) for s in strides)
    row, offset_a, offset_b, length = expand_runs(np.array([extent]), a, b)
    assert (row == 0).all()
    covered = [(x + i, y + i) for x, y, n in zip(offset_a, offset_b, length, strict=True) for i in range(n)]
    expected = [
        (
            sum(c * s for c, s in zip(index, strides[0], strict=True)),
            sum(c * s for c, s in zip(index, strides[1], strict=True)),
        )
        for index in np.ndindex(*extent)
    ]
    assert covered == expected


@settings(max_examples=25)
@given(
    name=st.sampled_from(sorted(CONFIGS)),
    trainer=st.sampled_from(["fsdp3", "tp2", "fsdp3.tp2", "hsdp2x2", "pp2.fsdp2"]),
    engine=st.sampled_from(["tp1", "tp2", "tp4"]),
    seed=st.integers(0, 99),
)
def test_copying_run_by_run_equals_a_full_load(name, trainer, engine, seed):
    model = tiny_model(name).with_dtype("bf16")
    layout, recipe = trainer_layout(model, trainer), engine_recipe(model, engine)
    topology = load_topology("h100-ib400").place(num_trainers=layout.num_ranks, num_engines=recipe.engine.num_ranks)
    plan = make_plan(trainer=layout, recipe=recipe, topology=topology)
    checkpoint = random_checkpoint(plan, seed)
    shards = [shard_memory(plan, checkpoint, i)[0] for i in range(len(plan.trainer.lo))]
    engines = [np.zeros(t.shape, dtype=NUMPY_DTYPE[t.dtype]) for t in plan.recipe.engine.tensors]
    runs = route_runs(plan, np.arange(plan.num_rows))
    shard_address = np.array([shard.ctypes.data for shard in shards])
    engine_address = np.array([tensor.ctypes.data for tensor in engines])
    native.copy(
        (engine_address[runs.dst] + runs.dst_offset).astype(np.uint64),
        (shard_address[runs.shard] + runs.src_offset).astype(np.uint64),
        runs.num_bytes.astype(np.uint64),
        num_threads=2,
    )
    assert runs.num_bytes.sum() == plan.row_bytes.sum()
    mesh = parse_engine(engine)
    for i, tensor in enumerate(plan.recipe.engine.tensors):
        rank = int(plan.recipe.engine.groups.of(int(plan.recipe.engine.group_of[i]))[0])
        loaded = ReferenceEngine(
            model, checkpoint, tp=mesh.tp, ep=mesh.ep, ranks=mesh.stage_size, rank=rank, dtype="bf16"
        ).load()
        assert same_bits(engines[i], loaded[tensor.name]), tensor.name


def test_whole_tensors_are_single_runs():
    model = tiny_model("qwen3").with_dtype("bf16")
    layout, recipe = trainer_layout(model, "ddp1"), engine_recipe(model, "tp1")
    topology = load_topology("h100-ib400").place(num_trainers=1, num_engines=1)
    plan = make_plan(trainer=layout, recipe=recipe, topology=topology)
    assert len(route_runs(plan, np.arange(plan.num_rows)).row) == plan.num_rows


@pytest.mark.parametrize("extent", [[1, 1, 1], [5, 1, 1], [1, 5, 1]])
def test_dimensions_of_size_one_do_not_break_runs(extent):
    odd = np.array([[77, 1 if extent[1] > 1 else 99, 13]]) if extent[0] == 1 else np.array([[1, 99, 13]])
    _, _, _, length = expand_runs(np.array([extent]), odd, odd)
    assert length.tolist() == [int(np.prod(extent))]
