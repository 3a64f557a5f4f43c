"""Random transfers, and what they must give: whole arrays and NumPy slices, nothing of the planner.

`random_case(rng)` draws trainer shards and engine pieces that fit together: one to five dimensions, tensors no engine
uses, empty shards, padding, single elements, permuted and selected dimensions, stacks, replicas, strided memory, casts
and FP8 with every kind of scale. `spoiled(rng, case)` is the same case with one mistake. `whole_arrays` draws the
trainer's tensors; `copied` makes every engine tensor from them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.executor import NUMPY_DTYPE
from weft.core.assign import Policy
from weft.core.geometry.scaling import Scaling
from weft.core.layout import Shard, Tensor
from weft.core.recipe import Op, Piece

Array = NDArray[Any]
Shape = tuple[int, ...]
Box = tuple[Shape, Shape]
PLAIN_DTYPES = ("fp32", "bf16", "fp16")


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomCase:
    """Everything `make_plan` is asked."""

    tensors: list[Tensor]
    shards: list[Shard]
    num_trainers: int
    local: dict[int, list[Tensor]]
    pieces: dict[int, list[Piece]]
    num_replicas: int = 1
    scaling: dict[str, Scaling] = field(default_factory=dict)
    ignore: list[str] = field(default_factory=list)
    policy: Policy = Policy.BALANCED
    min_write_bytes: int = 1
    mistake: str = ""
    """What is wrong with it; empty: nothing."""


def random_case(rng: np.random.Generator) -> RandomCase:
    """A transfer that is possible."""
    tensors, scaling = _sources(rng)
    num_trainers, num_engines = int(rng.integers(1, 6)), int(rng.integers(1, 4))
    local: dict[int, list[Tensor]] = {rank: [] for rank in range(num_engines)}
    pieces: dict[int, list[Piece]] = {rank: [] for rank in range(num_engines)}
    for number in range(int(rng.integers(1, 4))):
        made, parts = _engine_tensors(rng, f"d{number}", tensors, scaling)
        for rank in _ranks(rng, num_engines):
            local[rank] += made
            pieces[rank] += parts
    used = {piece.source for parts in pieces.values() for piece in parts}
    quantized = {piece.source for parts in pieces.values() for piece in parts if piece.op is Op.QUANTIZE}
    return RandomCase(
        tensors=tensors,
        shards=[shard for tensor in tensors for shard in _shards(rng, tensor, num_trainers)],
        num_trainers=num_trainers,
        local=local,
        pieces=pieces,
        num_replicas=int(rng.integers(1, 3)),
        scaling={name: kind for name, kind in scaling.items() if name in quantized and kind is not Scaling.BLOCK},
        ignore=[tensor.name for tensor in tensors if tensor.name not in used],
        policy=_one(rng, list(Policy)),
        min_write_bytes=_one(rng, [1, 16, 4096]),
    )


def _one(rng: np.random.Generator, values: Any) -> Any:
    return values[int(rng.integers(len(values)))]


def _ranks(rng: np.random.Generator, num_ranks: int) -> list[int]:
    """Some ranks, at least one."""
    return sorted(rng.choice(num_ranks, size=int(rng.integers(1, num_ranks + 1)), replace=False).tolist())


def _sources(rng: np.random.Generator) -> tuple[list[Tensor], dict[str, Scaling]]:
    """Trainer tensors, and how those that may be quantised share scales; sometimes none at all."""
    tensors: list[Tensor] = []
    scaling: dict[str, Scaling] = {}
    for number in range(int(rng.integers(0, 5))):
        name = f"s{number}"
        kind = rng.random()
        if kind < 0.25:
            shape = tuple(int(size) for size in rng.choice([1, 5, 127, 128, 129, 200, 257], size=2))
            tensors.append(Tensor(name=name, dtype=_one(rng, ["bf16", "fp32"]), shape=shape))
            scaling[name] = _one(rng, list(Scaling))
        elif kind < 0.35:
            tensors.append(Tensor(name=name, dtype="bf16", shape=(1,) * int(rng.integers(1, 6))))
        else:
            num_dims = int(rng.integers(1, 6))
            shape = tuple(int(size) for size in rng.integers(1, 8 if num_dims < 4 else 5, size=num_dims))
            tensors.append(Tensor(name=name, dtype=_one(rng, [*PLAIN_DTYPES, "fp8_e4m3"]), shape=shape))
    return tensors, scaling


def _shards(rng: np.random.Generator, tensor: Tensor, num_ranks: int) -> list[Shard]:
    """A tiling with replicas, and empty shards on ranks that got nothing."""
    shards = []
    for lo, extent in _tiles(rng, tensor.shape, int(rng.integers(0, 5))):
        strides = _strides(rng, extent)
        shards += [
            Shard(tensor=tensor.name, rank=rank, lo=lo, extent=extent, strides=strides)
            for rank in _ranks(rng, num_ranks)
        ]
    for rank in range(num_ranks):
        if rng.random() < 0.2:
            lo = tuple(int(rng.integers(0, size + 1)) for size in tensor.shape)
            shards.append(Shard(tensor=tensor.name, rank=rank, lo=lo, extent=(0,) * len(lo)))
    return shards


def _strides(rng: np.random.Generator, extent: Shape) -> Shape | None:
    """Contiguous, or with gaps, or with the dimensions in another order in memory."""
    if rng.random() < 0.5:
        return None
    order = rng.permutation(len(extent)) if rng.random() < 0.5 else range(len(extent))
    strides, pitch = [0] * len(extent), 1
    for dim in reversed(list(order)):
        strides[dim] = pitch * int(rng.integers(1, 3))
        pitch = strides[dim] * extent[dim]
    return tuple(strides)


def _tiles(rng: np.random.Generator, shape: Shape, num_cuts: int) -> list[Box]:
    """Boxes that tile a shape, by cuts at random places."""
    tiles = [((0,) * len(shape), shape)]
    for _ in range(num_cuts):
        i, dim = int(rng.integers(len(tiles))), int(rng.integers(len(shape)))
        lo, extent = tiles[i]
        if extent[dim] > 1:
            at = int(rng.integers(1, extent[dim]))
            tiles[i : i + 1] = [
                (lo, _with(extent, dim, at)),
                (_with(lo, dim, lo[dim] + at), _with(extent, dim, extent[dim] - at)),
            ]
    return tiles


def _with(values: Shape, dim: int, value: int) -> Shape:
    return (*values[:dim], value, *values[dim + 1 :])


def _engine_tensors(
    rng: np.random.Generator, name: str, sources: list[Tensor], scaling: dict[str, Scaling]
) -> tuple[list[Tensor], list[Piece]]:
    """One engine tensor with its pieces; with its scales if it is FP8."""
    quantizable = [tensor for tensor in sources if tensor.name in scaling]
    kind = rng.random()
    if quantizable and kind < 0.4:
        source = _one(rng, quantizable)
        return _quantized(rng, name, source, _scale_shape(source.shape, scaling[source.name]))
    if sources and kind < 0.55:
        return _stacked(rng, name, _one(rng, sources))
    if sources and kind < 0.75:
        return _permuted(rng, name, _one(rng, sources))
    if kind < 0.85:
        return _all_padding(rng, name)
    return _mosaic(rng, name, sources)


def _quantized(rng: np.random.Generator, name: str, source: Tensor, grid: Shape) -> tuple[list[Tensor], list[Piece]]:
    """FP8 values of a matrix, whole or in part, turned or not; all its scales, as a matrix or as a vector."""
    axes = _one(rng, [(0, 1), (1, 0)])
    lo = tuple(int(rng.integers(0, size)) for size in source.shape) if rng.random() < 0.5 else (0, 0)
    box = tuple(source.shape[axis] - lo[axis] for axis in axes)
    values = Tensor(name=name, dtype="fp8_e4m3", shape=box)
    parts = _walk(rng, values, source, lo, axes, Op.QUANTIZE)
    if grid[1] == 1 and rng.random() < 0.5:
        scales = Tensor(name=f"{name}_scale", dtype="fp32", shape=grid[:1])
        piece = Piece(
            dst=scales.name, source=source.name, dst_lo=(0,), extent=grid[:1], src_lo=(0, 0), axes=(0,), op=Op.SCALE
        )
        return [values, scales], [*parts, piece]
    scales = Tensor(name=f"{name}_scale", dtype="fp32", shape=tuple(grid[axis] for axis in axes))
    return [values, scales], [*parts, *_walk(rng, scales, source, (0, 0), axes, Op.SCALE)]


def _walk(
    rng: np.random.Generator, dst: Tensor, source: Tensor, src_lo: Shape, axes: Shape, op: Op, *, dst_lo: Shape = ()
) -> list[Piece]:
    """Pieces that fill a destination (or, with `dst_lo`, the rest of it) from one box of a source."""
    start = dst_lo or (0,) * len(dst.shape)
    room = tuple(size - at for size, at in zip(dst.shape, start, strict=True))
    pieces = []
    for lo, extent in _tiles(rng, room, int(rng.integers(0, 3))):
        at = list(src_lo)
        for dim, axis in enumerate(axes):
            if axis >= 0:
                at[axis] += lo[dim]
        pieces.append(
            Piece(
                dst=dst.name,
                source=source.name,
                dst_lo=tuple(a + b for a, b in zip(start, lo, strict=True)),
                extent=extent,
                src_lo=tuple(at),
                axes=None if axes == tuple(range(len(src_lo))) else axes,
                op=op,
            )
        )
    return pieces


def _permuted(rng: np.random.Generator, name: str, source: Tensor) -> tuple[list[Tensor], list[Piece]]:
    """A whole source with its dimensions in another order, behind some rows of padding."""
    axes = tuple(int(axis) for axis in rng.permutation(len(source.shape)))
    turned = tuple(source.shape[axis] for axis in axes)
    padding = int(rng.integers(0, 3))
    dtype, op = _converted(rng, source)
    dst = Tensor(name=name, dtype=dtype, shape=(turned[0] + padding, *turned[1:]))
    nothing = (0,) * (len(turned) - 1)
    pieces = _walk(rng, dst, source, (0,) * len(turned), axes, op, dst_lo=(padding, *nothing))
    if padding:
        pieces.append(_pad(name, (0, *nothing), (padding, *turned[1:])))
    return [dst], pieces


def _stacked(rng: np.random.Generator, name: str, source: Tensor) -> tuple[list[Tensor], list[Piece]]:
    """A source several times along a new first dimension."""
    dtype, op = _converted(rng, source)
    if len(source.shape) > 5:
        return _permuted(rng, name, source)
    count = int(rng.integers(1, 4))
    dst = Tensor(name=name, dtype=dtype, shape=(count, *source.shape))
    zero = (0,) * len(source.shape)
    axes = (-1, *range(len(source.shape)))
    return [dst], [
        Piece(
            dst=name,
            source=source.name,
            dst_lo=(i, *zero),
            extent=(1, *source.shape),
            src_lo=zero,
            axes=axes,
            op=op,
        )
        for i in range(count)
    ]


def _converted(rng: np.random.Generator, source: Tensor) -> tuple[str, Op]:
    if source.dtype == "fp8_e4m3":
        return source.dtype, Op.COPY
    dtype = _one(rng, PLAIN_DTYPES)
    return dtype, Op.COPY if dtype == source.dtype and rng.random() < 0.9 else Op.CAST


def _all_padding(rng: np.random.Generator, name: str) -> tuple[list[Tensor], list[Piece]]:
    shape = tuple(int(size) for size in rng.integers(1, 5, size=int(rng.integers(1, 6))))
    dst = Tensor(name=name, dtype="bf16", shape=shape)
    return [dst], [_pad(name, lo, extent) for lo, extent in _tiles(rng, shape, int(rng.integers(0, 3)))]


def _pad(name: str, lo: Shape, extent: Shape) -> Piece:
    return Piece(dst=name, source="", dst_lo=lo, extent=extent, src_lo=(), axes=(-1,) * len(extent), op=Op.PAD)


def _mosaic(rng: np.random.Generator, name: str, sources: list[Tensor]) -> tuple[list[Tensor], list[Piece]]:
    """A tensor whose tiles come from anywhere: any source whose dimensions hold the tile, or padding."""
    shape = tuple(int(size) for size in rng.integers(1, 6, size=int(rng.integers(1, 6))))
    dtype = _one(rng, PLAIN_DTYPES)
    pieces = []
    for lo, extent in _tiles(rng, shape, int(rng.integers(0, 8))):
        source = _one(rng, sources) if sources else None
        axes = _fitting_axes(rng, extent, source.shape) if source and source.dtype != "fp8_e4m3" else None
        if source is None or axes is None:
            pieces.append(_pad(name, lo, extent))
            continue
        span = [1] * len(source.shape)
        for dim, axis in enumerate(axes):
            if axis >= 0:
                span[axis] = extent[dim]
        src_lo = tuple(int(rng.integers(0, size - n + 1)) for size, n in zip(source.shape, span, strict=True))
        op = Op.COPY if source.dtype == dtype else Op.CAST
        pieces.append(Piece(dst=name, source=source.name, dst_lo=lo, extent=extent, src_lo=src_lo, axes=axes, op=op))
    return [Tensor(name=name, dtype=dtype, shape=shape)], pieces


def _fitting_axes(rng: np.random.Generator, extent: Shape, shape: Shape) -> Shape | None:
    """A different source dimension for every longer destination dimension; none if they do not fit."""
    free = [int(dim) for dim in rng.permutation(len(shape))]
    axes = [-1] * len(extent)
    for dim in sorted(range(len(extent)), key=lambda d: -extent[d]):
        found = next((axis for axis in free if shape[axis] >= extent[dim]), None)
        if found is not None and (extent[dim] > 1 or rng.random() < 0.5):
            axes[dim] = found
            free.remove(found)
        elif extent[dim] > 1:
            return None
    return tuple(axes)


def whole_arrays(rng: np.random.Generator, tensors: list[Tensor]) -> dict[str, Array]:
    """Values of whole trainer tensors."""
    return {
        tensor.name: rng.standard_normal(tensor.shape, dtype=np.float32).astype(NUMPY_DTYPE[tensor.dtype])
        for tensor in tensors
    }


@dataclass(frozen=True, slots=True)
class Copied:
    """One engine tensor as it must be, and which of its elements have a source."""

    value: Array
    written: NDArray[np.bool_]


def copied(case: RandomCase, whole: dict[str, Array]) -> dict[int, dict[str, Copied]]:
    """What every engine rank must hold, copied piece by piece from whole arrays."""
    converted = _Converted(case, whole)
    found: dict[int, dict[str, Copied]] = {}
    ranks_per_engine = 1 + max(case.local)
    for rank, local in case.local.items():
        made = {
            tensor.name: Copied(np.zeros(tensor.shape, NUMPY_DTYPE[tensor.dtype]), np.zeros(tensor.shape, dtype=bool))
            for tensor in local
        }
        for piece in case.pieces[rank]:
            if piece.op is not Op.PAD:
                box = _slices(piece.dst_lo, piece.extent)
                out = made[piece.dst]
                out.value[box] = _taken(converted.of(piece.source, piece.op, out.value.dtype), piece)
                out.written[box] = True
        for replica in range(case.num_replicas):
            found[replica * ranks_per_engine + rank] = made
    return found


def _taken(source: Array, piece: Piece) -> Array:
    """The box a piece reads, in the destination's order of dimensions."""
    axes = range(len(piece.extent)) if piece.axes is None else piece.axes
    walked = [(dim, axis) for dim, axis in enumerate(axes) if axis >= 0]
    span = [1] * source.ndim
    for dim, axis in walked:
        span[axis] = piece.extent[dim]
    box = source[_slices(piece.src_lo, tuple(span))]
    order = [axis for _, axis in walked]
    order += [axis for axis in range(source.ndim) if axis not in order]
    return box.transpose(order).reshape(piece.extent)


def _slices(lo: Shape, extent: Shape) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(lo, extent, strict=True))


class _Converted:
    """Whole tensors as engines want them: cast, quantised, or their scales."""

    def __init__(self, case: RandomCase, whole: dict[str, Array]) -> None:
        self._whole = whole
        self._scaling = case.scaling

    def of(self, name: str, op: Op, dtype: np.dtype[Any]) -> Array:
        whole = self._whole[name]
        if op in (Op.COPY, Op.CAST):
            return whole.astype(dtype)
        scaling = self._scaling.get(name, Scaling.BLOCK)
        scales = _scales(whole.astype(np.float32), scaling)
        if op is Op.SCALE:
            return scales
        height, width = _sharing(whole.shape, scaling)
        spread = np.repeat(np.repeat(scales, height, axis=0), width, axis=1)[: whole.shape[0], : whole.shape[1]]
        return (whole.astype(np.float32) / spread).astype(dtype)


def _sharing(shape: Shape, scaling: Scaling) -> Shape:
    """Rows and columns of a matrix that share a scale."""
    return {Scaling.BLOCK: (128, 128), Scaling.CHANNEL: (1, shape[1]), Scaling.TENSOR: shape}[scaling]


def _scale_shape(shape: Shape, scaling: Scaling) -> Shape:
    return tuple(-(-size // side) for size, side in zip(shape, _sharing(shape, scaling), strict=True))


def _scales(weight: Array, scaling: Scaling) -> Array:
    """The largest magnitude of all elements that share a scale, over 448."""
    height, width = _sharing(weight.shape, scaling)
    tops, lefts = range(0, weight.shape[0], height), range(0, weight.shape[1], width)
    amax = [[np.abs(weight[top : top + height, left : left + width]).max() for left in lefts] for top in tops]
    found = np.array(amax, dtype=np.float32)
    return (np.where(found == 0, np.float32(1), found) / np.float32(448)).astype(np.float32)


def spoiled(rng: np.random.Generator, case: RandomCase) -> RandomCase:
    """The case with one mistake that must be refused by name; the case itself where none applies."""
    for name in rng.permutation(list(_MISTAKES)):
        wrong = _MISTAKES[str(name)](rng, case)
        if wrong is not None:
            return replace(wrong, mistake=str(name))
    return case


def _piece_mistake(
    change: Callable[[Piece], Piece], *, fits: Callable[[Piece], bool] = lambda _: True
) -> Callable[[np.random.Generator, RandomCase], RandomCase | None]:
    """A mistake in one piece that has a source."""

    def spoil(rng: np.random.Generator, case: RandomCase) -> RandomCase | None:
        places = [
            (rank, i)
            for rank, parts in case.pieces.items()
            for i, piece in enumerate(parts)
            if piece.op is not Op.PAD and fits(piece)
        ]
        if not places:
            return None
        rank, i = _one(rng, places)
        parts = list(case.pieces[rank])
        parts[i] = change(parts[i])
        return replace(case, pieces={**case.pieces, rank: parts})

    return spoil


def _shard_mistake(
    change: Callable[[Shard], Shard], *, fits: Callable[[Shard], bool] = lambda _: True
) -> Callable[[np.random.Generator, RandomCase], RandomCase | None]:
    def spoil(rng: np.random.Generator, case: RandomCase) -> RandomCase | None:
        places = [i for i, shard in enumerate(case.shards) if fits(shard)]
        if not places:
            return None
        shards = list(case.shards)
        i = _one(rng, places)
        shards[i] = change(shards[i])
        return replace(case, shards=shards)

    return spoil


def _without_rank(rng: np.random.Generator, case: RandomCase) -> RandomCase | None:
    gone = _one(rng, list(case.pieces))
    return replace(case, pieces={rank: parts for rank, parts in case.pieces.items() if rank != gone})


def _without_scales(_: np.random.Generator, case: RandomCase) -> RandomCase | None:
    if not any(piece.op is Op.SCALE for parts in case.pieces.values() for piece in parts):
        return None
    scales = {piece.dst for parts in case.pieces.values() for piece in parts if piece.op is Op.SCALE}
    return replace(
        case,
        local={rank: [tensor for tensor in made if tensor.name not in scales] for rank, made in case.local.items()},
        pieces={rank: [piece for piece in parts if piece.dst not in scales] for rank, parts in case.pieces.items()},
    )


def _negative_rank(rng: np.random.Generator, case: RandomCase) -> RandomCase | None:
    rank = _one(rng, list(case.local))
    return replace(
        case,
        local={-1 if r == rank else r: made for r, made in case.local.items()},
        pieces={-1 if r == rank else r: parts for r, parts in case.pieces.items()},
    )


def _unexpected(_: np.random.Generator, case: RandomCase) -> RandomCase | None:
    return replace(case, ignore=case.ignore[1:]) if case.ignore else None


def _used_axes(piece: Piece) -> Shape:
    return tuple(range(len(piece.extent))) if piece.axes is None else piece.axes


_MISTAKES: dict[str, Callable[[np.random.Generator, RandomCase], RandomCase | None]] = {
    "a source that does not exist": _piece_mistake(lambda piece: replace(piece, source="nowhere")),
    "no source": _piece_mistake(lambda piece: replace(piece, source="")),
    "a longer dst_lo": _piece_mistake(lambda piece: replace(piece, dst_lo=(*piece.dst_lo, 0))),
    "a longer extent": _piece_mistake(lambda piece: replace(piece, extent=(*piece.extent, 1))),
    "longer axes": _piece_mistake(lambda piece: replace(piece, axes=(*_used_axes(piece), -1))),
    "a shorter src_lo": _piece_mistake(lambda piece: replace(piece, src_lo=piece.src_lo[:-1])),
    "a longer src_lo": _piece_mistake(lambda piece: replace(piece, src_lo=(*piece.src_lo, 0))),
    "a negative src_lo": _piece_mistake(lambda piece: replace(piece, src_lo=(-1, *piece.src_lo[1:]))),
    "a piece that reads too far": _piece_mistake(lambda piece: replace(piece, src_lo=(10**6, *piece.src_lo[1:]))),
    "a piece that writes too far": _piece_mistake(lambda piece: replace(piece, dst_lo=(10**6, *piece.dst_lo[1:]))),
    "an empty piece": _piece_mistake(lambda piece: replace(piece, extent=(0, *piece.extent[1:]))),
    "a list as lo": _shard_mistake(lambda shard: replace(shard, lo=list(shard.lo))),  # type: ignore[arg-type]
    "a shard outside": _shard_mistake(lambda shard: replace(shard, lo=(10**6, *shard.lo[1:]))),
    "a shard on rank -1": _shard_mistake(lambda shard: replace(shard, rank=-1)),
    "elements at one address": _shard_mistake(
        lambda shard: replace(shard, strides=(1,) * len(shard.lo)),
        fits=lambda shard: sum(size > 1 for size in shard.extent) > 1,
    ),
    "no pieces for a rank": _without_rank,
    "no scales": _without_scales,
    "an engine rank -1": _negative_rank,
    "a tensor no engine uses": _unexpected,
    "an ignored tensor that does not exist": lambda _, case: replace(case, ignore=[*case.ignore, "nowhere"]),
}
