"""Trainers' weights under checkpoint names: what is read there equals what `save_pretrained` writes."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from weft.integrations.hf import checkpoint_weights

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
}


def qwen3(tied: bool = False) -> torch.nn.Module:
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=tied))


def qwen3_moe() -> torch.nn.Module:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **experts, tie_word_embeddings=False))


def deepseek() -> torch.nn.Module:
    shape = {name: value for name, value in SHAPE.items() if name not in ("head_dim", "num_key_value_heads")}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_shared_experts": 1}
    ranks = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
    config = DeepseekV3Config(
        **shape, **experts, **ranks, num_key_value_heads=4, n_group=1, topk_group=1, first_k_dense_replace=1
    )
    return DeepseekV3ForCausalLM(config)


@pytest.mark.parametrize(
    "make",
    [qwen3, lambda: qwen3(tied=True), qwen3_moe, deepseek],
    ids=["qwen3", "tied", "qwen3_moe", "deepseek"],
)
def test_boxes_of_the_checkpoint_lie_in_the_parameters(make, tmp_path):
    torch.manual_seed(1)
    model = make()
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point():
                tensor.copy_(torch.randn_like(tensor))
    model.save_pretrained(tmp_path)
    saved = load_file(next(tmp_path.glob("*.safetensors")))
    found: dict[str, np.ndarray] = {}
    for held in checkpoint_weights(model).held:
        buffer = (ctypes.c_uint8 * held.span_bytes).from_address(held.address)
        values = torch.as_strided(torch.frombuffer(buffer, dtype=torch.float32), held.extent, held.strides)
        for name in (held.tensor.name, *held.aliases):
            whole = found.setdefault(name, np.full(held.tensor.shape, np.nan, np.float32))
            whole[tuple(slice(a, a + n) for a, n in zip(held.lo, held.extent, strict=True))] = values.numpy()
    assert saved.keys() <= found.keys()
    assert {name for name in found if name not in saved} <= {"lm_head.weight"}  # tied: saved once
    for name, value in saved.items():
        np.testing.assert_array_equal(found[name], value.numpy(), err_msg=name)
