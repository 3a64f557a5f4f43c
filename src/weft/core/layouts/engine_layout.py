"""Engine layouts from a text: the fused tensors real engines hold, and the declared recipe that makes them.

Axes: `tp` (attention, dense layers, vocabulary), `dp` (attention replicated, "dp-attention"), `ep` (experts), `pp`. One
engine has pp·tp·dp ranks. `tp8` cuts everything 8 ways, `ep8` replicates attention on 8 ranks and spreads the
experts, `tp32.ep32` does both, `tp4.dp8.ep32` is what SGLang calls TP32 EP32 with dp-attention 8. Without `ep`
experts are cut by tensor parallelism; with `ep` smaller than tp·dp the rest of the ranks cut each expert.

    recipe = engine_recipe(load_model("qwen3-235b-a22b"), "ep8", num_replicas=4, dtype="fp8-block128")

Names and fusions are vLLM's: `qkv_proj`, `gate_up_proj`, `experts.w13_weight`, `experts.w2_weight`,
`…_scale_inv`; the vocabulary is padded to a multiple of 64; KV heads repeat when `tp` exceeds them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import lcm

import numpy as np

from weft.core.geometry.boxes import Ints
from weft.core.geometry.scaling import QUANT_BLOCK, scale_shape
from weft.core.layout import Tensor
from weft.core.layouts.axes import check_world, parse_axes
from weft.core.models.model import Model, ModelTensor, Split, expert_range
from weft.core.recipe import Op, Piece, Recipe, RecipeBuilder, padding_piece
from weft.errors import ConfigError, LayoutError

VOCAB_MULTIPLE = 64
DTYPES = ("bf16", "fp16", "fp32", "fp8-block128")
_AXES = ("pp", "tp", "dp", "ep")

_FUSED: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    ("self_attn.fused_qkv_a_proj", ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa")),
    ("self_attn.indexer.wk_weights_proj", ("self_attn.indexer.wk", "self_attn.indexer.weights_proj")),
    ("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),
    ("mlp.shared_experts.gate_up_proj", ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")),
)
"""Declared fusions, by the end of the module name: engine module ← checkpoint modules in order."""

_EXPERT_FUSED = (("w13_weight", ("gate_proj", "up_proj")), ("w2_weight", ("down_proj",)))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMesh:
    """The ranks of one engine. Inside a stage, rank = data part * tp + tensor part = expert part * etp + slice."""

    pp: int
    tp: int
    dp: int
    ep: int

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage."""
        return self.tp * self.dp

    @property
    def expert_tp(self) -> int:
        """Ranks that share the slices of one expert."""
        return self.stage_size // self.ep

    @property
    def num_ranks(self) -> int:
        """Ranks of one engine."""
        return self.pp * self.stage_size


def parse_engine(text: str) -> EngineMesh:
    """The mesh a text describes."""
    axes = parse_axes(text, allowed=_AXES, what="engine", example="tp4.dp2.ep8")
    sizes = {name: size[0] for name, size in axes.items()}
    tp, ep = sizes.get("tp", 1), sizes.get("ep", 1)
    dp = sizes.get("dp", max(ep // tp, 1))
    if tp * dp % ep:
        raise ConfigError(
            f"engine layout `{text}`: {ep} expert parts do not divide the {tp * dp} ranks of a stage (tp·dp)",
            hint="choose ep so that it divides tp·dp",
        )
    mesh = EngineMesh(pp=sizes.get("pp", 1), tp=tp, dp=dp, ep=ep)
    check_world(text, mesh.num_ranks, what="engine")
    return mesh


def engine_recipe(model: Model, text: str, *, num_replicas: int = 1, dtype: str = "bf16") -> Recipe:
    """The declared recipe of identical engines that serve a model."""
    if dtype not in DTYPES:
        raise ConfigError(f"unknown engine dtype `{dtype}`", hint=f"use one of {', '.join(DTYPES)}")
    mesh = parse_engine(text)
    if num_replicas < 1:
        raise ConfigError(f"num_replicas is {num_replicas}", hint="give at least one replica")
    check_world(text, mesh.num_ranks * num_replicas, what="engine")
    _check_fits(model, mesh, text)
    rules = _Rules(model=model, mesh=mesh, num_replicas=num_replicas, dtype=dtype, text=text)
    for group in _fusion_groups(model):
        rules.add(group)
    return rules.build()


@dataclass(frozen=True, slots=True, kw_only=True)
class _FusedTensor:
    """One engine tensor: the checkpoint tensors fused into it; for experts one row of parts per expert."""

    name: str
    parts: tuple[ModelTensor, ...]
    expert_parts: tuple[tuple[ModelTensor, ...], ...] = ()


def _fusion_groups(model: Model) -> Iterator[_FusedTensor]:
    """Checkpoint tensors in order, gathered into the engine tensors they become."""
    by_name = {tensor.name: tensor for tensor in model.policy_tensors}
    done: set[str] = set()
    for tensor in model.policy_tensors:
        if tensor.name in done:
            continue
        if tensor.expert >= 0:
            groups = _expert_groups(tensor, by_name, model.num_experts)
        else:
            groups = [_fused_group(tensor, by_name)]
        for group in groups:
            done.update(part.name for part in group.parts)
            done.update(part.name for parts in group.expert_parts for part in parts)
            yield group


def _fused_group(tensor: ModelTensor, by_name: dict[str, ModelTensor]) -> _FusedTensor:
    module, _, leaf = tensor.name.rpartition(".")
    for engine, sources in _FUSED:
        for source in sources:
            if module.endswith("." + source):
                prefix = module.removesuffix(source)
                names = [f"{prefix}{name}.{leaf}" for name in sources]
                if all(name in by_name for name in names):
                    return _FusedTensor(name=f"{prefix}{engine}.{leaf}", parts=tuple(by_name[name] for name in names))
    return _FusedTensor(name=tensor.name, parts=(tensor,))


def _expert_groups(tensor: ModelTensor, by_name: dict[str, ModelTensor], num_experts: int) -> list[_FusedTensor]:
    prefix = tensor.name.partition(".experts.")[0] + ".experts."
    return [
        _FusedTensor(
            name=prefix + engine,
            parts=(),
            expert_parts=tuple(
                tuple(by_name[f"{prefix}{expert}.{source}.weight"] for source in sources)
                for expert in range(num_experts)
            ),
        )
        for engine, sources in _EXPERT_FUSED
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slice:
    """A box of one checkpoint tensor that goes into one engine tensor, and the padding rows after it."""

    tensor: ModelTensor
    lo: tuple[int, ...]
    extent: tuple[int, ...]
    num_pad_rows: int = 0

    def in_blocks(self) -> _Slice:
        """The same slice of the block scales."""
        lo = tuple(start // QUANT_BLOCK for start in self.lo)
        return replace(self, lo=lo, extent=scale_shape(self.extent))

    @property
    def cuts_blocks(self) -> bool:
        """Whether a border lies inside a block, so that two ranks would need one scale."""
        ends = zip(self.lo, self.extent, self.tensor.shape, strict=True)
        return any(lo % QUANT_BLOCK or ((lo + n) % QUANT_BLOCK and lo + n != size) for lo, n, size in ends)


@dataclass(slots=True, kw_only=True)
class _Rules:
    """Turns fusion groups into engine tensors and pieces, for every distinct part of the engine's mesh."""

    model: Model
    mesh: EngineMesh
    num_replicas: int
    dtype: str
    text: str
    builder: RecipeBuilder = field(init=False)
    misaligned: dict[str, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.builder = RecipeBuilder(num_replicas=self.num_replicas)

    def build(self) -> Recipe:
        if self.misaligned:
            raise LayoutError(
                f"engine layout `{self.text}` cuts FP8 blocks of {QUANT_BLOCK} in `{self.model.name}`",
                problems=tuple(self.misaligned),
                hint="use a smaller tp (with ep for the experts), or bf16",
            )
        return self.builder.build(num_ranks=self.mesh.num_ranks * self.num_replicas, text=self.text)

    def add(self, group: _FusedTensor) -> None:
        """All engine tensors of one fusion group."""
        if group.expert_parts:
            self._add_experts(group)
            return
        sliced = any(part.split is not Split.NONE for part in group.parts)
        inside = np.arange(self.mesh.stage_size)
        for part in range(self.mesh.tp if sliced else 1):
            positions = inside[inside % self.mesh.tp == part] if sliced else inside
            slices = _slices(group.parts, self.mesh.tp, part)
            self._emit(group.name, slices, self._ranks(group.parts[0], positions))

    def _add_experts(self, group: _FusedTensor) -> None:
        """Experts of a layer are alike: the pieces of one, repeated along a new first dimension."""
        num_slices = self.mesh.expert_tp
        first = group.expert_parts[0]
        for part in range(num_slices):
            slices = _slices(first, num_slices, part)
            for expert_part in range(self.mesh.ep):
                local = expert_range(len(group.expert_parts), self.mesh.ep, expert_part)
                sources = [tuple(t.name for t in group.expert_parts[expert]) for expert in local]
                position = np.array([expert_part * num_slices + part])
                self._emit(group.name, slices, self._ranks(first[0], position), stack=sources)

    def _ranks(self, tensor: ModelTensor, positions: Ints) -> Ints:
        """The ranks, in all replicas, at some positions inside the stages that serve a tensor."""
        stages = np.array(self.model.stages_of(tensor, self.mesh.pp))
        in_engine = (stages[:, None] * self.mesh.stage_size + positions).ravel()
        return (np.arange(self.num_replicas)[:, None] * self.mesh.num_ranks + in_engine).ravel()

    def _emit(
        self, name: str, slices: list[_Slice], ranks: Ints, *, stack: Sequence[tuple[str, ...]] | None = None
    ) -> None:
        """Add one engine tensor in the engine's precision; a quantised one comes with its scales."""
        like = slices[0].tensor
        if self.dtype == "fp8-block128" and like.quantized and not like.engine_dtype:
            self.misaligned.update(dict.fromkeys(piece.tensor.name for piece in slices if piece.cuts_blocks))
            not_last = (piece for piece in slices[:-1] if piece.extent[0] % QUANT_BLOCK)
            self.misaligned.update(dict.fromkeys(piece.tensor.name for piece in not_last))
            blocks = [piece.in_blocks() for piece in slices]
            self._add_tensor(name, "fp8_e4m3", Op.QUANTIZE, slices, ranks, stack)
            self._add_tensor(f"{name}_scale_inv", "fp32", Op.SCALE, blocks, ranks, stack)
            return
        plain = "bf16" if self.dtype == "fp8-block128" else self.dtype
        dtype = like.dtype if like.keeps_dtype else plain if like.engine_dtype in ("", "plain") else like.engine_dtype
        self._add_tensor(name, dtype, Op.COPY if like.dtype == dtype else Op.CAST, slices, ranks, stack)

    def _add_tensor(
        self,
        name: str,
        dtype: str,
        op: Op,
        slices: list[_Slice],
        ranks: Ints,
        stack: Sequence[tuple[str, ...]] | None,
    ) -> None:
        pieces, shape = _fuse(name, slices, op)
        if stack is None:
            self.builder.add(Tensor(name=name, dtype=dtype, shape=shape), ranks, pieces)
        else:
            tensor = Tensor(name=name, dtype=dtype, shape=(len(stack), *shape))
            self.builder.add_stacked(tensor, ranks, pieces, stack)


def _slices(parts: Sequence[ModelTensor], num_parts: int, part: int) -> list[_Slice]:
    """What one tensor-parallel part takes of each checkpoint tensor."""
    found = []
    for tensor in parts:
        if tensor.split is Split.VOCAB:
            found.append(_vocab_slice(tensor, num_parts, part))
        else:
            found += [_Slice(tensor=tensor, lo=lo, extent=n) for lo, n in tensor.part_boxes(num_parts, part)]
    return found


def _vocab_slice(tensor: ModelTensor, num_parts: int, part: int) -> _Slice:
    """Equal parts of the padded vocabulary; the last ones end in padding rows."""
    multiple = lcm(VOCAB_MULTIPLE, num_parts)
    per_part = -(-tensor.num_units // multiple) * multiple // num_parts
    start = min(part * per_part, tensor.num_units)
    length = min(per_part, tensor.num_units - start)
    lo, extent = tensor.cut(start, length)
    return _Slice(tensor=tensor, lo=lo, extent=extent, num_pad_rows=per_part - length)


def _fuse(name: str, slices: list[_Slice], op: Op) -> tuple[list[Piece], tuple[int, ...]]:
    """Pieces that lay slices one after the other along the engine tensor's first dimension, and its shape."""
    pieces: list[Piece] = []
    rows = 0
    rest: tuple[int, ...] = ()
    for part in slices:
        axes = tuple(range(len(part.extent)))
        axes = axes[::-1] if part.tensor.transposed and len(axes) > 1 else axes
        extent = tuple(part.extent[axis] for axis in axes)
        rest = extent[1:]
        dst_lo = (rows, *(0,) * len(rest))
        if extent[0]:
            source = part.tensor.name
            pieces.append(
                Piece(dst=name, source=source, dst_lo=dst_lo, extent=extent, src_lo=part.lo, axes=axes, op=op)
            )
        rows += extent[0]
        if part.num_pad_rows:
            pieces.append(padding_piece(name, (rows, *(0,) * len(rest)), (part.num_pad_rows, *rest)))
            rows += part.num_pad_rows
    return pieces, (rows, *rest)


def _check_fits(model: Model, mesh: EngineMesh, text: str) -> None:
    problems: dict[str, str] = {}
    for tensor in model.policy_tensors:
        parts = mesh.expert_tp if tensor.expert >= 0 else mesh.tp
        if not tensor.divides_into(parts):
            problems.setdefault(tensor.unit, f"{tensor.name}: {tensor.num_units} {tensor.unit} over {parts} parts")
    if mesh.ep > max(model.num_experts, 1):
        problems["experts"] = f"{model.num_experts} experts over ep{mesh.ep}"
    if mesh.pp > model.num_layers:
        problems["layers"] = f"{model.num_layers} layers over pp{mesh.pp}"
    if problems:
        raise LayoutError(
            f"engine layout `{text}` does not fit `{model.name}`",
            problems=tuple(problems.values()),
            hint="tp must divide the attention heads and the intermediate size; ep must not exceed the experts",
        )
