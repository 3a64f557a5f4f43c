"""Plans as data: identity, files, differences, explanations."""

from __future__ import annotations

import json
import struct
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from tests.support.tiny import tiny_model
from weft.config import Settings
from weft.core.case import Case, plan_case
from weft.core.layouts.engine_layout import engine_recipe
from weft.core.layouts.trainer_layout import trainer_layout
from weft.core.planner import make_plan
from weft.core.plans import plan_file
from weft.core.plans.explain import explain
from weft.core.plans.proof import prove
from weft.core.recipe import Op
from weft.core.streams.stream import Path
from weft.core.topology import load_topology, place_members, with_placement
from weft.errors import ConfigError, LayoutError, PlanError
from weft.transport.capabilities import CAPABILITIES
from weft.transport.registry import Place, choose


def small_plan(trainer="fsdp4", engine="tp2", policy="balanced", dtype="fp8-block128", **settings):
    model = tiny_model("qwen3-moe")
    layout = trainer_layout(model, trainer)
    recipe = engine_recipe(model, engine, num_replicas=2, dtype=dtype)
    topology = load_topology("h100-ib400").place(num_trainers=layout.num_ranks, num_engines=recipe.engine.num_ranks)
    return make_plan(
        trainer=layout,
        recipe=recipe,
        topology=topology,
        policy=policy,
        settings=Settings(**settings),
        model="tiny",
    )


def test_the_same_inputs_give_the_same_digest():
    assert plan_file.digest(small_plan()) == plan_file.digest(small_plan())
    assert plan_file.digest(small_plan()) != plan_file.digest(small_plan(policy="rank0", trainer="ddp4"))


def test_a_plan_survives_saving_and_loading(tmp_path):
    plan = small_plan()
    digest = plan_file.save(plan, tmp_path / "a.plan")
    loaded = plan_file.load(tmp_path / "a.plan")
    assert plan_file.digest(loaded) == digest == plan_file.digest(plan)
    assert np.array_equal(loaded.pair_bytes, plan.pair_bytes)
    assert not (tmp_path / "a.plan.part").exists()


@pytest.mark.parametrize("where", [0.0, 0.001, 0.01, 0.3, 0.6, 0.95, 0.999])
def test_a_damaged_file_is_refused(tmp_path, where):
    path = tmp_path / "a.plan"
    digest = plan_file.save(small_plan(), path)
    data = bytearray(path.read_bytes())
    data[int(where * (len(data) - 1))] ^= 0x40
    path.write_bytes(data)
    try:
        loaded = plan_file.load(path)
    except PlanError as error:
        assert "a.plan" in str(error)
    else:  # a few bits of a compressed stream do not matter: then the content is the same
        assert plan_file.digest(loaded) == digest


@pytest.mark.parametrize("keep", [0, 7, 15, 100, -1])
def test_a_truncated_or_padded_file_is_refused(tmp_path, keep):
    path = tmp_path / "a.plan"
    plan_file.save(small_plan(), path)
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    with pytest.raises(PlanError):
        plan_file.load(path)
    path.write_bytes(data + b"x")
    with pytest.raises(PlanError):
        plan_file.load(path)


@pytest.mark.parametrize("number", [1, 2, 99])
def test_another_format_version_is_refused(tmp_path, number):
    path = tmp_path / "a.plan"
    plan_file.save(small_plan(), path)
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, 8, number)
    path.write_bytes(data)
    with pytest.raises(PlanError, match=rf"a\.plan`: format version {number}, expected 3") as caught:
        plan_file.load(path)
    assert "weft plan" in caught.value.hint


def test_where_members_are_is_part_of_a_plan(tmp_path):
    plan = small_plan()
    seats = [("a", None)] * 4
    placed = replace(plan, topology=place_members(plan.topology.cluster, trainers=seats, engines=seats))
    assert placed.topology.is_local.all()
    digest = plan_file.save(placed, tmp_path / "a.plan")
    assert digest != plan_file.digest(plan)
    loaded = plan_file.load(tmp_path / "a.plan")
    assert plan_file.digest(loaded) == digest
    assert loaded.topology.engine_device.tolist() == [4, 5, 6, 7]


def test_a_consistent_but_wrong_plan_is_not_loaded(tmp_path):
    """An attacker who also recomputes the digest still cannot smuggle in a plan that leaves bytes out."""
    plan = small_plan()
    sender = plan.sender.copy()
    sender[0] = (sender[0] + 1) % 4
    plan_file.save(replace(plan, sender=sender), tmp_path / "a.plan")
    with pytest.raises(PlanError, match="does not hold"):
        plan_file.load(tmp_path / "a.plan")


def test_a_missing_file_is_an_error_with_its_name(tmp_path):
    with pytest.raises(PlanError, match=r"none\.plan"):
        plan_file.load(tmp_path / "none.plan")


def test_header_is_plain_json(tmp_path):
    path = tmp_path / "a.plan"
    plan_file.save(small_plan(), path)
    data = path.read_bytes()
    (length,) = struct.unpack_from("<I", data, 12)
    header = json.loads(data[16 : 16 + length])
    assert header["model"] == "tiny"
    assert header["policy"] == "balanced"


def test_differences_between_policies_are_moves_only():
    found = plan_file.compare(small_plan("ddp4"), small_plan("ddp4", policy="greedy"))
    assert found.num_removed == found.num_added == 0
    assert not found.same_digest
    same = plan_file.compare(small_plan(), small_plan())
    assert same.same_digest
    assert same.num_moved == 0
    assert same.tensors == ()


def test_differences_between_layouts_are_new_routes():
    found = plan_file.compare(small_plan("fsdp4"), small_plan("fsdp2"))
    assert found.num_removed > 0
    assert found.num_added > 0
    assert found.tensors


def test_large_runs_go_straight_from_memory_and_small_ones_are_packed():
    plan = small_plan(dtype="bf16", min_write_bytes=4096)
    chunks = plan.chunks
    assert set(chunks.path.tolist()) == {Path.ZERO_COPY, Path.PACKED}
    straight = chunks.path == Path.ZERO_COPY
    assert (chunks.num_writes * 4096 <= chunks.payload)[straight].all()
    assert (chunks.num_writes[~straight] == 1).all()
    converted = small_plan(dtype="fp32", min_write_bytes=1)
    assert (converted.chunks.path == Path.PACKED).all()


def test_hosts_of_one_link_domain_have_its_rate_and_take_descriptors_as_at_runtime():
    model = tiny_model("qwen3")
    layout, recipe = trainer_layout(model, "ddp2"), engine_recipe(model, "tp2", num_replicas=3)
    topology = with_placement(load_topology("gb200-nvl72"), "packed").place(num_trainers=2, num_engines=6)
    chunks = make_plan(trainer=layout, recipe=recipe, topology=topology).chunks
    assert topology.is_local.all()
    at = Place(host="0", container="", user=0, device="cuda:0", installed=("cuda_ipc", "nixl"))
    hosts = topology.host_of(topology.engine_device)
    assert hosts.tolist() == [0, 0, 1, 1, 1, 1]
    for engine, host in enumerate(hosts.tolist()):
        transport = choose(at, msgspec.structs.replace(at, host=str(host))).transport
        is_direct = chunks.path[chunks.receiver == engine] == Path.DIRECT
        assert len(is_direct)
        assert (is_direct == CAPABILITIES[transport].is_mapped).all()


def test_pairs_on_one_host_are_written_directly():
    model = tiny_model("qwen3")
    layout, recipe = trainer_layout(model, "fsdp2"), engine_recipe(model, "tp2")
    topology = with_placement(load_topology("h100-ib400"), "packed").place(num_trainers=2, num_engines=2)
    plan = make_plan(trainer=layout, recipe=recipe, topology=topology)
    assert (plan.chunks.path == Path.DIRECT).all()
    assert plan.chunks.payload.sum() == plan.total_bytes


def test_packing_makes_few_writes_of_many_small_rows():
    assert small_plan(min_write_bytes=1 << 20).num_writes == np.count_nonzero(small_plan().pair_bytes)
    assert small_plan(dtype="bf16", min_write_bytes=1).num_writes > 500


def test_scales_travel_once_and_cut_blocks_are_agreed_on():
    plan = small_plan("fsdp8", "ep2")
    assert plan.amax_bytes > 0
    assert small_plan("ddp2", "ep2").amax_bytes == 0


def test_explain_by_engine_and_by_trainer_name():
    plan = small_plan()
    fused = explain(plan, "model.layers.0.self_attn.qkv_proj.weight")
    assert {row.source.rpartition(".self_attn.")[2] for row in fused} == {
        "q_proj.weight",
        "k_proj.weight",
        "v_proj.weight",
    }
    assert sum(row.num_bytes * len(row.receivers) for row in fused) == 4 * (256 + 256) * 256
    source = explain(plan, "model.layers.0.mlp.experts.3.down_proj.weight")
    assert {row.op for row in source} == {"quantize"}
    assert all(set(row.senders) <= set(row.holders) for row in source)
    with pytest.raises(ConfigError) as caught:
        explain(plan, "model.layers.0.self_attn.qkv_proj.wieght")
    assert "qkv_proj.weight" in str(caught.value.hint)


def test_mismatched_sides_are_refused():
    model, other = tiny_model("qwen3"), tiny_model("qwen3-moe")
    layout, recipe = trainer_layout(other, "fsdp2"), engine_recipe(model, "tp2")
    topology = load_topology("h100-ib400").place(num_trainers=2, num_engines=2)
    with pytest.raises(LayoutError) as caught:
        make_plan(trainer=layout, recipe=recipe, topology=topology)
    assert any(problem.startswith("missing: model.layers.0.mlp.gate_proj") for problem in caught.value.problems)
    assert any(problem.startswith("unexpected: model.layers.0.mlp.experts.0") for problem in caught.value.problems)


def test_topology_and_layouts_must_agree_on_ranks():
    model = tiny_model("qwen3")
    topology = load_topology("h100-ib400").place(num_trainers=3, num_engines=2)
    with pytest.raises(PlanError, match="3 trainers"):
        make_plan(trainer=trainer_layout(model, "fsdp2"), recipe=engine_recipe(model, "tp2"), topology=topology)


@pytest.mark.parametrize("field", ["policy", "gather", "topology", "dtype", "trainer_dtype", "placement"])
def test_unknown_words_in_a_case(field):
    case = Case(model="qwen3-0.6b", trainer="fsdp2", engine="tp2")
    with pytest.raises(ConfigError, match="nonsense"):
        plan_case(replace(case, **{field: "nonsense"}))


def test_plans_too_large_to_make_are_refused_early():
    with pytest.raises(PlanError, match="routes"):
        plan_case(Case(model="qwen3-0.6b", trainer="fsdp1024", engine="tp1", num_replicas=4096))


def test_conversions_are_part_of_the_proof():
    plan = small_plan()
    copied = np.where(plan.recipe.op == Op.QUANTIZE, Op.COPY, plan.recipe.op).astype(np.int8)
    with pytest.raises(PlanError, match="dtype"):
        prove(replace(plan, recipe=replace(plan.recipe, op=copied)))


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("engine.group_of", 999),
        ("trainer.members", 999),
        ("trainer.members", -1),
        ("piece.axes", 99),
        ("piece.src", 10**6),
        ("route.piece", -1),
        ("route.shard", 10**6),
        ("trainer.starts", 5),
    ],
)
def test_hostile_columns_are_refused_without_a_traceback(tmp_path, monkeypatch, column, value):
    """The digest is right, so only the checks of the content stand between the file and its use."""
    plan, real = small_plan(), plan_file._columns

    def altered(of):
        columns = real(of)
        changed = columns[column].copy()
        changed.flat[0] = value
        return {**columns, column: changed}

    monkeypatch.setattr(plan_file, "_columns", altered)
    plan_file.save(plan, tmp_path / "a.plan")
    monkeypatch.undo()
    with pytest.raises(PlanError, match=r"a\.plan"):
        plan_file.load(tmp_path / "a.plan")


@pytest.mark.parametrize(
    "change",
    [
        {"num_replicas": "x"},
        {"settings": {"chunk_bytes": 1}},
        {"memory": {"trainer": "cpu", "engine": []}},
        {"memory": "cpu"},
        {"columns": []},
        {"engine": 3},
    ],
)
def test_hostile_headers_are_refused_without_a_traceback(tmp_path, monkeypatch, change):
    plan, real = small_plan(), plan_file._header
    monkeypatch.setattr(plan_file, "_header", lambda of: {**real(of), **change})
    plan_file.save(plan, tmp_path / "a.plan")
    monkeypatch.undo()
    with pytest.raises(PlanError, match=r"a\.plan"):
        plan_file.load(tmp_path / "a.plan")
