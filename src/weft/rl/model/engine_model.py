"""The policy as engines hold it: fused tensors, cut for tensor parallelism, in BF16, FP32 or FP8 with a scale per row.

    model = EngineModel(architecture, dtype=Precision.FP8, rank=0, num_ranks=2)
    weights = weft.weights_of(model, parts=model.parts)       # which box of which trainer tensor lies where

Every parameter knows the boxes of trainer tensors it is made of; that is all weft needs to write it. Nothing is
loaded here: version 0 arrives like all others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft import Part
from weft.errors import ConfigError
from weft.rl.model.architecture import Architecture
from weft.rl.model.policy import DTYPES
from weft.rl.model.rotation import rotate, rotation
from weft.rl.settings import Precision

Reduce = Callable[[Tensor], Tensor]
"""Sums the partial results of an engine's ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Some output features of a trainer's linear layer."""

    source: str
    features: int
    """Of the whole layer."""
    lo: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Some of its input features."""

    features: int
    lo: int
    count: int


class FusedLinear(nn.Module):
    """Cuts of several linear layers, stacked; `stored_in_out`: as GPT-2 stores weights."""

    def __init__(
        self, cuts: Sequence[Cut], inputs: Inputs, *, bias: bool, dtype: Precision, stored_in_out: bool = False
    ) -> None:
        super().__init__()
        outputs = sum(cut.count for cut in cuts)
        self.stored_in_out = stored_in_out
        shape = _turned((outputs, inputs.count), stored_in_out)
        self.weight = _parameter(shape, DTYPES[dtype])
        self.weight_scale = _parameter((shape[0], 1), torch.float32) if dtype is Precision.FP8 else None
        plain = Precision.BF16 if dtype is Precision.FP8 else dtype
        self.bias = _parameter((outputs,), DTYPES[plain]) if bias else None
        self.parts: dict[str, list[Part]] = {"weight": [], "weight_scale": [], "bias": []}
        at = 0
        for cut in cuts:
            self._add(cut, inputs, at)
            at += cut.count

    def _add(self, cut: Cut, inputs: Inputs, at: int) -> None:
        """Where a cut lies in the parameters."""
        name, turned = cut.source, self.stored_in_out
        shape = _turned((cut.features, inputs.features), turned)
        lo, extent = _turned((cut.lo, inputs.lo), turned), _turned((cut.count, inputs.count), turned)
        self.parts["weight"].append(
            Part(source=f"{name}.weight", shape=shape, lo=lo, extent=extent, at=_turned((at, 0), turned))
        )
        scales = f"{name}.weight_scale"
        if self.weight_scale is not None and not any(part.source == scales for part in self.parts["weight_scale"]):
            where = (0, 0) if turned else (at, 0)
            self.parts["weight_scale"].append(
                Part(source=scales, shape=(shape[0], 1), lo=(lo[0], 0), extent=(extent[0], 1), at=where)
            )
        self.parts["bias"].append(
            Part(source=f"{name}.bias", shape=(cut.features,), lo=(cut.lo,), extent=(cut.count,), at=(at,))
        )

    def forward(self, x: Tensor, *, with_bias: bool = True) -> Tensor:
        """`x · weightᵀ + bias`, in the precision of `x`."""
        weight = self.weight.to(x.dtype)
        if self.weight_scale is not None:
            weight = weight * self.weight_scale.to(x.dtype)
        bias = self.bias.to(x.dtype) if self.bias is not None and with_bias else None
        return F.linear(x, weight.T if self.stored_in_out else weight, bias)


class Norm(nn.Module):
    """A root-mean-square norm, or a layer norm where it has a bias."""

    def __init__(self, source: str, size: int, *, eps: float, bias: bool, dtype: Precision) -> None:
        super().__init__()
        self.eps = eps
        self.weight = _parameter((size,), DTYPES[dtype])
        self.bias = _parameter((size,), DTYPES[dtype]) if bias else None
        self.parts = {
            name: [Part(source=f"{source}.{name}", shape=(size,), lo=(0,), extent=(size,), at=(0,))]
            for name in ("weight", "bias")
        }

    def forward(self, x: Tensor) -> Tensor:
        """Norm over the last dimension."""
        weight = self.weight.to(x.dtype)
        if self.bias is None:
            return F.rms_norm(x, x.shape[-1:], weight, self.eps)
        return F.layer_norm(x, x.shape[-1:], weight, self.bias.to(x.dtype), self.eps)


class LookupTable(nn.Module):
    """Rows looked up by number: embeddings, positions, or the output layer."""

    def __init__(self, source: str, rows: int, columns: int, dtype: Precision) -> None:
        super().__init__()
        self.weight = _parameter((rows, columns), DTYPES[dtype])
        whole = Part(source=f"{source}.weight", shape=(rows, columns), lo=(0, 0), extent=(rows, columns), at=(0, 0))
        self.parts = {"weight": [whole]}

    def forward(self, numbers: Tensor) -> Tensor:
        """The rows of these numbers."""
        return F.embedding(numbers, self.weight)


class Cache:
    """Keys and values of all tokens so far."""

    def __init__(self, a: Architecture, *, kv_heads: int, batch: int, length: int, like: Tensor) -> None:
        shape = (a.layers, 2, batch, kv_heads, length, a.head_dim)
        self.memory = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self.length = 0

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keep new keys and values [batch, heads, new, head_dim]; returns all of them so far."""
        end = self.length + keys.shape[2]
        self.memory[layer, 0, :, :, self.length : end] = keys
        self.memory[layer, 1, :, :, self.length : end] = values
        return self.memory[layer, 0, :, :, :end], self.memory[layer, 1, :, :, :end]


class EngineBlock(nn.Module):
    """One layer of one rank: its heads and its share of the feed-forward layer."""

    def __init__(self, a: Architecture, number: int, dtype: Precision, rank: int, num_ranks: int) -> None:
        super().__init__()
        self.a, self.number, self.adds_bias = a, number, rank == 0
        self.heads, first = a.heads // num_ranks, rank * (a.heads // num_ranks)
        self.kv_heads = max(a.kv_heads // num_ranks, 1)
        kv_first = first * a.kv_heads // a.heads
        width = a.width // num_ranks
        heads = Inputs(features=a.heads * a.head_dim, lo=first * a.head_dim, count=self.heads * a.head_dim)
        whole = Inputs(features=a.hidden, lo=0, count=a.hidden)
        inner = Inputs(features=a.width, lo=rank * width, count=width)
        names = _GPT2_NAMES if a.is_gpt2 else _GATED_NAMES
        at = names["layer"].format(number)
        linear = partial(FusedLinear, dtype=dtype, stored_in_out=a.is_gpt2)
        queries = (first * a.head_dim, self.heads * a.head_dim)
        keys = (kv_first * a.head_dim, self.kv_heads * a.head_dim)
        qkv = _gpt2_qkv(at, a, queries) if a.is_gpt2 else _gated_qkv(at, a, queries, keys)
        self.qkv = linear(qkv, whole, bias=a.qkv_bias)
        self.out = linear([_all(at + names["out"], a.hidden)], heads, bias=a.is_gpt2)
        into = [Cut(source=at + name, features=a.width, lo=rank * width, count=width) for name in names["into"].split()]
        self.into = linear(into, whole, bias=a.is_gpt2)
        self.down = linear([_all(at + names["down"], a.hidden)], inner, bias=a.is_gpt2)
        plain = Precision.BF16 if dtype is Precision.FP8 else dtype
        norm = partial(Norm, eps=a.eps, bias=a.is_gpt2, dtype=plain)
        self.first_norm = norm(at + names["first_norm"], a.hidden)
        self.second_norm = norm(at + names["second_norm"], a.hidden)
        if a.qk_norm:
            self.q_norm = norm(f"{at}.self_attn.q_norm", a.head_dim)
            self.k_norm = norm(f"{at}.self_attn.k_norm", a.head_dim)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor] | None, cache: Cache, reduce: Reduce) -> Tensor:
        """[batch, new, hidden] to the same."""
        x = x + reduce(self.out(self._mix(self.first_norm(x), turn, cache), with_bias=self.adds_bias))
        inner = self.into(self.second_norm(x))
        if self.a.is_gpt2:
            inner = F.gelu(inner, approximate="tanh")
        else:
            gate, up = inner.chunk(2, dim=-1)
            inner = F.silu(gate) * up
        return x + reduce(self.down(inner, with_bias=self.adds_bias))

    def _mix(self, x: Tensor, turn: tuple[Tensor, Tensor] | None, cache: Cache) -> Tensor:
        sizes = [self.heads, self.kv_heads, self.kv_heads]
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.a.head_dim)).split(sizes, dim=2)
        if self.a.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if turn is not None:
            q, k = rotate(q, turn), rotate(k, turn)
        keys, values = cache.extend(self.number, k.transpose(1, 2), v.transpose(1, 2))
        repeat = self.heads // self.kv_heads
        keys, values = keys.repeat_interleave(repeat, 1), values.repeat_interleave(repeat, 1)
        mixed = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, is_causal=x.shape[1] > 1)
        return mixed.transpose(1, 2).flatten(2)


class EngineModel(nn.Module):
    """One rank of an engine."""

    def __init__(self, a: Architecture, *, dtype: Precision, rank: int = 0, num_ranks: int = 1) -> None:
        super().__init__()
        check_divides(a, num_ranks)
        self.a, self._kv_heads = a, max(a.kv_heads // num_ranks, 1)
        plain = Precision.BF16 if dtype is Precision.FP8 else dtype
        embedding, positions, norm = _GPT2_OUTER if a.is_gpt2 else _GATED_OUTER
        self.embed = LookupTable(embedding, a.vocab_size, a.hidden, plain)
        self.positions = LookupTable(positions, a.max_positions, a.hidden, plain) if a.is_gpt2 else None
        self.blocks = nn.ModuleList(EngineBlock(a, number, dtype, rank, num_ranks) for number in range(a.layers))
        self.norm = Norm(norm, a.hidden, eps=a.eps, bias=a.is_gpt2, dtype=plain)
        self.head = None if a.tied else LookupTable("lm_head", a.vocab_size, a.hidden, plain)
        self.requires_grad_(False)

    @property
    def parts(self) -> dict[str, list[Part]]:
        """Which boxes of which trainer tensors every parameter is made of."""
        found: dict[str, list[Part]] = {}
        for name, module in self.named_modules():
            if isinstance(module, (FusedLinear, Norm, LookupTable)):
                found |= {f"{name}.{own}": module.parts[own] for own, _ in module.named_parameters()}
        return found

    @torch.no_grad()
    def load(self, name: str, whole: Tensor) -> None:
        """Put a whole trainer tensor where it belongs, as loaders do; for collectives, and to check what weft wrote."""
        found = {name: whole}
        if whole.dim() == 2:
            found[f"{name} codes"], found[f"{name}_scale"] = quantized_rows(whole)
        parameters = dict(self.named_parameters())
        for parameter, parts in self.parts.items():
            target = parameters[parameter].data
            is_fp8 = target.dtype == torch.float8_e4m3fn
            for part in parts:
                source = found.get(f"{part.source} codes" if is_fp8 else part.source)
                if source is not None:
                    _box(target, part.at, part.extent).copy_(_box(source, part.lo, part.extent))

    def cache(self, batch: int, length: int) -> Cache:
        """Room for the keys and values of a batch."""
        return Cache(self.a, kv_heads=self._kv_heads, batch=batch, length=length, like=self._compute())

    def _compute(self) -> Tensor:
        """A tensor with the precision and device used for arithmetic."""
        weight = self.embed.weight
        return torch.empty(
            0, dtype=torch.float32 if weight.device.type == "cpu" else weight.dtype, device=weight.device
        )

    def forward(self, tokens: Tensor, cache: Cache, reduce: Reduce) -> Tensor:
        """Logits [batch, vocabulary] after the last of these new tokens."""
        compute = self._compute()
        numbers = torch.arange(cache.length, cache.length + tokens.shape[1], device=tokens.device)
        x = self.embed(tokens).to(compute.dtype)
        turn = None
        if self.positions is not None:
            x = x + self.positions(numbers).to(compute.dtype)
        else:
            turn = rotation(numbers, self.a.head_dim, self.a.rope_theta, compute.dtype)
        for block in self.blocks:
            x = block(x, turn, cache, reduce)
        cache.length += tokens.shape[1]
        head = self.embed if self.head is None else self.head
        return F.linear(self.norm(x[:, -1]), head.weight.to(compute.dtype)).float()


_GATED_NAMES = {
    "layer": "model.layers.{}",
    "out": ".self_attn.o_proj",
    "into": ".mlp.gate_proj .mlp.up_proj",
    "down": ".mlp.down_proj",
    "first_norm": ".input_layernorm",
    "second_norm": ".post_attention_layernorm",
}
_GPT2_NAMES = {
    "layer": "transformer.h.{}",
    "out": ".attn.c_proj",
    "into": ".mlp.c_fc",
    "down": ".mlp.c_proj",
    "first_norm": ".ln_1",
    "second_norm": ".ln_2",
}
_GATED_OUTER = ("model.embed_tokens", "", "model.norm")
_GPT2_OUTER = ("transformer.wte", "transformer.wpe", "transformer.ln_f")


def quantized_rows(whole: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 codes and the scale of every row, as `weft.codec.fp8` defines them."""
    wide = whole.float()
    scale = wide.abs().amax(dim=1, keepdim=True).clamp(min=1e-10) / torch.tensor(448.0)
    return (wide * (1 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def _box(tensor: Tensor, lo: tuple[int, ...] | None, extent: tuple[int, ...] | None) -> Tensor:
    lo, extent = lo or (0,) * tensor.dim(), extent or tuple(tensor.shape)
    return tensor[tuple(slice(start, start + count) for start, count in zip(lo, extent, strict=True))]


def _parameter(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape).to(dtype), requires_grad=False)


def _turned(pair: tuple[int, int], turned: bool) -> tuple[int, int]:
    return (pair[1], pair[0]) if turned else pair


def _all(source: str, features: int) -> Cut:
    return Cut(source=source, features=features, lo=0, count=features)


def _gated_qkv(at: str, a: Architecture, queries: tuple[int, int], keys: tuple[int, int]) -> list[Cut]:
    """Queries, keys and values of three layers."""
    sizes = {"q_proj": (a.heads, queries), "k_proj": (a.kv_heads, keys), "v_proj": (a.kv_heads, keys)}
    return [
        Cut(source=f"{at}.self_attn.{name}", features=heads * a.head_dim, lo=lo, count=count)
        for name, (heads, (lo, count)) in sizes.items()
    ]


def _gpt2_qkv(at: str, a: Architecture, queries: tuple[int, int]) -> list[Cut]:
    """Queries, keys and values of one layer that has them side by side."""
    lo, count = queries
    if count == a.hidden:
        return [_all(f"{at}.attn.c_attn", 3 * a.hidden)]
    return [
        Cut(source=f"{at}.attn.c_attn", features=3 * a.hidden, lo=third * a.hidden + lo, count=count)
        for third in range(3)
    ]


def check_divides(a: Architecture, num_ranks: int) -> None:
    """Raise if a model cannot be cut among so many ranks."""
    if a.heads % num_ranks or a.width % num_ranks or (a.kv_heads % num_ranks and num_ranks % a.kv_heads):
        raise ConfigError(
            f"{a.heads} heads, {a.kv_heads} key-value heads and a width of {a.width} do not divide among "
            f"{num_ranks} ranks"
        )
