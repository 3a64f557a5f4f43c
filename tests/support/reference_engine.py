"""What a real engine holds after loading the full checkpoint, written the way engines do it: slice, then concatenate.

Independent of weft's pieces: it only knows the model's config, the engine's axes and a rank.
"""

from __future__ import annotations

import numpy as np

from tests.support.executor import NUMPY_DTYPE, Array, block_scales, quantize
from weft.core.models.model import Model

Checkpoint = dict[str, Array]


class ReferenceEngine:
    """Loads a checkpoint for one rank of an engine with tp·dp ranks (rank = dp part * tp + tp part)."""

    def __init__(
        self, model: Model, checkpoint: Checkpoint, *, tp: int, ep: int, ranks: int, rank: int, dtype: str
    ) -> None:
        self.c, self.w, self.dtype = model.config, checkpoint, dtype
        self.model = model
        self.tp, self.tp_rank = tp, rank % tp
        self.ep, self.etp = ep, ranks // ep
        self.ep_rank, self.etp_rank = rank // self.etp, rank % self.etp
        self.out: Checkpoint = {}

    def load(self) -> Checkpoint:
        if self.model.family == "gpt2":
            self._gpt2()
            return self.out
        self._plain("model.embed_tokens.weight", self._vocab("model.embed_tokens.weight"))
        if not self.model.tied:
            self._plain("lm_head.weight", self._vocab("lm_head.weight"))
        self._plain("model.norm.weight", self.w["model.norm.weight"])
        for layer in range(self.c["num_hidden_layers"]):
            self._layer(f"model.layers.{layer}.", layer)
        return self.out

    def _layer(self, p: str, layer: int) -> None:
        for norm in (
            "input_layernorm",
            "post_attention_layernorm",
            "post_self_attn_layernorm",
            "post_mlp_layernorm",
        ):
            if f"{p}{norm}.weight" in self.w:
                self._plain(f"{p}{norm}.weight", self.w[f"{p}{norm}.weight"])
        (self._mla if "kv_lora_rank" in self.c else self._attention)(p + "self_attn.")
        moe = self.model.num_experts and layer >= self.c.get("first_k_dense_replace", 0)
        if moe:
            self._experts(p + "mlp.")
        elif f"{p}mlp.gate_up_proj.weight" in self.w:
            gate, up = np.split(self.w[f"{p}mlp.gate_up_proj.weight"], 2)
            self._linear(f"{p}mlp.gate_up_proj", [self._rows(gate), self._rows(up)])
            self._linear(f"{p}mlp.down_proj", [self._columns(self.w[f"{p}mlp.down_proj.weight"])])
        else:
            self._mlp(f"{p}mlp.")

    def _attention(self, p: str) -> None:
        heads, kv = self.c["num_attention_heads"], self.c["num_key_value_heads"]
        width = self.c["head_dim"]
        per_rank = heads // self.tp
        q_heads = range(self.tp_rank * per_rank, (self.tp_rank + 1) * per_rank)
        kv_heads = range(self.tp_rank * kv // self.tp, self.tp_rank * kv // self.tp + max(kv // self.tp, 1))
        for leaf in ("weight", "bias"):
            if f"{p}q_proj.{leaf}" not in self.w:
                continue
            parts = [self._heads(self.w[f"{p}q_proj.{leaf}"], q_heads, width)]
            parts += [self._heads(self.w[f"{p}{x}_proj.{leaf}"], kv_heads, width) for x in "kv"]
            if leaf == "weight":
                self._linear(f"{p}qkv_proj", parts)
            else:
                self._plain(f"{p}qkv_proj.bias", np.concatenate(parts))
        self._linear(f"{p}o_proj", [self._columns(self.w[f"{p}o_proj.weight"])])
        for norm in ("q_norm", "k_norm"):
            if f"{p}{norm}.weight" in self.w:
                self._plain(f"{p}{norm}.weight", self.w[f"{p}{norm}.weight"])

    def _mla(self, p: str) -> None:
        for norm in ("q_a_layernorm", "kv_a_layernorm"):
            self._plain(f"{p}{norm}.weight", self.w[f"{p}{norm}.weight"])
        self._linear(f"{p}fused_qkv_a_proj", [self.w[f"{p}{x}.weight"] for x in ("q_a_proj", "kv_a_proj_with_mqa")])
        for name in ("q_b_proj", "kv_b_proj"):
            self._linear(f"{p}{name}", [self._rows(self.w[f"{p}{name}.weight"])])
        self._linear(f"{p}o_proj", [self._columns(self.w[f"{p}o_proj.weight"])])

    def _mlp(self, p: str) -> None:
        self._linear(f"{p}gate_up_proj", [self._rows(self.w[f"{p}{x}_proj.weight"]) for x in ("gate", "up")])
        self._linear(f"{p}down_proj", [self._columns(self.w[f"{p}down_proj.weight"])])

    def _experts(self, p: str) -> None:
        self._plain(f"{p}gate.weight", self.w[f"{p}gate.weight"])
        if f"{p}gate.e_score_correction_bias" in self.w:
            self.out[f"{p}gate.e_score_correction_bias"] = self.w[f"{p}gate.e_score_correction_bias"]
        if f"{p}shared_experts.gate_proj.weight" in self.w:
            self._mlp(f"{p}shared_experts.")
        mine = np.array_split(np.arange(self.model.num_experts), self.ep)[self.ep_rank]
        w13: list[list[Array]] = []
        w2: list[list[Array]] = []
        for expert in mine:
            e = f"{p}experts.{expert}."
            w13.append([self._etp(self.w[f"{e}{x}_proj.weight"], 0) for x in ("gate", "up")])
            w2.append([self._etp(self.w[f"{e}down_proj.weight"], 1)])
        for name, stack in (("w13_weight", w13), ("w2_weight", w2)):
            made = [self._converted(parts) for parts in stack]
            self.out[f"{p}experts.{name}"] = np.stack([value for value, _ in made])
            if made[0][1] is not None:
                self.out[f"{p}experts.{name}_scale_inv"] = np.stack([scale for _, scale in made])

    def _gpt2(self) -> None:
        t = "transformer."
        self._plain(f"{t}wte.weight", self._vocab(f"{t}wte.weight"))
        for name in ("wpe.weight", "ln_f.weight", "ln_f.bias"):
            self._plain(t + name, self.w[t + name])
        heads, hidden = self.c["n_head"], self.c["n_embd"]
        for layer in range(self.c["n_layer"]):
            p = f"{t}h.{layer}."
            for norm in ("ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias"):
                self._plain(p + norm, self.w[p + norm])
            mine = range(self.tp_rank * heads // self.tp, (self.tp_rank + 1) * heads // self.tp)
            qkv = np.split(self.w[f"{p}attn.c_attn.weight"].T, 3)
            self._linear(f"{p}attn.c_attn", [self._heads(part, mine, hidden // heads) for part in qkv])
            bias = np.split(self.w[f"{p}attn.c_attn.bias"], 3)
            self._plain(f"{p}attn.c_attn.bias", np.concatenate([self._heads(b, mine, hidden // heads) for b in bias]))
            self._linear(f"{p}attn.c_proj", [self._columns(self.w[f"{p}attn.c_proj.weight"].T)])
            self._linear(f"{p}mlp.c_fc", [self._rows(self.w[f"{p}mlp.c_fc.weight"].T)])
            self._plain(f"{p}mlp.c_fc.bias", self._rows(self.w[f"{p}mlp.c_fc.bias"]))
            self._linear(f"{p}mlp.c_proj", [self._columns(self.w[f"{p}mlp.c_proj.weight"].T)])
            for name in ("attn.c_proj.bias", "mlp.c_proj.bias"):
                self._plain(p + name, self.w[p + name])

    def _vocab(self, name: str) -> Array:
        full = self.w[name]
        multiple = np.lcm(64, self.tp)
        padded = np.zeros((-(-len(full) // multiple) * multiple, full.shape[1]), dtype=full.dtype)
        padded[: len(full)] = full
        return np.split(padded, self.tp)[self.tp_rank]

    def _rows(self, full: Array) -> Array:
        return np.split(full, self.tp)[self.tp_rank]

    def _columns(self, full: Array) -> Array:
        return np.split(full, self.tp, axis=1)[self.tp_rank]

    def _etp(self, full: Array, axis: int) -> Array:
        return np.split(full, self.etp, axis=axis)[self.etp_rank]

    @staticmethod
    def _heads(full: Array, heads: range, width: int) -> Array:
        return np.concatenate([full[head * width : (head + 1) * width] for head in heads])

    def _plain(self, name: str, value: Array) -> None:
        wanted = "bf16" if self.dtype == "fp8-block128" else self.dtype
        self.out[name] = value.astype(NUMPY_DTYPE[wanted])

    def _linear(self, name: str, parts: list[Array]) -> None:
        value, scale = self._converted(parts)
        self.out[f"{name}.weight"] = value
        if scale is not None:
            self.out[f"{name}.weight_scale_inv"] = scale

    def _converted(self, parts: list[Array]) -> tuple[Array, Array | None]:
        """Fused, and quantised part by part: blocks never straddle two source tensors."""
        if self.dtype != "fp8-block128":
            return np.concatenate(parts).astype(NUMPY_DTYPE[self.dtype]), None
        scales = [block_scales(part) for part in parts]
        values = [quantize(part, scale) for part, scale in zip(parts, scales, strict=True)]
        return np.concatenate(values), np.concatenate(scales)
