"""Real models: from the fields of a Hugging Face `config.json` to the exact tensor list of its checkpoint.

`load_model("qwen3-235b-a22b")` takes a catalog name or the path of a `config.json`. Each tensor carries what
parallelism needs to know about it: how it may be split, into how many indivisible units, its layer and expert.

    model = load_model("qwen3-0.6b")
    [t.name for t in model.tensors][:2]     # ['model.embed_tokens.weight', 'model.layers.0.self_attn.q_proj.weight']
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weft.core.models.configs import CONFIGS, DEFAULTS
from weft.core.models.model import FIRST_STAGE, LAST_STAGE, Model, ModelTensor, Split
from weft.errors import ConfigError

MAX_LAYERS, MAX_EXPERTS, MAX_WIDTH = 2_000, 16_384, 2**24
MAX_TENSORS = 1_000_000

_HF_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def model_names() -> list[str]:
    """All catalog names."""
    return sorted(CONFIGS)


def load_model(name: str) -> Model:
    """A model by catalog name or hub id, or by the path of its `config.json` (or of the folder that holds it)."""
    known = _catalog_name(name)
    if known in CONFIGS:
        return build_model(known, CONFIGS[known])
    path = Path(name)
    if len(name) < 200 and path.is_dir():
        path = path / "config.json"
    if path.suffix == ".json" or "/" in name:
        return build_model(name, _read_config(path))
    close = difflib.get_close_matches(name.lower(), CONFIGS, n=3, cutoff=0.4)
    hint = f"did you mean {', '.join(close)}? " if close else ""
    raise ConfigError(
        f"unknown model `{name}`",
        hint=f"{hint}`weft models` lists the catalog; a path to a config.json works too",
    )


def _catalog_name(name: str) -> str:
    """`Qwen/Qwen3-8B` and `qwen3-8b-instruct` both give `qwen3-8b`."""
    short = name.lower() if name.count("/") == 0 else name.lower().rpartition("/")[2]
    if name.count("/") > 1 or Path(name[:200]).exists():
        return name
    return short.removesuffix("-instruct").removesuffix("-base")


def build_model(name: str, config: Mapping[str, Any]) -> Model:
    """The model a config describes."""
    family = config.get("model_type")
    if not isinstance(family, str) or family not in _FAMILIES:
        raise ConfigError(
            f"config of `{name}`: model_type {family!r} is not supported",
            hint=f"supported families: {', '.join(sorted(_FAMILIES))}",
        )
    fields = _Fields(name, config, DEFAULTS[family])
    describe, num_layers = _FAMILIES[family](fields)
    tensors = tuple(describe)
    return Model(
        name=name,
        family=family,
        config=config,
        tensors=tensors,
        num_layers=num_layers,
        num_experts=1 + max(tensor.expert for tensor in tensors),
        tied=fields.flag("tie_word_embeddings"),
    )


def _read_config(path: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(
            f"`{path}` cannot be read: {error.strerror}", hint="give the path of a config.json"
        ) from error
    except ValueError as error:
        raise ConfigError(f"`{path}` is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"`{path}` does not hold a JSON object")
    return config


class _Fields:
    """Reads config fields, with the family's defaults where one is absent, and errors that name the field."""

    def __init__(self, name: str, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._name = name
        self._config = config
        self._defaults = defaults
        self.dtype = self._dtype()

    def _dtype(self) -> str:
        given = self._config.get("torch_dtype") or self._config.get("dtype")
        text = given or self._defaults.get("torch_dtype", "bfloat16")
        if not isinstance(text, str) or text not in _HF_DTYPES:
            raise ConfigError(
                f"config of `{self._name}`: torch_dtype {text!r}", hint=f"use one of {', '.join(_HF_DTYPES)}"
            )
        return _HF_DTYPES[text]

    def _read(self, *names: str) -> tuple[str, Any]:
        """The first of some names of one field that the config has, and its value: null, or the family's default."""
        present = [name for name in names if name in self._config]
        for name in present:
            if self._config[name] is not None:
                return name, self._config[name]
        if present:
            return present[0], None
        return names[0], next((self._defaults[name] for name in names if name in self._defaults), None)

    def count(self, *names: str, most: int = MAX_WIDTH, least: int = 1, null: int | None = None) -> int:
        """A whole number; `null` is what the field means when it is null, or absent and without a default."""
        name, value = self._read(*names)
        if value is None and null is not None:
            return null
        if type(value) is not int or not least <= value <= most:
            shown = "null" if value is None else repr(value)
            raise ConfigError(
                f"config of `{self._name}`: {name} is {shown}", hint=f"expected a number from {least} to {most}"
            )
        return value

    def refuse_more_tensors_than(self, most: int, number: int) -> None:
        """Raise if layers times experts is absurd."""
        if number > most:
            raise ConfigError(
                f"config of `{self._name}` describes {number} expert tensors, more than {most}",
                hint="check the numbers of layers and experts",
            )

    def layers(self, name: str) -> frozenset[int]:
        """A list of layer numbers."""
        value = self._config.get(name) or []
        if not isinstance(value, list) or not all(type(layer) is int for layer in value):
            raise ConfigError(f"config of `{self._name}`: {name} is {value!r}", hint="expected a list of layer numbers")
        return frozenset(value)

    def kinds(self, name: str, allowed: Mapping[str, bool]) -> list[bool] | None:
        """A kind for every layer, as a list or a string of letters, as what each kind means; None if it is null."""
        value = self._config.get(name)
        if value is None:
            return None
        num_layers = self.count("num_hidden_layers", most=MAX_LAYERS)
        known = isinstance(value, list | str) and all(isinstance(kind, str) and kind in allowed for kind in value)
        if not known or len(value) < num_layers:
            raise ConfigError(
                f"config of `{self._name}`: {name} is {value!r}",
                hint=f"expected one of {', '.join(allowed)} for each of {num_layers} layers",
            )
        return [allowed[kind] for kind in value]

    def flag(self, name: str) -> bool:
        """A true/false field."""
        _, value = self._read(name)
        if value is not None and not isinstance(value, bool):
            raise ConfigError(f"config of `{self._name}`: {name} is {value!r}", hint="expected true or false")
        return bool(value)

    def has(self, name: str) -> bool:
        """Whether the field has a value other than null."""
        return self._read(name)[1] is not None

    def refuse(self, name: str) -> None:
        """Raise if a feature is on that the catalog does not describe."""
        if self.flag(name):
            raise ConfigError(f"config of `{self._name}`: {name} is not supported")

    @property
    def fp8_stored(self) -> bool:
        """Whether the published checkpoint itself is block-quantised FP8."""
        quantization = self._config.get("quantization_config") or {}
        if not isinstance(quantization, Mapping):
            raise ConfigError(f"config of `{self._name}`: quantization_config is {quantization!r}")
        return quantization.get("quant_method") == "fp8"


@dataclass(slots=True)
class _LayerTensors:
    """Makes the tensors of one layer."""

    prefix: str
    dtype: str
    layer: int
    policy: bool = True

    def linear(
        self,
        name: str,
        rows: int,
        columns: int,
        split: Split,
        num_units: int,
        unit: str,
        *,
        expert: int = -1,
        bias: bool = False,
        quantized: bool = True,
    ) -> Iterator[ModelTensor]:
        """A weight [rows, columns], and its bias."""
        yield ModelTensor(
            name=f"{self.prefix}{name}.weight",
            dtype=self.dtype,
            shape=(rows, columns),
            layer=self.layer,
            split=split,
            num_units=num_units,
            unit=unit,
            expert=expert,
            quantized=quantized,
            policy=self.policy,
        )
        if bias:
            yield ModelTensor(
                name=f"{self.prefix}{name}.bias",
                dtype=self.dtype,
                shape=(rows,),
                layer=self.layer,
                split=split if split is Split.COLUMN else Split.NONE,
                num_units=num_units,
                unit=unit,
                expert=expert,
                policy=self.policy,
            )

    def plain(self, name: str, *shape: int, dtype: str | None = None, engine_dtype: str = "") -> ModelTensor:
        """A tensor every rank holds whole: norms, routers, biases."""
        return ModelTensor(
            name=self.prefix + name,
            dtype=dtype or self.dtype,
            engine_dtype=engine_dtype,
            shape=shape,
            layer=self.layer,
            policy=self.policy,
        )

    def column(self, name: str, rows: int, columns: int, units: int, unit: str, **more: Any) -> Iterator[ModelTensor]:
        return self.linear(name, rows, columns, Split.COLUMN, units, unit, **more)

    def row(self, name: str, rows: int, columns: int, units: int, unit: str, **more: Any) -> Iterator[ModelTensor]:
        return self.linear(name, rows, columns, Split.ROW, units, unit, **more)

    def mlp(self, name: str, hidden: int, width: int, *, expert: int = -1, bias: bool = False) -> Iterator[ModelTensor]:
        """gate, up and down projections."""
        unit = "intermediate rows"
        yield from self.column(f"{name}.gate_proj", width, hidden, width, unit, expert=expert, bias=bias)
        yield from self.column(f"{name}.up_proj", width, hidden, width, unit, expert=expert, bias=bias)
        yield from self.row(f"{name}.down_proj", hidden, width, width, unit, expert=expert, bias=bias)


def _vocab(name: str, fields: _Fields, layer: int, *, policy: bool = True) -> ModelTensor:
    rows = fields.count("vocab_size")
    shape = (rows, fields.count("hidden_size", "n_embd"))
    return ModelTensor(
        name=name,
        dtype=fields.dtype,
        shape=shape,
        layer=layer,
        split=Split.VOCAB,
        num_units=rows,
        unit="vocabulary rows",
        policy=policy,
    )


Described = tuple[Iterator[ModelTensor], int]
Block = Callable[[_LayerTensors, int], Iterator[ModelTensor]]


def _decoder(fields: _Fields, block: Block, *, draft_vocab: bool = True) -> Iterator[ModelTensor]:
    """Embedding, layers, final norm, head, draft (MTP) layers: the frame all modern families share.

    Draft layers store copies of the embedding and the head (`draft_vocab`), except in GLM-5.
    """
    num_layers = fields.count("num_hidden_layers", most=MAX_LAYERS)
    hidden = fields.count("hidden_size")
    yield _vocab("model.embed_tokens.weight", fields, FIRST_STAGE)
    for layer in range(num_layers):
        yield from block(_LayerTensors(f"model.layers.{layer}.", fields.dtype, layer), layer)
    yield _LayerTensors("model.", fields.dtype, LAST_STAGE).plain("norm.weight", hidden)
    if not fields.flag("tie_word_embeddings"):
        yield _vocab("lm_head.weight", fields, LAST_STAGE)
    for extra in range(fields.count("num_nextn_predict_layers", "num_mtp_layers", least=0, most=64, null=0)):
        layer = num_layers + extra
        writer = _LayerTensors(f"model.layers.{layer}.", fields.dtype, layer, policy=False)
        if draft_vocab:
            yield _vocab(f"model.layers.{layer}.embed_tokens.weight", fields, layer, policy=False)
            yield _vocab(f"model.layers.{layer}.shared_head.head.weight", fields, layer, policy=False)
        yield writer.plain("enorm.weight", hidden)
        yield writer.plain("hnorm.weight", hidden)
        yield writer.plain("eh_proj.weight", hidden, 2 * hidden)
        yield from block(writer, layer)
        yield writer.plain("shared_head.norm.weight", hidden)


def _stored_scales(tensors: Iterator[ModelTensor]) -> Iterator[ModelTensor]:
    """A checkpoint that is itself FP8 has a scale beside every quantised weight."""
    for tensor in tensors:
        yield tensor
        if tensor.quantized:
            shape = tuple(-(-size // 128) for size in tensor.shape)
            name = f"{tensor.name}_scale_inv"
            yield ModelTensor(name=name, dtype="fp32", shape=shape, layer=tensor.layer, policy=False)


def _attention(fields: _Fields, *, qkv_bias: bool, out_bias: bool, qk_norm: bool) -> Block:
    """Multi-head or grouped-query attention with separate q, k, v."""
    hidden = fields.count("hidden_size")
    heads = fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", null=heads)
    width = fields.count("head_dim", null=hidden // heads)

    def block(writer: _LayerTensors, _: int) -> Iterator[ModelTensor]:
        q_rows, kv_rows = heads * width, kv_heads * width
        attn = "self_attn"
        yield from writer.column(f"{attn}.q_proj", q_rows, hidden, heads, "attention heads", bias=qkv_bias)
        yield from writer.column(f"{attn}.k_proj", kv_rows, hidden, kv_heads, "KV heads", bias=qkv_bias)
        yield from writer.column(f"{attn}.v_proj", kv_rows, hidden, kv_heads, "KV heads", bias=qkv_bias)
        yield from writer.row(f"{attn}.o_proj", hidden, q_rows, heads, "attention heads", bias=out_bias)
        if qk_norm:
            yield writer.plain(f"{attn}.q_norm.weight", width)
            yield writer.plain(f"{attn}.k_norm.weight", width)

    return block


def _latent_attention(fields: _Fields, *, rope_names: tuple[str, ...] = ("qk_rope_head_dim",)) -> Block:
    """Multi-head latent attention (DeepSeek), with the sparse-attention indexer where the config has one."""
    hidden = fields.count("hidden_size")
    heads = fields.count("num_attention_heads")
    q_rank = fields.count("q_lora_rank", null=0, least=0)
    kv_rank = fields.count("kv_lora_rank")
    nope, rope = fields.count("qk_nope_head_dim"), fields.count(*rope_names)
    v_width = fields.count("v_head_dim")
    q_rows = heads * (nope + rope)
    bias = fields.flag("attention_bias")
    has_indexer = _indexed_layers(fields)

    def block(writer: _LayerTensors, layer: int) -> Iterator[ModelTensor]:
        attn, unit = "self_attn", "attention heads"
        if q_rank:
            yield from writer.linear(f"{attn}.q_a_proj", q_rank, hidden, Split.NONE, 1, unit, bias=bias)
            yield writer.plain(f"{attn}.q_a_layernorm.weight", q_rank)
            yield from writer.column(f"{attn}.q_b_proj", q_rows, q_rank, heads, unit)
        else:
            yield from writer.column(f"{attn}.q_proj", q_rows, hidden, heads, unit)
        yield from writer.linear(f"{attn}.kv_a_proj_with_mqa", kv_rank + rope, hidden, Split.NONE, 1, unit, bias=bias)
        yield writer.plain(f"{attn}.kv_a_layernorm.weight", kv_rank)
        yield from writer.column(f"{attn}.kv_b_proj", heads * (nope + v_width), kv_rank, heads, unit)
        yield from writer.row(f"{attn}.o_proj", hidden, heads * v_width, heads, unit, bias=bias)
        if has_indexer(layer):
            yield from _indexer(fields, writer, hidden, q_rank)

    return block


def _indexed_layers(fields: _Fields) -> Callable[[int], bool]:
    """Which layers have an indexer of their own; the others use the last one's choice. Draft layers have one."""
    if not fields.has("index_n_heads"):
        return lambda _: False
    listed = fields.kinds("indexer_types", {"full": True, "shared": False})
    if listed is None:
        letters = {"F": True, "S": False, "full": True, "shared": False}
        listed = fields.kinds("index_topk_pattern", letters)
    num_layers = fields.count("num_hidden_layers", most=MAX_LAYERS)
    if listed is None:
        frequency = max(fields.count("index_topk_freq", least=0, most=MAX_LAYERS, null=1), 1)
        offset = fields.count("index_skip_topk_offset", least=0, most=MAX_LAYERS, null=2)
        listed = [max(layer - offset + 1, 0) % frequency == 0 for layer in range(num_layers)]
    return lambda layer: layer >= num_layers or listed[layer]


def _indexer(fields: _Fields, writer: _LayerTensors, hidden: int, q_rank: int) -> Iterator[ModelTensor]:
    heads, width = fields.count("index_n_heads"), fields.count("index_head_dim")
    index, unit = "self_attn.indexer", "index heads"
    yield from writer.linear(f"{index}.wq_b", heads * width, q_rank, Split.NONE, 1, unit)
    for tensor in writer.linear(f"{index}.wk", width, hidden, Split.NONE, 1, unit):
        yield replace(tensor, engine_dtype="plain")
    yield writer.plain(f"{index}.k_norm.weight", width, engine_dtype="fp32")
    yield writer.plain(f"{index}.k_norm.bias", width, engine_dtype="fp32")
    yield writer.plain(f"{index}.weights_proj.weight", heads, hidden)


def _num_experts(fields: _Fields) -> int:
    """Routed experts of a layer; 0: all layers are dense."""
    return fields.count("n_routed_experts", "num_experts", "num_local_experts", most=MAX_EXPERTS, least=0)


def _experts(fields: _Fields, *, correction_bias: bool) -> Block:
    """Router, routed experts and shared experts."""
    hidden = fields.count("hidden_size")
    num_experts = _num_experts(fields)
    fields.refuse_more_tensors_than(MAX_TENSORS, 3 * num_experts * fields.count("num_hidden_layers", most=MAX_LAYERS))
    width = fields.count("moe_intermediate_size")
    num_shared = fields.count("n_shared_experts", null=0, least=0)

    def block(writer: _LayerTensors, _: int) -> Iterator[ModelTensor]:
        yield writer.plain("mlp.gate.weight", num_experts, hidden)
        if correction_bias:
            bias = writer.plain("mlp.gate.e_score_correction_bias", num_experts, dtype="fp32")
            yield replace(bias, keeps_dtype=True)
        for expert in range(num_experts):
            yield from writer.mlp(f"mlp.experts.{expert}", hidden, width, expert=expert)
        if num_shared:
            yield from writer.mlp("mlp.shared_experts", hidden, width * num_shared)

    return block


def _pre_norm(hidden: int, attention: Block, feed_forward: Block, *, extra_norms: bool = False) -> Block:
    def block(writer: _LayerTensors, layer: int) -> Iterator[ModelTensor]:
        yield from attention(writer, layer)
        yield from feed_forward(writer, layer)
        yield writer.plain("input_layernorm.weight", hidden)
        yield writer.plain("post_attention_layernorm.weight", hidden)
        if extra_norms:
            yield writer.plain("post_self_attn_layernorm.weight", hidden)
            yield writer.plain("post_mlp_layernorm.weight", hidden)

    return block


def _dense(fields: _Fields, *, qkv_bias: bool, out_bias: bool, qk_norm: bool, mlp_bias: bool = False) -> Described:
    hidden, width = fields.count("hidden_size"), fields.count("intermediate_size")
    attention = _attention(fields, qkv_bias=qkv_bias, out_bias=out_bias, qk_norm=qk_norm)
    block = _pre_norm(hidden, attention, lambda writer, _: writer.mlp("mlp", hidden, width, bias=mlp_bias))
    return _decoder(fields, block), fields.count("num_hidden_layers", most=MAX_LAYERS)


def _sparse_layers(fields: _Fields) -> Callable[[int], bool]:
    """Which layers have experts: after the first dense ones, every so often, and not where the config excludes it."""
    listed = fields.kinds("mlp_layer_types", {"sparse": True, "dense": False})
    num_dense = fields.count("first_k_dense_replace", null=0, least=0, most=MAX_LAYERS)
    step = fields.count("decoder_sparse_step", null=1, most=MAX_LAYERS)
    frequency = fields.count("moe_layer_freq", null=1, most=MAX_LAYERS)
    excluded = fields.layers("mlp_only_layers")
    num_experts = _num_experts(fields)

    def is_sparse(layer: int) -> bool:
        if num_experts == 0:
            return False
        if listed is not None:
            return layer >= len(listed) or listed[layer]
        regular = (layer + 1) % step == 0 and layer % frequency == 0
        return layer >= num_dense and regular and layer not in excluded

    return is_sparse


def _mixture(fields: _Fields, attention: Block, *, correction_bias: bool, draft_vocab: bool = True) -> Described:
    hidden = fields.count("hidden_size")
    is_sparse = _sparse_layers(fields)
    experts = _experts(fields, correction_bias=correction_bias)

    def feed_forward(writer: _LayerTensors, layer: int) -> Iterator[ModelTensor]:
        if is_sparse(layer):
            return experts(writer, layer)
        return writer.mlp("mlp", hidden, fields.count("intermediate_size"))

    tensors = _decoder(fields, _pre_norm(hidden, attention, feed_forward), draft_vocab=draft_vocab)
    tensors = _stored_scales(tensors) if fields.fp8_stored else tensors
    return tensors, fields.count("num_hidden_layers", most=MAX_LAYERS)


def _llama(fields: _Fields) -> Described:
    bias = fields.flag("attention_bias")
    return _dense(fields, qkv_bias=bias, out_bias=bias, qk_norm=False, mlp_bias=fields.flag("mlp_bias"))


def _qwen2(fields: _Fields) -> Described:
    return _dense(fields, qkv_bias=True, out_bias=False, qk_norm=False)


def _qwen3(fields: _Fields) -> Described:
    bias = fields.flag("attention_bias")
    return _dense(fields, qkv_bias=bias, out_bias=bias, qk_norm=True)


def _qwen3_moe(fields: _Fields) -> Described:
    bias = fields.flag("attention_bias")
    attention = _attention(fields, qkv_bias=bias, out_bias=bias, qk_norm=True)
    return _mixture(fields, attention, correction_bias=False)


def _deepseek(fields: _Fields) -> Described:
    return _mixture(fields, _latent_attention(fields), correction_bias=True)


def _glm4_lite(fields: _Fields) -> Described:
    attention = _latent_attention(fields, rope_names=("qk_rope_head_dim", "head_dim"))
    return _mixture(fields, attention, correction_bias=True)


def _kimi(fields: _Fields) -> Described:
    """DeepSeek's tensors, plus the rotary frequencies Kimi-K2's checkpoint stores in every layer."""
    attention = _latent_attention(fields)

    def with_buffer(writer: _LayerTensors, layer: int) -> Iterator[ModelTensor]:
        yield from attention(writer, layer)
        buffer = writer.plain("self_attn.rotary_emb.inv_freq", 56, dtype="fp32")
        yield replace(buffer, policy=False)

    return _mixture(fields, with_buffer, correction_bias=True)


def _glm5(fields: _Fields) -> Described:
    return _mixture(fields, _latent_attention(fields), correction_bias=True, draft_vocab=False)


def _glm4_moe(fields: _Fields) -> Described:
    attention = _attention(
        fields, qkv_bias=fields.flag("attention_bias"), out_bias=False, qk_norm=fields.flag("use_qk_norm")
    )
    return _mixture(fields, attention, correction_bias=True)


def _glm4(fields: _Fields) -> Described:
    """GLM-4 dense: gate and up already fused in the checkpoint, four norms per layer."""
    hidden, width = fields.count("hidden_size"), fields.count("intermediate_size")
    attention = _attention(fields, qkv_bias=fields.flag("attention_bias"), out_bias=False, qk_norm=False)

    def feed_forward(writer: _LayerTensors, _: int) -> Iterator[ModelTensor]:
        for tensor in writer.column("mlp.gate_up_proj", 2 * width, hidden, width, "intermediate rows"):
            yield replace(tensor, num_fused=2)
        yield from writer.row("mlp.down_proj", hidden, width, width, "intermediate rows")

    block = _pre_norm(hidden, attention, feed_forward, extra_norms=True)
    return _decoder(fields, block), fields.count("num_hidden_layers", most=MAX_LAYERS)


def _gpt2(fields: _Fields) -> Described:
    fields.refuse("add_cross_attention")
    hidden = fields.count("n_embd", "hidden_size")
    num_layers = fields.count("n_layer", "num_hidden_layers", most=MAX_LAYERS)
    heads = fields.count("n_head", "num_attention_heads")
    inner = fields.count("n_inner", null=4 * hidden)

    def conv(writer: _LayerTensors, name: str, out: int, into: int, split: Split, units: int) -> Iterator[ModelTensor]:
        for tensor in writer.linear(name, out, into, split, units, "attention heads", bias=True):
            flipped = tensor.name.endswith(".weight")
            fused = replace(tensor, num_fused=3 if name.endswith("c_attn") else 1)
            yield replace(fused, shape=tensor.shape[::-1], transposed=True) if flipped else fused

    def tensors() -> Iterator[ModelTensor]:
        yield _vocab("transformer.wte.weight", fields, FIRST_STAGE)
        positions = fields.count("n_positions", "max_position_embeddings")
        yield _LayerTensors("transformer.", fields.dtype, FIRST_STAGE).plain("wpe.weight", positions, hidden)
        for layer in range(num_layers):
            writer = _LayerTensors(f"transformer.h.{layer}.", fields.dtype, layer)
            for norm in ("ln_1", "ln_2"):
                yield writer.plain(f"{norm}.weight", hidden)
                yield writer.plain(f"{norm}.bias", hidden)
            yield from conv(writer, "attn.c_attn", 3 * hidden, hidden, Split.COLUMN, heads)
            yield from conv(writer, "attn.c_proj", hidden, hidden, Split.ROW, heads)
            yield from conv(writer, "mlp.c_fc", inner, hidden, Split.COLUMN, inner)
            yield from conv(writer, "mlp.c_proj", hidden, inner, Split.ROW, inner)
        for part in ("weight", "bias"):
            yield _LayerTensors("transformer.", fields.dtype, LAST_STAGE).plain(f"ln_f.{part}", hidden)
        if not fields.flag("tie_word_embeddings"):
            yield _vocab("lm_head.weight", fields, LAST_STAGE)

    return tensors(), num_layers


_FAMILIES: dict[str, Callable[[_Fields], Described]] = {
    "deepseek_v3": _deepseek,
    "glm4": _glm4,
    "glm4_moe": _glm4_moe,
    "glm4_moe_lite": _glm4_lite,
    "glm_moe_dsa": _glm5,
    "gpt2": _gpt2,
    "kimi_k2": _kimi,
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
}
