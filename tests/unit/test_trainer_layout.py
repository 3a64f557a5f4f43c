from __future__ import annotations

import numpy as np
import pytest

from tests.support.tiny import CONFIGS, tiny_model
from weft.core.geometry.splits import chunk
from weft.core.layouts.trainer_layout import Gather, parse_trainer, trainer_layout
from weft.core.models.catalog import load_model
from weft.errors import ConfigError, LayoutError


@pytest.mark.parametrize(
    ("text", "num_ranks"),
    [
        ("ddp8", 8),
        ("fsdp128", 128),
        ("hsdp8x16", 128),
        ("pp2.ep8.fsdp16", 256),
        ("pp2.fsdp16.ep8/hsdp16x8", 256),
        ("tp4.pp4.cp2.ep16", 64),
        ("tp8.pp8.cp4.ep32", 256),
        ("tp4.dp4.ep8", 16),
        ("fsdp8.tp4", 32),
    ],
)
def test_number_of_ranks(text, num_ranks):
    assert parse_trainer(text).num_ranks == num_ranks


def test_fsdp_cuts_by_the_uneven_rule_of_pytorch():
    assert [chunk(10, 4, part) for part in range(4)] == [(0, 3), (3, 3), (6, 3), (9, 1)]
    assert [chunk(5, 4, part) for part in range(4)] == [(0, 2), (2, 2), (4, 1), (5, 0)]


def shards_of(layout, name):
    number = [tensor.name for tensor in layout.tensors].index(name)
    rows = np.flatnonzero(layout.tensor_of == number)
    return {tuple(layout.lo[r]): layout.groups.of(int(layout.group_of[r])).tolist() for r in rows}


def test_expert_and_dense_meshes():
    model = tiny_model("qwen3-moe")
    expert, norm = "model.layers.0.mlp.experts.3.up_proj.weight", "model.norm.weight"
    neighbours_are_experts = trainer_layout(model, "fsdp2.ep4/hsdp2x4")
    assert shards_of(neighbours_are_experts, expert) == {(0, 0): [3], (128, 0): [7]}
    assert shards_of(neighbours_are_experts, norm) == {(64 * i, 0): [i, i + 4] for i in range(4)}
    neighbours_are_shards = trainer_layout(model, "ep4.fsdp2")
    assert shards_of(neighbours_are_shards, expert) == {(0, 0): [6], (128, 0): [7]}
    assert len(shards_of(neighbours_are_shards, norm)) == 8


def test_hsdp_replicates_over_its_first_number():
    shards = shards_of(trainer_layout(tiny_model("qwen3"), "hsdp2x4"), "model.norm.weight")
    assert sorted(shards.values()) == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_fsdp_cuts_the_rows_a_fused_tensor_has_left():
    shards = shards_of(trainer_layout(tiny_model("glm4"), "fsdp2.tp2"), "model.layers.0.mlp.gate_up_proj.weight")
    assert shards == {(0, 0): [0], (256, 0): [1], (512, 0): [2], (768, 0): [3]}


def test_ddp_replicates_everything_but_experts():
    shards = shards_of(trainer_layout(tiny_model("qwen3-moe"), "ddp1.ep4"), "model.norm.weight")
    assert shards == {(0, 0): [0, 1, 2, 3]}


def test_pipeline_stages_hold_their_layers_and_a_tied_embedding_is_on_both_ends():
    layout = trainer_layout(tiny_model("qwen2-tied"), "pp2.fsdp1")
    assert shards_of(layout, "model.layers.0.input_layernorm.weight") == {(0, 0): [0]}
    assert shards_of(layout, "model.layers.1.input_layernorm.weight") == {(0, 0): [1]}
    assert shards_of(layout, "model.embed_tokens.weight") == {(0, 0): [0, 1]}


def test_kv_heads_repeat_when_tensor_parallelism_exceeds_them():
    shards = shards_of(trainer_layout(tiny_model("qwen3"), "tp4"), "model.layers.0.self_attn.k_proj.weight")
    assert shards == {(0, 0): [0, 1], (128, 0): [2, 3]}


@pytest.mark.parametrize("name", sorted(CONFIGS))
@pytest.mark.parametrize("text", ["ddp3", "fsdp5", "hsdp2x3", "tp2", "tp2.pp2", "fsdp3.tp2"])
@pytest.mark.parametrize("gather", list(Gather))
def test_shards_tile_every_tensor(name, text, gather):
    trainer_layout(tiny_model(name), text, gather=gather).check()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot read"),
        ("fsdp", "cannot read `fsdp`"),
        ("fsdp8.fsdp2", "given twice"),
        ("zero3", "unknown axis `zero`"),
        ("fsdp0", "out of range"),
        ("fsdp99999999", "out of range"),
        ("fsdp60000.tp60000", "ranks"),
        ("hsdp8", "hsdp"),
        ("fsdp8x2", "fsdp8x2"),
        ("fsdp2.ddp2", "mixes ddp and fsdp"),
        ("fsdp2.dp2", "mixes fsdp with Megatron"),
        ("tp2.dp3.ep4", "do not divide the 6 ranks"),
        ("ep2.fsdp4/fsdp4", "has 4 ranks, a stage 8"),
        ("ep2.fsdp4/tp8", "unknown axis `tp`"),
    ],
)
def test_impossible_texts(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_trainer(text)


@pytest.mark.parametrize(
    ("model", "text", "message"),
    [
        ("qwen3-8b", "tp3", "32 attention heads over 3 parts"),
        ("gpt2", "pp13.fsdp2", "more pipeline stages"),
        ("qwen3-8b", "ep8.fsdp2", "splits 0 experts"),
    ],
)
def test_layouts_that_do_not_fit_the_model(model, text, message):
    with pytest.raises(LayoutError, match=message):
        trainer_layout(load_model(model), text)
