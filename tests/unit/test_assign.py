from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tiny import tiny_model
from weft.core.assign import Policy, fill_order, round_robin_sources
from weft.core.layout import Layout, Shard, Tensor
from weft.core.layouts.engine_layout import engine_recipe
from weft.core.layouts.trainer_layout import Gather, trainer_layout
from weft.core.planner import make_plan
from weft.core.plans.bound import balance
from weft.core.recipe import Piece, Recipe
from weft.core.topology import Cluster, HostKind, Nic, load_topology, place_members, with_placement


@given(
    levels=st.lists(st.integers(0, 50), min_size=1, max_size=6),
    cost=st.integers(1, 20),
    num_items=st.integers(0, 40),
)
def test_fill_order_equals_the_one_by_one_loop(levels, cost, num_items):
    expected, level = [], list(levels)
    for _ in range(num_items):
        lowest = level.index(min(level))
        expected.append(lowest)
        level[lowest] += cost
    found = fill_order(np.array(levels, float), np.full(len(levels), float(cost)), num_items)
    assert found.tolist() == expected


def test_miles_vectors():
    assert round_robin_sources(4, 2, 3) == {
        0: [(0, 0)],
        1: [(0, 1), (1, 1)],
        2: [(0, 2), (1, 2)],
        3: [(1, 0)],
    }
    served = round_robin_sources(8, 2, 16)
    assert sorted(served[0]) == [(0, 0), (0, 8), (1, 0), (1, 8)]
    served = round_robin_sources(16, 2, 32)
    assert all(len(given) == 4 and len({rank for _, rank in given}) == 2 for given in served.values())


def one_tensor_each(sizes: dict[str, int], holders: dict[str, list[int]], num_trainers: int, num_engines: int = 1):
    """Tensors of given bytes and holders, all wanted whole by every engine rank."""
    tensors = [Tensor(name=name, dtype="fp8_e4m3", shape=(size,)) for name, size in sizes.items()]
    shards = [Shard(tensor=t.name, rank=rank, lo=(0,), extent=t.shape) for t in tensors for rank in holders[t.name]]
    layout = Layout.from_shards(tensors, shards, num_ranks=num_trainers)
    pieces = [Piece(dst=t.name, source=t.name, dst_lo=(0,), extent=t.shape, src_lo=(0,)) for t in tensors]
    recipe = Recipe.from_pieces(dict.fromkeys(range(num_engines), tensors), dict.fromkeys(range(num_engines), pieces))
    return layout, recipe


def plan(layout, recipe, policy, cluster=None):
    cluster = cluster or load_topology("h100-ib400")
    topology = cluster.place(num_trainers=layout.num_ranks, num_engines=recipe.engine.num_ranks)
    return make_plan(trainer=layout, recipe=recipe, topology=topology, policy=policy)


def test_greedy_takes_the_list_in_order():
    layout, recipe = one_tensor_each({"a": 10, "b": 10, "c": 30}, dict.fromkeys("abc", [0, 1]), 2)
    assert plan(layout, recipe, "greedy").tx_bytes.tolist() == [40, 10]


def test_balanced_takes_the_largest_first():
    layout, recipe = one_tensor_each({"a": 10, "b": 10, "c": 30, "d": 10}, dict.fromkeys("abcd", [0, 1]), 2)
    assert sorted(plan(layout, recipe, "balanced").tx_bytes.tolist()) == [30, 30]


def test_balanced_counts_what_has_no_choice():
    holders = {"forced": [0], "free": [0, 1]}
    layout, recipe = one_tensor_each({"forced": 50, "free": 50}, holders, 2)
    assert plan(layout, recipe, "balanced").tx_bytes.tolist() == [50, 50]


def test_refinement_moves_along_chains_of_overlapping_holders():
    """Filling smallest-choice-first leaves rank 1 busy with `b`; the best plan shifts every tensor one rank on."""
    sizes = {f"{name}{i}": 10 for name in "abc" for i in range(12)}
    holders = {
        f"{name}{i}": ranks for name, ranks in zip("abc", ([0, 1], [1, 2], [1, 3]), strict=True) for i in range(12)
    }
    layout, recipe = one_tensor_each(sizes, holders, 4)
    made = plan(layout, recipe, "balanced")
    assert made.tx_bytes.max() == 90
    assert balance(made).bounds_s["trainer NICs"] == pytest.approx(90 / 50e9)


def test_rank0_sends_everything_after_a_gather():
    model = tiny_model("qwen3")
    layout = trainer_layout(model, "fsdp4", gather=Gather.WORLD)
    made = plan(layout, engine_recipe(model, "tp2"), "rank0")
    assert (made.tx_bytes[1:] == 0).all()
    assert made.tx_bytes[0] == made.total_bytes


def test_every_policy_moves_the_same_bytes():
    model = tiny_model("qwen3-moe")
    layout = trainer_layout(model, "fsdp2.ep2/hsdp2x2")
    recipe = engine_recipe(model, "ep2", num_replicas=2)
    made = {policy: plan(layout, recipe, policy) for policy in Policy}
    assert len({p.total_bytes for p in made.values()}) == 1
    assert len({tuple(p.rx_bytes) for p in made.values()}) == 1
    assert made[Policy.BALANCED].tx_bytes.max() <= made[Policy.GREEDY].tx_bytes.max()


def test_a_holder_in_the_same_domain_is_preferred():
    layout, recipe = one_tensor_each({"a": 1000, "b": 1000}, dict.fromkeys("ab", [0, 8]), 9)
    cluster = with_placement(load_topology("h100-ib400"), "packed")
    made = plan(layout, recipe, "balanced", cluster)
    assert made.topology.is_local[8, 0]
    assert made.tx_bytes[8] == 2000


def test_a_shared_uplink_is_balanced_over_hosts():
    nics = tuple(Nic(gbps=100, devices=(d,)) for d in range(2))
    host = HostKind(devices=2, nics=nics, link_gb_per_s=100, pinned_gb_per_s=20, uplink_gbps=100)
    sizes = {f"t{i}": 10 for i in range(320)}
    layout, recipe = one_tensor_each(sizes, dict.fromkeys(sizes, [0, 1, 2]), 3)
    made = plan(layout, recipe, "balanced", Cluster(name="uplinks", host=host))
    hosts = np.bincount(made.topology.host_of(made.topology.trainer_device), weights=made.tx_bytes)
    assert hosts.max() <= 1.05 * hosts.mean()
    assert "host uplinks" in balance(made).bounds_s


def test_the_bound_holds_for_every_policy_and_is_met_by_balanced():
    model = tiny_model("qwen3-moe")
    layout = trainer_layout(model, "hsdp3x2")
    recipe = engine_recipe(model, "tp1")
    measured = {policy: balance(plan(layout, recipe, policy)) for policy in ("balanced", "greedy", "round_robin")}
    assert all(found.over_bound >= 1 for found in measured.values())
    assert measured["balanced"].makespan_s <= min(found.makespan_s for found in measured.values())


def rails(gbps: float, cross_rail_gbps: float) -> Cluster:
    nics = tuple(Nic(gbps=gbps, devices=(d,), rail=d) for d in range(4))
    host = HostKind(devices=4, nics=nics, link_gb_per_s=100, pinned_gb_per_s=20, cross_rail_gbps=cross_rail_gbps)
    return Cluster(name="rails", host=host)


def test_scarce_cross_rail_capacity_is_avoided():
    sizes = {f"t{i}": 1000 for i in range(16)}
    layout, recipe = one_tensor_each(sizes, dict.fromkeys(sizes, [0, 1, 2, 3]), 4, num_engines=4)
    made = plan(layout, recipe, "balanced", rails(100, 10))
    crossing = made.pair_bytes[made.topology.changes_rail].sum()
    assert crossing <= 0.15 * made.total_bytes
    assert balance(made).over_bound < 1.2


def test_bytes_that_must_change_rail_are_in_the_bound():
    layout, recipe = one_tensor_each({"a": 1000}, {"a": [1]}, 4)
    found = balance(plan(layout, recipe, "balanced", rails(100, 10)))
    assert found.bound_by == "cross-rail links"
    assert found.over_bound == pytest.approx(1.0)


def test_bytes_that_must_use_a_link_are_in_the_bound():
    layout, recipe = one_tensor_each({"a": 1000}, {"a": [0]}, 1)
    cluster = with_placement(rails(100, 0), "packed")
    found = balance(plan(layout, recipe, "balanced", cluster))
    assert found.bound_by == "links inside a domain"
    assert found.over_bound == pytest.approx(1.0)


@pytest.mark.parametrize("host_of_engine", ["a", "b"])
def test_trainers_that_share_a_device_share_its_rate(host_of_engine):
    """Trainers 0 and 1 are on one device, 2 on another: over links inside the host, and over NICs to the next."""
    names = "abcdefghijkl"
    layout, recipe = one_tensor_each(dict.fromkeys(names, 100), dict.fromkeys(names, [0, 1, 2]), 3)
    seats = [("a", 0), ("a", 0), ("a", 1)]
    topology = place_members(load_topology("h100-ib400"), trainers=seats, engines=[(host_of_engine, 2)])
    found = make_plan(trainer=layout, recipe=recipe, topology=topology)
    shared, alone = found.tx_bytes[:2].sum(), found.tx_bytes[2]
    assert (shared, alone) == (600, 600)
    assert balance(found).over_bound >= 1.0


def test_a_large_tensor_is_cut_among_its_holders():
    layout, recipe = one_tensor_each({"a": 8 << 20}, {"a": [0, 1]}, 2)
    made = plan(layout, recipe, "balanced")
    assert made.tx_bytes.tolist() == [4 << 20, 4 << 20]
    assert (made.src_lo[:, 0] % 128 == 0).all()
    assert plan(layout, recipe, "greedy").num_rows == 1


def test_a_scarce_receiving_port_is_spared_by_links():
    """The holder on the engine's host sends nearly all: the others would have to pass the engine's slow NIC."""
    nics = tuple(Nic(gbps=rate, devices=(d,)) for d, rate in enumerate([400, 10]))
    host = HostKind(devices=2, nics=nics, link_gb_per_s=50, pinned_gb_per_s=20)
    sizes = {f"t{i}": 10_000 for i in range(200)}
    layout, recipe = one_tensor_each(sizes, dict.fromkeys(sizes, [0, 1, 2]), 3)
    made = plan(layout, recipe, "balanced", Cluster(name="slow door", host=host, placement="packed"))
    assert made.topology.is_local[:, 0].tolist() == [False, False, True]
    assert made.tx_bytes[2] >= 0.95 * made.total_bytes
