"""How every engine tensor is made from checkpoint tensors: Op, Piece, Recipe.

A Piece says `dst box ← op(source tensor, src box, axis order)`. Fusion, tensor- and expert-parallel slices,
transposes, tied embeddings, repeated KV heads and padding are all just pieces. A Recipe is the engine Layout plus
all its pieces as columns; rows of the engine layout that are made the same way on several ranks are one row.

    recipe = Recipe.from_pieces({0: [Tensor(name="qkv", dtype="bf16", shape=(12, 4))]}, {0: [
        Piece(dst="qkv", source="q", dst_lo=(0, 0), extent=(8, 4), src_lo=(0, 0)),
        Piece(dst="qkv", source="kv", dst_lo=(8, 0), extent=(4, 4), src_lo=(0, 0)),
    ]})

Loaders that were traced give strided views instead: `weft.core.layouts.strided`.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from weft.core.geometry import boxes
from weft.core.geometry.boxes import Ints, pad_dims
from weft.core.geometry.fingerprint import distinct
from weft.core.geometry.scaling import Scaling, block_sides_of
from weft.core.layout import (
    DTYPE_BYTES,
    MAX_RANKS,
    Layout,
    LayoutBuilder,
    Tensor,
    check_tensors,
    coordinate_column,
    is_coordinates,
    is_rank,
    shape_column,
)
from weft.errors import ConfigError, LayoutError


class Op(enum.IntEnum):
    """What happens to the bytes between source and destination."""

    COPY = 0
    """Same dtype, same bits."""
    CAST = 1
    """Another floating-point dtype, element by element."""
    QUANTIZE = 2
    """FP8 value, with the scale of its source block."""
    SCALE = 3
    """The FP32 scale itself; boxes are in blocks, not elements."""
    PAD = 4
    """No source: destination bytes that are never written, such as vocabulary padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One box of a destination tensor and where it comes from.

    `axes[d]` is the source dimension that destination dimension d walks along, or -1 for a destination dimension
    of extent 1 that the source does not have (stacked experts). `None` means the same order on both sides.
    For `Op.PAD` the source is empty.

    >>> keys = Piece(dst="qkv", source="k", dst_lo=(8, 0), extent=(4, 4), src_lo=(0, 0))   # k is rows 8 to 11 of qkv
    """

    dst: str
    source: str
    dst_lo: tuple[int, ...]
    extent: tuple[int, ...]
    src_lo: tuple[int, ...]
    axes: tuple[int, ...] | None = None
    op: Op = Op.COPY

    @property
    def walked(self) -> tuple[tuple[int, int], ...]:
        """Destination dimensions with the source dimension each walks along, where there is one."""
        axes = range(len(self.extent)) if self.axes is None else self.axes
        return tuple((dim, axis) for dim, axis in enumerate(axes) if axis >= 0)

    @property
    def source_extent(self) -> tuple[int, ...]:
        """The size of the box in the dimensions of its source."""
        extent = [1] * len(self.src_lo)
        for dim, axis in self.walked:
            extent[axis] = self.extent[dim]
        return tuple(extent)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All pieces of all engine ranks, as columns over `engine`'s rows and `sources`' names.

    >>> q = Piece(dst="qkv", source="q", dst_lo=(0, 0), extent=(8, 4), src_lo=(0, 0))
    >>> kv = Piece(dst="qkv", source="kv", dst_lo=(8, 0), extent=(4, 4), src_lo=(0, 0))
    >>> recipe = Recipe.from_pieces({0: [Tensor(name="qkv", dtype="bf16", shape=(12, 4))]}, {0: [q, kv]})
    >>> recipe.sources
    ('q', 'kv')
    """

    engine: Layout
    sources: tuple[str, ...]
    dst: NDArray[np.int32]
    """Row of `engine` (and so tensor number) each piece writes."""
    src: NDArray[np.int32]
    """Index into `sources`; -1 for padding."""
    op: NDArray[np.int8]
    dst_lo: Ints
    extent: Ints
    src_lo: Ints
    axes: Ints
    num_replicas: int = 1
    """Identical engines; engine rank = replica * ranks_per_replica + rank inside the replica."""
    scaling: Mapping[str, Scaling] = field(default_factory=dict)
    """Which elements of a source share a scale, where that is not a 128×128 block."""
    src_dims: NDArray[np.int8] | None = None
    """Coordinates each piece gives of its source; None for a recipe loaded from a plan file."""

    @cached_property
    def src_extent(self) -> Ints:
        """Extents in source dimension order."""
        return to_source_dims(self.extent, self.axes)

    def scaling_numbers(self, layout: Layout) -> NDArray[np.int64]:
        """For each tensor of a layout: which of its elements share a scale, as a number in the order of `Scaling`."""
        numbers = np.zeros(len(layout.tensors), dtype=np.int64)
        if self.scaling:
            kinds = {kind: number for number, kind in enumerate(Scaling)}
            numbers[:] = [kinds[self.scaling.get(tensor.name, Scaling.BLOCK)] for tensor in layout.tensors]
        return numbers

    def block_sides(self, layout: Layout) -> Ints:
        """Sides of the blocks of a layout's tensors that share a scale, one row for each tensor."""
        return block_sides_of(layout.shapes, layout.tensor_dims, self.scaling_numbers(layout))

    def with_scaling(self, scaling: Mapping[str, Scaling]) -> Recipe:
        """The same recipe, where elements of some sources share scales in other ways than 128×128 blocks."""
        return replace(self, scaling=_checked_scaling(self, scaling))

    def check_cover(self) -> None:
        """Raise unless the pieces tile every engine tensor exactly."""
        self._check_axes()
        defects = boxes.cover_defects(self.dst, self.dst_lo, self.extent, self.engine.shapes)
        if defects:
            raise LayoutError(
                f"the recipe does not fill {len(defects)} engine tensors exactly once",
                problems=tuple(
                    f"{self.engine.tensors[row].name}: "
                    + (f"{-surplus} elements have no piece" if surplus < 0 else "pieces overlap")
                    for row, surplus in defects.items()
                ),
                hint="declare bytes without a source as Op.PAD pieces",
            )

    def _check_axes(self) -> None:
        """Every source dimension is walked by at most one destination dimension."""
        num_dims = self.axes.shape[1]
        walks = [(self.axes == dim).sum(axis=1) for dim in range(num_dims)]
        wrong = (self.axes < -1).any(axis=1) | (self.axes >= num_dims).any(axis=1) | (np.array(walks) > 1).any(axis=0)
        wrong |= ((self.axes < 0) & (self.extent > 1)).any(axis=1) & (self.op != Op.PAD)
        if wrong.any():
            piece = int(np.flatnonzero(wrong)[0])
            name = self.engine.tensors[self.dst[piece]].name
            raise LayoutError(
                f"a piece of `{name}` has the axis order {self.axes[piece].tolist()} for extents "
                f"{self.extent[piece].tolist()}",
                hint="each source dimension may be used once, and extents above 1 need one",
            )

    def check_scales(self) -> None:
        """Raise unless every rank that takes a weight in FP8 takes scales of it, and every scale has a weight."""
        problems = list(_scale_problems(self))
        if problems:
            raise LayoutError(
                f"{len(problems)} FP8 weights and scales do not belong together",
                problems=tuple(problems),
                hint="make an FP8 weight of Op.QUANTIZE pieces, and its scales of Op.SCALE pieces of the same source",
            )

    def check_sources(self, trainer: Layout, *, ignore: Collection[str] = ()) -> None:
        """Raise unless trainer tensors and recipe agree; every problem is listed, by tensor name.

        `ignore` are names of trainer tensors that no engine uses, on purpose.
        """
        problems = tuple(_source_problems(self, trainer, frozenset(ignore)))
        if problems:
            raise LayoutError(
                f"trainer and engine do not agree on {len(problems)} tensors",
                problems=problems,
                hint="check that both sides describe the same model; name tensors to leave out with `ignore`",
            )

    @classmethod
    def from_pieces(
        cls,
        tensors: Mapping[int, Sequence[Tensor]],
        pieces: Mapping[int, Sequence[Piece]],
        *,
        num_replicas: int = 1,
        scaling: Mapping[str, Scaling] | None = None,
    ) -> Recipe:
        """A recipe from the local tensors and pieces of each rank of one engine, repeated for every replica.

        Ranks that agree on a tensor share its row. `scaling` says which elements of a source share a scale, where
        that is not a 128×128 block.
        """
        _check_ranks(tensors, pieces, num_replicas)
        num_ranks = 1 + max(tensors)
        same: dict[tuple[Tensor, tuple[Piece, ...]], list[int]] = {}
        for rank, local in tensors.items():
            check_tensors(local)
            _check_pieces(rank, local, pieces[rank])
            by_dst: dict[str, list[Piece]] = {tensor.name: [] for tensor in local}
            for piece in pieces[rank]:
                by_dst[piece.dst].append(piece)
            for tensor in local:
                same.setdefault((tensor, tuple(by_dst[tensor.name])), []).append(rank)
        builder = RecipeBuilder(num_replicas=num_replicas)
        starts = np.arange(num_replicas)[:, None] * num_ranks
        for (tensor, made_of), ranks in same.items():
            builder.add(tensor, (starts + np.array(ranks)).ravel(), made_of)
        recipe = builder.build(num_ranks=num_ranks * num_replicas)
        return recipe.with_scaling(scaling or {})


def ignored_tensors(trainer: Layout, ignore: Sequence[str]) -> tuple[str, ...]:
    """The trainer tensors that match some names or patterns (`visual.*`), in layout order."""
    if isinstance(ignore, str) or not all(isinstance(name, str) for name in ignore):
        raise ConfigError(f"`ignore` is {ignore!r}", hint='give a list of names or patterns: ["visual.*"]')
    names = [tensor.name for tensor in trainer.tensors]
    matched = {wanted: {name for name in names if name == wanted or fnmatchcase(name, wanted)} for wanted in ignore}
    unknown = [wanted for wanted, found in matched.items() if not found]
    if unknown:
        close = [name for wanted in unknown for name in difflib.get_close_matches(wanted, names, n=1)]
        raise LayoutError(
            f"{len(unknown)} of the tensors to ignore do not exist",
            problems=tuple(f"ignore: `{wanted}` matches no trainer tensor" for wanted in unknown),
            hint=f"did you mean {', '.join(close)}?" if close else "give a name, or a pattern such as `visual.*`",
        )
    left_out = set().union(*matched.values()) if matched else set()
    return tuple(name for name in names if name in left_out)


def _check_ranks(
    tensors: Mapping[int, Sequence[Tensor]], pieces: Mapping[int, Sequence[Piece]], num_replicas: int
) -> None:
    """Raise unless ranks are numbers, some rank has a tensor, and both mappings have the same ranks."""
    wrong = [rank for rank in (*tensors, *pieces) if not is_rank(rank)]
    problems = [f"engine rank {rank!r}: outside 0…{MAX_RANKS - 1}" for rank in wrong]
    problems += [f"engine rank {rank}: has tensors but no entry in `pieces`" for rank in tensors if rank not in pieces]
    problems += [f"engine rank {rank}: has pieces but no entry in `tensors`" for rank in pieces if rank not in tensors]
    if not any(len(local) for local in tensors.values()):
        problems.append("no engine rank has a tensor")
    if problems:
        raise LayoutError("the engine ranks are invalid", problems=tuple(dict.fromkeys(problems)))
    num_ranks = 1 + max(tensors)
    if type(num_replicas) is not int or num_replicas < 1 or num_ranks * num_replicas > MAX_RANKS:
        raise LayoutError(
            f"{num_replicas!r} replicas of {num_ranks} ranks", hint=f"expected 1 to {MAX_RANKS} ranks in all"
        )


def _check_pieces(rank: int, local: Sequence[Tensor], pieces: Sequence[Piece]) -> None:
    shapes = {tensor.name: tensor.shape for tensor in local}
    problems = []
    for piece in pieces:
        if not isinstance(piece, Piece):
            problems.append(f"{piece!r} on engine rank {rank}: expected a Piece")
        elif problem := _piece_problem(piece, shapes):
            problems.append(f"{piece.dst} on engine rank {rank}: {problem}")
    if problems:
        raise LayoutError("the piece list is invalid", problems=tuple(problems))


def _piece_problem(piece: Piece, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """What is wrong with a piece, as far as its destination tells; empty if nothing is."""
    shape = shapes.get(piece.dst) if isinstance(piece.dst, str) else None
    if shape is None:
        return f"a piece for it, but no tensor `{piece.dst}`"
    if not isinstance(piece.op, Op):
        return f"op is {piece.op!r}, expected an Op"
    axes = tuple(range(len(shape))) if piece.axes is None else piece.axes
    boxed = {"dst_lo": piece.dst_lo, "extent": piece.extent, "axes": axes, "src_lo": piece.src_lo}
    for name, value in boxed.items():
        if not is_coordinates(value):
            return f"{name} is {value!r}, expected a tuple of whole numbers"
        if len(value) != len(shape) and name != "src_lo":
            return f"{name} {list(value)} has {len(value)} dimensions, the tensor {len(shape)}"
    for lo, n, size in zip(piece.dst_lo, piece.extent, shape, strict=True):
        if lo < 0 or n < 1 or lo + n > size:
            return f"box {list(piece.dst_lo)} + {list(piece.extent)} is empty or outside {list(shape)}"
    return _reading_problem(piece, axes)


def _reading_problem(piece: Piece, axes: tuple[int, ...]) -> str:
    """What is wrong with the source of a piece."""
    is_padding = piece.op is Op.PAD
    if not isinstance(piece.source, str) or (piece.source == "") != is_padding:
        return f"source is {piece.source!r}, but padding has none" if is_padding else "a piece without a source"
    if is_padding:
        return ""
    if piece.src_lo and min(piece.src_lo) < 0:
        return f"reads {piece.source} from {list(piece.src_lo)}"
    walked = [axis for n, axis in zip(piece.extent, axes, strict=True) if axis != -1 or n > 1]
    if (walked and not 0 <= min(walked) <= max(walked) < len(piece.src_lo)) or len(set(walked)) < len(walked):
        return (
            f"axis order {list(axes)} for extents {list(piece.extent)} and {len(piece.src_lo)} coordinates of "
            f"{piece.source}: each source dimension may be used once, and extents above 1 need one"
        )
    return ""


def _checked_scaling(recipe: Recipe, scaling: Mapping[str, Scaling]) -> dict[str, Scaling]:
    """Kinds of scaling by source, once all of them are known and used."""
    quantized = {
        recipe.sources[number] for number in distinct(recipe.src[recipe.op == Op.SCALE], len(recipe.sources)).tolist()
    }
    problems = [f"{name}: no scales are made of it" for name in scaling if name not in quantized]
    problems += [f"{name}: unknown scaling {kind!r}" for name, kind in scaling.items() if kind not in list(Scaling)]
    if problems:
        hint = f"kinds: {', '.join(Scaling)}"
        raise LayoutError("`scaling` does not fit the pieces", problems=tuple(problems), hint=hint)
    return {name: Scaling(kind) for name, kind in scaling.items()}


def padding_piece(dst: str, dst_lo: tuple[int, ...], extent: tuple[int, ...]) -> Piece:
    """Destination elements that have no source."""
    return Piece(dst=dst, source="", dst_lo=dst_lo, extent=extent, src_lo=(), axes=(-1,) * len(extent), op=Op.PAD)


class RecipeBuilder:
    """Collects engine tensors with their pieces and turns them into columns."""

    def __init__(self, *, num_replicas: int = 1) -> None:
        self._num_replicas = num_replicas
        self._tensors: list[Tensor] = []
        self._ranks: list[Sequence[int] | Ints] = []
        self._pieces: list[Sequence[Piece]] = []
        self._stacks: list[Sequence[tuple[str, ...]] | None] = []

    def add(self, tensor: Tensor, ranks: Sequence[int] | Ints, pieces: Sequence[Piece]) -> None:
        """One engine tensor, equal on all of `ranks`."""
        self._add(tensor, ranks, pieces, None)

    def add_stacked(
        self, tensor: Tensor, ranks: Sequence[int] | Ints, pieces: Sequence[Piece], stack: Sequence[tuple[str, ...]]
    ) -> None:
        """One engine tensor that repeats the same pieces along a new first dimension, each time from other sources."""
        self._add(tensor, ranks, pieces, stack)

    def _add(
        self,
        tensor: Tensor,
        ranks: Sequence[int] | Ints,
        pieces: Sequence[Piece],
        stack: Sequence[tuple[str, ...]] | None,
    ) -> None:
        self._tensors.append(tensor)
        self._ranks.append(ranks)
        self._pieces.append(pieces)
        self._stacks.append(stack)

    def build(self, *, num_ranks: int, text: str = "explicit") -> Recipe:
        """The finished recipe, with its pieces proven to fill every engine tensor."""
        layout = LayoutBuilder(self._tensors)
        for row, (tensor, ranks) in enumerate(zip(self._tensors, self._ranks, strict=True)):
            layout.add(row, ranks, (0,) * len(tensor.shape), tensor.shape)
        engine = layout.build(side="engine", num_ranks=num_ranks, text=text)
        widest_source = max((len(piece.src_lo) for pieces in self._pieces for piece in pieces), default=1)
        engine = widen(engine, max(engine.num_dims, widest_source))
        numbers: dict[str, int] = {}
        blocks = [
            _block(pieces, stack, engine.num_dims, numbers)
            for pieces, stack in zip(self._pieces, self._stacks, strict=True)
        ]
        dst = np.repeat(np.arange(len(blocks), dtype=np.int32), [len(block.op) for block in blocks])
        recipe = Recipe(
            engine=engine,
            sources=tuple(numbers),
            dst=dst,
            src=np.concatenate([block.src for block in blocks]),
            op=np.concatenate([block.op for block in blocks]),
            dst_lo=np.concatenate([block.dst_lo for block in blocks]),
            extent=np.concatenate([block.extent for block in blocks]),
            src_lo=np.concatenate([block.src_lo for block in blocks]),
            axes=np.concatenate([block.axes for block in blocks]),
            num_replicas=self._num_replicas,
            src_dims=np.concatenate([block.src_dims for block in blocks]),
        )
        recipe.check_cover()
        recipe.check_scales()
        return recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class _TensorPieces:
    """The piece columns of one engine tensor."""

    src: NDArray[np.int32]
    op: NDArray[np.int8]
    dst_lo: Ints
    extent: Ints
    src_lo: Ints
    axes: Ints
    src_dims: NDArray[np.int8]


def _block(
    pieces: Sequence[Piece], stack: Sequence[tuple[str, ...]] | None, num_dims: int, numbers: dict[str, int]
) -> _TensorPieces:
    """Columns of one engine tensor's pieces; new source names are numbered as they appear."""
    names = [piece.source for piece in pieces] if stack is None else [name for row in stack for name in row]
    src = [numbers.setdefault(name, len(numbers)) if name else -1 for name in names]
    plain = _TensorPieces(
        src=np.array(src, dtype=np.int32),
        op=np.array([piece.op for piece in pieces], dtype=np.int8),
        dst_lo=coordinate_column([piece.dst_lo for piece in pieces], num_dims, fill=0),
        extent=shape_column([piece.extent for piece in pieces], num_dims),
        src_lo=coordinate_column([piece.src_lo for piece in pieces], num_dims, fill=0),
        axes=coordinate_column([piece.axes or tuple(range(len(piece.extent))) for piece in pieces], num_dims, fill=-1),
        src_dims=np.array([len(piece.src_lo) for piece in pieces], dtype=np.int8),
    )
    if stack is None:
        return plain
    count = len(stack)
    dst_lo = np.tile(np.roll(plain.dst_lo, 1, axis=1), (count, 1))
    dst_lo[:, 0] = np.repeat(np.arange(count), len(pieces))
    return _TensorPieces(
        src=plain.src,
        op=np.tile(plain.op, count),
        dst_lo=dst_lo,
        extent=np.tile(np.roll(plain.extent, 1, axis=1), (count, 1)),
        src_lo=np.tile(plain.src_lo, (count, 1)),
        axes=np.tile(np.roll(plain.axes, 1, axis=1), (count, 1)),
        src_dims=np.tile(plain.src_dims, count),
    )


def widen(layout: Layout, num_dims: int) -> Layout:
    """The same layout with trailing dimensions of size one added."""
    if layout.num_dims >= num_dims:
        return layout
    return replace(
        layout,
        lo=pad_dims(layout.lo, num_dims, 0),
        extent=pad_dims(layout.extent, num_dims, 1),
        strides=pad_dims(layout.strides, num_dims, 1),
    )


def to_source_dims(extent: Ints, axes: Ints) -> Ints:
    """Extents given in destination dimension order, in source dimension order."""
    found = np.ones_like(extent)
    rows = np.arange(len(extent))
    for dim in range(extent.shape[1]):
        mapped = axes[:, dim] >= 0
        found[rows[mapped], axes[mapped, dim]] = extent[mapped, dim]
    return found


def to_destination_dims(values: Ints, axes: Ints, fill: int) -> Ints:
    """Values given in source dimension order, in destination dimension order (`fill` where a dimension has none)."""
    taken = np.take_along_axis(values, np.maximum(axes, 0), axis=1)
    return np.where(axes >= 0, taken, fill)


def _source_problems(recipe: Recipe, trainer: Layout, ignore: frozenset[str]) -> Iterator[str]:
    number = trainer.numbers
    for name in recipe.sources:
        if name not in number:
            yield f"missing: {name} (the engine needs it, no trainer rank has it)"
        elif name in ignore:
            yield f"ignored: {name} (listed in `ignore`, but the engine needs it)"
    used = frozenset(recipe.sources) | ignore
    for name in number:
        if name not in used:
            yield f"unexpected: {name} (a trainer has it, no engine tensor uses it)"
    source_of = np.array([*map(number.get, recipe.sources, repeat(-1)), -1], dtype=np.int64)
    known = np.flatnonzero((recipe.src >= 0) & (source_of[recipe.src] >= 0))
    tensor_of = source_of[recipe.src[known]]
    yield from _shape_problems(recipe, trainer, known, tensor_of)
    yield from _dtype_problems(recipe, trainer, known, tensor_of)


def _shape_problems(recipe: Recipe, trainer: Layout, pieces: Ints, tensor_of: Ints) -> Iterator[str]:
    num_dims = max(recipe.extent.shape[1], trainer.num_dims)
    shapes = pad_dims(trainer.shapes, num_dims, 1)[tensor_of]
    in_blocks = (recipe.op[pieces] == Op.SCALE)[:, None]
    sides = pad_dims(recipe.block_sides(trainer), num_dims, 1)[tensor_of]
    limit = np.where(in_blocks, -(-shapes // sides), shapes)
    end = pad_dims(recipe.src_lo[pieces] + recipe.src_extent[pieces], num_dims, 1)
    seen = set()
    for i in _other_dims(recipe, trainer, pieces, tensor_of):
        tensor, row = trainer.tensors[tensor_of[i]], recipe.dst[pieces[i]]
        if tensor.name not in seen and recipe.src_dims is not None:
            seen.add(tensor.name)
            rank = recipe.engine.groups.of(int(recipe.engine.group_of[row]))[0]
            yield (
                f"shape: {tensor.name} is {list(tensor.shape)}, a piece of {recipe.engine.tensors[row].name} on engine "
                f"rank {rank} reads it with {recipe.src_dims[pieces[i]]} coordinates"
            )
    for i in np.flatnonzero((end > limit).any(axis=1)):
        tensor = trainer.tensors[tensor_of[i]]
        if tensor.name not in seen:
            seen.add(tensor.name)
            needs = end[i, : len(tensor.shape)].tolist()
            yield f"shape: {tensor.name} is {list(tensor.shape)}, the engine reads up to {needs}"


def _other_dims(recipe: Recipe, trainer: Layout, pieces: Ints, tensor_of: Ints) -> Ints:
    """Pieces that read their source with more or fewer coordinates than it has."""
    if recipe.src_dims is None:
        return np.zeros(0, dtype=np.int64)
    return np.flatnonzero(recipe.src_dims[pieces] != trainer.tensor_dims[tensor_of])


def _scale_problems(recipe: Recipe) -> Iterator[str]:
    """FP8 weights without scales, by rank, and scales without a weight."""
    group, num_sources = recipe.engine.group_of[recipe.dst].astype(np.int64), len(recipe.sources)
    keys = group * num_sources + recipe.src
    quantized, scaled = (np.unique(keys[recipe.op == op]) for op in (Op.QUANTIZE, Op.SCALE))
    alone = np.setdiff1d(quantized, scaled)
    if len(alone):  # other groups of ranks may hold its scales
        groups = recipe.engine.groups
        held = {
            (int(key % num_sources), rank) for key in scaled for rank in groups.of(int(key // num_sources)).tolist()
        }
        for source, ranks in ((int(key % num_sources), groups.of(int(key // num_sources))) for key in alone):
            missing = [rank for rank in ranks.tolist() if (source, rank) not in held]
            if missing:
                yield f"{recipe.sources[source]}: engine rank {missing[0]} takes it in FP8, but not its scales"
    for source in np.setdiff1d(scaled % max(num_sources, 1), quantized % max(num_sources, 1)):
        yield f"{recipe.sources[source]}: its scales are taken, but nothing of it in FP8"


def _dtype_problems(recipe: Recipe, trainer: Layout, pieces: Ints, tensor_of: Ints) -> Iterator[str]:
    """Pieces whose operation cannot give the destination's dtype, once per source tensor."""
    fp8, fp32 = (list(DTYPE_BYTES).index(name) for name in ("fp8_e4m3", "fp32"))
    src_dtype, dst_dtype = trainer.dtype_of[tensor_of], recipe.engine.dtype_of[recipe.dst[pieces]]
    op = recipe.op[pieces]
    wrong = (op == Op.COPY) & (src_dtype != dst_dtype)
    wrong |= (op == Op.CAST) & ((dst_dtype == fp8) | (src_dtype == fp8))
    wrong |= (op == Op.QUANTIZE) & ((dst_dtype != fp8) | (src_dtype == fp8))
    wrong |= (op == Op.SCALE) & (dst_dtype != fp32)
    seen = set()
    for i in np.flatnonzero(wrong):
        source, dst = trainer.tensors[tensor_of[i]], recipe.engine.tensors[recipe.dst[pieces[i]]]
        if source.name not in seen:
            seen.add(source.name)
            how = Op(int(op[i])).name.lower()
            yield f"dtype: {source.name} is {source.dtype}, {dst.name} is {dst.dtype}, and the piece is a {how}"
    is_matrix = (trainer.tensor_dims == 2)[tensor_of]
    quantized = (op == Op.QUANTIZE) | (op == Op.SCALE)
    for number in np.unique(tensor_of[quantized & ~is_matrix]):
        tensor = trainer.tensors[number]
        yield f"dtype: {tensor.name} is {list(tensor.shape)}, only matrices become FP8"
