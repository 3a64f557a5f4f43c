"""The shards a member holds, on the wire and as columns: a hundred thousand of them fit into a small message.

held = HeldTable.of([HeldShard(name="w", dtype="bf16", shape=(8, 4), …)])
message = Join(held=held.packed(), …)
message.held.table.extent          # decoded once; raises ProtocolError for columns that do not fit together
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain

import msgspec
import numpy as np
from numpy.typing import NDArray

from weft.core.geometry.boxes import contiguous_run, pad_dims, volume
from weft.core.layout import DTYPE_BYTES, MAX_DIMS, coordinate_column
from weft.errors import LayoutError, ProtocolError
from weft.runtime.control.columns import expand, squeeze

Int64s = NDArray[np.int64]
MAX_NAME_BYTES = 1 << 28
"""Maximum bytes of all names of a member together."""
MAX_COLUMN_NUMBERS = 1 << 25
"""Maximum numbers in all columns of a member: 200 bytes for each of a million shards."""
_COORDINATES = {"shape": 1, "lo": 0, "extent": 1, "strides": 1}
"""Columns of coordinates, and their values in dimensions that a shard does not have."""
_END = "\0"
"""Ends a name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldShard:
    """One shard of a member."""

    name: str
    aliases: tuple[str, ...] = ()
    """Other names of the same memory (tied weights)."""
    dtype: str
    shape: tuple[int, ...]
    lo: tuple[int, ...]
    extent: tuple[int, ...]
    strides: tuple[int, ...]


class HeldColumns(msgspec.Struct, frozen=True, dict=True, forbid_unknown_fields=True, kw_only=True):
    """All shards of a member, on the wire."""

    names: bytes
    """Compressed; first those of the shards, then aliases."""
    dtypes: tuple[str, ...]
    columns: bytes
    """A table of weft.runtime.control.columns."""

    @cached_property
    def table(self) -> HeldTable:
        """The columns; raises ProtocolError if they are damaged."""
        columns = expand(self.columns, _COLUMN_NAMES, max_numbers=MAX_COLUMN_NUMBERS)
        alias_of = columns.pop("alias_of")
        problem = _misfit(columns, alias_of, len(self.dtypes))
        if problem:
            raise ProtocolError(f"shard table of a member is damaged: {problem}")
        count = len(columns["dtype"])
        names, others = _split_names(self.names, count, len(alias_of))
        aliases: dict[int, tuple[str, ...]] = {}
        for shard, alias in zip(alias_of.tolist(), others, strict=True):
            aliases[shard] = (*aliases.get(shard, ()), alias)
        return HeldTable(names=names, aliases=aliases, dtypes=self.dtypes, **columns)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldTable:
    """The shards of a member, as columns; coordinates are (n, D), with ones, or zeros for `lo`, after the last dim."""

    names: Sequence[str]
    aliases: dict[int, tuple[str, ...]]
    """Other names of a shard's memory, by its number, where it has any."""
    dtypes: tuple[str, ...]
    """The distinct dtypes."""
    dtype: Int64s
    """Numbers in `dtypes`."""
    num_dims: Int64s
    shape: Int64s
    lo: Int64s
    extent: Int64s
    strides: Int64s

    def __len__(self) -> int:
        return len(self.names)

    @classmethod
    def of(cls, shards: Sequence[HeldShard]) -> HeldTable:
        """Shards as columns; raises LayoutError for one whose coordinates have different numbers of dimensions."""
        return cls.of_lists(
            names=[shard.name for shard in shards],
            aliases={i: shard.aliases for i, shard in enumerate(shards) if shard.aliases},
            dtypes=[shard.dtype for shard in shards],
            **{name: [getattr(shard, name) for shard in shards] for name in _COORDINATES},
        )

    @classmethod
    def of_lists(
        cls,
        *,
        names: Sequence[str],
        aliases: dict[int, tuple[str, ...]],
        dtypes: Sequence[str],
        **coordinates: Sequence[tuple[int, ...]],
    ) -> HeldTable:
        """The same from a list of each field."""
        num_dims = {name: np.fromiter(map(len, found), np.int64, len(names)) for name, found in coordinates.items()}
        _check_dims(names, num_dims)
        width = int(num_dims["extent"].max(initial=1))
        number = {dtype: i for i, dtype in enumerate(dict.fromkeys(dtypes))}
        return cls(
            names=names,
            aliases=aliases,
            dtypes=tuple(number),
            dtype=np.array([number[dtype] for dtype in dtypes], dtype=np.int64),
            num_dims=num_dims["extent"],
            **{name: coordinate_column(coordinates[name], width, fill=fill) for name, fill in _COORDINATES.items()},
        )

    def __getitem__(self, number: int) -> HeldShard:
        dims = int(self.num_dims[number])
        boxes = {name: tuple(getattr(self, name)[number, :dims].tolist()) for name in _COORDINATES}
        dtype = self.dtypes[self.dtype[number]]
        return HeldShard(name=self.names[number], aliases=self.aliases.get(number, ()), dtype=dtype, **boxes)

    def __iter__(self) -> Iterator[HeldShard]:
        return (self[number] for number in range(len(self)))

    def take(self, numbers: Int64s) -> HeldTable:
        """Some of the shards, or the same ones several times; without aliases."""
        columns = ("dtype", "num_dims", *_COORDINATES)
        names = [self.names[number] for number in numbers.tolist()]
        return replace(self, names=names, aliases={}, **{name: getattr(self, name)[numbers] for name in columns})

    def packed(self) -> HeldColumns:
        """Encoded for the wire."""
        others = [alias for aliases in self.aliases.values() for alias in aliases]
        wrong = [name for name in chain(self.names, others) if _END in name]
        if wrong:
            raise LayoutError("tensor names contain null characters", problems=tuple(map(repr, wrong)))
        alias_of = [number for number, aliases in self.aliases.items() for _ in aliases]
        columns = {name: getattr(self, name) for name in _COLUMN_NAMES if name != "alias_of"}
        text = _END.join(chain(self.names, others, ("",))) if len(self) else ""
        return HeldColumns(
            names=zlib.compress(text.encode(), 1),
            dtypes=self.dtypes,
            columns=squeeze(columns | {"alias_of": np.array(alias_of, dtype=np.int64)}),
        )

    @property
    def itemsize(self) -> Int64s:
        """Bytes of an element of each shard."""
        return np.array([DTYPE_BYTES[dtype] for dtype in self.dtypes] or [0], dtype=np.int64)[self.dtype]

    @property
    def num_bytes(self) -> Int64s:
        """Bytes of each shard, without gaps."""
        return volume(self.extent) * self.itemsize

    @property
    def span_bytes(self) -> Int64s:
        """Bytes from the first to the last element of each shard, gaps included."""
        reach = ((self.extent - 1) * self.strides).sum(axis=1)
        return np.where(self.is_filled, reach + 1, 0) * self.itemsize

    @property
    def is_filled(self) -> NDArray[np.bool_]:
        """Whether each shard has any elements."""
        return np.asarray((self.extent > 0).all(axis=1))

    @property
    def is_contiguous(self) -> NDArray[np.bool_]:
        """Whether the elements of each shard are contiguous in memory, row after row."""
        num_elements = volume(self.extent)
        return (num_elements == 0) | (contiguous_run(self.extent, self.strides) == num_elements)

    @property
    def num_runs(self) -> Int64s:
        """Contiguous pieces of memory of each shard."""
        return volume(self.extent) // np.maximum(contiguous_run(self.extent, self.strides), 1)


_COLUMN_NAMES = ("dtype", "num_dims", *_COORDINATES, "alias_of")


def concatenated(tables: Sequence[HeldTable]) -> HeldTable:
    """Shards of several members, one member after the other."""
    dtypes = tuple(dict.fromkeys(dtype for table in tables for dtype in table.dtypes))
    starts = np.cumsum([0, *map(len, tables)]).tolist()
    numbers = [np.array([dtypes.index(dtype) for dtype in table.dtypes] or [0], dtype=np.int64) for table in tables]
    width = max((table.shape.shape[1] for table in tables), default=1)
    return HeldTable(
        names=list(chain.from_iterable(table.names for table in tables)),
        aliases={
            start + i: found for start, table in zip(starts, tables, strict=False) for i, found in table.aliases.items()
        },
        dtypes=dtypes,
        dtype=np.concatenate([number[table.dtype] for number, table in zip(numbers, tables, strict=True)]),
        num_dims=np.concatenate([table.num_dims for table in tables]),
        **{
            name: np.concatenate([pad_dims(getattr(table, name), width, fill) for table in tables])
            for name, fill in _COORDINATES.items()
        },
    )


def _check_dims(names: Sequence[str], num_dims: dict[str, Int64s]) -> None:
    """Raise unless all coordinates of a shard have as many dimensions."""
    sizes = np.stack([num_dims[name] for name in _COORDINATES], axis=1)
    problems = []
    for shard in np.flatnonzero((sizes != sizes[:, :1]).any(axis=1)).tolist():
        found = ", ".join(f"{name} has {size}" for name, size in zip(_COORDINATES, sizes[shard].tolist(), strict=True))
        problems.append(f"{names[shard]}: {found} dimensions")
    if problems:
        raise LayoutError("the shards are invalid", problems=tuple(problems))


def _misfit(columns: dict[str, Int64s], alias_of: Int64s, num_dtypes: int) -> str:
    """Why columns are inconsistent; empty if they are consistent."""
    count = len(columns["dtype"])
    width = columns["shape"].shape[-1] if columns["shape"].ndim == 2 else 0
    shapes = {"dtype": (count,), "num_dims": (count,)} | dict.fromkeys(_COORDINATES, (count, width))
    wrong = [name for name, shape in shapes.items() if columns[name].shape != shape]
    if wrong or alias_of.ndim != 1 or not 1 <= width <= MAX_DIMS:
        return f"columns of different sizes, or {width} dimensions: {', '.join(wrong)}"
    limits = {"dtype": num_dtypes, "num_dims": width + 1}
    wrong = [name for name, most in limits.items() if ((columns[name] < 0) | (columns[name] >= most)).any()]
    wrong += ["alias_of"] if ((alias_of < 0) | (alias_of >= count)).any() else []
    behind = np.arange(width) >= columns["num_dims"][:, None]
    wrong += [name for name, fill in _COORDINATES.items() if (columns[name][behind] != fill).any()]
    return f"impossible numbers in {', '.join(wrong)}" if wrong else ""


@lru_cache(maxsize=2)
def _split_names(data: bytes, num_shards: int, num_aliases: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of shards, and aliases; raises ProtocolError unless there are exactly as many.

    Most members of a side name the same tensors in the same order: then they share the names, one list for each side.
    """
    try:
        unpacker = zlib.decompressobj()
        raw = unpacker.decompress(data, MAX_NAME_BYTES + 1)
        if len(raw) > MAX_NAME_BYTES or not unpacker.eof:
            raise ValueError(f"more than {MAX_NAME_BYTES} bytes, or incomplete")
        names = raw.decode().split(_END)
        if len(names) != num_shards + num_aliases + 1 or names.pop():
            raise ValueError(f"{len(names)} names for {num_shards} shards and {num_aliases} aliases")
    except (ValueError, zlib.error) as error:
        raise ProtocolError(f"names of a member's shards are damaged: {error}") from error
    return tuple(names[:num_shards]), tuple(names[num_shards:])


def forget_names() -> None:
    """All members have joined and share their names: keep those no longer than the members."""
    _split_names.cache_clear()
