"""Boxes of one link, cut out of a plan of two trainers and two engine ranks, and what of their tables is refused.

Each trainer holds four of eight rows of `w`; trainer 1 also has `v`. Each engine rank holds two of four columns of `w`,
and all of `v` in another dtype.
"""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from tests.support.planned_members import held, join
from weft.codec.conversion import DTYPES
from weft.core.plans.plan import Plan
from weft.core.recipe import Op
from weft.core.topology import load_topology
from weft.errors import ProtocolError
from weft.runtime.compile.holding import LayoutRows, RowNumbers
from weft.runtime.compile.link_boxes import LinkBoxes, PlanBoxes
from weft.runtime.compile.matching import plan_members

FP32, BF16 = DTYPES.index("fp32"), DTYPES.index("bf16")


@pytest.fixture(scope="module")
def members():
    """What the members of both sides hold."""
    vector = held("v", "fp32", (8,), (0,), (8,))
    halves = [held("w", "fp32", (8, 4), (row, 0), (4, 4)) for row in (0, 4)]
    trainers = {0: join("trainer", 0, [halves[0]]), 1: join("trainer", 1, [vector, halves[1]])}
    columns = [held("w", "fp32", (8, 4), (0, column), (8, 2)) for column in (0, 2)]
    cast = held("v", "bf16", (8,), (0,), (8,))
    return trainers, {rank: join("engine", rank, [cast, mine]) for rank, mine in enumerate(columns)}


@pytest.fixture(scope="module")
def plan(members) -> Plan:
    return plan_members(*members, load_topology("h100-ib400"), ranks_per_engine=1)


@pytest.fixture(scope="module")
def link(plan, members):
    """The boxes of a link."""
    boxes, (trainers, engines) = PlanBoxes(plan, plan.row_boxes), members

    def cut(trainer: int, engine: int) -> LinkBoxes:
        mine, theirs = trainers[trainer].held.table, engines[engine].held.table
        shard = LayoutRows(plan.trainer).numbers(trainer, mine, mine.lo)
        tensor = LayoutRows(plan.recipe.engine).numbers(engine, theirs, np.zeros_like(theirs.lo))
        return boxes.link(trainer, engine, shard=shard, tensor=tensor, grid=np.full(2, 5))

    return cut


@pytest.mark.parametrize(
    ("trainer", "engine", "src_offset", "dst_offset"), [(0, 0, 0, 0), (0, 1, 2, 0), (1, 0, 0, 8), (1, 1, 2, 8)]
)
def test_a_box_of_a_matrix(link, trainer, engine, src_offset, dst_offset):
    """Two of the four columns the trainer holds, as four rows of the engine's matrix of two columns."""
    found = link(trainer, engine)
    (box,) = np.flatnonzero(found.op == Op.COPY)
    kind = found.kind[box]
    assert found.extent[kind].tolist() == [4, 2]
    assert found.src_strides[kind].tolist() == [4, 1]
    assert found.dst_strides[kind].tolist() == found.compact[kind].tolist() == [2, 1]
    assert found.what[kind].tolist() == [Op.COPY, FP32, FP32]
    assert (found.src_width[box], found.width[box]) == (4, 4)
    assert (found.src_offset[box], found.dst_offset[box]) == (src_offset, dst_offset)
    assert found.first[box].tolist() == [4 * trainer, 2 * engine]
    assert found.src[box] == trainer, "the shard after `v`, where it holds that"
    assert found.tensors[found.dst[box]] == 1
    assert (found.grid[box], found.group[box]) == (-1, -1), "it needs no scales"


def test_a_link_carries_what_its_trainer_holds(link, plan):
    boxes = PlanBoxes(plan, plan.row_boxes)
    assert [[len(link(trainer, engine)) for engine in range(2)] for trainer in range(2)] == [[1, 1], [2, 2]]
    rows = [boxes.rows_of(trainer, engine) for trainer in range(2) for engine in range(2)]
    carried = [
        plan.trainer.tensors[number].name for mine in rows for number in plan.trainer.tensor_of[plan.shard[mine]]
    ]
    assert sorted(carried) == ["v", "v", "w", "w", "w", "w"]
    assert sum(int(plan.row_bytes[mine].sum()) for mine in rows) == plan.pair_bytes.sum()


@pytest.mark.parametrize("engine", [0, 1])
def test_a_tensor_that_is_cast(link, engine):
    found = link(1, engine)
    (box,) = np.flatnonzero(found.op == Op.CAST)
    assert found.what[found.kind[box]].tolist() == [Op.CAST, FP32, BF16]
    assert (found.src_width[box], found.width[box]) == (4, 2)
    assert found.extent[found.kind[box]].tolist() == [1, 8]
    assert found.tensors.tolist() == [0, 1]
    assert found.dst[box] == 0
    assert found.src[box] == 0
    assert sorted(found.place.tolist()) == [0, 1]
    assert found.place[box] < found.place[1 - box], "destination order"


def test_boxes_that_are_alike_share_their_kind(members):
    """Experts of one layer differ only in where they begin."""
    trainers, engines = ({0: join(side, 0, experts())} for side in ("trainer", "engine"))
    plan = plan_members(trainers, engines, load_topology("h100-ib400"), ranks_per_engine=1)
    every = RowNumbers(np.arange(4), np.arange(4))
    found = PlanBoxes(plan, plan.row_boxes).link(0, 0, shard=every, tensor=every, grid=np.full(4, -1))
    assert len(found) == 4
    assert len(found.extent) == 2
    kinds = [found.extent[found.kind[box]].tolist() for box in np.argsort(found.dst)]
    assert kinds == [[4, 2], [4, 2], [4, 2], [8, 2]]
    assert sorted(found.src.tolist()) == sorted(found.dst.tolist()) == [0, 1, 2, 3]


def experts():
    shapes = {"e.0": (4, 2), "e.1": (4, 2), "e.2": (4, 2), "w": (8, 2)}
    return [held(name, "fp32", shape, (0, 0), shape) for name, shape in shapes.items()]


def test_a_matrix_that_is_quantised_knows_its_grid():
    """`other` is the first tensor of the trainer, but its only grid is that of `w`."""
    scales = held("w_scale_inv", "fp32", (1, 1), (0, 0), (1, 1))
    whole = {name: held(name, dtype, (8, 4), (0, 0), (8, 4)) for name, dtype in (("other", "fp32"), ("w", "fp32"))}
    trainers = {0: join("trainer", 0, [whole["other"], whole["w"]])}
    quantized = held("w", "fp8_e4m3", (8, 4), (0, 0), (8, 4))
    engines = {0: join("engine", 0, [whole["other"], quantized, scales])}
    plan = plan_members(trainers, engines, load_topology("h100-ib400"), ranks_per_engine=1)
    names = [tensor.name for tensor in plan.trainer.tensors]
    grid = np.array([0 if name == "w" else -1 for name in names])
    every = RowNumbers(np.arange(3), np.arange(3))
    found = PlanBoxes(plan, plan.row_boxes).link(0, 0, shard=every, tensor=every, grid=grid)
    facts = {Op(op): (found.grid[box], found.group[box]) for box, op in enumerate(found.op.tolist())}
    assert facts == {Op.COPY: (-1, -1), Op.QUANTIZE: (0, 0), Op.SCALE: (0, 0)}
    (scale,) = np.flatnonzero(found.op == Op.SCALE)
    assert found.src[scale] == 0, "scales are not read from a shard"


def test_boxes_survive_the_journey(link):
    boxes = link(1, 1)
    found = LinkBoxes.decode(boxes.encode())
    for field in fields(LinkBoxes):
        np.testing.assert_array_equal(getattr(found, field.name), getattr(boxes, field.name))


@pytest.mark.parametrize("name", [field.name for field in fields(LinkBoxes) if field.name != "tensors"])
def test_columns_of_another_length_are_refused(link, name):
    boxes = link(1, 0)
    longer = np.concatenate([getattr(boxes, name)] * 2)
    with pytest.raises(ProtocolError, match="table of a plan is inconsistent"):
        LinkBoxes.decode(replace(boxes, **{name: longer}).encode())


@pytest.mark.parametrize("name", ["src_strides", "dst_strides", "what", "first"])
def test_tables_of_another_width_are_refused(link, name):
    boxes = link(1, 0)
    with pytest.raises(ProtocolError, match="table of a plan is inconsistent"):
        LinkBoxes.decode(replace(boxes, **{name: getattr(boxes, name)[:, :1]}).encode())


@pytest.mark.parametrize(
    ("name", "value"),
    [("kind", 2), ("kind", -1), ("dst", 2), ("dst", -1), ("what", len(DTYPES)), ("extent", 0), ("extent", -4)],
)
def test_numbers_of_what_is_not_there_are_refused(link, name, value):
    boxes = link(1, 0)
    column = getattr(boxes, name).copy()
    column.reshape(-1)[-1] = value
    with pytest.raises(ProtocolError, match="table of a plan is inconsistent"):
        LinkBoxes.decode(replace(boxes, **{name: column}).encode())
