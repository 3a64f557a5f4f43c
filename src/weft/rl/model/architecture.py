"""The shape of a decoder, from a config.json; trainer modules and engine models are both built from it.

architecture = load_architecture("tiny", vocab_size=32)
architecture = load_architecture("models/Qwen2.5-0.5B/config.json")
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weft.core.models.configs import CONFIGS, DEFAULTS
from weft.errors import ConfigError

TINY: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 192,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
GATED = ("llama", "qwen2", "qwen3")
"""Kinds with RMS norms, rotated positions and gated feed-forward layers."""

OPTIONAL = ("head_dim", "num_key_value_heads", "tie_word_embeddings")
"""Fields a config may leave out; each kind has its defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One dense decoder. `gpt2` has learned positions, layer norms, biases and weights stored [in, out]."""

    kind: str
    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    """Of the feed-forward layers."""
    qkv_bias: bool
    qk_norm: bool
    tied: bool
    eps: float
    rope_theta: float
    max_positions: int
    config: Mapping[str, Any]
    """The config as read."""

    @property
    def is_gpt2(self) -> bool:
        """Whether it is a GPT-2."""
        return self.kind == "gpt2"


def load_architecture(model: str, *, vocab_size: int = 0) -> Architecture:
    """The built-in `tiny`, a name of the catalog, or a config.json (or the folder it is in)."""
    if model == "tiny":
        return _architecture("tiny", {**TINY, "vocab_size": vocab_size})
    name = model.rpartition("/")[2].lower()
    config = CONFIGS[name] if name in CONFIGS and not Path(model).exists() else _read(Path(model))
    found = _architecture(model, config)
    if found.vocab_size < vocab_size:
        raise ConfigError(f"`{model}` has {found.vocab_size} tokens, the task needs {vocab_size}")
    return found


def _read(path: Path) -> Mapping[str, Any]:
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        hint = "use tiny, gpt2, qwen2.5-0.5b, …, or a path to a config.json"
        raise ConfigError(f"the model `{path}` cannot be read: {error.strerror}", hint=hint) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"`{path}` is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"`{path}` is not a JSON object")
    return config


def _architecture(name: str, config: Mapping[str, Any]) -> Architecture:
    kind = str(config.get("model_type", ""))
    if kind not in (*GATED, "gpt2"):
        raise ConfigError(f"`{name}` has the unsupported kind `{kind}`", hint=f"use {', '.join(GATED)} or gpt2")
    _refuse_unsupported(name, config)
    full = {**{field: DEFAULTS[kind][field] for field in OPTIONAL if field in DEFAULTS[kind]}, **config}
    try:
        return replace(_gpt2(full) if kind == "gpt2" else _gated(kind, full), config=config)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"`{name}` lacks the field {error}", hint="give a config.json as Hugging Face writes it"
        ) from None


def _refuse_unsupported(name: str, config: Mapping[str, Any]) -> None:
    """Raise for features these decoders do not have, instead of ignoring them."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    is_scaled = str(rope.get("rope_type", rope.get("type", "default"))) != "default"
    flags = [flag for flag in ("attention_bias", "mlp_bias", "use_sliding_window") if config.get(flag)]
    problems = [*flags, *(["scaled rotary positions"] if is_scaled else [])]
    if config.get("model_type") == "gpt2" and config.get("tie_word_embeddings") is False:
        problems.append("untied embeddings")
    if config.get("hidden_act", "silu") != "silu" and config.get("model_type") != "gpt2":
        problems.append(f"activation {config['hidden_act']}")
    if problems:
        raise ConfigError(f"`{name}` has {', '.join(problems)}", hint="weft's own engines do not support this")


def _gated(kind: str, config: Mapping[str, Any]) -> Architecture:
    heads = int(config["num_attention_heads"])
    rope = config.get("rope_parameters") or {}
    return Architecture(
        kind=kind,
        vocab_size=int(config["vocab_size"]),
        hidden=int(config["hidden_size"]),
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or int(config["hidden_size"]) // heads),
        width=int(config["intermediate_size"]),
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        tied=bool(config["tie_word_embeddings"]),
        eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=float(config.get("rope_theta") or rope.get("rope_theta") or 10_000.0),
        max_positions=int(config.get("max_position_embeddings", 1 << 15)),
        config=config,
    )


def _gpt2(config: Mapping[str, Any]) -> Architecture:
    heads, hidden = int(config["n_head"]), int(config["n_embd"])
    return Architecture(
        kind="gpt2",
        vocab_size=int(config["vocab_size"]),
        hidden=hidden,
        layers=int(config["n_layer"]),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        width=int(config.get("n_inner") or 4 * hidden),
        qkv_bias=True,
        qk_norm=False,
        tied=True,
        eps=float(config.get("layer_norm_epsilon", 1e-5)),
        rope_theta=0.0,
        max_positions=int(config["n_positions"]),
        config=config,
    )
