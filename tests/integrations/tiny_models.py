"""Tiny models with random weights, as real inference engines load them; values derive from a seed.

Everything is float32: the aarch64 builds' bfloat16 kernels stop with an illegal instruction on CPUs without the
extension.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SHAPE = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.5,  # large, so that the tokens of random weights vary
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
LATENT = {
    "kv_lora_rank": 512,  # with the rotary part the one size vLLM's CPU kernel has
    "q_lora_rank": 64,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
}
KINDS = ("qwen3", "tied", "padded", "moe", "mla", "llama")
PROMPTS = ([1, 2, 3, 4], [5, 6, 7], [9] * 7, list(range(200)))
"""The last is longer than a block of vLLM's prefix cache (128 tokens on CPU): stale keys and values would show."""


def config_of(kind: str) -> Any:
    import transformers  # noqa: PLC0415

    match kind:
        case "qwen3":
            return transformers.Qwen3Config(**SHAPE)
        case "tied":
            return transformers.Qwen3Config(**{**SHAPE, "tie_word_embeddings": True})
        case "padded":
            return transformers.Qwen3Config(**{**SHAPE, "vocab_size": 500})
        case "moe":
            return transformers.Qwen3MoeConfig(**SHAPE, **EXPERTS, num_experts=4, decoder_sparse_step=1)
        case "llama":
            return transformers.LlamaConfig(**SHAPE)
        case "mla":
            shape = {name: value for name, value in SHAPE.items() if name != "head_dim"} | LATENT
            return transformers.DeepseekV3Config(
                **shape,
                **EXPERTS,
                n_routed_experts=4,
                n_shared_experts=1,
                n_group=1,
                topk_group=1,
                first_k_dense_replace=1,
                num_nextn_predict_layers=0,
                topk_method="noaux_tc",
                scoring_func="sigmoid",
            )
    raise ValueError(kind)


def make_model(kind: str, seed: int) -> torch.nn.Module:
    """The model of a seed; the same in every process."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config_of(kind), dtype=torch.float32)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                buffer.copy_(torch.randn_like(buffer))
    return model


def save_checkpoint(kind: str, seed: int, folder: Path) -> Path:
    """A checkpoint on disk, in a folder that says what it is."""
    path = folder / f"{kind}-{seed}"
    if not path.exists():
        make_model(kind, seed).save_pretrained(path)
    return path
