"""The shards of one side as a table, and which of a member's shards holds a row of a layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.planned_members import held
from weft.core.layout import Layout, Shard, Tensor
from weft.runtime.compile.holding import LayoutRows, RowNumbers, _last_equal
from weft.runtime.compile.sides import Side
from weft.runtime.control.held import HeldShard, HeldTable


def vector(name: str, size: int = 4, *, dtype: str = "bf16", aliases: tuple[str, ...] = ()) -> HeldShard:
    return held(name, dtype, (size,), (0,), (size,), aliases)


def rows_of_matrix(name: str, first: int, count: int) -> HeldShard:
    return held(name, "fp32", (8, 2), (first, 0), (count, 2))


def side(**shards: list[HeldShard]) -> Side:
    """Members by rank: `r0`, `r3`."""
    return Side.of({int(rank[1:]): HeldTable.of(mine) for rank, mine in shards.items()})


# Sides


@pytest.mark.parametrize(
    ("members", "rank", "starts", "names", "name"),
    [
        ({"r0": ["b", "a"]}, [0, 0], {0: 0}, ("b", "a"), [0, 1]),
        ({"r0": ["a", "b"], "r1": ["b", "c"]}, [0, 0, 1, 1], {0: 0, 1: 2}, ("a", "b", "c"), [0, 1, 1, 2]),
        ({"r0": ["a", "a"], "r1": ["a"]}, [0, 0, 1], {0: 0, 1: 2}, ("a",), [0, 0, 0]),
        ({"r0": [], "r3": ["a"], "r5": []}, [3], {0: 0, 3: 0, 5: 1}, ("a",), [0]),
    ],
)
def test_the_shards_of_all_members_are_one_table(members, rank, starts, names, name):
    found = side(**{member: [vector(each) for each in mine] for member, mine in members.items()})
    assert found.rank.tolist() == rank
    assert found.starts == starts
    assert (found.names, found.name.tolist()) == (names, name)
    assert [found.names[number] for number in found.name] == list(found.held.names)


def test_dtypes_and_shapes_are_those_of_each_member():
    """Each member numbers its own dtypes, and has its own most dimensions."""
    found = side(r0=[vector("a"), vector("b", dtype="fp32")], r1=[rows_of_matrix("c", 4, 4), vector("d", 3)])
    assert [found.dtype_name(row) for row in range(4)] == ["bf16", "fp32", "fp32", "bf16"]
    assert [found.shape(row) for row in range(4)] == [[4], [4], [8, 2], [3]]


@pytest.mark.parametrize(
    ("shards", "rows"),
    [
        ([("a", ()), ("b", ())], {"a": 0, "b": 1}),
        ([("a", ()), ("b", ()), ("a", ())], {"a": 2, "b": 1}),
        ([("a", ("x", "y"))], {"a": 0, "x": 0, "y": 0}),
        ([("a", ("x",)), ("b", ("x",))], {"a": 0, "b": 1, "x": 0}),
        ([("a", ("b",)), ("b", ())], {"a": 0, "b": 1}),  # a name takes precedence over an alias
    ],
)
def test_shards_are_found_by_name_and_alias(shards, rows):
    mine = [vector(name, aliases=aliases) for name, aliases in shards]
    assert side(r0=mine).rows_by_name() == rows
    shifted = {name: row + 2 for name, row in rows.items()}
    others = [vector("other"), vector("one more")]
    assert side(r0=others, r1=mine).rows_by_name() == {"other": 0, "one more": 1} | shifted


# Rows


@pytest.mark.parametrize(
    ("rows", "shards", "wanted", "found"),
    [
        ([], [], [0, 5], [-1, -1]),
        ([2, 5], [7, 3], [], []),
        ([2, 5], [7, 3], [2, 5, 2], [7, 3, 7]),
        ([2, 5], [7, 3], [0, 3, 6], [-1, -1, -1]),
        ([0], [0], [0, 1], [0, -1]),
    ],
)
def test_numbers_of_rows_that_a_member_holds(rows, shards, wanted, found):
    numbers = RowNumbers(np.array(rows, dtype=np.int64), np.array(shards, dtype=np.int64))
    assert numbers[np.array(wanted, dtype=np.int64)].tolist() == found


def layout(*shards: tuple[str, int, tuple[int, ...], tuple[int, ...]]) -> Layout:
    """Tensors `w` of eight rows of two, `e` and `tied` of three elements; name, rank, lo and extent of shards."""
    shapes: dict[str, Any] = {"w": (8, 2), "e": (3,), "tied": (3,)}
    used = [name for name in shapes if name in {shard[0] for shard in shards}]
    tensors = [Tensor(name=name, dtype="fp32", shape=shapes[name]) for name in used]
    return Layout.from_shards(
        tensors, [Shard(tensor=name, rank=rank, lo=lo, extent=extent) for name, rank, lo, extent in shards]
    )


HALVES = [("w", 0, (0, 0), (4, 2)), ("w", 1, (4, 0), (4, 2))]


@pytest.mark.parametrize(
    ("rank", "shards", "found"),
    [
        (0, [rows_of_matrix("w", 0, 4)], [0, -1]),
        (1, [rows_of_matrix("w", 4, 4)], [-1, 0]),
        (0, [rows_of_matrix("w", 4, 4)], [-1, -1]),  # the row of another rank
        (0, [rows_of_matrix("w", 0, 8)], [-1, -1]),  # another box
        (0, [rows_of_matrix("v", 0, 4)], [-1, -1]),
        (0, [rows_of_matrix("w", 0, 4), rows_of_matrix("w", 4, 4)], [0, -1]),
        (0, [rows_of_matrix("w", 0, 4), rows_of_matrix("w", 0, 4)], [1, -1]),  # the last of equal ones
        (0, [vector("x"), rows_of_matrix("w", 0, 4), vector("y")], [1, -1]),
        (2, [rows_of_matrix("w", 0, 4)], [-1, -1]),
    ],
)
def test_a_row_is_held_by_the_shard_with_its_name_and_box(rank, shards, found):
    table = HeldTable.of(shards)
    assert LayoutRows(layout(*HALVES)).numbers(rank, table, table.lo)[np.arange(2)].tolist() == found


@pytest.mark.parametrize(
    ("shards", "found"),
    [
        ([vector("e", 3, aliases=("tied",))], [0, 0]),
        ([vector("e", 3, aliases=("tied",)), vector("tied", 3)], [0, 1]),  # a name takes precedence over an alias
        ([vector("tied", 3), vector("e", 3, aliases=("tied",))], [1, 0]),
        ([vector("e", 4, aliases=("tied",)), vector("tied", 3)], [-1, 1]),
        ([vector("f", 3, aliases=("e", "tied"))], [0, 0]),
    ],
)
def test_tied_weights_are_found_by_each_of_their_names(shards, found):
    rows = LayoutRows(layout(("e", 0, (0,), (3,)), ("tied", 0, (0,), (3,))))
    table = HeldTable.of(shards)
    assert rows.numbers(0, table, table.lo)[np.arange(2)].tolist() == found


def test_a_shard_may_be_a_tensor_of_its_own_in_the_layout():
    """Engines report boxes of checkpoint tensors; in a plan each begins at zero."""
    mine = HeldTable.of([held("w", "fp32", (16, 2), (8, 0), (8, 2))])
    rows = LayoutRows(layout(("w", 0, (0, 0), (8, 2))))
    assert rows.numbers(0, mine, mine.lo)[np.arange(1)].tolist() == [-1]
    assert rows.numbers(0, mine, np.zeros_like(mine.lo))[np.arange(1)].tolist() == [0]


@pytest.mark.parametrize(
    ("table", "wanted", "found"),
    [
        ([], [[1, 2]], [-1]),
        ([[1, 2]], [], []),
        ([[1, 2], [3, 4]], [[3, 4], [1, 2], [2, 1]], [1, 0, -1]),
        ([[1, 2], [3, 4], [1, 2]], [[1, 2], [3, 4]], [2, 1]),
        ([[9, 9]], [[0, 0], [10, 10]], [-1, -1]),
    ],
)
def test_the_last_of_equal_rows(table, wanted, found):
    columns = [np.array(rows, dtype=np.int64).reshape(-1, 2) for rows in (table, wanted)]
    assert _last_equal(*columns).tolist() == found
