from __future__ import annotations

import numpy as np
import pytest

from tests.support.tiny import tiny_model
from weft.core.layouts.engine_layout import engine_recipe, parse_engine
from weft.core.models.catalog import load_model
from weft.core.recipe import Op
from weft.errors import ConfigError, LayoutError


@pytest.mark.parametrize(
    ("text", "tp", "dp", "ep", "ranks"),
    [
        ("tp8", 8, 1, 1, 8),
        ("ep8", 1, 8, 8, 8),
        ("tp32.ep32", 32, 1, 32, 32),
        ("tp4.dp8.ep32", 4, 8, 32, 32),
        ("pp2.tp4", 4, 1, 1, 8),
    ],
)
def test_meshes(text, tp, dp, ep, ranks):
    mesh = parse_engine(text)
    assert (mesh.tp, mesh.dp, mesh.ep, mesh.num_ranks) == (tp, dp, ep, ranks)


@pytest.mark.parametrize(
    ("model", "engine", "replicas", "dtype", "gb"),
    [
        ("qwen3-235b-a22b", "ep8", 4, "fp8-block128", 37.688),
        ("qwen3-235b-a22b", "tp32.ep32", 2, "bf16", 14.963),
        ("qwen3-30b-a3b", "tp8.ep8", 2, "bf16", 7.681),
        ("glm-4.5-air", "tp8.ep8", 4, "bf16", 26.755),
    ],
)
def test_bytes_per_engine_rank_of_published_runs(model, engine, replicas, dtype, gb):
    recipe = engine_recipe(load_model(model), engine, num_replicas=replicas, dtype=dtype)
    assert recipe.engine.rank_bytes().max() / 1e9 == pytest.approx(gb, abs=0.001)


def tensors_on(recipe, rank):
    engine = recipe.engine
    rows = [i for i in range(len(engine.tensors)) if rank in engine.groups.of(int(engine.group_of[i]))]
    return {engine.tensors[i].name: engine.tensors[i] for i in rows}


def test_fused_names_and_shapes():
    tensors = tensors_on(engine_recipe(tiny_model("qwen3-moe"), "tp2.ep2", dtype="fp8-block128"), 1)
    assert tensors["model.layers.0.self_attn.qkv_proj.weight"].shape == (2 * 128 + 2 * 128, 256)
    assert tensors["model.layers.0.mlp.experts.w13_weight"].shape == (2, 512, 256)
    assert tensors["model.layers.0.mlp.experts.w13_weight"].dtype == "fp8_e4m3"
    assert tensors["model.layers.0.mlp.experts.w13_weight_scale_inv"].shape == (2, 4, 2)
    assert tensors["model.layers.0.mlp.experts.w13_weight_scale_inv"].dtype == "fp32"
    assert tensors["model.layers.0.mlp.gate.weight"].dtype == "bf16"
    assert tensors["model.embed_tokens.weight"].shape == (160, 256)


def test_vocabulary_padding_is_declared_not_written():
    recipe = engine_recipe(tiny_model("qwen3"), "tp2")
    padding = recipe.op == Op.PAD
    assert padding.sum() == 2
    assert recipe.extent[padding][:, 0].tolist() == [20, 20]


def test_a_part_that_is_all_padding_has_no_piece():
    recipe = engine_recipe(tiny_model("qwen3"), "dp2")
    assert recipe.engine.num_ranks == 2
    assert tensors_on(recipe, 1).keys() == tensors_on(recipe, 0).keys()


def test_replicas_share_rows():
    one = engine_recipe(tiny_model("qwen3"), "tp2")
    many = engine_recipe(tiny_model("qwen3"), "tp2", num_replicas=50)
    assert len(one.dst) == len(many.dst)
    assert many.engine.num_ranks == 100
    assert np.array_equal(many.engine.rank_bytes(), np.tile(one.engine.rank_bytes(), 50))


def test_correction_bias_stays_fp32():
    tensors = tensors_on(engine_recipe(tiny_model("deepseek").with_dtype("fp32"), "tp1", dtype="bf16"), 0)
    assert tensors["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == "fp32"
    assert tensors["model.norm.weight"].dtype == "bf16"


@pytest.mark.parametrize(
    ("model", "text", "dtype", "message"),
    [
        ("qwen3-8b", "tp3", "bf16", "32 attention heads over 3 parts"),
        ("qwen3-8b", "ep2", "bf16", "0 experts over ep2"),
        ("qwen3-30b-a3b", "tp4", "fp8-block128", "cuts FP8 blocks of 128"),
        ("glm-4.5-air", "ep8", "fp8-block128", "cuts FP8 blocks of 128"),
        ("gpt2", "pp20.tp1", "bf16", "12 layers over pp20"),
    ],
)
def test_layouts_that_do_not_fit(model, text, dtype, message):
    with pytest.raises(LayoutError, match=message) as caught:
        engine_recipe(load_model(model), text, dtype=dtype)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("text", "dtype", "replicas"),
    [("tp4.ep3", "bf16", 1), ("tp2", "int4", 1), ("tp2", "bf16", 0), ("tp2", "bf16", 10**6)],
)
def test_wrong_settings(text, dtype, replicas):
    with pytest.raises(ConfigError):
        engine_recipe(tiny_model("qwen3"), text, dtype=dtype, num_replicas=replicas)
