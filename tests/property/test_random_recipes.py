"""Random tensors, shardings and transposes: the plan moves exactly the right bytes, and only whole plans pass."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.executor import execute, random_checkpoint, same_bits
from weft.core.assign import Policy
from weft.core.layout import Layout, Shard, Tensor
from weft.core.planner import make_plan
from weft.core.plans.plan import Plan
from weft.core.plans.proof import prove
from weft.core.recipe import Op, Piece, Recipe
from weft.core.topology import load_topology
from weft.errors import PlanError

NUM_TRAINERS, NUM_ENGINES = 5, 3


def _cut(draw: st.DrawFn, shape: tuple[int, ...], depth: int = 3) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """A random tiling of a box by recursive cuts."""
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, depth))):
        i = draw(st.integers(0, len(boxes) - 1))
        lo, extent = boxes[i]
        dim = draw(st.integers(0, len(shape) - 1))
        if extent[dim] < 2:
            continue
        at = draw(st.integers(1, extent[dim] - 1))
        low, high = list(extent), list(extent)
        low[dim], high[dim] = at, extent[dim] - at
        start = list(lo)
        start[dim] += at
        boxes[i : i + 1] = [(lo, tuple(low)), (tuple(start), tuple(high))]
    return boxes


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    tensors, shards = [], []
    for i in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
        tensors.append(Tensor(name=f"s{i}", dtype="fp32", shape=shape))
        for lo, extent in _cut(draw, shape):
            row_major = tuple(int(np.prod(extent[d + 1 :])) for d in range(len(extent)))
            gap = draw(st.sampled_from([1, 1, 2]))
            strides = tuple(stride * gap for stride in row_major)
            ranks = draw(st.sets(st.integers(0, NUM_TRAINERS - 1), min_size=1))
            shards += [Shard(tensor=f"s{i}", rank=r, lo=lo, extent=extent, strides=strides) for r in sorted(ranks)]
    layout = Layout.from_shards(tensors, shards, num_ranks=NUM_TRAINERS)
    local: dict[int, list[Tensor]] = {rank: [] for rank in range(NUM_ENGINES)}
    pieces: dict[int, list[Piece]] = {rank: [] for rank in range(NUM_ENGINES)}
    for source in tensors:
        name = f"d_{source.name}"
        axes = tuple(draw(st.permutations(range(len(source.shape)))))
        dtype = draw(st.sampled_from(["fp32", "bf16"]))
        op = Op.COPY if dtype == "fp32" else Op.CAST
        turned = tuple(source.shape[axis] for axis in axes)
        padding = draw(st.integers(0, 2))
        shape = (turned[0] + padding, *turned[1:])
        made = []
        for lo, extent in _cut(draw, turned):
            src_lo = [0] * len(lo)
            for dim, axis in enumerate(axes):
                src_lo[axis] = lo[dim]
            made.append(
                Piece(
                    dst=name,
                    source=source.name,
                    dst_lo=lo,
                    extent=extent,
                    src_lo=tuple(src_lo),
                    axes=axes,
                    op=op,
                )
            )
        if padding:
            lo = (turned[0], *(0,) * (len(turned) - 1))
            made.append(
                Piece(
                    dst=name,
                    source="",
                    dst_lo=lo,
                    extent=(padding, *turned[1:]),
                    src_lo=(),
                    axes=(-1,) * len(lo),
                    op=Op.PAD,
                )
            )
        for rank in draw(st.sets(st.integers(0, NUM_ENGINES - 1), min_size=1)) | {0}:
            local[rank].append(Tensor(name=name, dtype=dtype, shape=shape))
            pieces[rank].extend(made)
    recipe = Recipe.from_pieces(local, pieces)
    topology = load_topology("h100-ib400").place(num_trainers=NUM_TRAINERS, num_engines=NUM_ENGINES)
    return make_plan(trainer=layout, recipe=recipe, topology=topology, policy=draw(st.sampled_from(Policy)))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plan=plans(), seed=st.integers(0, 2**32 - 1))
def test_random_plan_moves_the_right_bytes(plan, seed):
    checkpoint = random_checkpoint(plan, seed)
    done = execute(plan, checkpoint)
    for rank in range(NUM_ENGINES):
        for name, value in done.tensors[rank].items():
            source = checkpoint[name.removeprefix("d_")]
            row = next(i for i in range(len(plan.recipe.dst)) if _reads(plan, i, name))
            axes = [int(a) for a in plan.recipe.axes[row] if a >= 0][: source.ndim]
            expected = source.transpose(axes).astype(value.dtype)
            assert same_bits(value[: expected.shape[0]], expected)
            assert (done.writes[rank][name][: expected.shape[0]] == 1).all()
            assert (done.writes[rank][name][expected.shape[0] :] == 0).all()


def _reads(plan: Plan, piece: int, name: str) -> bool:
    dst = plan.recipe.engine.tensors[plan.recipe.dst[piece]]
    return dst.name == name and plan.recipe.op[piece] != Op.PAD


def _without(plan: Plan, row: int) -> Plan:
    keep = np.arange(plan.num_rows) != row
    routes = np.repeat(keep, plan.fan_out)
    first = np.concatenate([[0], np.cumsum(plan.fan_out[keep])])
    columns = {name: getattr(plan, name)[keep] for name in ("piece", "shard", "dst_lo", "src_lo", "extent")}
    return replace(plan, **columns, first=first, sender=plan.sender[routes])


def _twice(plan: Plan, row: int) -> Plan:
    order = np.sort(np.append(np.arange(plan.num_rows), row))
    first = np.concatenate([[0], np.cumsum(plan.fan_out[order])])
    sender = np.concatenate([plan.sender[plan.first[i] : plan.first[i + 1]] for i in order])
    columns = {name: getattr(plan, name)[order] for name in ("piece", "shard", "dst_lo", "src_lo", "extent")}
    return replace(plan, **columns, first=first, sender=sender)


def _shifted(plan: Plan, row: int, column: str, dim: int, by: int) -> Plan:
    moved = getattr(plan, column).copy()
    moved[row, dim] += by
    return replace(plan, **{column: moved})


@given(data=st.data())
def test_a_selected_row_of_a_source_is_checked_too(data):
    """A piece may read one index of a source dimension that the destination does not have (a `select`)."""
    shape = data.draw(st.tuples(st.integers(2, 4), st.integers(1, 5)))
    chosen = data.draw(st.integers(0, shape[0] - 1))
    layout = Layout.from_shards(
        [Tensor(name="s", dtype="fp32", shape=shape)],
        [Shard(tensor="s", rank=0, lo=(0, 0), extent=shape)],
    )
    piece = Piece(dst="d", source="s", dst_lo=(0,), extent=shape[1:], src_lo=(chosen, 0), axes=(1,))
    recipe = Recipe.from_pieces({0: [Tensor(name="d", dtype="fp32", shape=shape[1:])]}, {0: [piece]})
    topology = load_topology("h100-ib400").place(num_trainers=1, num_engines=1)
    plan = make_plan(trainer=layout, recipe=recipe, topology=topology)
    checkpoint = random_checkpoint(plan, 0)
    assert same_bits(execute(plan, checkpoint).tensors[0]["d"], checkpoint["s"][chosen])
    with pytest.raises(PlanError, match="does not ask for"):
        prove(_shifted(plan, 0, "src_lo", 0, 1 if chosen == 0 else -1))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plan=plans(), data=st.data())
def test_a_plan_with_one_wrong_route_is_rejected(plan, data):
    prove(plan)
    row = data.draw(st.integers(0, plan.num_rows - 1))
    change = data.draw(st.sampled_from(["removed", "duplicated", "dst_lo", "src_lo", "extent", "sender"]))
    if change == "removed":
        wrong = _without(plan, row)
    elif change == "duplicated":
        wrong = _twice(plan, row)
    elif change == "sender":
        group = plan.trainer.groups.of(int(plan.trainer.group_of[plan.shard[row]]))
        others = sorted(set(range(NUM_TRAINERS)) - set(group.tolist()))
        if not others:
            return
        sender = plan.sender.copy()
        sender[plan.first[row]] = data.draw(st.sampled_from(others))
        wrong = replace(plan, sender=sender)
    else:
        dim = data.draw(st.integers(0, plan.extent.shape[1] - 1))
        wrong = _shifted(plan, row, change, dim, data.draw(st.sampled_from([-1, 1])))
    with pytest.raises(PlanError):
        prove(wrong)
