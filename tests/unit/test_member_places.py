"""Plans between members: where they are is what they report, who sends is what the policy says."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from tests.support.planned_members import PLACE, held, join
from weft.core.assign import Policy
from weft.core.topology import load_topology
from weft.runtime.compile.matching import plan_members

WEIGHTS = [held(f"layer{i}", "fp32", (64, 8), (0, 0), (64, 8)) for i in range(8)]


def members(side, *places):
    """Replicas on (host, GPU number)."""
    at = [msgspec.structs.replace(PLACE, host=host, device_number=number) for host, number in places]
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


def test_another_topology_places_otherwise():
    trainers, engines = members("trainer", ("a", 0), ("a", 1)), members("engine", ("b", 0))
    found = plan(trainers, engines, topology="ethernet-10g").topology
    assert (found.cluster.name, found.trainer_device.tolist(), found.engine_device.tolist()) == (
        "ethernet-10g",
        [0, 0],
        [1],
    )
