from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from weft.bench.links import LinkCost, LinkReport
from weft.core.topology import (
    CX7,
    EFA,
    PRESETS,
    cluster_from_mapping,
    cluster_toml,
    load_topology,
    place_members,
    topology_from_mapping,
    with_placement,
)
from weft.errors import ConfigError
from weft.sim.costs import fit_writes

SHARED = """
name = "shared"
[host]
devices = 4
link_gb_per_s = 100
pinned_gb_per_s = 20
uplink_gbps = 100
[[nic]]
gbps = 200
devices = [0, 1]
rail = 0
[[nic]]
gbps = 100
devices = [2, 3]
rail = 1
[[nic]]
gbps = 100
devices = [2, 3]
rail = 2
"""


def test_devices_that_share_nics_share_a_port(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(SHARED)
    topology = load_topology(str(path)).place(num_trainers=8, num_engines=4)
    ports = topology.port_of(topology.trainer_device)
    assert ports.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert topology.port_rate(ports).tolist() == [25e9] * 8
    assert topology.engine_device.tolist() == [8, 9, 10, 11]
    assert not topology.is_uniform


def test_separate_and_packed_placement():
    cluster = load_topology("h100-ib400")
    apart = cluster.place(num_trainers=4, num_engines=4)
    assert apart.engine_device.tolist() == [8, 9, 10, 11]
    assert apart.is_uniform
    together = with_placement(cluster, "packed").place(num_trainers=4, num_engines=4)
    assert together.engine_device.tolist() == [4, 5, 6, 7]
    assert together.is_local.all()


def test_nvl72_is_one_domain_over_eighteen_hosts():
    cluster = with_placement(load_topology("gb200-nvl72"), "packed")
    topology = cluster.place(num_trainers=36, num_engines=72)
    assert topology.is_local[:, :36].all()
    assert not topology.is_local[:, 36:].any()


def test_two_nics_per_device_add_up():
    topology = load_topology("h200-efa3200").place(num_trainers=8, num_engines=8)
    assert topology.port_rate(topology.port_of(topology.trainer_device)).tolist() == [50e9] * 8


def test_a_topology_survives_its_description():
    for cluster in PRESETS.values():
        placed = cluster.place(num_trainers=3, num_engines=2)
        again = cluster_from_mapping(placed.to_json(), where="test")
        assert again == cluster


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("devices = 4", "devices = 0"), "devices is 0"),
        (("gbps = 200", 'gbps = "fast"'), "gbps is 'fast'"),
        (("gbps = 200", "speed = 200"), "unknown key `speed`"),
        (("gbps = 200\n", ""), "missing"),
        (("devices = [2, 3]", "devices = [2, 9]"), "device 9 is not on the host"),
        (("devices = 4", "devices = 5"), "device 4 has no NIC"),
        (("devices = [2, 3]", "devices = []"), "serves no device"),
        (("rail = 2", "rail = 2\n[[nic]]\ngbps = 100\ndevices = [2]"), "overlapping groups"),
        (("devices = [2, 3]", 'devices = ["a"]'), "devices is"),
        (("devices = [2, 3]", "devices = 3"), "devices is 3"),
        (("devices = 4", "devices = 2.5"), "devices is 2.5"),
        (("devices = 4", "devices = 999999999"), "devices is 999999999"),
        (("gbps = 200", "gbps = 200\nefficiency = 0"), "efficiency is 0"),
        (("gbps = 200", "gbps = 200\nefficiency = 0.5"), "NICs differ"),
        (('name = "shared"', 'placement = "anywhere"'), "placement is 'anywhere'"),
        (("[host]", "[hosts]"), r"needs a \[host\]"),
        (("[host]", "[host"), "not TOML"),
    ],
)
def test_bad_files_say_what_is_wrong(tmp_path, change, message):
    path = tmp_path / "cluster.toml"
    path.write_text(SHARED.replace(*change))
    with pytest.raises(ConfigError, match=message):
        load_topology(str(path))


@pytest.mark.parametrize(
    ("costs", "told"),
    [
        ("{ nixl = 10 }", "op_us is {'nixl': 10}"),
        ("{ nixl = { gpu = 10 } }", "op_us is {'nixl': {'gpu': 10}}"),
        ("{ nixl = { cpu = -1 } }", "op_us has -1"),
        ("{ nixl = { cpu = true } }", "op_us has True"),
        ("3", "op_us is 3"),
    ],
)
def test_a_cost_of_writes_names_its_memory(tmp_path, costs, told):
    path = tmp_path / "cluster.toml"
    path.write_text(SHARED.replace("uplink_gbps = 100", f"op_us = {costs}"))
    with pytest.raises(ConfigError, match=re.escape(told)) as caught:
        load_topology(str(path))
    assert ("nixl = { cpu = 1.2, cuda = 10 }" in str(caught.value.hint)) == ("has" not in told)


def test_costs_that_were_measured_count_for_their_memory_only(tmp_path):
    """NIXL writes of CPU memory cost a tenth of those between GPUs."""
    usual = load_topology("h100-ib400")
    cpu = LinkCost(transport="nixl", memory="cpu", op_us=2.4, gb_per_s=5.0, of_copy=1.0, min_run_bytes=6000)
    report = LinkReport(cpu_gb_per_s=5.0, device_gb_per_s=None, rows=[cpu], missing={})
    path = tmp_path / "here.toml"
    path.write_text(cluster_toml(report.put_into(usual)))
    here = load_topology(str(path))
    before, after = (cluster.place(num_trainers=1, num_engines=1) for cluster in (usual, here))
    assert after.min_run_bytes("nixl", "cuda") == before.min_run_bytes("nixl", "cuda") == 7_500_000
    assert after.min_run_bytes("nixl", "cpu") == 6000
    gpu = LinkReport(cpu_gb_per_s=5.0, device_gb_per_s=2000.0, rows=[replace(cpu, memory="cuda")], missing={})
    both = gpu.put_into(here).place(num_trainers=1, num_engines=1)
    assert (both.min_run_bytes("nixl", "cuda"), both.min_run_bytes("nixl", "cpu")) == (2_400_000, 6000)


def test_unknown_names_get_a_suggestion():
    with pytest.raises(ConfigError) as caught:
        load_topology("h100-ib200")
    assert "h100-ib400" in str(caught.value.hint)


@pytest.mark.parametrize(("nic", "preset"), [("CX7", CX7), ("EFA", EFA)])
def test_presets_carry_the_fitted_constants(nic, preset):
    cost = fit_writes(nic)
    fitted = (cost.gb_per_s / 50, cost.latency_us, cost.gap_us)
    assert np.allclose((preset["efficiency"], preset["latency_us"], preset["gap_us"]), fitted, rtol=0.01)


@pytest.mark.parametrize(
    ("preset", "trainers", "engines", "expected"),
    [
        # GPUs where they are; a second host although only one rank is on it
        ("h100-ib400", [("a", 0), ("a", 3), ("b", 1)], [("c", 7)], ([0, 3, 9], [23])),
        # hosts by the lowest rank on them, whatever their names and the order of ranks
        ("h100-ib400", [("z", 0), ("a", 0), ("z", 1)], [("a", 1), ("m", 0)], ([0, 8, 1], [9, 16])),
        # CPU members: the next free device, also behind a GPU that another member has
        ("h100-ib400", [("a", None), ("a", None)], [("a", 0), ("a", None)], ([1, 2], [0, 3])),
        # more members than devices, and two members on one device: shared
        ("ethernet-10g", [("a", None), ("a", None)], [("a", None), ("b", None)], ([0, 0], [0, 1])),
        ("gb200-nvl72", [("a", None)] * 6, [("a", 2)], ([0, 1, 3, 0, 1, 2], [2])),
        ("h100-ib400", [("a", 2), ("a", 2)], [("a", 11)], ([2, 2], [3])),
        # engine hosts begin a link domain of their own: 18 hosts of 4 devices
        ("gb200-nvl72", [("a", 0), ("b", 1)], [("c", 0), ("d", 0)], ([0, 5], [72, 76])),
    ],
)
def test_members_are_placed_where_they_say_they_are(preset, trainers, engines, expected):
    topology = place_members(load_topology(preset), trainers=trainers, engines=engines)
    assert (topology.trainer_device.tolist(), topology.engine_device.tolist()) == expected


def test_engines_of_one_link_domain_stay_in_it_where_the_cluster_packs():
    cluster = with_placement(load_topology("gb200-nvl72"), "packed")
    assert place_members(cluster, trainers=[("a", 0)], engines=[("b", 0)]).is_local.all()


def test_reported_placement_is_part_of_the_description():
    cluster = load_topology("h100-ib400")
    usual = cluster.place(num_trainers=2, num_engines=1)
    same = place_members(cluster, trainers=[("a", None), ("a", None)], engines=[("b", None)])
    assert same.to_json() == usual.to_json()
    assert "devices" not in usual.to_json()
    apart = place_members(cluster, trainers=[("a", 0), ("b", 0)], engines=[("a", 1)])
    table = json.loads(json.dumps(apart.to_json()))
    read = topology_from_mapping(table, num_trainers=2, num_engines=1, where="here")
    assert (read.trainer_device.tolist(), read.engine_device.tolist()) == ([0, 8], [1])
    assert read.to_json() == apart.to_json()


@pytest.mark.parametrize("devices", [{}, [], {"trainer": [0, 1]}, {"trainer": [0], "engine": [1]}, None])
def test_impossible_devices_are_refused(devices):
    table = load_topology("h100-ib400").place(num_trainers=2, num_engines=1).to_json()
    bad = devices if devices is not None else {"trainer": [0, 1 << 60], "engine": [0]}
    with pytest.raises(ConfigError, match="devices of"):
        topology_from_mapping(table | {"devices": bad}, num_trainers=2, num_engines=1, where="here")


@pytest.mark.parametrize("preset", PRESETS)
def test_a_kind_of_cluster_survives_its_file(tmp_path, preset):
    path = tmp_path / "a.toml"
    path.write_text(cluster_toml(load_topology(preset)))
    assert load_topology(str(path)) == load_topology(preset)
