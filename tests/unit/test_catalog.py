"""The catalog against published checkpoints: number of tensors and of elements."""

from __future__ import annotations

import json

import pytest

from weft.core.models.catalog import build_model, load_model, model_names
from weft.core.models.configs import CONFIGS
from weft.errors import ConfigError

PUBLISHED_ELEMENTS = {
    "deepseek-v3": 684_531_386_000,
    "glm-4.5-air": 110_468_824_832,
    "glm-4.7-flash": 31_221_488_576,
    "glm-5": 753_864_139_008,
    "glm-z1-9b": 9_400_279_040,
    "gpt2": 124_439_808,
    "kimi-k2": 1_026_470_731_056,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-72b": 72_706_203_648,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-32b": 32_762_123_264,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
}
"""Elements in the published safetensors files."""


@pytest.mark.parametrize("name", sorted(PUBLISHED_ELEMENTS))
def test_elements_equal_the_published_checkpoint(name):
    assert sum(tensor.num_elements for tensor in load_model(name).tensors) == PUBLISHED_ELEMENTS[name]


def test_tensor_counts_of_published_checkpoints():
    assert len(load_model("llama-3.1-8b").tensors) == 291
    assert len(load_model("deepseek-v3").tensors) == 91_991
    assert len(load_model("gpt2").tensors) == 148


def test_draft_layers_and_stored_scales_are_not_policy():
    model = load_model("deepseek-v3")
    left_out = {tensor.name for tensor in model.tensors} - {tensor.name for tensor in model.policy_tensors}
    assert "model.layers.61.eh_proj.weight" in left_out
    assert "model.layers.3.mlp.experts.0.up_proj.weight_scale_inv" in left_out
    assert model.num_params == 671_026_419_200


def test_names_are_unique_and_every_model_builds():
    for name in model_names():
        tensors = load_model(name).tensors
        assert len({tensor.name for tensor in tensors}) == len(tensors)


def test_a_config_json_from_a_path(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIGS["qwen3-0.6b"], "num_hidden_layers": 3}))
    assert load_model(str(path)).num_layers == 3
    assert load_model(str(tmp_path)).num_layers == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size is null"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"model_type": "mamba"}, "'mamba' is not supported"),
        ({"torch_dtype": "int4"}, "torch_dtype 'int4'"),
        ({"torch_dtype": [1]}, "torch_dtype"),
        ({"model_type": []}, "is not supported"),
    ],
)
def test_bad_configs_name_the_field(change, message):
    with pytest.raises(ConfigError, match=message):
        build_model("mine", {**CONFIGS["qwen3-0.6b"], **change})


def test_a_near_miss_gets_a_suggestion():
    with pytest.raises(ConfigError) as caught:
        load_model("qwen3-235b")
    assert "qwen3-235b-a22b" in str(caught.value.hint)


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_broken_config_file_is_named(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_model(str(path))


def test_a_config_with_too_many_tensors_is_refused():
    config = {**CONFIGS["qwen3-30b-a3b"], "num_hidden_layers": 2000, "num_experts": 16_000}
    with pytest.raises(ConfigError, match="expert tensors, more than 1000000"):
        build_model("huge", config)


@pytest.mark.parametrize("change", [{"quantization_config": "fp8"}, {"mlp_only_layers": "none"}])
def test_bad_mixture_configs_name_the_field(change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        build_model("mine", {**CONFIGS["qwen3-30b-a3b"], **change})


def test_fields_that_change_the_tensor_list_are_honoured():
    names = {t.name for t in build_model("mine", {**CONFIGS["llama-3.1-8b"], "mlp_bias": True}).tensors}
    assert "model.layers.0.mlp.down_proj.bias" in names
    sparse = {**CONFIGS["qwen3-30b-a3b"], "intermediate_size": 6144, "attention_bias": True}
    names = {t.name for t in build_model("mine", {**sparse, "mlp_only_layers": [1], "decoder_sparse_step": 2}).tensors}
    assert "model.layers.0.mlp.gate_proj.weight" in names
    assert "model.layers.1.mlp.gate_proj.weight" in names
    assert "model.layers.3.mlp.experts.0.gate_proj.weight" in names
    assert "model.layers.0.self_attn.o_proj.bias" in names


@pytest.mark.parametrize(
    ("hub_id", "name"),
    [
        ("Qwen/Qwen3-0.6B", "qwen3-0.6b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("moonlight-16b-a3b-instruct", "moonlight-16b-a3b"),
        ("GPT2", "gpt2"),
    ],
)
def test_hub_ids_mean_their_catalog_entry(hub_id, name):
    assert load_model(hub_id).name == name


def test_a_very_long_name_is_just_unknown():
    with pytest.raises(ConfigError, match="unknown model"):
        load_model("q" * 5000)
