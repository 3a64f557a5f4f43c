"""The catalog against Transformers' own models: equal names, shapes and tying, whatever the config leaves out."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from weft.core.layouts.engine_layout import engine_recipe
from weft.core.layouts.trainer_layout import trainer_layout
from weft.core.models.catalog import build_model
from weft.core.planner import make_plan
from weft.core.topology import load_topology
from weft.errors import ConfigError

Choices = dict[str, list[Any]]

DENSE: Choices = {
    "vocab_size": [64, 101],
    "hidden_size": [32, 64],
    "num_hidden_layers": [1, 2, 3],
    "num_attention_heads": [2, 4],
    "num_key_value_heads": [1, 2, None],
    "head_dim": [8, 16, None],
    "intermediate_size": [48, 80],
    "attention_bias": [True, False],
    "mlp_bias": [True, False],
    "tie_word_embeddings": [True, False],
}
SPARSE: Choices = {
    **DENSE,
    "moe_intermediate_size": [16, 24],
    "n_routed_experts": [3, 4],
    "n_shared_experts": [1, 2],
    "first_k_dense_replace": [0, 1, 2],
    "num_nextn_predict_layers": [0, 1],
}
LATENT: Choices = {
    **SPARSE,
    "q_lora_rank": [12, 16, None],
    "kv_lora_rank": [8, 16],
    "qk_nope_head_dim": [8, 16],
    "qk_rope_head_dim": [4, 8],
    "v_head_dim": [8, 16],
}
LITE = {name: values for name, values in LATENT.items() if name not in ("first_k_dense_replace", "head_dim")}
"""`glm4_moe_lite` of Transformers reads `mlp_layer_types` only; weft also honours the field other engines read."""
FAMILIES: dict[str, Choices] = {
    "llama": DENSE,
    "qwen2": DENSE,
    "qwen3": DENSE,
    "qwen3_moe": {
        **{name: values for name, values in SPARSE.items() if not name.startswith(("n_", "first_"))},
        "num_experts": [0, 3, 4],
        "decoder_sparse_step": [1, 2],
        "mlp_only_layers": [[], [0], [1, 2], None],
    },
    "glm4": DENSE,
    "glm4_moe": {**SPARSE, "use_qk_norm": [True, False]},
    "glm4_moe_lite": {**LITE, "mlp_layer_types": [["sparse", "dense", "sparse"], None]},
    "glm_moe_dsa": {
        **LATENT,
        "index_n_heads": [2, 4],
        "index_head_dim": [8, 16],
        "mlp_layer_types": [["sparse", "dense", "sparse"], None],
        "indexer_types": [["full", "shared", "full"], None],
        "index_topk_pattern": ["FSS", None],
        "index_topk_freq": [1, 2],
        "index_skip_topk_offset": [1, 2],
    },
    "deepseek_v3": LATENT,
    "gpt2": {
        "vocab_size": [64, 101],
        "n_positions": [16, 32],
        "n_embd": [32, 64],
        "n_layer": [1, 2],
        "n_head": [2, 4],
        "n_inner": [48, None],
        "tie_word_embeddings": [True, False],
    },
}
ALIASES = {
    "num_experts": "num_local_experts",
    "n_routed_experts": "num_local_experts",
    "qk_rope_head_dim": "head_dim",
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
}
NUM_CONFIGS = 30
ALWAYS = ("num_hidden_layers", "n_layer", "n_routed_experts", "num_experts")
"""What random configs always say: the defaults are large. One config of every family says nothing at all."""
known = pytest.mark.parametrize("family", [family for family in FAMILIES if family in CONFIG_MAPPING])


def random_config(rng: random.Random, family: str) -> dict[str, Any]:
    config: dict[str, Any] = {"model_type": family}
    for name, values in FAMILIES[family].items():
        value = rng.choice(values)
        if name in ALWAYS or rng.random() < 0.7:
            alias = ALIASES.get(name, name)
            reads = CONFIG_MAPPING[family].attribute_map
            config[alias if alias in (*reads, *reads.values()) and rng.random() < 0.3 else name] = value
    return config


@dataclass(frozen=True, slots=True)
class Expected:
    """What Transformers makes of a config."""

    shapes: dict[str, tuple[int, ...]]
    """Of a checkpoint; experts under the names they are stored by."""
    is_tied: bool


def transformers_model(config: dict[str, Any]) -> Expected | None:
    """Nothing where Transformers refuses the config."""
    try:
        made = CONFIG_MAPPING[config["model_type"]].from_dict({**config, "pad_token_id": None})
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(made)
    except Exception:  # of any kind
        return None
    shapes = dict(stored(model.state_dict()))
    if made.tie_word_embeddings:
        del shapes["lm_head.weight"]
    return Expected(shapes, bool(made.tie_word_embeddings))


def stored(state: dict[str, torch.Tensor]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes as checkpoints have them: experts one by one."""
    for name, tensor in state.items():
        experts = re.fullmatch(r"(.*\.experts)\.(gate_up_proj|down_proj)", name)
        if experts is None:
            yield name, tuple(tensor.shape)
            continue
        number, rows, columns = tensor.shape
        parts = ("gate_proj", "up_proj") if experts[2] == "gate_up_proj" else ("down_proj",)
        for expert in range(number):
            for part in parts:
                yield f"{experts[1]}.{expert}.{part}.weight", (rows // len(parts), columns)


def check(config: dict[str, Any], expected: Expected) -> None:
    model = build_model("mine", config)
    assert {tensor.name: tensor.shape for tensor in model.policy_tensors} == expected.shapes, config
    assert model.tied == expected.is_tied, config


@known
def test_random_configs_give_the_tensors_of_transformers(family):
    rng = random.Random(family)
    num_checked = 0
    for _ in range(NUM_CONFIGS):
        config = random_config(rng, family)
        expected = transformers_model(config)
        if expected is not None:
            check(config, expected)
            num_checked += 1
    assert num_checked > NUM_CONFIGS // 4


@known
def test_a_config_that_says_nothing_is_the_default_of_transformers(family):
    expected = transformers_model({"model_type": family})
    assert expected is not None
    check({"model_type": family}, expected)


@known
def test_a_null_is_what_transformers_makes_of_it_or_an_error_with_a_name(family):
    rng = random.Random(f"{family}, nulls")
    for name in FAMILIES[family]:
        config = {field: rng.choice(values) for field, values in FAMILIES[family].items() if rng.random() < 0.5}
        config |= {always: FAMILIES[family][always][-1] for always in ALWAYS if always in FAMILIES[family]}
        config |= {"model_type": family, name: None}
        expected = transformers_model(config)
        try:
            if expected is not None:
                check(config, expected)
            else:
                build_model("mine", config)
        except ConfigError as error:
            assert expected is None, f"{name}: {error}"


def test_the_last_stage_of_gpt2_holds_the_tied_embedding():
    """The published config.json of GPT-2 does not say that its embeddings are tied."""
    config = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": 64}
    model = build_model("gpt2", config)
    trainer, recipe = trainer_layout(model, "pp2"), engine_recipe(model, "pp2.tp1")
    plan = make_plan(
        trainer=trainer,
        recipe=recipe,
        topology=load_topology("h100-ib400").place(num_trainers=2, num_engines=2),
    )
    holders = {
        int(rank)
        for row, tensor in enumerate(plan.recipe.engine.tensors)
        if "wte" in tensor.name
        for rank in plan.recipe.engine.groups.of(int(plan.recipe.engine.group_of[row]))
    }
    assert holders == {0, 1}
