"""Who holds which part of which tensor: Tensor, Shard, RankGroups, Layout.

A Layout describes one side. On the trainer side tensors have global shapes and shards are boxes of them; on
the engine side every tensor is local to the ranks that hold it and its one shard is the whole. Ranks that hold
the same bytes share a row: `ddp128` of a model is one shard row per tensor with a group of 128 ranks, so big
layouts stay small.

    layout = Layout.from_shards(
        [Tensor(name="w", dtype="bf16", shape=(8, 4))],
        [Shard(tensor="w", rank=0, lo=(0, 0), extent=(4, 4)), Shard(tensor="w", rank=1, lo=(4, 0), extent=(4, 4))],
    )
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from math import prod

import numpy as np
from numpy.typing import NDArray

from weft.core.geometry import boxes
from weft.core.geometry.boxes import Ints
from weft.core.geometry.fingerprint import by_appearance, distinct_rows
from weft.errors import LayoutError

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8_e4m3": 1}
MAX_RANKS = 65_536
MAX_TENSOR_DIM = 2**31 - 1
MAX_SHARD_ROWS = 30_000_000
MAX_DIMS = 6
MAX_ELEMENTS = 1 << 60
MAX_INTERLEAVED = 1 << 20
"""Elements of a shard whose addresses are compared one by one, where its strides alone do not tell them apart."""
SIDES = ("trainer", "engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A named array.

    >>> Tensor(name="model.norm.weight", dtype="bf16", shape=(4096,)).num_bytes
    8192
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the whole tensor."""
        return int(np.prod(self.shape, dtype=np.int64)) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The box of a tensor that one rank holds, and the strides (in elements) of its memory.

    `strides=None` means row-major and contiguous, which is what FSDP and tensor parallelism give.

    >>> second_half = Shard(tensor="w", rank=1, lo=(4, 0), extent=(4, 4))    # rows 4 to 7 of w, on rank 1
    """

    tensor: str
    rank: int
    lo: tuple[int, ...]
    extent: tuple[int, ...]
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroups:
    """A table of rank sets. Row g is `members[starts[g]:starts[g + 1]]`, sorted."""

    members: NDArray[np.int32]
    starts: NDArray[np.int64]

    @property
    def sizes(self) -> NDArray[np.int64]:
        """How many ranks each group has."""
        return np.diff(self.starts)

    def of(self, group: int) -> NDArray[np.int32]:
        """The ranks of one group."""
        return self.members[self.starts[group] : self.starts[group + 1]]

    def contain(self, groups: Ints, ranks: Ints) -> NDArray[np.bool_]:
        """Row by row: whether the group has the rank."""
        stride = max(int(self.members.max(initial=0)), int(ranks.max(initial=0))) + 1
        keys = np.repeat(np.arange(len(self.sizes), dtype=np.int64), self.sizes) * stride + self.members
        wanted = groups.astype(np.int64) * stride + ranks
        at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        return np.asarray(keys[at] == wanted) if len(keys) else np.zeros(len(wanted), dtype=bool)

    def expand(self, groups: Ints) -> NDArray[np.int32]:
        """The ranks of many groups, one after the other."""
        sizes = self.sizes[groups]
        ends = np.cumsum(sizes)
        within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - sizes, sizes)
        return self.members[np.repeat(self.starts[groups], sizes) + within]


def group_ranks(row: Ints, rank: Ints) -> tuple[RankGroups, NDArray[np.int32]]:
    """The sets of ranks of rows, and the number of each row's set; sets are numbered as they appear.

    Pair i says that `rank[i]` belongs to `row[i]`; rows are numbers from 0, in ascending order.
    """
    pairs = np.stack([row, rank], axis=1).astype(np.int64)
    pairs = pairs[np.lexsort((rank, row))]
    is_new = np.ones(len(pairs), dtype=bool)
    is_new[1:] = (pairs[1:] != pairs[:-1]).any(axis=1)
    pairs = pairs[is_new]
    sizes = np.bincount(pairs[:, 0]) if len(pairs) else np.zeros(0, dtype=np.int64)
    starts = np.cumsum(sizes) - sizes
    group = np.empty(len(sizes), dtype=np.int64)
    num_groups = 0
    for size in np.unique(sizes).tolist():
        rows = np.flatnonzero(sizes == size)
        sets, number = distinct_rows(pairs[starts[rows][:, None] + np.arange(size), 1])
        group[rows] = number + num_groups
        num_groups += len(sets)
    first, number = by_appearance(group)
    all_sets = RankGroups(members=pairs[:, 1].astype(np.int32), starts=np.append(starts, len(pairs)).astype(np.int64))
    ends = np.concatenate([[0], np.cumsum(sizes[first])]).astype(np.int64)
    return RankGroups(members=all_sets.expand(first), starts=ends), number.astype(np.int32)


class GroupBuilder:
    """Gives equal rank sets the same group number."""

    def __init__(self) -> None:
        self._groups: dict[bytes, int] = {}
        self._arrays: list[NDArray[np.int32]] = []

    def add(self, ranks: Iterable[int] | Ints) -> int:
        """The number of this set of ranks."""
        array = np.unique(np.asarray(list(ranks) if not isinstance(ranks, np.ndarray) else ranks, dtype=np.int32))
        key = array.tobytes()
        if key not in self._groups:
            self._groups[key] = len(self._arrays)
            self._arrays.append(array)
        return self._groups[key]

    def build(self) -> RankGroups:
        """The finished table."""
        sizes = [len(array) for array in self._arrays]
        return RankGroups(
            members=np.concatenate([np.zeros(0, np.int32), *self._arrays]),
            starts=np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64),
        )


@dataclass(frozen=True, kw_only=True)
class Layout:
    """All shards of one side, as columns; row i is one box of one tensor, held by every rank of its group.

    >>> halves = [Shard(tensor="w", rank=rank, lo=(4 * rank, 0), extent=(4, 4)) for rank in (0, 1)]
    >>> layout = Layout.from_shards([Tensor(name="w", dtype="bf16", shape=(8, 4))], halves)
    >>> layout.num_ranks, layout.rank_bytes().tolist()
    (2, [32, 32])
    """

    side: str
    """`trainer` or `engine`."""
    num_ranks: int
    tensors: tuple[Tensor, ...]
    tensor_of: NDArray[np.int32]
    group_of: NDArray[np.int32]
    lo: Ints
    extent: Ints
    strides: Ints
    groups: RankGroups
    text: str = field(default="explicit", compare=False)
    """The description it was made from, such as `ep8.fsdp16`."""

    @property
    def num_dims(self) -> int:
        """Width of the coordinate columns; tensors with fewer dimensions have trailing ones."""
        return int(self.lo.shape[1])

    @cached_property
    def shapes(self) -> Ints:
        """Tensor shapes as a column."""
        return shape_column([tensor.shape for tensor in self.tensors], self.num_dims)

    @cached_property
    def tensor_dims(self) -> NDArray[np.int64]:
        """How many dimensions each tensor has."""
        return np.array([len(tensor.shape) for tensor in self.tensors], dtype=np.int64)

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Numbers of tensors by name; where several ranks have tensors of one name, the last one."""
        return {tensor.name: number for number, tensor in enumerate(self.tensors)}

    @cached_property
    def dtype_of(self) -> NDArray[np.int64]:
        """Number of each tensor's dtype, in the order of `DTYPE_BYTES`."""
        number = {dtype: i for i, dtype in enumerate(DTYPE_BYTES)}
        return np.fromiter((number[tensor.dtype] for tensor in self.tensors), np.int64, len(self.tensors))

    @cached_property
    def itemsize(self) -> NDArray[np.int64]:
        """Bytes per element of each tensor."""
        return np.array(list(DTYPE_BYTES.values()), dtype=np.int64)[self.dtype_of]

    @cached_property
    def shard_bytes(self) -> NDArray[np.int64]:
        """Bytes of each shard row."""
        return boxes.volume(self.extent) * self.itemsize[self.tensor_of]

    def rank_bytes(self) -> NDArray[np.int64]:
        """Bytes every rank holds."""
        ranks = self.groups.expand(self.group_of)
        held = np.repeat(self.shard_bytes, self.groups.sizes[self.group_of])
        return np.bincount(ranks, weights=held, minlength=self.num_ranks).astype(np.int64)

    def check(self) -> None:
        """Raise unless the shards tile every tensor exactly (replicas count once)."""
        defects = boxes.cover_defects(self.tensor_of, self.lo, self.extent, self.shapes)
        if defects:
            problems = tuple(f"{self.tensors[t].name}: {_defect(surplus)}" for t, surplus in defects.items())
            raise LayoutError(
                f"the {self.side} shards do not tile {len(problems)} of {len(self.tensors)} tensors",
                problems=problems,
                hint="every element must be in exactly one box; only identical boxes may be held by several ranks",
            )

    def without(self, names: Collection[str]) -> Layout:
        """The layout without some tensors, in columns no wider than the other tensors need."""
        if not names:
            return self
        stays = np.array([tensor.name not in names for tensor in self.tensors], dtype=bool)
        rows = np.flatnonzero(stays[self.tensor_of])
        tensors = tuple(tensor for tensor in self.tensors if tensor.name not in names)
        num_dims = max((len(tensor.shape) for tensor in tensors), default=1)
        number = np.cumsum(stays, dtype=np.int32) - 1
        return replace(
            self,
            tensors=tensors,
            tensor_of=number[self.tensor_of[rows]],
            group_of=self.group_of[rows],
            lo=self.lo[rows, :num_dims],
            extent=self.extent[rows, :num_dims],
            strides=self.strides[rows, :num_dims],
        )

    @classmethod
    def from_shards(
        cls,
        tensors: Sequence[Tensor],
        shards: Sequence[Shard],
        *,
        side: str = "trainer",
        num_ranks: int | None = None,
        check: bool = True,
    ) -> Layout:
        """Build and check a layout from explicit shards; identical boxes on several ranks become replicas.

        Without `check` the caller must check that they tile their tensors.
        """
        check_tensors(tensors)
        _check_shards(tensors, shards)
        num_needed = 1 + max((shard.rank for shard in shards), default=0)
        _check_side(side, num_ranks, num_needed)
        index = {tensor.name: i for i, tensor in enumerate(tensors)}
        num_dims = max((len(tensor.shape) for tensor in tensors), default=1)
        extent = shape_column([shard.extent for shard in shards], num_dims)
        strides = boxes.row_major_strides(extent)
        for i, shard in enumerate(shards):
            if shard.strides is not None:
                strides[i, : len(shard.strides)] = shard.strides
        return cls.from_boxes(
            tensors,
            tensor_of=np.array([index[shard.tensor] for shard in shards], dtype=np.int64),
            rank=np.array([shard.rank for shard in shards], dtype=np.int64),
            lo=coordinate_column([shard.lo for shard in shards], num_dims, fill=0),
            extent=extent,
            strides=strides,
            side=side,
            num_ranks=num_ranks or num_needed,
            check=check,
        )

    @classmethod
    def from_boxes(
        cls,
        tensors: Sequence[Tensor],
        *,
        tensor_of: Ints,
        rank: Ints,
        lo: Ints,
        extent: Ints,
        strides: Ints,
        num_ranks: int,
        side: str = "trainer",
        check: bool = True,
    ) -> Layout:
        """The same from columns, where tensors and boxes are known to be possible: row i is a box on `rank[i]`.

        Columns of coordinates are as wide as the widest tensor needs.
        """
        held = np.flatnonzero((extent > 0).all(axis=1))
        keys = (rank[held], *extent[held].T[::-1], *lo[held].T[::-1], tensor_of[held])
        held = held[np.lexsort(keys)]
        tensor_of, rank, lo, extent = tensor_of[held], rank[held], lo[held], extent[held]
        strides = _used_strides(extent, strides[held])
        box = np.concatenate([tensor_of[:, None], lo, extent], axis=1)
        is_first = np.ones(len(held), dtype=bool)
        is_first[1:] = (box[1:] != box[:-1]).any(axis=1)
        row = np.cumsum(is_first) - 1
        first = np.flatnonzero(is_first)
        _check_strides(tensors, row, first, tensor_of, rank, lo, strides)
        groups, group_of = group_ranks(row, rank)
        layout = cls(
            side=side,
            num_ranks=num_ranks,
            tensors=tuple(tensors),
            tensor_of=tensor_of[first].astype(np.int32),
            group_of=group_of,
            lo=lo[first].astype(np.int64),
            extent=extent[first].astype(np.int64),
            strides=strides[first].astype(np.int64),
            groups=groups,
        )
        if check:
            layout.check()
        return layout


class LayoutBuilder:
    """Collects shard rows and turns them into columns."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.groups = GroupBuilder()
        self._tensors = list(tensors)
        self._num_dims = max((len(tensor.shape) for tensor in tensors), default=1)
        self._rows: list[tuple[int, int]] = []
        self._boxes: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None]] = []

    def add(
        self,
        tensor: int,
        ranks: Iterable[int] | Ints,
        lo: tuple[int, ...],
        extent: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
    ) -> None:
        """One box of tensor number `tensor`, held by all of `ranks`."""
        self._rows.append((tensor, self.groups.add(ranks)))
        self._boxes.append((lo, extent, strides))

    def build(self, *, side: str, num_ranks: int, text: str = "explicit") -> Layout:
        """The finished layout (not yet checked)."""
        rows = np.array(self._rows, dtype=np.int32).reshape(-1, 2)
        extent = shape_column([box[1] for box in self._boxes], self._num_dims)
        strides = boxes.row_major_strides(extent)
        for i, (_, _, given) in enumerate(self._boxes):
            if given is not None:
                strides[i, : len(given)] = given
        return Layout(
            side=side,
            num_ranks=num_ranks,
            tensors=tuple(self._tensors),
            tensor_of=rows[:, 0],
            group_of=rows[:, 1],
            lo=coordinate_column([box[0] for box in self._boxes], self._num_dims, fill=0),
            extent=extent,
            strides=strides,
            groups=self.groups.build(),
            text=text,
        )


def tensors_of(
    names: Iterable[str], dtypes: Sequence[str], dtype: Ints, num_dims: Ints, shape: Ints
) -> tuple[Tensor, ...]:
    """Tensors from columns: numbers in `dtypes`, and shapes with trailing ones."""
    kinds, number = distinct_rows(np.concatenate([dtype[:, None], num_dims[:, None], shape], axis=1))
    described = [(dtypes[kind[0]], tuple(kind[2 : 2 + kind[1]])) for kind in kinds.tolist()]
    return tuple(
        Tensor(name=name, dtype=described[kind][0], shape=described[kind][1])
        for name, kind in zip(names, number.tolist(), strict=True)
    )


def shape_column(shapes: Sequence[tuple[int, ...]], num_dims: int) -> Ints:
    """Shapes or extents as an (n, num_dims) column with trailing ones."""
    return coordinate_column(shapes, num_dims, fill=1)


def coordinate_column(values: Sequence[tuple[int, ...]], num_dims: int, *, fill: int) -> Ints:
    """Tuples of coordinates as an (n, num_dims) column, `fill` in the trailing dimensions."""
    found = np.full((len(values), num_dims), fill, dtype=np.int64)
    lengths = np.fromiter(map(len, values), dtype=np.int64, count=len(values))
    flat = np.fromiter(chain.from_iterable(values), dtype=np.int64, count=int(lengths.sum()))
    found[np.arange(num_dims) < lengths[:, None]] = flat
    return found


def check_tensors(tensors: Sequence[Tensor]) -> None:
    """Raise unless names are unique and shapes and dtypes possible."""
    problems = []
    seen: set[str] = set()
    for tensor in tensors:
        if not isinstance(tensor, Tensor) or not isinstance(tensor.name, str) or not tensor.name:
            problems.append(f"{tensor!r}: expected a Tensor with a name")
            continue
        if tensor.name in seen:
            problems.append(f"{tensor.name}: listed twice")
        seen.add(tensor.name)
        if not isinstance(tensor.dtype, str) or tensor.dtype not in DTYPE_BYTES:
            problems.append(f"{tensor.name}: unknown dtype `{tensor.dtype}` (known: {', '.join(DTYPE_BYTES)})")
        if not is_coordinates(tensor.shape):
            problems.append(f"{tensor.name}: shape {tensor.shape!r}, expected a tuple of whole numbers")
            continue
        possible = 0 < len(tensor.shape) <= MAX_DIMS and all(0 < size <= MAX_TENSOR_DIM for size in tensor.shape)
        if not possible or prod(size + 1 for size in tensor.shape) > MAX_ELEMENTS:
            problems.append(f"{tensor.name}: impossible shape {list(tensor.shape)}")
    if problems:
        raise LayoutError("the tensor list is invalid", problems=tuple(problems))


def is_coordinates(value: object) -> bool:
    """Whether a value is a tuple of whole numbers, as boxes and shapes are."""
    return isinstance(value, tuple) and {int}.issuperset(map(type, value))


def is_rank(value: object) -> bool:
    """Whether a value can be the number of a rank."""
    return type(value) is int and 0 <= value < MAX_RANKS


def _check_shards(tensors: Sequence[Tensor], shards: Sequence[Shard]) -> None:
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    problems = []
    for shard in shards:
        if not isinstance(shard, Shard):
            problems.append(f"{shard!r}: expected a Shard")
        elif problem := shard_problem(shard, shapes):
            problems.append(f"{shard.tensor} on rank {shard.rank}: {problem}")
    if problems:
        raise LayoutError("the shard list is invalid", problems=tuple(problems))


def shard_problem(shard: Shard, shapes: dict[str, tuple[int, ...]]) -> str:
    """What is wrong with a shard; empty if nothing is."""
    lo, extent = shard.lo, shard.extent
    shape = shapes.get(shard.tensor) if isinstance(shard.tensor, str) else None
    if shape is None:
        return "no such tensor"
    if not is_rank(shard.rank):
        return f"rank outside 0…{MAX_RANKS - 1}"
    if not is_coordinates(lo) or not is_coordinates(extent):
        return f"lo is {lo!r} and extent {extent!r}, expected tuples of whole numbers"
    if len(lo) != len(shape) or len(extent) != len(shape):
        return f"lo has {len(lo)} and extent {len(extent)} dimensions, the tensor {len(shape)}"
    if any(start < 0 or n < 0 or start + n > size for start, n, size in zip(lo, extent, shape, strict=True)):
        return f"box {list(lo)} + {list(extent)} is outside {list(shape)}"
    return "" if shard.strides is None else _strides_problem(extent, shard.strides)


def _strides_problem(extent: tuple[int, ...], strides: tuple[int, ...]) -> str:
    """What is wrong with the memory of a shard."""
    if not is_coordinates(strides) or len(strides) != len(extent) or min(strides) < 1:
        return f"strides {strides!r}, expected {len(extent)} numbers from 1"
    if _aliases(extent, strides):
        return f"strides {list(strides)} put two elements of {list(extent)} at one address"
    return ""


def _aliases(extent: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether two elements of a shard lie at one address."""
    if 0 in extent or _is_nested(zip(strides[::-1], extent[::-1], strict=True)):
        return False
    walked = sorted((step, n) for step, n in zip(strides, extent, strict=True) if n > 1)
    if _is_nested(walked):
        return False
    if prod(extent) > MAX_INTERLEAVED:
        return True  # no framework interleaves rows like this
    addresses = np.zeros(1, dtype=np.int64)
    for step, n in walked:
        addresses = np.add.outer(addresses, step * np.arange(n)).ravel()
    return len(np.unique(addresses)) < len(addresses)


def _is_nested(walked: Iterable[tuple[int, int]]) -> bool:
    """Whether each dimension, given from the innermost, steps beyond all that the ones before it reach."""
    reach = 0
    for step, n in walked:
        if n > 1:
            if step <= reach:
                return False
            reach += step * (n - 1)
    return True


def _used_strides(extent: Ints, strides: Ints) -> Ints:
    """The strides of boxes; row-major in dimensions of one element, where they do not matter."""
    return np.where(extent == 1, boxes.row_major_strides(extent), strides)


def _check_strides(
    tensors: Sequence[Tensor], row: Ints, first: Ints, tensor_of: Ints, rank: Ints, lo: Ints, strides: Ints
) -> None:
    """Raise unless all replicas of a box have one memory layout; `row[i]` is the box of replica i, sorted."""
    wrong = np.flatnonzero((strides != strides[first][row]).any(axis=1))
    if not len(wrong):
        return
    same = np.flatnonzero(row == row[wrong[0]])
    tensor = tensors[tensor_of[same[0]]]
    dims = len(tensor.shape)
    found = sorted({tuple(steps) for steps in strides[same, :dims].tolist()})
    raise LayoutError(
        f"replicas of `{tensor.name}` at {lo[same[0], :dims].tolist()} have different memory strides: "
        f"{found} on ranks {sorted(set(rank[same].tolist()))}",
        hint="give all replicas of a shard one memory layout",
    )


def _check_side(side: str, num_ranks: int | None, num_needed: int) -> None:
    if side not in SIDES:
        raise LayoutError(f"unknown side `{side}`", hint=f"use {' or '.join(SIDES)}")
    if num_ranks is None:
        return
    if type(num_ranks) is not int or not num_needed <= num_ranks <= MAX_RANKS:
        raise LayoutError(f"{num_ranks!r} {side} ranks, expected {num_needed} to {MAX_RANKS}")


def _defect(surplus: int) -> str:
    if surplus < 0:
        return f"{-surplus} elements are missing"
    if surplus > 0:
        return f"{surplus} elements too many: shards overlap"
    return "shards overlap and leave holes"
