"""Plans between members: where they are is what they report, who sends is what the policy says."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from tests.support.planned_members import PLACE, held, join
from weft.config import TransferSettings
from weft.core.assign import Policy
from weft.core.plans import plan_file
from weft.core.plans.bound import balance
from weft.core.topology import load_topology
from weft.runtime.compile.matching import plan_members
from weft.runtime.controller.planning import Planning

WEIGHTS = [held(f"layer{i}", "fp32", (64, 8), (0, 0), (64, 8)) for i in range(8)]


def members(side, *places, gbps=None, cards=0):
    """Replicas on (host, GPU number). `gbps`: what hosts report; `cards`: how many RDMA cards each has."""
    nics = tuple(f"mlx5_{card}" for card in range(cards))
    at = [
        msgspec.structs.replace(PLACE, host=host, device_number=number, nic_gbps=(gbps or {}).get(host, 0.0), nics=nics)
        for host, number in places
    ]
    return {r: msgspec.structs.replace(join(side, r, WEIGHTS), place=place) for r, place in enumerate(at)}


def plan(trainers, engines, policy=Policy.BALANCED, topology="h100-ib400"):
    return plan_members(trainers, engines, load_topology(topology), ranks_per_engine=1, policy=policy)


def test_members_take_their_own_hosts_and_devices():
    found = plan(members("trainer", ("a", 4), ("b", 0)), members("engine", ("b", 3), ("c", 0))).topology
    assert found.trainer_device.tolist() == [4, 8]
    assert found.engine_device.tolist() == [11, 16]
    assert found.is_local.tolist() == [[False, False], [True, False]]


def test_all_processes_of_a_laptop_are_planned_for():
    found = plan(members("trainer", *[("a", None)] * 3), members("engine", *[("a", None)] * 9))
    assert found.topology.is_local.all()
    assert found.tx_bytes.sum() == 9 * 8 * 64 * 8 * 4


@pytest.mark.parametrize("policy", Policy)
def test_the_policy_is_the_one_asked_for(policy):
    trainers, engines = members("trainer", ("a", 0), ("a", 1)), members("engine", ("b", 0), ("b", 1))
    found = plan(trainers, engines, policy)
    assert found.policy == policy
    each = 8 * 64 * 8 * 4
    if policy is Policy.RANK0:
        assert found.tx_bytes.tolist() == [2 * each, 0]
    if policy is Policy.ROUND_ROBIN:
        assert np.array_equal(found.pair_bytes, np.eye(2) * each)


def planned(trainers, engines, topology=None):
    """As a controller plans."""
    planning = Planning.of(policy=None, topology=topology, ignore=(), plan=None, transfer=TransferSettings())
    return planning.plan(trainers, engines, ranks_per_engine=1, speeds={})


def nic_gbps(topology):
    """Of the ports of trainers, then of engines."""
    devices = np.concatenate([topology.trainer_device, topology.engine_device])
    return (topology.port_rate(topology.port_of(devices)) * 8 / 1e9).tolist()


def test_bounds_count_with_the_rates_that_hosts_report():
    rates = {"a": 10.0, "b": 10.0, "c": 5.0}
    trainers, engines = (
        members("trainer", ("a", None), ("b", None), gbps=rates),
        members("engine", ("c", None), gbps=rates),
    )
    plan, digest = planned(trainers, engines)
    assert nic_gbps(plan.topology) == [10, 10, 5]
    assert balance(plan).bound_s == pytest.approx(plan.total_bytes / (5e9 / 8))
    assert planned(trainers, engines)[1] == digest
    assert nic_gbps(planned(trainers, engines, "h100-ib400")[0].topology) == [400, 400, 200], "the one that was given"
    unlike = planned(members("trainer", ("a", None), ("b", None)), members("engine", ("c", None)))[0]
    assert (nic_gbps(unlike.topology), unlike.topology.cluster.name) == ([400] * 3, "h100-ib400")


@pytest.mark.parametrize(
    ("gbps", "cards", "expected"),
    [
        # no RDMA cards: one card for all devices
        (10, 0, [10, 10, 10]),
        (3200, 8, [400, 400, 400]),
        # devices 0 to 3 share the first card, 4 to 7 the second
        (100, 2, [50, 50, 50]),
        (3200, 16, [400, 400, 400]),
        (1200, 3, [1200, 1200, 1200]),
        # virtual ones
        (3200, 1000, [400, 400, 400]),
    ],
)
def test_members_have_the_cards_of_their_hosts(gbps, cards, expected):
    rates = {"a": gbps, "b": gbps}
    trainers = members("trainer", ("a", 0), ("a", 1), gbps=rates, cards=cards)
    plan, _ = planned(trainers, members("engine", ("b", 5), gbps=rates, cards=cards))
    assert nic_gbps(plan.topology) == pytest.approx(expected)
    ports = plan.topology.port_of(plan.topology.trainer_device)
    assert (ports[0] == ports[1]) == (cards in (0, 2, 3))
    thresholds = [
        topology.min_run_bytes("nixl")
        for topology in (plan.topology, load_topology("h100-ib400").place(num_trainers=2, num_engines=1))
    ]
    assert thresholds[0] == thresholds[1]


def test_what_is_reported_survives_the_plans_file(tmp_path):
    rates = {"a": 25.0, "b": 10.0}
    plan, digest = planned(members("trainer", ("a", 0), gbps=rates), members("engine", ("b", 0), gbps=rates))
    plan_file.save(plan, tmp_path / "a.plan")
    read = plan_file.load(tmp_path / "a.plan")
    assert (plan_file.digest(read), nic_gbps(read.topology)) == (digest, [25, 10])


def test_another_topology_places_otherwise():
    trainers, engines = members("trainer", ("a", 0), ("a", 1)), members("engine", ("b", 0))
    found = plan(trainers, engines, topology="ethernet-10g").topology
    assert (found.cluster.name, found.trainer_device.tolist(), found.engine_device.tolist()) == (
        "ethernet-10g",
        [0, 0],
        [1],
    )
