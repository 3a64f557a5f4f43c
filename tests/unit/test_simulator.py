"""Schedules and predictions: conservation, budgets, monotonicity, and hand-computable cases."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.unit.test_plan import small_plan
from weft.config import DeltaPolicy, ReceiverMode, Settings
from weft.core.case import Case, plan_case
from weft.core.layouts.engine_layout import engine_recipe
from weft.core.layouts.trainer_layout import trainer_layout
from weft.core.models.catalog import load_model
from weft.core.planner import make_plan
from weft.core.plans.memory_cost import image_bytes, memory_cost
from weft.core.plans.plan import Plan
from weft.core.plans.schedule import make_schedule
from weft.core.topology import Cluster, HostKind, Nic
from weft.observe.trace import trace_events
from weft.sim.costs import GatherCosts, StageCosts
from weft.sim.queues import Journeys, serve
from weft.sim.simulator import Barrier, Options, simulate, simulate_rank

FREE = StageCosts(control_s=0.0)


@pytest.fixture(scope="module")
def plan():
    return plan_case(Case(model="qwen3-0.6b", trainer="fsdp4", engine="tp2", num_replicas=2))


def test_chunks_carry_every_byte_of_every_pair_once(plan):
    schedule = make_schedule(plan)
    carried = np.zeros_like(plan.pair_bytes)
    np.add.at(carried, (schedule.sender, schedule.receiver), schedule.num_bytes)
    assert np.array_equal(carried, plan.pair_bytes)
    assert schedule.num_bytes.max() <= plan.links.chunk_bytes.max()
    assert schedule.num_bytes.min() > 0


def test_offsets_of_a_pair_follow_each_other(plan):
    schedule = make_schedule(plan)
    for sender in range(4):
        for receiver in range(4):
            rows = [i for i in schedule.of(sender) if schedule.receiver[i] == receiver]
            ends = np.cumsum(schedule.num_bytes[rows])
            assert schedule.stream_offset[rows].tolist() == [0, *ends[:-1].tolist()]


def test_senders_start_with_different_receivers():
    schedule = make_schedule(plan_case(Case(model="qwen3-0.6b", trainer="fsdp4", engine="tp1", num_replicas=4)))
    assert len({int(schedule.receiver[schedule.of(s)[0]]) for s in range(4)}) == 4


def test_staging_budget_gives_the_number_of_slots(plan):
    small = replace(plan, settings=Settings(chunk_bytes=1 << 20, staging_bytes=5 << 20))
    assert make_schedule(small).num_slots == 5


def test_a_network_bound_update_takes_the_receivers_time(plan):
    fine = replace(plan, settings=Settings(chunk_bytes=1 << 20))
    predicted = simulate(fine, costs=FREE)
    nic = plan.topology.nic
    wire = plan.rx_bytes.max() / (nic.line_bytes_per_s * nic.efficiency)
    assert wire <= predicted.transfer_s <= 1.02 * wire
    assert predicted.wire_bytes == plan.total_bytes


def test_less_staging_memory_never_helps(plan):
    times = [
        simulate(
            replace(plan, settings=Settings(chunk_bytes=1 << 20, staging_bytes=slots << 20)), costs=FREE
        ).transfer_s
        for slots in (4, 6, 16, 64)
    ]
    assert times == sorted(times, reverse=True)


def test_skew_and_offloading_add_time(plan):
    base = simulate(plan).predicted_s
    assert simulate(plan, options=Options(skew_s=1.0)).predicted_s > base + 0.5
    offloaded = simulate(plan, options=Options(offloaded=True))
    assert offloaded.predicted_s > base
    assert offloaded.stages["h2d"] == pytest.approx(plan.trainer.rank_bytes().max() / 55e9, rel=0.01)


def test_in_place_pauses_for_the_whole_update(plan):
    shadow, in_place = simulate(plan), simulate(plan, options=Options(mode=ReceiverMode.IN_PLACE))
    assert shadow.pause_s < 0.1 * shadow.predicted_s
    assert in_place.pause_s == in_place.predicted_s


def test_phases_follow_each_other(plan):
    halves = (np.arange(plan.num_rows) % 2).astype(np.int64)
    serial = simulate(plan, costs=FREE, phase_of_row=halves, options=Options(barrier=Barrier.WRITTEN))
    together = simulate(plan, costs=FREE)
    assert serial.transfer_s > together.transfer_s


def test_pairs_inside_a_domain_use_their_links():
    case = Case(model="qwen3-0.6b", trainer="fsdp4", engine="tp2", num_replicas=2)
    packed = plan_case(replace(case, placement="packed"))
    assert packed.topology.is_local.all()
    assert simulate(packed, costs=FREE).transfer_s < simulate(plan_case(case), costs=FREE).transfer_s / 3


def test_events_tell_the_same_story_as_the_prediction(plan):
    predicted = simulate(plan, record=True)
    writes = [event for event in predicted.recorder.events if event.name == "write"]
    assert sum(event.num_bytes for event in writes) == plan.total_bytes
    assert max(event.start_s + event.duration_s for event in writes) == pytest.approx(predicted.transfer_s)
    assert simulate(plan).recorder is None


def test_the_trace_names_members_and_lanes():
    predicted = simulate(small_plan(), record=True)
    events = trace_events(predicted.recorder.events)
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {"trainer 0", "engine 3", "nic", "convert", "main"} <= names
    spans = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in spans)


def test_the_published_breakdown_adds_up():
    assert GatherCosts().total_s == pytest.approx(1.233)


def test_patches_shrink_the_wire_and_the_pause(plan):
    whole = simulate(plan, costs=FREE)
    options = Options(mode=ReceiverMode.PATCH, delta_density=0.01)
    patched = simulate(plan, options=options, costs=FREE)
    assert whole.wire_bytes / patched.wire_bytes == pytest.approx(82, rel=0.05)  # as measured: docs/codec.md
    assert patched.transfer_s < whole.transfer_s
    assert patched.pause_s < whole.pause_s
    assert patched.stages["delta"] > 0
    dense = simulate(plan, options=replace(options, delta_density=1.0), costs=FREE)
    assert dense.wire_bytes == pytest.approx(whole.wire_bytes, rel=0.01)


def test_patches_take_longer_to_apply_the_more_they_change(plan):
    """The measured point is 1% of BF16; there the pause is the apply time at the measured rate."""
    densities = (0.001, 0.01, 0.1, 1.0)
    for mode in ReceiverMode:
        options = [Options(mode=mode, delta_density=density) for density in densities]
        seconds = [simulate(plan, options=one, costs=FREE).stages for one in options]
        spent = [stages["verify"] + stages["commit"] for stages in seconds]
        assert spent == sorted(set(spent))
    patched = simulate(plan, options=Options(mode=ReceiverMode.PATCH, delta_density=0.01), costs=FREE)
    copy_bytes_per_s = plan.topology.host.device_gb_per_s * 1e9
    assert patched.pause_s == pytest.approx(plan.rx_bytes.max() / (copy_bytes_per_s * FREE.apply_of_copy))


def slow_sender_plan(gbps: list[int]):
    """Data-parallel trainers with NICs of unlike rates, one engine of two ranks."""
    nics = tuple(Nic(gbps=rate, devices=(device,)) for device, rate in enumerate(gbps))
    host = HostKind(devices=len(gbps), nics=nics, link_gb_per_s=450, pinned_gb_per_s=55)
    model = load_model("qwen3-0.6b")
    return make_plan(
        trainer=trainer_layout(model, f"ddp{len(gbps)}"),
        recipe=engine_recipe(model, "tp2"),
        topology=Cluster(name="unlike", host=host).place(num_trainers=len(gbps), num_engines=2),
        settings=Settings(chunk_bytes=4 << 20),
    )


def test_a_slow_sender_keeps_no_receiver_idle():
    """A trainer with a tenth of the rate helps, or does no harm; before, receivers waited for it with others' bytes."""
    alone = simulate(slow_sender_plan([400, 400]), costs=FREE)
    helped = simulate(slow_sender_plan([400, 400, 40]), costs=FREE)
    assert helped.transfer_s <= 1.01 * alone.transfer_s
    assert helped.transfer_s <= 1.03 * max(helped.stages["send"], helped.stages["receive"])


def test_streams_of_a_sender_end_together():
    schedule = make_schedule(slow_sender_plan([400, 400]))
    for sender in range(2):
        rows = np.array(schedule.of(sender))
        middle = rows[: len(rows) // 2]
        half = [schedule.num_bytes[middle][schedule.receiver[middle] == receiver].sum() for receiver in range(2)]
        whole = [schedule.num_bytes[rows][schedule.receiver[rows] == receiver].sum() for receiver in range(2)]
        assert np.array(half) / np.array(whole) == pytest.approx([0.5, 0.5], abs=0.05)


def test_memory_is_counted_once_for_replicas(plan):
    """Four trainers hold a quarter each and send it to two replicas of two ranks."""
    cost = memory_cost(plan)
    assert cost.staging_bytes == pytest.approx(plan.tx_bytes.max() / 2, rel=0.01)
    assert cost.delta_bytes == 2 * cost.staging_bytes
    assert cost.shadow_bytes == plan.rx_bytes.max()
    assert image_bytes(plan).sum() == pytest.approx(plan.total_bytes / 2, rel=0.01)


@pytest.mark.parametrize("dtype", ["bf16", "fp8-block128"])
def test_a_rank_alone_takes_what_a_case_of_one_pair_takes(dtype):
    case = Case(model="qwen3-0.6b", trainer="fsdp1", engine="tp1", dtype=dtype, topology="h200-efa3200")
    plan = plan_case(case)
    whole, costs = simulate(plan), StageCosts()
    trainer = simulate_rank(plan, side="trainer", rank=0)
    rounds = 2 if dtype == "fp8-block128" else 1  # magnitudes take one more
    assert trainer.predicted_s == pytest.approx(whole.transfer_s - rounds * costs.control_s, rel=0.01)
    assert trainer.wire_s == pytest.approx(whole.stages["send"])
    engine = simulate_rank(plan, side="engine", rank=0)
    assert engine.wire_s == pytest.approx(whole.stages["receive"])
    assert engine.stages == pytest.approx({name: whole.stages[name] for name in ("verify", "commit")})


@pytest.mark.parametrize(
    ("num_places", "arrived", "drained"),
    [(1, [1, 4, 7], [3, 6, 9]), (2, [1, 2, 4], [3, 5, 7]), (3, [1, 2, 3], [3, 5, 7])],
)
def test_a_chunk_waits_until_its_place_in_the_window_is_free(num_places, arrived, drained):
    """Three Chunks of a second each, which take two seconds to drain."""
    count, none = 3, np.zeros(3)
    served = serve(
        Journeys(
            sender=np.zeros(count, np.int64),
            phase=np.zeros(count, np.int64),
            due=np.arange(count) / count,
            share=np.full(count, 1 / count),
            latency_s=none,
            first=np.arange(count + 1),
            resource=np.zeros(count, np.int64),
            seconds=np.ones(count),
            is_stage=np.zeros(count, bool),
            is_gate=np.zeros(count, bool),
            num_packets=1,
            drain_s=np.full(count, 2.0),
            drained_by=np.zeros(count, np.int64),
            place_of=np.arange(count) - num_places if num_places < count else np.full(count, -1),
        ),
        num_slots=count,
        opens_s=np.zeros(1),
    )
    assert served.arrived_s.tolist() == arrived
    assert served.drained_s.tolist() == drained


def windowed(mode: ReceiverMode, **settings: object) -> Plan:
    """Everything is packed, and in place drained from windows by engines whose memory is slower than the network."""
    nics = (Nic(gbps=400.0, devices=(0, 1, 2, 3)),)
    host = HostKind(devices=4, nics=nics, link_gb_per_s=450, pinned_gb_per_s=55, device_gb_per_s=8.0)
    model = load_model("qwen3-0.6b")
    return make_plan(
        trainer=trainer_layout(model, "fsdp4"),
        recipe=engine_recipe(model, "tp2"),
        topology=Cluster(name="slow memory", host=host).place(num_trainers=4, num_engines=2),
        settings=Settings(mode=mode, transport="nixl", min_write_bytes=1 << 40, chunk_bytes=4 << 20, **settings),
    )


def test_a_version_through_windows_takes_as_long_as_draining():
    plan = windowed(ReceiverMode.IN_PLACE)
    assert (plan.links.num_slots > 0).any()
    beside, found = (simulate(each, costs=FREE) for each in (windowed(ReceiverMode.SHADOW), plan))
    drain_s = float(plan.rx_bytes.max()) / (plan.topology.host.device_gb_per_s * 1e9)
    assert drain_s <= found.predicted_s <= 1.1 * drain_s
    assert found.transfer_s > 1.5 * beside.transfer_s, "trainers wait for room"


def test_patches_need_no_room_in_a_window():
    plans = [windowed(mode, delta=DeltaPolicy.ON) for mode in (ReceiverMode.SHADOW, ReceiverMode.IN_PLACE)]
    beside, found = (simulate(each, options=Options(delta_density=0.01), costs=FREE) for each in plans)
    assert found.transfer_s == pytest.approx(beside.transfer_s, rel=0.02)
