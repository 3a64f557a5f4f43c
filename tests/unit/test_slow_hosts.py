"""Hosts that carry less than they report: found from what writes took, planned around, forgotten when they recover."""

from __future__ import annotations

import json
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from tests.support.planned_members import PLACE, join
from weft.bench.payload import SMALL, load_payload
from weft.core.layouts.engine_layout import engine_recipe
from weft.core.layouts.trainer_layout import trainer_layout
from weft.core.planner import make_plan
from weft.core.plans.bound import balance
from weft.core.topology import load_topology, place_members, topology_from_mapping
from weft.errors import ConfigError
from weft.runtime.compile.matching import host_speeds
from weft.runtime.control.member_id import MemberId
from weft.runtime.control.write_reports import WriteReport, WriteReports
from weft.runtime.controller.membership import Member
from weft.runtime.controller.slow_hosts import NUM_VERSIONS, HostRates, SlowHosts, differ
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


def fleet(trainers: dict[str, float], engines: dict[str, float]) -> dict[MemberId, Member]:
    """Members on hosts that report these rates, one each."""
    found = {}
    for side, hosts in (("trainer", trainers), ("engine", engines)):
        for rank, (host, gbps) in enumerate(hosts.items()):
            place = msgspec.structs.replace(PLACE, host=host, nic_gbps=gbps)
            joined = msgspec.structs.replace(join(side, rank, []), place=place)
            member = MemberId(side, rank)
            found[member] = Member(connection=str(member), member=member, join=joined, incarnation=rank, last_heard=0.0)
    return found


def written(num_bytes: list[float], rates: list[float], num_engines: int) -> WrittenLinks:
    """A version in which trainers wrote so much each, evenly to all engines, at so many bytes per second each."""
    return WrittenLinks.of(
        [
            (
                rank,
                WriteReports.of(
                    WriteReport(e, int(size / num_engines), 0, seconds=size / rate) for e in range(num_engines)
                ),
            )
            for rank, (size, rate) in enumerate(zip(num_bytes, rates, strict=True))
        ]
    )


FOUR = dict.fromkeys("efgh", 100.0)
GB = 1e9


@pytest.mark.parametrize(
    ("reported", "engines", "num_bytes", "rates", "expected"),
    [
        # says 400 and carries what those carry that say 100: it gets four times as much, and is late
        ([400, 100, 100, 100], dict.fromkeys("efgh", 400.0), [4, 1, 1, 1], [1, 1, 1, 1], {"trainer 0": 0.25}),
        ([400, 100, 100, 100], FOUR, [4, 1, 1, 1], [1, 1, 1, 1], {"trainer 0": 0.25}),
        # carries the little that it says, with its part of replicas or as much as the others
        ([40, 400, 400, 400], dict.fromkeys("efgh", 400.0), [0.4, 4, 4, 4], [0.4, 4, 4, 4], {}),
        ([40, 400, 400, 400], dict.fromkeys("efgh", 400.0), [1, 1, 1, 1], [0.4, 4, 4, 4], {}),
        # one of three cards is gone
        ([300, 300, 300, 300], dict.fromkeys("efgh", 300.0), [3, 3, 3, 3], [2, 3, 3, 3], {"trainer 0": 0.667}),
        # nobody knows more than it reports: a tenth of it
        ([400, 0, 0, 400], dict.fromkeys("efgh", 0.0), [1, 1, 1, 1], [1, 1, 1, 0.1], {"trainer 3": 0.1}),
        # one engine is the limit: senders share its card as TCP has it, whatever their own could do
        ([100, 100], {"e": 100.0}, [1, 1], [0.59, 0.41], {}),
        ([400, 100], {"e": 100.0}, [4, 1], [0.8, 0.5], {}),
        ([400, 100], {"e": 100.0}, [1, 1], [0.5, 0.5], {}),
        # one engine is the limit, and a sender has much less than its part of it
        ([100] * 8, {"e": 100.0}, [1] * 8, [0.14] * 7 + [0.05], {"trainer 7": 0.357}),
    ],
)
def test_hosts_are_judged_by_what_they_report(reported, engines, num_bytes, rates, expected):
    trainers = {f"t{rank}": float(gbps) for rank, gbps in enumerate(reported)}
    members, hosts = fleet(trainers, engines), SlowHosts()
    version = written([size * GB for size in num_bytes], [rate * GB for rate in rates], len(engines))
    is_new = [hosts.look(version, members) for _ in range(NUM_VERSIONS)]
    assert hosts.by_members == expected
    assert is_new == [False] * (NUM_VERSIONS - 1) + [bool(expected)]


def test_an_engine_host_that_carries_the_little_it_reports_is_not_slow():
    engines = {"e": 400.0, "f": 40.0}
    members, hosts = fleet(dict.fromkeys("ab", 400.0), engines), SlowHosts()
    reports = [WriteReport(0, int(GB), 0, seconds=0.5), WriteReport(1, int(GB), 0, seconds=5.0)]
    for _ in range(NUM_VERSIONS):
        hosts.look(WrittenLinks.of([(0, WriteReports.of(reports)), (1, WriteReports.of(reports))]), members)
    assert hosts.by_members == {}


def test_a_host_that_was_planned_around_stays_so_until_it_carries_more(caplog):
    members, hosts = fleet({f"t{rank}": 300.0 for rank in range(4)}, dict.fromkeys("efgh", 300.0)), SlowHosts()
    for _ in range(NUM_VERSIONS):
        hosts.look(written([3 * GB] * 4, [2 * GB, 3 * GB, 3 * GB, 3 * GB], 4), members)
    assert [record.message for record in caplog.records] == [
        "the host of trainer 0 carries only 0.67 of what it reports, compared with the others"
    ]
    hosts.plan_for_found()
    hosts.begin()
    joins = [known.join for known in members.values()]
    assert host_speeds(joins, hosts.planned)["t0"] == pytest.approx(2 / 3)
    for _ in range(NUM_VERSIONS):  # all end together, and engines are as busy as trainers
        assert not hosts.look(written([2 * GB, 3 * GB, 3 * GB, 3 * GB], [2 * GB, 3 * GB, 3 * GB, 3 * GB], 4), members)
    assert hosts.by_members == {"trainer 0": 0.667}
    for _ in range(NUM_VERSIONS):
        is_new = hosts.look(written([2 * GB, 3 * GB, 3 * GB, 3 * GB], [3 * GB] * 4, 4), members)
    assert is_new
    assert hosts.by_members == {}


def test_what_was_measured_is_a_part_of_what_is_reported():
    joins = [known.join for known in fleet({"a": 400.0, "b": 100.0, "c": 0.0}, {"e": 200.0}).values()]
    assert host_speeds(joins, {}) == {"a": 1.0, "b": 0.25, "c": 1.0, "e": 0.5}
    assert host_speeds(joins, {"a": 0.25, "b": 0.5}) == {"a": 0.25, "b": 0.125, "c": 1.0, "e": 0.5}


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
