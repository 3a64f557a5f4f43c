"""No plan and no simulation is faster than the lower bound, whatever the network looks like."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tiny import tiny_model
from weft.config import Settings
from weft.core.assign import Policy
from weft.core.layouts.engine_layout import engine_recipe
from weft.core.layouts.trainer_layout import trainer_layout
from weft.core.planner import make_plan
from weft.core.plans.bound import balance
from weft.core.topology import Cluster, HostKind, Nic
from weft.sim.costs import StageCosts
from weft.sim.simulator import simulate


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    devices = draw(st.sampled_from([1, 2, 4]))
    share = draw(st.sampled_from([1, devices]))
    groups = [tuple(range(start, start + share)) for start in range(0, devices, share)]
    per_group = draw(st.integers(1, 2))
    nics = tuple(
        Nic(gbps=draw(st.sampled_from([10, 100, 400])), devices=group, rail=i, latency_us=0, gap_us=0)
        for i, group in enumerate(groups)
        for _ in range(per_group)
    )
    host = HostKind(
        devices=devices,
        nics=nics,
        link_gb_per_s=draw(st.sampled_from([1, 50, 450])),
        pinned_gb_per_s=50,
        domain_hosts=draw(st.integers(1, 2)),
        uplink_gbps=draw(st.sampled_from([0, 5, 50])),
        cross_rail_gbps=draw(st.sampled_from([0, 5, 50])),
    )
    return Cluster(name="random", host=host, placement=draw(st.sampled_from(["separate", "packed"])))


@settings(max_examples=80)
@given(
    cluster=clusters(),
    trainer=st.sampled_from(["ddp3", "fsdp5", "hsdp2x3", "fsdp2.ep2/hsdp2x2"]),
    engine=st.sampled_from([("tp1", 3), ("tp2", 2), ("ep2", 2)]),
    policy=st.sampled_from([Policy.BALANCED, Policy.GREEDY, Policy.ROUND_ROBIN]),
)
def test_nothing_beats_the_bound(cluster, trainer, engine, policy):
    model = tiny_model("qwen3-moe")
    layout = trainer_layout(model, trainer)
    recipe = engine_recipe(model, engine[0], num_replicas=engine[1])
    topology = cluster.place(num_trainers=layout.num_ranks, num_engines=recipe.engine.num_ranks)
    limits = Settings(chunk_bytes=65536)
    plan = make_plan(trainer=layout, recipe=recipe, topology=topology, policy=policy, settings=limits)
    found = balance(plan)
    assert found.makespan_s >= found.bound_s * (1 - 1e-9)
    for kind, bound_s in found.bounds_s.items():
        assert found.busy_s[kind] >= bound_s * (1 - 1e-9)
    simulated = simulate(plan, costs=StageCosts(control_s=0.0)).transfer_s
    assert simulated >= found.makespan_s * (1 - 1e-9)
    slower = replace(plan, settings=Settings(chunk_bytes=65536, staging_bytes=4 * 65536))
    assert simulate(slower, costs=StageCosts(control_s=0.0)).transfer_s >= simulated * (1 - 1e-9)
