"""The policy as trainers hold it: a plain decoder with Hugging Face's names, or Hugging Face's own modules.

    actor = build_actor(settings, architecture)       # policy and value head, with random or given weights
    logits, values = actor(tokens)

Weights are stored in the run's precision. On CPUs they are widened where they are used, because most CPUs have no fast
BF16 arithmetic; on GPUs everything runs in the stored precision.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.errors import ConfigError
from weft.rl.model.architecture import Architecture
from weft.rl.model.rotation import rotate, rotation
from weft.rl.settings import LoopSettings, Modules, Precision

DTYPES = {Precision.BF16: torch.bfloat16, Precision.FP32: torch.float32, Precision.FP8: torch.float8_e4m3fn}
INIT_STD = 0.02


class Linear(nn.Linear):
    """A linear layer whose weights are widened to the precision of its input."""

    def forward(self, x: Tensor) -> Tensor:
        """`x · weightᵀ + bias`."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """`x / rms(x) · weight`."""
        return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Causal attention over whole sequences."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.a = a
        self.q_proj = Linear(a.hidden, a.heads * a.head_dim, bias=a.qkv_bias)
        self.k_proj = Linear(a.hidden, a.kv_heads * a.head_dim, bias=a.qkv_bias)
        self.v_proj = Linear(a.hidden, a.kv_heads * a.head_dim, bias=a.qkv_bias)
        self.o_proj = Linear(a.heads * a.head_dim, a.hidden, bias=False)
        if a.qk_norm:
            self.q_norm = RMSNorm(a.head_dim, a.eps)
            self.k_norm = RMSNorm(a.head_dim, a.eps)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """[batch, length, hidden] to the same."""
        q, k, v = (layer(x).unflatten(-1, (-1, self.a.head_dim)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        if self.a.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = rotate(q, turn).transpose(1, 2), rotate(k, turn).transpose(1, 2), v.transpose(1, 2)
        repeat = self.a.heads // self.a.kv_heads
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """A gated feed-forward layer."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.gate_proj = Linear(a.hidden, a.width, bias=False)
        self.up_proj = Linear(a.hidden, a.width, bias=False)
        self.down_proj = Linear(a.width, a.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`down(silu(gate(x)) · up(x))`."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderBlock(nn.Module):
    """Attention and feed-forward, each after a norm and added to the residual stream."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.self_attn = Attention(a)
        self.mlp = FeedForward(a)
        self.input_layernorm = RMSNorm(a.hidden, a.eps)
        self.post_attention_layernorm = RMSNorm(a.hidden, a.eps)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """[batch, length, hidden] to the same."""
        x = x + self.self_attn(self.input_layernorm(x), turn)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    """Embedding, blocks and the last norm."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.a = a
        self.embed_tokens = nn.Embedding(a.vocab_size, a.hidden)
        self.layers = nn.ModuleList(DecoderBlock(a) for _ in range(a.layers))
        self.norm = RMSNorm(a.hidden, a.eps)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens to hidden states."""
        x = self.embed_tokens(tokens)
        x = x.float() if x.device.type == "cpu" else x
        positions = torch.arange(tokens.shape[1], device=x.device)
        turn = rotation(positions, self.a.head_dim, self.a.rope_theta, x.dtype)
        for layer in self.layers:
            x = layer(x, turn)
        return self.norm(x)


class Decoder(nn.Module):
    """A decoder of the Llama and Qwen kind, with the parameter names of its checkpoints."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.model = Trunk(a)
        self.lm_head = Linear(a.hidden, a.vocab_size, bias=False)
        if a.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, and the hidden states they come from."""
        hidden = self.model(tokens)
        return self.lm_head(hidden), hidden


class Actor(nn.Module):
    """A policy and its value head."""

    def __init__(self, policy: nn.Module, hidden: int) -> None:
        super().__init__()
        self.policy = policy
        self.value = Linear(hidden, 1)
        nn.init.zeros_(self.value.weight)
        nn.init.zeros_(self.value.bias)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [batch, length, vocabulary] and values [batch, length], in FP32."""
        if isinstance(self.policy, Decoder):
            logits, hidden = self.policy(tokens)
        else:
            found = self.policy(input_ids=tokens, output_hidden_states=True, use_cache=False)
            logits, hidden = found.logits, found.hidden_states[-1]
        return logits.float(), self.value(hidden).float().sum(-1)  # not a view: FSDP2 warns of those


def build_actor(settings: LoopSettings, architecture: Architecture) -> Actor:
    """The same weights on every rank: random ones from the seed, or those of a checkpoint."""
    torch.manual_seed(settings.seed)
    policy = _transformers(architecture) if settings.modules is Modules.TRANSFORMERS else _builtin(architecture)
    actor = Actor(policy, architecture.hidden)
    if settings.weights:
        _load(policy, Path(settings.weights))
    for parameter in actor.parameters():  # not buffers: rounded frequencies would shift positions
        parameter.data = parameter.data.to(DTYPES[settings.dtype])
    return actor.eval()  # no dropout: engines would not agree


def policy_shapes(settings: LoopSettings, architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a policy's parameters; nothing is allocated."""
    with torch.device("meta"):
        policy = _transformers(architecture) if settings.modules is Modules.TRANSFORMERS else _builtin(architecture)
    return {name: tuple(parameter.shape) for name, parameter in policy.named_parameters()}


def layers_of(policy: nn.Module) -> Iterator[nn.Module]:
    """The blocks of a policy, which are sharded one by one."""
    stacks = [child for child in policy.modules() if isinstance(child, nn.ModuleList)]
    yield from (stacks[0] if stacks else ())


def check_modules(settings: LoopSettings, architecture: Architecture) -> None:
    """Raise if the modules of a run are not installed, or do not support its model."""
    if settings.modules is Modules.BUILTIN and architecture.is_gpt2:
        raise ConfigError("gpt2 needs Hugging Face's modules", hint="add --modules transformers")
    if settings.modules is Modules.TRANSFORMERS and importlib.util.find_spec("transformers") is None:
        raise ConfigError("transformers is not installed", hint="pip install 'weft[hf]'")
    if settings.weights and not _files(Path(settings.weights)):
        raise ConfigError(f"no safetensors at `{settings.weights}`")


def _builtin(architecture: Architecture) -> nn.Module:
    policy = Decoder(architecture)
    for module in policy.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=max(INIT_STD, 0.5 * architecture.hidden**-0.5))
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    return policy


def _transformers(architecture: Architecture) -> nn.Module:
    import transformers  # noqa: PLC0415  # optional, and slow to import

    fields = {key: value for key, value in architecture.config.items() if key != "torch_dtype"}
    config = transformers.AutoConfig.for_model(**fields)
    build: Any = transformers.AutoModelForCausalLM.from_config
    model: nn.Module = build(config)
    return model


def _files(path: Path) -> list[Path]:
    """The safetensors of a folder, or the one file."""
    return [file for file in (sorted(path.glob("*.safetensors")) if path.is_dir() else [path]) if file.is_file()]


def _load(policy: nn.Module, path: Path) -> None:
    """Weights of a checkpoint, which must have every parameter."""
    try:
        from safetensors.torch import load_file  # noqa: PLC0415  # optional
    except ImportError as error:
        raise ConfigError("safetensors is not installed", hint="pip install 'weft[hf]'") from error
    found: dict[str, Any] = {}
    for file in _files(path):
        try:
            found |= load_file(str(file))
        except Exception as error:  # safetensors raises its own, undeclared
            raise ConfigError(f"`{file}` cannot be read: {error}") from error
    wanted = dict(policy.named_parameters())
    short = {name: name.partition(".")[2] for name in wanted}  # some checkpoints hold the model without its head
    found |= {name: found[short[name]] for name in wanted if name not in found and short[name] in found}
    missing = sorted(set(wanted) - set(found))
    wrong = sorted(name for name in wanted if name in found and found[name].shape != wanted[name].shape)
    if missing or wrong:
        listed = json.dumps({"missing": missing[:5], "of other shape": wrong[:5]})
        raise ConfigError(f"`{path}` does not fit: {len(missing)} missing, {len(wrong)} of other shape: {listed}")
    policy.load_state_dict({name: found[name] for name in wanted}, strict=False)
