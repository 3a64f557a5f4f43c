"""Hosts that carry less than the others: found from what writes took, planned around, forgotten when they recover."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from weft.bench.payload import SMALL, load_payload
from weft.core.layouts.engine_layout import engine_recipe
from weft.core.layouts.trainer_layout import trainer_layout
from weft.core.planner import make_plan
from weft.core.plans.bound import balance
from weft.core.topology import load_topology, place_members, topology_from_mapping
from weft.errors import ConfigError
from weft.runtime.control.write_reports import WriteReport, WriteReports
from weft.runtime.controller.slow_hosts import NUM_VERSIONS, HostRates, differ
from weft.runtime.controller.written_links import WrittenLinks
from weft.sim.simulator import simulate

TRAINERS = {0: "a", 1: "b", 2: "c", 3: "d"}
ENGINES = {0: "e", 1: "f", 2: "g"}
NUM_BYTES = 10_000_000


def links(seconds: dict[tuple[int, int], float], default: float = 1.0) -> WrittenLinks:
    """A version in which every trainer wrote as much to every engine."""
    reported = []
    for trainer in TRAINERS:
        took = {engine: seconds.get((trainer, engine), default) for engine in ENGINES}
        written = (WriteReport(engine, NUM_BYTES, 0, seconds=took_s) for engine, took_s in took.items())
        reported.append((trainer, WriteReports.of(written)))
    return WrittenLinks.of(reported)


def rates_after(*versions: WrittenLinks) -> HostRates:
    rates = HostRates()
    for written in versions:
        rates.add(written, trainers=TRAINERS, engines=ENGINES)
    return rates


def from_trainer(rank: int, seconds: float) -> WrittenLinks:
    return links({(rank, engine): seconds for engine in ENGINES})


def test_a_slow_sender_is_found_and_no_receiver_is_blamed():
    assert rates_after(*[from_trainer(2, 10.0)] * NUM_VERSIONS).slow_hosts({}) == {"c": pytest.approx(0.1)}


def test_a_slow_receiver_is_found_and_no_sender_is_blamed():
    version = links({(trainer, 1): 5.0 for trainer in TRAINERS})
    assert rates_after(*[version] * NUM_VERSIONS).slow_hosts({}) == {"f": pytest.approx(0.2)}


def test_hosts_are_judged_by_several_versions():
    assert rates_after(*[from_trainer(2, 10.0)] * (NUM_VERSIONS - 1)).slow_hosts({}) == {}
    once = [links({}), from_trainer(2, 10.0), links({})]
    assert rates_after(*once).slow_hosts({}) == {}


def test_what_was_known_stands_until_it_is_measured_again():
    rates = rates_after(links({}))
    assert rates.slow_hosts({"c": 0.1}) == {"c": 0.1}
    for _ in range(NUM_VERSIONS):
        rates.add(links({}), trainers=TRAINERS, engines=ENGINES)
    assert rates.slow_hosts({"c": 0.1}) == {}


def test_links_inside_a_host_and_short_ones_say_nothing():
    inside = from_trainer(2, 10.0)
    rates = HostRates()
    for _ in range(NUM_VERSIONS):
        rates.add(inside, trainers={**TRAINERS, 2: "e"}, engines=dict.fromkeys(ENGINES, "e"))
    assert rates.slow_hosts({}) == {}
    quick = [from_trainer(2, 0.010)] * NUM_VERSIONS
    assert rates_after(*quick).slow_hosts({}) == {}


@pytest.mark.parametrize(
    ("found", "known", "is_different"),
    [({}, {}, False), ({"a": 0.1}, {}, True), ({}, {"a": 0.1}, True), ({"a": 0.10}, {"a": 0.11}, False)],
)
def test_small_differences_do_not_count(found, known, is_different):
    assert differ(found, known) is is_different


def plan_with(layout: str, speeds: dict[str, float]):
    model = load_payload(SMALL)
    hosts = [(name, None) for name in "abcd"]
    topology = place_members(
        load_topology("ethernet-10g"), trainers=hosts, engines=[("e", None), ("f", None)], speeds=speeds
    )
    return make_plan(trainer=trainer_layout(model, layout), recipe=engine_recipe(model, "tp2"), topology=topology)


def test_what_others_hold_is_sent_by_others():
    even, uneven = plan_with("ddp4", {}), plan_with("ddp4", {"d": 0.1})
    assert even.tx_bytes[3] / even.total_bytes == pytest.approx(1 / 4, rel=0.05)
    assert uneven.tx_bytes[3] / uneven.total_bytes == pytest.approx(0.1 / 3.1, rel=0.2)
    assert balance(uneven).makespan_s < 1.05 * balance(uneven).bound_s


def test_what_only_a_slow_host_holds_is_bounded_by_it():
    plan = plan_with("fsdp4", {"d": 0.1})
    rate = 10e9 / 8 * 0.1
    assert balance(plan).bound_s == pytest.approx(plan.tx_bytes[3] / rate, rel=1e-6)
    assert simulate(plan).transfer_s == pytest.approx(plan.tx_bytes[3] / (rate * 0.94), rel=0.05)


def test_slow_hosts_are_part_of_a_plans_description():
    topology = plan_with("ddp4", {"d": 0.25}).topology
    table = json.loads(json.dumps(topology.to_json()))
    read = topology_from_mapping(table, num_trainers=4, num_engines=2, where="here")
    assert read.host_speed == (1.0, 1.0, 1.0, 0.25)
    ports = read.port_of(np.concatenate([read.trainer_device, read.engine_device]))
    assert (read.port_rate(ports) / 1.25e9).tolist() == [1, 1, 1, 0.25, 1, 1]
    assert "speeds" not in replace(topology, host_speed=()).to_json()
    for wrong in ([0], [2], ["x"], "all", [True]):
        with pytest.raises(ConfigError, match="speeds"):
            topology_from_mapping({**table, "speeds": wrong}, num_trainers=4, num_engines=2, where="here")
