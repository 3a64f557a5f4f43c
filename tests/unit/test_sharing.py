"""Trainers that hold parts of the same FP8 blocks find each other, directly or through a hub; nobody else does."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.test_plan import small_plan
from weft.codec.grids import SCALINGS
from weft.core.geometry.scaling import Scaling, block_sides_of
from weft.core.layout import Layout, RankGroups, Shard, Tensor
from weft.core.plans.plan import Plan
from weft.core.streams.exchange import ScaleGroups
from weft.runtime.compile.sharing import (
    COLLECTED_ELSEWHERE,
    COLLECTED_HERE,
    DIRECT,
    NO_HUB,
    Neighbours,
    _directed,
    _trainer_pairs,
)
from weft.runtime.send.magnitudes import CutBlocks, Sharing


class BruteForce:
    """What each trainer holds of each quantised matrix, element by element."""

    def __init__(self, plan: Any) -> None:
        layout = plan.trainer
        everything = np.arange(len(layout.tensors))
        self.groups = ScaleGroups(tensors=everything, group=np.zeros_like(everything), first_key=everything)
        self.neighbours = Neighbours.of(plan, self.groups)
        self.ranks, self.num_trainers = layout.groups, layout.num_ranks
        self.sides = plan.recipe.block_sides(layout)
        self.boxes: dict[tuple[int, int], list[tuple[slice, slice]]] = {}
        self.held = {
            (trainer, tensor): np.zeros(layout.tensors[tensor].shape, dtype=bool)
            for trainer in range(layout.num_ranks)
            for tensor in self.groups.tensors.tolist()
        }
        for row in np.flatnonzero(self.groups.group[layout.tensor_of] >= 0).tolist():
            (top, left), (rows, columns) = layout.lo[row, :2], layout.extent[row, :2]
            first, last = layout.groups.starts[layout.group_of[row] :][:2]
            for trainer in layout.groups.members[first:last].tolist():
                box = slice(top, top + rows), slice(left, left + columns)
                self.held[trainer, int(layout.tensor_of[row])][box] = True
                self.boxes.setdefault((trainer, int(layout.tensor_of[row])), []).append(box)

    def friends(self, trainer: int) -> set[int]:
        return {*self.neighbours.servers_of(trainer), *self.neighbours.clients_of(trainer)}

    def role(self, trainer: int, tensor: int) -> int:
        return int(self.neighbours.roles(self.ranks, trainer, np.array([tensor]))[0])

    def cut_blocks(self, trainer: int, tensor: int) -> list[tuple[slice, slice]]:
        """Blocks of which some shard of a trainer has a part, and not all."""
        mine, (height, width) = self.held[trainer, tensor], self.sides[tensor, :2].tolist()
        every = [
            (slice(top, top + height), slice(left, left + width))
            for top in range(0, mine.shape[0], height)
            for left in range(0, mine.shape[1], width)
        ]
        boxes = self.boxes.get((trainer, tensor), [])
        return [block for block in every if any(cuts_block(box, block, mine.shape) for box in boxes)]

    def numbered(self, trainer: int) -> dict[int, tuple[int, int, tuple[slice, slice]]]:
        """Role, tensor and place of the blocks a trainer has a part of, by numbers that all trainers know."""
        return {
            (tensor << 40) + (block[0].start << 20) + block[1].start: (self.role(trainer, tensor), tensor, block)
            for tensor in self.groups.tensors.tolist()
            for block in self.cut_blocks(trainer, tensor)
        }

    def is_known(self, trainer: int, tensor: int, block: tuple[slice, slice]) -> bool:
        """Whether a trainer and those it talks to have all of a block."""
        holders = [self.held[other, tensor][block] for other in {trainer, *self.friends(trainer)}]
        return bool(np.logical_or.reduce(holders).all())


def cuts_block(box: tuple[slice, slice], block: tuple[slice, slice], shape: tuple[int, ...]) -> bool:
    touches = all(mine.start < its.stop and its.start < mine.stop for mine, its in zip(box, block, strict=True))
    inside = zip(box, block, shape, strict=True)
    return touches and not all(m.start <= b.start and min(b.stop, size) <= m.stop for m, b, size in inside)


def random_plan(rng: random.Random, scaling: Scaling) -> Any:
    """What neighbours are found from: matrices cut at random rows and columns, each part on some trainers."""
    num_trainers = rng.randint(2, 6)
    tensors, shards = [], []
    for number in range(rng.randint(1, 4)):
        shape = rng.randint(1, 700), rng.randint(1, 500)
        tensors.append(Tensor(name=f"w{number}", dtype="bf16", shape=shape))
        row_cuts, column_cuts = (cuts(rng, size) for size in shape)
        for top, bottom in pairwise(row_cuts):
            for left, right in pairwise(column_cuts):
                for rank in rng.sample(range(num_trainers), rng.randint(1, min(3, num_trainers))):
                    lo, extent = (top, left), (bottom - top, right - left)
                    shards.append(Shard(tensor=f"w{number}", rank=rank, lo=lo, extent=extent))
    layout = Layout.from_shards(tensors, shards)
    kind = np.full(len(tensors), SCALINGS.index(scaling))
    sides = block_sides_of(layout.shapes, layout.tensor_dims, kind)
    return SimpleNamespace(trainer=layout, recipe=SimpleNamespace(block_sides=lambda _: sides))


def cuts(rng: random.Random, size: int) -> list[int]:
    inner = rng.sample(range(1, size), min(rng.randint(0, 3), size - 1)) if size > 1 else []
    return [0, *sorted(inner), size]


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32), st.sampled_from(list(Scaling)))
def test_trainers_that_talk_have_all_of_the_blocks_they_share(seed, scaling):
    found = BruteForce(random_plan(random.Random(seed), scaling))
    for rank, tensor in found.held:
        for block in found.cut_blocks(rank, tensor):
            if found.role(rank, tensor) == COLLECTED_ELSEWHERE:
                hubs = [other for other in found.friends(rank) if found.role(other, tensor) == COLLECTED_HERE]
                assert any(found.is_known(hub, tensor, block) for hub in hubs)
            else:
                assert found.is_known(rank, tensor, block)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32), st.sampled_from(list(Scaling)))
def test_what_they_tell_each_other_is_the_largest_of_the_whole_block(seed, scaling):
    rng = random.Random(seed)
    found = BruteForce(random_plan(rng, scaling))
    numbers = {tensor: np.random.default_rng(tensor).random(found.held[0, tensor].shape) for _, tensor in found.held}
    cut = {rank: found.numbered(rank) for rank in range(found.num_trainers)}
    sharings = {
        rank: Sharing([CutBlocks(np.array(sorted(mine), dtype=np.int64), roles_of(mine))], peers=found.friends(rank))
        for rank, mine in cut.items()
    }
    for rank, sharing in sharings.items():
        sharing.begin(1)
        mine = [(found.held[rank, tensor][block], numbers[tensor][block]) for _, tensor, block in by_key(cut[rank])]
        sharing.found(0, np.array([values[is_held].max() for is_held, values in mine], dtype=np.float32))
    links = [(one, other) for one in sharings for other in found.friends(one)]
    rng.shuffle(links)
    for one, other in links:
        sharings[one].met(other, sharings[other].introduction)
    for _ in range(3):
        for one, other in links:
            for finding, values in sharings[one].due(other):
                sharings[other].told(one, finding, values)
    for rank, sharing in sharings.items():
        wanted = [numbers[tensor][block].max() for _, tensor, block in by_key(cut[rank])]
        agreed = sharing.agreed(0)
        assert agreed is not None
        np.testing.assert_array_equal(agreed, np.array(wanted, dtype=np.float32))


def roles_of(cut: dict[int, Any]) -> np.ndarray:
    return np.array([role for role, _, _ in by_key(cut)], dtype=np.int64)


def by_key(cut: dict[int, Any]) -> list[Any]:
    return [cut[key] for key in sorted(cut)]


def fsdp(num_trainers: int, scaling: Scaling) -> BruteForce:
    """A matrix of 200 rows for each trainer."""
    shape = 200 * num_trainers, 128
    layout = Layout.from_shards(
        [Tensor(name="w", dtype="bf16", shape=shape)],
        [Shard(tensor="w", rank=rank, lo=(200 * rank, 0), extent=(200, 128)) for rank in range(num_trainers)],
    )
    sides = block_sides_of(layout.shapes, layout.tensor_dims, np.array([SCALINGS.index(scaling)]))
    return BruteForce(SimpleNamespace(trainer=layout, recipe=SimpleNamespace(block_sides=lambda _: sides)))


def test_a_border_has_few_neighbours():
    found = fsdp(16, Scaling.BLOCK)
    assert [sorted(found.friends(rank)) for rank in (0, 1, 15)] == [[1], [0, 2], [14]]


def test_of_a_single_scale_everybody_knows_the_hub_alone():
    found = fsdp(64, Scaling.TENSOR)
    assert found.friends(0) == set(range(1, 64))
    assert all(found.friends(rank) == {0} for rank in range(1, 64))
    assert found.neighbours.servers_of(0) == []  # the one that all others connect to


def test_those_that_hold_whole_blocks_talk_to_nobody():
    for scaling in (Scaling.BLOCK, Scaling.TENSOR):
        plan = plan_with("ddp4", scaling)
        assert not Neighbours.of(plan, ScaleGroups.of(plan)).pairs
    assert not fsdp(4, Scaling.CHANNEL).neighbours.pairs


def groups_of(*groups: list[int]) -> RankGroups:
    starts = np.cumsum([0, *map(len, groups)])
    return RankGroups(members=np.concatenate(groups).astype(np.int32), starts=starts.astype(np.int64))


@pytest.mark.parametrize(
    ("trainer", "servers", "clients"), [(0, [], [1, 3]), (1, [0, 3], []), (2, [], []), (3, [0], [1])]
)
def test_whom_a_trainer_connects_to(trainer, servers, clients):
    found = Neighbours(pairs=frozenset({(1, 3), (3, 0), (1, 0)}), hub=np.zeros(0, dtype=np.int64))
    assert (found.servers_of(trainer), found.clients_of(trainer)) == (servers, clients)


@pytest.mark.parametrize(
    ("trainer", "roles"),
    [
        (0, [DIRECT, COLLECTED_HERE, COLLECTED_ELSEWHERE]),
        (1, [DIRECT, COLLECTED_HERE, COLLECTED_HERE]),
        (2, [DIRECT, COLLECTED_ELSEWHERE, COLLECTED_HERE]),
        (3, [DIRECT, COLLECTED_ELSEWHERE, COLLECTED_ELSEWHERE]),
    ],
)
def test_who_collects_the_magnitudes_of_a_matrix(trainer, roles):
    """Every trainer of the hub's group holds the same bits, and collects them."""
    ranks = groups_of([0, 1], [1, 2], [3])
    found = Neighbours(pairs=frozenset(), hub=np.array([0, NO_HUB, 1]))
    assert found.roles(ranks, trainer, np.array([1, 0, 2])).tolist() == roles


@pytest.mark.parametrize(
    ("groups", "touching", "pairs"),
    [
        ([[0], [1], [2]], [(0, 1)], {(0, 1)}),
        ([[0], [1], [2]], [(0, 1), (1, 2)], {(0, 1), (1, 2)}),
        ([[0, 1], [2, 3]], [(0, 1)], {(0, 2), (1, 3)}),
        ([[0, 1, 2], [3]], [(0, 1)], {(0, 3), (1, 3), (2, 3)}),
        ([[0, 1, 2], [3, 4]], [(0, 1)], {(0, 3), (1, 4), (2, 3)}),
        ([[0, 1], [1, 2]], [(0, 1)], {(0, 1), (1, 2)}),  # trainer 1 has both parts
        ([[0, 1]], [(0, 0)], set()),
    ],
)
def test_every_holder_talks_to_one_holder_of_the_other_part(groups, touching, pairs):
    assert _trainer_pairs(touching, groups_of(*groups)) == pairs


@pytest.mark.parametrize(
    ("pairs", "directed"),
    [
        (set(), set()),
        ({(0, 1)}, {(1, 0)}),
        ({(0, 1), (1, 2)}, {(0, 1), (2, 1)}),
        ({(0, 3), (1, 3), (2, 3)}, {(0, 3), (1, 3), (2, 3)}),
        ({(0, 1), (0, 2), (0, 3), (2, 3)}, {(1, 0), (2, 0), (3, 0), (3, 2)}),
    ],
)
def test_those_with_few_neighbours_connect_to_those_with_many(pairs, directed):
    """Of two with as many, the one with the higher rank connects."""
    assert set(_directed(pairs)) == directed


def plan_with(trainer: str, scaling: Scaling) -> Plan:
    plan = small_plan(trainer)
    quantised = [plan.trainer.tensors[number].name for number in ScaleGroups.of(plan).tensors.tolist()]
    return replace(plan, recipe=plan.recipe.with_scaling(dict.fromkeys(quantised, scaling)))
