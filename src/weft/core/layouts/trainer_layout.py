"""Trainer layouts from a text: what each rank holds under DDP, FSDP, HSDP, tensor, pipeline and expert parallelism.

Two families of text; pipeline stages are always outermost:

- *sharded data parallel* (`ddp8`, `fsdp128`, `hsdp8x16`, `pp2.ep8.fsdp16`, `fsdp8.tp4`): the number of ranks is the
  product of the axes, and ranks are numbered with the last axis of the text fastest, so that `fsdp16.ep8` has the
  eight expert parts on neighbouring ranks and `ep8.fsdp16` the sixteen shards. `hsdpRxS` is R replicas of S shards.
  Experts are split over `ep` and then sharded over `fsdp`; everything else is sharded over both (`fsdp16.ep8` is
  128-way FSDP for attention). A part after a slash overrides that: `fsdp16.ep8/hsdp16x8` keeps attention sharded
  8-way inside each of 16 groups of neighbours.
- *Megatron* (`tp4.pp4.cp2.ep16`, `tp4.dp4.ep8`): pipeline stages of tp·cp·dp ranks; experts are folded over the ranks
  of a stage (`ep` divides tp·cp·dp; `dp` defaults to the smallest that makes it so).

FSDP cuts dimension 0 by PyTorch's rule: ceil-sized chunks, the last ones short or empty.

    layout = trainer_layout(load_model("kimi-k2"), "pp2.fsdp16.ep8/hsdp16x8")
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from math import gcd, prod

import numpy as np

from weft.core.geometry.boxes import Ints, pad_dims, row_major_strides
from weft.core.geometry.splits import chunk
from weft.core.layout import MAX_SHARD_ROWS, GroupBuilder, Layout
from weft.core.layouts.axes import check_world, parse_axes
from weft.core.models.model import Box, Model, ModelTensor, expert_range
from weft.errors import ConfigError, LayoutError

_SHARDED = ("pp", "ddp", "fsdp", "hsdp", "ep", "tp")
_MEGATRON = ("pp", "dp", "cp", "tp", "ep")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """How the ranks of one pipeline stage divide tensors.

    `ranks[r, s, e, t]` is the rank (inside its stage) with replica r, FSDP shard s, expert part e, tensor part t.
    """

    num_stages: int
    dense: Ints
    """Shape (replicas, shards, tensor parts): for everything but experts."""
    expert: Ints
    """Shape (replicas, shards, expert parts, tensor parts)."""

    @property
    def stage_size(self) -> int:
        """Ranks in one pipeline stage."""
        return int(self.dense.size)

    @property
    def num_ranks(self) -> int:
        """Ranks in all."""
        return self.num_stages * self.stage_size


class Gather(enum.StrEnum):
    """What is assembled on the trainers before sending. weft itself gathers nothing; other systems do."""

    NONE = "none"
    MESH = "mesh"
    """`full_tensor()`: every FSDP shard is whole on all ranks of its mesh."""
    WORLD = "world"
    """Everything on every rank, as sending from rank 0 needs it."""


def trainer_layout(model: Model, text: str, *, gather: Gather = Gather.NONE) -> Layout:
    """The layout of a model's policy tensors under a text, optionally after a gather."""
    mesh = parse_trainer(text)
    if gather is Gather.MESH:
        mesh = _gathered(mesh)
    elif gather is Gather.WORLD:
        _check_divisible(model, mesh, text)
        mesh = parse_trainer(f"ddp{mesh.num_ranks}")
    _check_divisible(model, mesh, text)
    columns = _Columns(mesh, model)
    tensors = model.policy_tensors
    for i, tensor in enumerate(tensors):
        columns.place(i, tensor)
    return columns.build(tensors, text)


def parse_trainer(text: str) -> Mesh:
    """The mesh a text describes."""
    main, _, dense = text.partition("/")
    axes = parse_axes(main, allowed=sorted({*_SHARDED, *_MEGATRON}), what="trainer", example="pp2.ep8.fsdp16")
    sharded = [name for name in ("ddp", "fsdp", "hsdp") if name in axes]
    if len(sharded) > 1:
        raise ConfigError(f"trainer layout `{text}` mixes {' and '.join(sharded)}", hint="use hsdpRxS for both")
    if sharded and ("dp" in axes or "cp" in axes):
        raise ConfigError(
            f"trainer layout `{text}` mixes {sharded[0]} with Megatron's dp/cp",
            hint="use hsdpRxS for replicas",
        )
    sizes = {name: size[0] for name, size in axes.items() if name != "hsdp"}
    if sharded:
        replicas, shards = _data_parallel(axes)
        order = ["data" if name in sharded else name for name in axes if name != "pp"]
        check_world(text, prod(sizes.values()) * (replicas * shards if "hsdp" in axes else 1), what="trainer")
        mesh = _sharded_mesh(sizes, replicas, shards, order)
    else:
        mesh = _megatron_mesh(sizes, text)
    check_world(text, mesh.num_ranks, what="trainer")
    return _with_dense(mesh, dense, text) if dense else mesh


def _data_parallel(axes: dict[str, tuple[int, ...]]) -> tuple[int, int]:
    """Replicas and shards of the data-parallel axis."""
    if "hsdp" in axes:
        return axes["hsdp"][0], axes["hsdp"][1]
    return (axes["ddp"][0], 1) if "ddp" in axes else (1, axes["fsdp"][0])


def _sharded_mesh(sizes: dict[str, int], replicas: int, shards: int, order: list[str]) -> Mesh:
    """Ranks numbered along `order` (last fastest), arranged as (replicas, shards, expert parts, tensor parts)."""
    experts, parts = sizes.get("ep", 1), sizes.get("tp", 1)
    extent = {"data": replicas * shards, "ep": experts, "tp": parts}
    names = [*(name for name in extent if name not in order), *order]
    ranks = np.arange(replicas * shards * experts * parts).reshape([extent[name] for name in names])
    ranks = ranks.transpose([names.index(name) for name in ("data", "ep", "tp")])
    expert = ranks.reshape(replicas, shards, experts, parts)
    dense_shards = 1 if "ddp" in sizes else shards * experts
    return Mesh(num_stages=sizes.get("pp", 1), dense=expert.reshape(-1, dense_shards, parts), expert=expert)


def _megatron_mesh(sizes: dict[str, int], text: str) -> Mesh:
    parts, experts = sizes.get("tp", 1), sizes.get("ep", 1)
    block = parts * sizes.get("cp", 1)
    data = sizes.get("dp", experts // gcd(experts, block))
    stage = block * data
    check_world(text, sizes.get("pp", 1) * stage, what="trainer")
    if stage % experts:
        raise ConfigError(
            f"trainer layout `{text}`: {experts} expert parts do not divide the {stage} ranks of a stage (tp·cp·dp)",
            hint="choose dp so that ep divides tp·cp·dp",
        )
    ranks = np.arange(stage)
    return Mesh(
        num_stages=sizes.get("pp", 1),
        dense=ranks.reshape(-1, 1, parts),
        expert=ranks.reshape(-1, 1, experts, 1),
    )


def _with_dense(mesh: Mesh, dense: str, text: str) -> Mesh:
    """Replace the sharding of everything but experts by the part after the slash."""
    axes = parse_axes(dense, allowed=("ddp", "fsdp", "hsdp"), what="trainer", example="fsdp16.ep8/hsdp16x8")
    if len(axes) != 1:
        raise ConfigError(f"trainer layout `{text}`: expected one axis after the slash", hint="for example /hsdp16x8")
    replicas, shards = _data_parallel(axes)
    parts = mesh.dense.shape[-1]
    if replicas * shards * parts != mesh.stage_size:
        raise ConfigError(
            f"trainer layout `{text}`: `{dense}` has {replicas * shards * parts} ranks, a stage {mesh.stage_size}",
            hint="replicas x shards after the slash must fill one pipeline stage",
        )
    dense_ranks = np.arange(mesh.stage_size).reshape(replicas, shards, parts)
    return Mesh(num_stages=mesh.num_stages, dense=dense_ranks, expert=mesh.expert)


def _gathered(mesh: Mesh) -> Mesh:
    """The mesh after a gather: every rank with one FSDP shard has them all."""
    replicas, shards, experts, parts = mesh.expert.shape
    return Mesh(
        num_stages=mesh.num_stages,
        dense=mesh.dense.reshape(-1, 1, mesh.dense.shape[-1]),
        expert=mesh.expert.reshape(replicas * shards, 1, experts, parts),
    )


def _check_divisible(model: Model, mesh: Mesh, text: str) -> None:
    problems: dict[str, str] = {}
    for tensor in model.policy_tensors:
        parts = mesh.expert.shape[-1] if tensor.expert >= 0 else mesh.dense.shape[-1]
        if not tensor.divides_into(parts):
            problems.setdefault(tensor.unit, f"{tensor.name}: {tensor.num_units} {tensor.unit} over {parts} parts")
    if problems:
        raise LayoutError(
            f"trainer layout `{text}` does not fit `{model.name}`",
            problems=tuple(problems.values()),
            hint="tensor parallelism must divide the attention heads and the intermediate size",
        )
    if mesh.num_stages > model.num_layers:
        raise LayoutError(
            f"trainer layout `{text}` has more pipeline stages than `{model.name}` has layers",
            hint=f"use at most pp{model.num_layers}",
        )
    experts = mesh.expert.shape[2]
    if experts > max(model.num_experts, 1):
        raise LayoutError(
            f"trainer layout `{text}` splits {model.num_experts} experts over {experts} parts",
            hint="leave `ep` out for models without experts" if not model.num_experts else "use a smaller `ep`",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _TensorShards:
    """The shard rows of one tensor."""

    lo: Ints
    extent: Ints
    strides: Ints
    groups: Ints


def _rows_of(boxes: list[Box], num_shards: int, shard: int, *, side_by_side: bool) -> list[Box]:
    """One FSDP shard of what a tensor-parallel part holds: a chunk of the rows of its boxes.

    The boxes of a fused tensor lie below each other in local memory, or side by side where columns are cut.
    """
    if side_by_side:
        start, length = chunk(boxes[0][1][0], num_shards, shard)
        return [((lo[0] + start, *lo[1:]), (length, *extent[1:])) for lo, extent in boxes if length]
    start, length = chunk(sum(extent[0] for _, extent in boxes), num_shards, shard)
    found, row = [], 0
    for lo, extent in boxes:
        first, last = max(start, row), min(start + length, row + extent[0])
        if first < last:
            found.append(((lo[0] + first - row, *lo[1:]), (last - first, *extent[1:])))
        row += extent[0]
    return found


class _Columns:
    """Collects shard rows; equal (shape, placement) pairs share one template of boxes."""

    def __init__(self, mesh: Mesh, model: Model) -> None:
        self._mesh = mesh
        self._model = model
        num_parts = mesh.expert.shape[2]
        self._part_of_expert = {
            expert: part for part in range(num_parts) for expert in expert_range(model.num_experts, num_parts, part)
        }
        self._groups = GroupBuilder()
        self._templates: dict[tuple[object, ...], _TensorShards] = {}
        self._tensor_of: list[int] = []
        self._blocks: list[_TensorShards] = []

    def place(self, number: int, tensor: ModelTensor) -> None:
        """Add the shards of one tensor."""
        stages = self._model.stages_of(tensor, self._mesh.num_stages)
        part = self._part_of_expert[tensor.expert] if tensor.expert >= 0 else -1
        key = (
            tensor.shape,
            tensor.split,
            tensor.num_units,
            tensor.num_fused,
            tensor.transposed,
            stages,
            part,
        )
        if key not in self._templates:
            self._templates[key] = self._template(tensor, stages, part)
        self._tensor_of.append(number)
        self._blocks.append(self._templates[key])

    def _template(self, tensor: ModelTensor, stages: tuple[int, ...], part: int) -> _TensorShards:
        """Boxes and groups of a tensor: tensor parallelism first, then FSDP along dimension 0 of what is left."""
        ranks = self._mesh.dense if part < 0 else self._mesh.expert[:, :, part, :]
        stage_bases = np.array(stages) * self._mesh.stage_size
        holders: dict[Box, list[Ints]] = {}
        for tensor_part in range(ranks.shape[2]):
            boxes = tensor.part_boxes(ranks.shape[2], tensor_part)
            for shard in range(ranks.shape[1]):
                members = (ranks[:, shard, tensor_part][:, None] + stage_bases).ravel()
                for box in _rows_of(boxes, ranks.shape[1], shard, side_by_side=tensor.split_dim == 1):
                    holders.setdefault(box, []).append(members)
        los, extents = zip(*holders, strict=True)
        extent_column = np.array(extents, dtype=np.int64)
        strides = row_major_strides(extent_column)
        if tensor.num_fused > 1 and tensor.split_dim == 1:
            strides[:, 0] *= tensor.num_fused if ranks.shape[2] > 1 else 1
        return _TensorShards(
            lo=np.array(los, dtype=np.int64),
            extent=extent_column,
            strides=strides,
            groups=np.array([self._groups.add(np.concatenate(same)) for same in holders.values()], dtype=np.int32),
        )

    def build(self, tensors: tuple[ModelTensor, ...], text: str) -> Layout:
        num_dims = max(len(tensor.shape) for tensor in tensors)
        lengths = [len(block.groups) for block in self._blocks]
        if sum(lengths) > MAX_SHARD_ROWS:
            raise ConfigError(
                f"trainer layout `{text}` cuts `{self._model.name}` into {sum(lengths)} shards",
                hint=f"at most {MAX_SHARD_ROWS} shards are supported",
            )
        return Layout(
            side="trainer",
            num_ranks=self._mesh.num_ranks,
            tensors=tuple(tensor.tensor() for tensor in tensors),
            tensor_of=np.repeat(np.array(self._tensor_of, dtype=np.int32), lengths),
            group_of=np.concatenate([block.groups for block in self._blocks]),
            lo=np.concatenate([pad_dims(block.lo, num_dims, 0) for block in self._blocks]),
            extent=np.concatenate([pad_dims(block.extent, num_dims, 1) for block in self._blocks]),
            strides=np.concatenate([pad_dims(block.strides, num_dims, 1) for block in self._blocks]),
            groups=self._groups.build(),
            text=text,
        )
