"""The same model twice: what trainers compute, engines compute, however their tensors are fused, cut and stored."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from weft.errors import ConfigError
from weft.rl.learn.generation import Sampling, generate
from weft.rl.model.architecture import TINY, load_architecture
from weft.rl.model.engine_model import EngineModel, check_divides
from weft.rl.model.policy import build_actor
from weft.rl.settings import LoopSettings, Precision

BASE = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
CONFIGS = {
    "llama": {**BASE, "model_type": "llama", "num_key_value_heads": 4},
    "qwen2, tied": {**BASE, "model_type": "qwen2", "num_key_value_heads": 1, "tie_word_embeddings": True},
    "qwen3": {**BASE, "model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 16},
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 40},
}


def write(tmp_path, config) -> str:
    import json  # noqa: PLC0415

    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def actor_of(tmp_path, name: str, modules: str):
    if modules == "transformers":
        pytest.importorskip("transformers")
    settings = LoopSettings.of(model=write(tmp_path, CONFIGS[name]), modules=modules, dtype="fp32", seed=3)
    architecture = load_architecture(settings.model)
    actor = build_actor(settings, architecture)
    with torch.no_grad():
        for parameter in actor.policy.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))  # biases and norms that matter
    return actor, architecture


def engines_of(actor, architecture, num_ranks: int, dtype: Precision = Precision.FP32) -> list[EngineModel]:
    engines = [EngineModel(architecture, dtype=dtype, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    for engine in engines:
        for name, parameter in actor.policy.named_parameters():
            engine.load(name, parameter.detach())
    return engines


def logits_together(engines: list[EngineModel], tokens: torch.Tensor, num_steps: int) -> list[torch.Tensor]:
    """Every rank in a thread: the prompt at once, then token by token, through the cache."""
    meet = threading.Barrier(len(engines), timeout=30.0)
    parts: list = [None] * len(engines)
    found: list = [None] * len(engines)

    def run(rank: int) -> None:
        def reduce(mine):
            parts[rank] = mine.clone()
            meet.wait()
            total = sum(parts)
            meet.wait()
            return total

        with torch.inference_mode():
            cache = engines[rank].cache(len(tokens), tokens.shape[1])
            start = tokens.shape[1] - num_steps
            steps = [tokens[:, :start], *(tokens[:, k : k + 1] for k in range(start, tokens.shape[1]))]
            found[rank] = torch.stack([engines[rank](new, cache, reduce) for new in steps], dim=1)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(engines))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    return found


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("llama", "builtin"),
        ("qwen2, tied", "builtin"),
        ("qwen3", "builtin"),
        ("llama", "transformers"),
        ("qwen2, tied", "transformers"),
        ("qwen3", "transformers"),
        ("gpt2", "transformers"),
    ],
)
def test_engines_compute_what_trainers_compute(tmp_path, name, modules, num_ranks):
    actor, architecture = actor_of(tmp_path, name, modules)
    tokens = torch.randint(0, 40, (3, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, _ = actor(tokens)
    for logits in logits_together(engines_of(actor, architecture, num_ranks), tokens, num_steps=5):
        torch.testing.assert_close(logits, expected[:, 6:], rtol=1e-4, atol=1e-4)


def test_fp8_engines_are_near():
    settings = LoopSettings.of(dtype="fp32")
    architecture = load_architecture("tiny", vocab_size=32)
    actor = build_actor(settings, architecture)
    tokens = torch.randint(0, 32, (4, 10))
    with torch.no_grad():
        expected, _ = actor(tokens)
    (logits,) = logits_together(engines_of(actor, architecture, 1, Precision.FP8), tokens, num_steps=3)
    assert not torch.equal(logits, expected[:, 6:])
    assert (logits - expected[:, 6:]).abs().mean() < 0.1 * expected.abs().mean()


def test_sampled_tokens_carry_their_probability_and_version():
    settings = LoopSettings.of(dtype="fp32")
    architecture = load_architecture("tiny", vocab_size=32)
    actor = build_actor(settings, architecture)
    (engine,) = engines_of(actor, architecture, 1)
    prompts = np.random.default_rng(0).integers(0, 32, (64, 5))
    versions = iter([4, 4, 5, 6])
    sampling = Sampling(answer_tokens=4, temperature=1.5, seed=9)
    options = {"reduce": lambda x: x, "agree": lambda x: x}
    made = generate(engine, prompts, sampling, between=lambda: next(versions), **options)
    assert made.versions.tolist() == [[4, 4, 5, 6]] * 64
    tokens = torch.from_numpy(np.concatenate([prompts, made.tokens], axis=1))
    with torch.no_grad():
        known = torch.log_softmax(actor(tokens)[0][:, 4:-1] / 1.5, dim=-1)
    expected = known.gather(-1, tokens[:, 5:, None]).squeeze(-1)
    np.testing.assert_allclose(made.logprobs, expected.numpy(), atol=1e-4)
    again = generate(engine, prompts, sampling, between=lambda: 0, **options)
    assert (again.tokens == made.tokens).all()
    assert len(np.unique(made.tokens)) > 8


def test_checkpoints_of_safetensors_are_loaded_whole_or_not_at_all(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    settings = LoopSettings.of(dtype="fp32", seed=1)
    architecture = load_architecture("tiny", vocab_size=32)
    weights = {name: p.detach().clone() for name, p in build_actor(settings, architecture).policy.named_parameters()}
    safetensors.save_file(weights, str(tmp_path / "model.safetensors"))
    loaded = build_actor(LoopSettings.of(dtype="fp32", seed=2, weights=str(tmp_path)), architecture)
    assert all(torch.equal(p, weights[name]) for name, p in loaded.policy.named_parameters())
    del weights["model.norm.weight"]
    safetensors.save_file(weights, str(tmp_path / "model.safetensors"))
    with pytest.raises(ConfigError, match="1 missing"):
        build_actor(LoopSettings.of(weights=str(tmp_path)), architecture)
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match="cannot be read"):
        build_actor(LoopSettings.of(weights=str(tmp_path)), architecture)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mamba"}, "unsupported kind `mamba`"),
        ({**CONFIGS["llama"], "rope_scaling": {"rope_type": "llama3"}}, "scaled rotary positions"),
        ({**CONFIGS["llama"], "attention_bias": True, "hidden_act": "gelu"}, "attention_bias, activation gelu"),
        ({"model_type": "qwen3", "vocab_size": 32}, "lacks the field"),
        ({**CONFIGS["gpt2"], "tie_word_embeddings": False}, "untied embeddings"),
        ([1], "not a JSON object"),
    ],
)
def test_configs_that_say_too_little_are_refused(tmp_path, config, message):
    with pytest.raises(ConfigError, match=message):
        load_architecture(write(tmp_path, config))


def test_models_too_small_for_a_task_or_not_divisible_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="40 tokens, the task needs 64"):
        load_architecture(write(tmp_path, CONFIGS["llama"]), vocab_size=64)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        load_architecture(str(tmp_path))
    with pytest.raises(ConfigError, match="do not divide"):
        check_divides(load_architecture("tiny", vocab_size=TINY["hidden_size"]), 3)
    known = load_architecture("Qwen/Qwen2.5-0.5B")
    assert (known.hidden, known.rope_theta) == (896, 1e6)


def test_rounding_weights_leaves_rotary_frequencies_alone(tmp_path):
    pytest.importorskip("transformers")
    settings = LoopSettings.of(model=write(tmp_path, CONFIGS["qwen3"]), modules="transformers", dtype="bf16")
    actor = build_actor(settings, load_architecture(settings.model))
    assert {parameter.dtype for parameter in actor.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in actor.buffers()} <= {torch.float32}
