"""Shards as they travel: what comes out is what went in, and damaged columns are refused."""

from __future__ import annotations

import zlib
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from weft.errors import LayoutError, ProtocolError
from weft.runtime.control.columns import expand, squeeze
from weft.runtime.control.held import HeldColumns, HeldShard, HeldTable, concatenated, forget_names
from weft.runtime.weights import Part, Weights

SHARDS = [
    HeldShard(name="w", dtype="bf16", shape=(8, 4), lo=(4, 0), extent=(4, 4), strides=(4, 1)),
    HeldShard(name="ω.norm", aliases=("tied", "other"), dtype="fp32", shape=(7,), lo=(0,), extent=(7,), strides=(2,)),
    HeldShard(name="experts", dtype="bf16", shape=(2, 3, 5), lo=(0, 0, 0), extent=(2, 0, 5), strides=(15, 5, 1)),
    HeldShard(name="", aliases=("last",), dtype="nonsense", shape=(1,), lo=(0,), extent=(1,), strides=(1,)),
]
COLUMNS = ("dtype", "num_dims", "shape", "lo", "extent", "strides", "alias_of")


def travelled(held: HeldColumns) -> HeldColumns:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(held), type=HeldColumns)


@pytest.mark.parametrize("shards", [SHARDS, SHARDS[:1], [SHARDS[3]], []], ids=["several", "one", "nameless", "none"])
def test_shards_survive_the_journey(shards):
    packed = HeldTable.of(shards).packed()
    assert list(travelled(packed).table) == shards
    assert travelled(packed) == packed, "equal shards are equal messages"


def test_many_shards_are_a_short_message():
    names = [f"model.layers.{i // 512}.mlp.experts.{i % 512}.gate_proj.weight" for i in range(20_000)]
    shards = [HeldShard(name=n, dtype="bf16", shape=(8, 4), lo=(0, 0), extent=(8, 4), strides=(4, 1)) for n in names]
    packed = HeldTable.of(shards).packed()
    assert len(msgspec.msgpack.encode(packed)) < 10 * len(shards)
    assert list(packed.table.names) == names


def test_members_that_name_the_same_tensors_share_the_names():
    shards = [HeldShard(name=n, dtype="bf16", shape=(8,), lo=(0,), extent=(4,), strides=(1,)) for n in "abc"]
    halves = [[replace(shard, lo=(lo,)) for shard in shards] for lo in (0, 4)]
    first, second = (travelled(HeldTable.of(half).packed()).table for half in halves)
    assert first.names is second.names
    assert [list(first), list(second)] == halves


def test_members_with_aliases_share_the_names():
    first, second = (travelled(HeldTable.of(SHARDS).packed()).table for _ in range(2))
    assert first.names is second.names
    assert all(first.aliases[1][number] is second.aliases[1][number] for number in range(2))
    assert [list(first), list(second)] == [SHARDS, SHARDS]


def test_as_many_names_with_another_number_of_aliases_are_not_shared():
    names = [shard.name for shard in SHARDS[:2]]
    plain = [replace(SHARDS[0], name=name) for name in (*names, *SHARDS[1].aliases)]
    tables = [travelled(HeldTable.of(shards).packed()).table for shards in (plain, SHARDS[:2], plain)]
    assert tables[0].names == (*names, *SHARDS[1].aliases) == tables[2].names
    assert tables[1].names == tuple(names)
    assert tables[1].aliases == {1: SHARDS[1].aliases}


def test_names_are_shared_until_all_members_have_joined():
    packed = HeldTable.of(SHARDS).packed()
    first = travelled(packed).table
    forget_names()
    assert travelled(packed).table.names == first.names
    assert travelled(packed).table.names is not first.names


def test_shards_can_be_taken_several_times():
    table = HeldTable.of(SHARDS[:2])
    assert list(table.take(np.array([1, 0, 1]))) == [replace(SHARDS[number], aliases=()) for number in (1, 0, 1)]


def test_tables_of_several_members_are_one():
    first, second = HeldTable.of(SHARDS[:2]), HeldTable.of(SHARDS[1:])
    assert list(concatenated([first, second])) == [*SHARDS[:2], *SHARDS[1:]]


def test_what_columns_say_of_memory():
    table = HeldTable.of(SHARDS[:3])
    assert table.num_bytes.tolist() == [32, 28, 0]
    assert table.is_contiguous.tolist() == [True, False, True]
    assert table.is_filled.tolist() == [True, True, False]
    assert table.num_runs.tolist() == [1, 7, 0]


def altered(name: str, change) -> HeldColumns:
    """The shards with one column changed."""
    packed = HeldTable.of(SHARDS).packed()
    columns = expand(packed.columns, COLUMNS)
    columns[name] = change(columns[name].copy())
    return msgspec.structs.replace(packed, columns=squeeze(columns))


def put(value):
    def change(column):
        column.reshape(-1)[-1] = value
        return column

    return change


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("dtype", put(3)),
        ("dtype", put(-1)),
        ("dtype", lambda column: column[:2]),
        ("num_dims", put(4)),
        ("num_dims", put(-1)),
        ("shape", put(2)),
        ("lo", put(1)),
        ("extent", put(0)),
        ("strides", put(7)),
        ("lo", lambda column: column[:, :1]),
        ("shape", lambda column: column[:, 0]),
        ("alias_of", put(4)),
        ("alias_of", put(-1)),
        ("alias_of", lambda column: column[:1]),
    ],
)
def test_columns_that_do_not_fit_together_are_refused(name, change):
    with pytest.raises(ProtocolError, match="damaged"):
        _ = altered(name, change).table


@pytest.mark.parametrize(
    "names",
    [
        b"",
        b"not compressed",
        zlib.compress(b"only\0two\0"),
        zlib.compress(b"a\0b\0c\0d\0e\0f\0no end"),
        zlib.compress(b"\xff\0b\0c\0d\0e\0f\0g\0"),
        zlib.compress(bytes(100_000))[:-4],
    ],
)
def test_damaged_names_are_refused(names):
    packed = msgspec.structs.replace(HeldTable.of(SHARDS).packed(), names=names)
    with pytest.raises(ProtocolError, match="names of a member's shards are damaged"):
        _ = packed.table


def test_more_numbers_than_a_member_can_have_are_refused_before_they_are_unpacked():
    columns = {name: np.zeros(0, dtype=np.int64) for name in COLUMNS} | {"shape": np.zeros((1 << 20, 40))}
    packed = msgspec.structs.replace(HeldTable.of([]).packed(), columns=squeeze(columns))
    with pytest.raises(ProtocolError, match="damaged"):
        _ = packed.table


@pytest.mark.parametrize("changes", [{"lo": (0,)}, {"strides": (4,)}, {"shape": ()}])
def test_a_shard_has_as_many_coordinates_as_dimensions(changes):
    fields = {"name": "w", "dtype": "bf16", "shape": (8, 4), "lo": (0, 0), "extent": (8, 4), "strides": (4, 1)}
    with pytest.raises(LayoutError, match="w: shape has"):
        HeldTable.of([HeldShard(**(fields | changes))])


def test_names_are_told_apart():
    with pytest.raises(LayoutError, match="null"):
        HeldTable.of([HeldShard(name="a\0b", dtype="bf16", shape=(1,), lo=(0,), extent=(1,), strides=(1,))]).packed()


def test_weights_are_columns():
    base = np.zeros((6, 4), dtype=np.float32)
    arrays = {"w": base[::2], "v": np.zeros(5, dtype=np.float16)}
    weights = Weights.from_arrays(arrays, parts={"w": Part(shape=(9, 4), lo=(3, 0))})
    assert list(weights.shards.table) == [
        HeldShard(name="w", dtype="fp32", shape=(9, 4), lo=(3, 0), extent=(3, 4), strides=(8, 1)),
        HeldShard(name="v", dtype="fp16", shape=(5,), lo=(0,), extent=(5,), strides=(1,)),
    ]
    assert weights.addresses.tolist() == [base.ctypes.data, arrays["v"].ctypes.data]
    assert weights.num_bytes == 3 * 4 * 4 + 5 * 2


def test_shapes_of_parts_may_be_lists():
    array = np.zeros((6, 4), dtype=np.float32)
    listed, plain = (
        Weights.from_arrays({"w": array}, parts={"w": Part(shape=kind((8, 4)), lo=kind((2, 0)))})
        for kind in (list, tuple)
    )
    assert listed.shards == plain.shards
    assert listed.held == plain.held


def test_a_part_has_as_many_dimensions_as_its_array():
    parts = {"v": Part(shape=(8,), lo=(2, 0))}
    with pytest.raises(LayoutError, match="v: shape has 1, lo has 2, extent has 2, strides has 2 dimensions"):
        Weights.from_arrays({name: np.zeros((6, 4), dtype=np.float32) for name in "vw"}, parts=parts)


@pytest.mark.parametrize("array", [np.zeros((0, 4)), np.zeros((3, 0)), np.zeros(0), np.zeros((6, 4))[6:]])
def test_arrays_without_elements_have_any_strides(array):
    """NumPy gives new ones strides of zero."""
    weights = Weights.from_arrays({"w": array.astype(np.float32)})
    (shard,) = weights.table
    assert (shard.extent, shard.strides) == (array.shape, (1,) * array.ndim)
    assert (weights.num_bytes, weights.table.span_bytes.tolist()) == (0, [0])
    assert weights.table.num_runs.tolist() == [0]


def test_weights_are_compared_by_identity():
    weights, others = (Weights.from_arrays({"w": np.zeros(2, dtype=np.float32)}) for _ in range(2))
    assert weights != others
    assert len({weights, others, weights}) == 2
