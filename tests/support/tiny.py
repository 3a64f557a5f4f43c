"""Tiny models of every family: a few thousand parameters, same structure as the real ones."""

from __future__ import annotations

from typing import Any

from weft.core.models.catalog import build_model
from weft.core.models.model import Model

_DENSE = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 512,
    "vocab_size": 300,
}
_MLA = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "vocab_size": 300,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_DENSE, "model_type": "llama"},
    "qwen2-tied": {**_DENSE, "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {**_DENSE, "model_type": "qwen3"},
    "qwen3-moe": {**_DENSE, "model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 256},
    "glm4": {**_DENSE, "model_type": "glm4", "attention_bias": True},
    "glm4-moe": {
        **_DENSE,
        "model_type": "glm4_moe",
        "attention_bias": True,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "moe_intermediate_size": 256,
        "first_k_dense_replace": 1,
    },
    "deepseek": {**_MLA, "model_type": "deepseek_v3"},
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 256,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 16,
        "vocab_size": 300,
        "tie_word_embeddings": True,
    },
}


def tiny_model(name: str) -> Model:
    return build_model(name, CONFIGS[name])
