"""Planner and simulator together against the optimum: no way of sending directly is 3% faster.

For random networks a linear program chooses, for all bytes that the same trainer ranks hold and one engine rank wants,
which part each holder sends, so that the busiest resource is done as early as possible. Resources and rates are the
simulator's. Bytes may be cut anywhere and everything flows at once, so nothing that sends directly can be faster; the
simulator sends whole Chunks of the plan that `balanced` made.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

from weft.config import Settings
from weft.core.layouts.engine_layout import engine_recipe
from weft.core.layouts.trainer_layout import trainer_layout
from weft.core.models.catalog import build_model
from weft.core.planner import make_plan
from weft.core.plans.plan import Plan
from weft.core.topology import Cluster, HostKind, Nic
from weft.sim.costs import StageCosts
from weft.sim.simulator import simulate

NUM_NETWORKS = 208
CHUNKS_ON_BUSIEST = 64
SMALLEST_CHUNK = 64 << 10
"""As settings allow it."""
MOST_OVER_OPTIMUM = 1.03
TRAINERS = (
    "fsdp1",
    "ddp2",
    "ddp3",
    "ddp6",
    "fsdp3",
    "fsdp5",
    "hsdp2x2",
    "hsdp3x2",
    "hsdp2x3",
    "fsdp2.ep2",
    "fsdp2.ep2/hsdp2x2",
)
ENGINES = (
    ("tp1", 1),
    ("tp1", 3),
    ("tp1", 6),
    ("tp2", 1),
    ("tp2", 3),
    ("tp4", 1),
    ("ep2", 2),
    ("ep3", 2),
    ("tp2.ep2", 2),
)
MODEL = build_model(
    "random networks",
    {
        "model_type": "qwen3_moe",
        "hidden_size": 1024,
        "num_hidden_layers": 3,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 4096,
        "vocab_size": 32000,
        "num_experts": 6,
        "moe_intermediate_size": 768,
    },
)


def random_cluster(rng: np.random.Generator) -> Cluster:
    """Hosts of unlike devices: own or shared NICs, one or several, of unlike rates; scarce uplinks and rails; links."""
    devices = int(rng.integers(1, 7))
    share = int(rng.integers(1, devices + 1)) if rng.random() < 0.4 else 1
    groups = [tuple(range(start, min(start + share, devices))) for start in range(0, devices, share)]
    rates = [10, 40, 100, 200, 400] if rng.random() < 0.6 else [100]
    most_nics = 3 if rng.random() < 0.6 else 1
    costs = {"efficiency": rng.uniform(0.8, 1.0), "latency_us": float(rng.choice([0.0, 10.0])), "gap_us": 0.1}
    nics = tuple(
        Nic(gbps=float(rng.choice(rates)), devices=group, rail=rail, **costs)
        for rail, group in enumerate(groups)
        for _ in range(int(rng.integers(1, most_nics + 1)))
    )
    total_gbps = sum(nic.gbps for nic in nics)
    host = HostKind(
        devices=devices,
        nics=nics,
        link_gb_per_s=float(rng.choice([5, 25, 100, 450])),
        pinned_gb_per_s=50,
        domain_hosts=int(rng.integers(1, 3)),
        uplink_gbps=float(rng.choice([0, 0, 0.3, 0.7])) * total_gbps,
        cross_rail_gbps=float(rng.choice([0, 0, 0.2, 0.5])) * total_gbps,
    )
    return Cluster(name="random", host=host, placement=str(rng.choice(["separate", "packed"])))


def random_plan(rng: np.random.Generator) -> Plan:
    """A plan over a random network; its busiest resource carries as many Chunks as are asked for."""
    while True:
        layout = trainer_layout(MODEL, str(rng.choice(TRAINERS)))
        engine, num_replicas = ENGINES[int(rng.integers(len(ENGINES)))]
        recipe = engine_recipe(MODEL, engine, num_replicas=num_replicas)
        topology = random_cluster(rng).place(num_trainers=layout.num_ranks, num_engines=recipe.engine.num_ranks)
        plan = make_plan(trainer=layout, recipe=recipe, topology=topology)
        chunk_bytes = _busiest_bytes(plan) // CHUNKS_ON_BUSIEST
        if chunk_bytes >= SMALLEST_CHUNK:  # else nearly everything stays inside link domains
            return replace(plan, settings=Settings(chunk_bytes=chunk_bytes // 64 * 64, staging_bytes=32 * chunk_bytes))


def _busiest_bytes(plan: Plan) -> int:
    """Bytes over the resource that the plan keeps busy for longest."""
    sender, receiver = np.nonzero(plan.pair_bytes)
    resource, way, rate = _resources(plan, sender, receiver)
    carried = np.bincount(resource, weights=plan.pair_bytes[sender, receiver][way])
    return int(carried[np.argmax(carried / rate)])


def optimum_s(plan: Plan) -> float:
    """Shortest time in which any choice of senders, cut anywhere, can send the plan's bytes."""
    topology, groups = plan.topology, plan.trainer.groups
    num_engines = topology.num_engines
    group = np.repeat(plan.trainer.group_of[plan.shard].astype(np.int64), plan.fan_out)
    wanted = np.bincount(group * num_engines + plan.receiver, weights=np.repeat(plan.row_bytes, plan.fan_out))
    demands = np.flatnonzero(wanted)
    demand = np.concatenate([np.full(groups.sizes[d // num_engines], i) for i, d in enumerate(demands)])
    sender = np.concatenate([groups.of(d // num_engines) for d in demands])
    receiver = demands[demand] % num_engines
    resource, way, rate = _resources(plan, sender, receiver)
    num_ways = len(sender)
    scale = wanted.sum()
    # Variables: the part of all bytes that takes each way, and the time. Each resource: parts · scale / rate <= time.
    use = coo_matrix((scale / rate[resource], (resource, way)), shape=(len(rate), num_ways + 1)).tolil()
    use[:, num_ways] = -1.0
    sums = coo_matrix((np.ones(num_ways), (demand, np.arange(num_ways))), shape=(len(demands), num_ways + 1))
    cost = np.zeros(num_ways + 1)
    cost[num_ways] = 1.0
    found = linprog(cost, A_ub=use.tocsr(), b_ub=np.zeros(len(rate)), A_eq=sums, b_eq=wanted[demands] / scale)
    assert found.success, found.message
    return float(found.fun)


def _resources(plan: Plan, sender: NDArray, receiver: NDArray) -> tuple[NDArray, NDArray, NDArray]:
    """Which resources each way uses, as pairs (resource, way), and the rate of every resource."""
    topology = plan.topology
    out, into = topology.trainer_device[sender], topology.engine_device[receiver]
    local = topology.is_local[sender, receiver]
    crossing = ~local & topology.changes_rail[sender, receiver]
    reached = topology.nic.efficiency
    kinds = [
        (out, local, np.full(len(out), topology.link_bytes_per_s)),
        (into, local, np.full(len(out), topology.link_bytes_per_s)),
        (topology.port_of(out), ~local, topology.port_rate(topology.port_of(out)) * reached),
        (topology.port_of(into), ~local, topology.port_rate(topology.port_of(into)) * reached),
        (topology.host_of(out), ~local, np.full(len(out), topology.uplink_bytes_per_s)),
        (topology.host_of(into), ~local, np.full(len(out), topology.uplink_bytes_per_s)),
        (topology.host_of(out), crossing, np.full(len(out), topology.cross_rail_bytes_per_s)),
    ]
    name = np.concatenate([kind * 10_000 + key[used] for kind, (key, used, _) in enumerate(kinds)])
    way = np.concatenate([np.flatnonzero(used) for _, used, _ in kinds])
    rates = np.concatenate([rate[used] for _, used, rate in kinds])
    _, first, resource = np.unique(name, return_index=True, return_inverse=True)
    return resource, way, rates[first]


@pytest.mark.parametrize("seed", range(4))
def test_no_choice_of_senders_and_no_order_is_much_faster(seed):
    for number in range(NUM_NETWORKS // 4):
        plan = random_plan(np.random.default_rng([seed, number]))
        simulated = simulate(plan, costs=StageCosts(control_s=0.0))
        over_optimum = simulated.transfer_s / optimum_s(plan)
        assert 1 - 1e-6 <= over_optimum <= MOST_OVER_OPTIMUM, f"network {number} of seed {seed}: {plan.topology}"
