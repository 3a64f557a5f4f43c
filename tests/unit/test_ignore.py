"""Trainer tensors no engine has: a vision tower beside a text engine, left out by name or by pattern."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.support.arena import Arena
from tests.support.executor import execute, random_checkpoint, same_bits
from weft.core.case import Case, plan_case
from weft.core.layout import Layout, Shard, Tensor
from weft.core.planner import make_plan
from weft.core.plans import plan_file
from weft.core.recipe import Piece, Recipe, padding_piece
from weft.core.topology import load_topology
from weft.errors import LayoutError, WeftError
from weft.runtime.weights import Weights

TEXT = Tensor(name="model.norm", dtype="fp32", shape=(6,))
CONV = Tensor(name="visual.patch", dtype="fp32", shape=(4, 3, 2, 2))
BIAS = Tensor(name="visual.bias", dtype="fp32", shape=(4,))


def layout(*tensors: Tensor) -> Layout:
    shards = [Shard(tensor=t.name, rank=0, lo=(0,) * len(t.shape), extent=t.shape) for t in tensors]
    return Layout.from_shards(tensors, shards)


def recipe(*tensors: Tensor) -> Recipe:
    pieces = [
        Piece(dst=t.name, source=t.name, dst_lo=(0,) * len(t.shape), extent=t.shape, src_lo=(0,) * len(t.shape))
        for t in tensors
    ]
    return Recipe.from_pieces({0: list(tensors)}, {0: pieces})


TOPOLOGY = load_topology("h100-ib400").place(num_trainers=1, num_engines=1)


@pytest.mark.parametrize("ignore", [["visual.*"], ["visual.patch", "visual.bias"], ["*.patch", "visual.bias"]])
def test_a_vision_tower_is_left_out(ignore, tmp_path):
    trainer = layout(CONV, TEXT, BIAS)
    plan = make_plan(trainer=trainer, recipe=recipe(TEXT), topology=TOPOLOGY, ignore=ignore)
    assert plan.ignored == ("visual.patch", "visual.bias")
    assert plan.total_bytes == TEXT.num_bytes
    assert plan.extent.shape[1] == 1  # what is left out costs nothing
    weights = random_checkpoint(plan, 0)
    assert same_bits(execute(plan, weights).tensors[0]["model.norm"], weights["model.norm"])
    plan_file.save(plan, tmp_path / "a.plan")
    assert plan_file.load(tmp_path / "a.plan").ignored == plan.ignored


def test_tensors_of_more_dimensions_than_the_engine_has_are_named():
    with pytest.raises(LayoutError) as caught:
        make_plan(trainer=layout(TEXT, CONV), recipe=recipe(TEXT), topology=TOPOLOGY)
    assert caught.value.problems == ("unexpected: visual.patch (a trainer has it, no engine tensor uses it)",)
    assert "ignore" in str(caught.value.hint)


def test_a_recipe_of_padding_only_needs_nothing():
    padded = Recipe.from_pieces({0: [TEXT]}, {0: [padding_piece(TEXT.name, (0,), TEXT.shape)]})
    plan = make_plan(trainer=layout(CONV), recipe=padded, topology=TOPOLOGY, ignore=["*"])
    assert (plan.num_routes, plan.total_bytes, plan.num_writes) == (0, 0, 0)


def test_names_that_match_nothing_are_refused():
    with pytest.raises(LayoutError, match=r"ignore: `visual\.blocks\.\*` matches no trainer tensor"):
        make_plan(
            trainer=layout(TEXT, CONV), recipe=recipe(TEXT), topology=TOPOLOGY, ignore=["visual.*", "visual.blocks.*"]
        )
    with pytest.raises(LayoutError) as caught:
        make_plan(trainer=layout(TEXT, CONV), recipe=recipe(TEXT), topology=TOPOLOGY, ignore=["visual.patches"])
    assert caught.value.hint == "did you mean visual.patch?"


def test_a_tensor_the_engine_needs_cannot_be_left_out():
    with pytest.raises(LayoutError, match=r"ignored: model\.norm \(listed in `ignore`, but the engine needs it\)"):
        make_plan(trainer=layout(TEXT), recipe=recipe(TEXT), topology=TOPOLOGY, ignore=["model.*"])


def test_a_case_leaves_tensors_out(tmp_path):
    norm = {"name": "transformer.ln_f.weight", "dtype": "fp32", "shape": [768]}
    view = {"shape": [768], "dst_offset": 0, "dst_strides": [1], "src_offset": 0, "src_strides": [1]}
    pieces = [{"dst": norm["name"], "source": norm["name"], **view}]
    path = tmp_path / "engine.json"
    path.write_text(json.dumps({"ranks": [{"tensors": [norm], "pieces": pieces}]}))
    ignore = ("transformer.h.*", "transformer.w?e.weight", "transformer.ln_f.bias")
    plan = plan_case(Case(model="gpt2", trainer="fsdp2", engine=str(path), ignore=ignore))
    assert plan.total_bytes == 768 * 4
    assert len(plan.ignored) == 147


def arrays(*tensors: Tensor, fill: bool) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    return {
        t.name: rng.standard_normal(t.shape, dtype=np.float32) if fill else np.zeros(t.shape, np.float32)
        for t in tensors
    }


@pytest.mark.parametrize("moved", [(TEXT,), (TEXT, CONV)], ids=["left out", "moved"])
def test_members_move_what_engines_have(moved):
    sent, got = arrays(TEXT, CONV, BIAS, fill=True), arrays(*moved, fill=False)
    ignore = [name for name in sent if name not in got]
    with Arena([Weights.from_arrays(sent)], [Weights.from_arrays(got)], ignore=ignore) as arena:
        arena.publish(1)
    assert all(np.array_equal(got[name], sent[name]) for name in got)


def test_members_hear_of_names_that_match_nothing():
    sent, got = arrays(TEXT, fill=True), arrays(TEXT, fill=False)
    with (
        pytest.raises(WeftError, match=r"ignore: `visual\.\*` matches no trainer tensor"),
        Arena([Weights.from_arrays(sent)], [Weights.from_arrays(got)], ignore=["visual.*"]) as arena,
    ):
        arena.publish(1)
