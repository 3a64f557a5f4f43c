"""Runs a Schedule over a Topology: when does the last engine have its last byte?

Every Chunk passes the stages of its sender in order (host→device copy, gather for systems that gather, convert, delta),
then the network: its sender's NIC, the uplinks and cross-rail capacity of hosts where they are limited, and its
receiver's NIC; or the links inside a domain. Chunks queue at each of these resources and share them
(`weft.sim.queues`); different resources overlap. A sender's NIC does not wait for a busy receiver: it continues
with Chunks for others, as long as the sender has slots. NICs charge a gap per write, and bytes over the rate they
reach.

    prediction = simulate(plan)
    prediction.predicted_s, prediction.pause_s, prediction.stages
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.config import DeltaPolicy, ReceiverMode
from weft.core.geometry.boxes import Ints
from weft.core.layout import DTYPE_BYTES
from weft.core.plans.plan import Plan
from weft.core.plans.schedule import Schedule, make_schedule
from weft.core.recipe import Op
from weft.events import Recorder
from weft.sim.costs import StageCosts
from weft.sim.delta_size import apply_traffic, patch_bytes
from weft.sim.queues import Floats, Journeys, Served, serve

_STAGE_ORDER = ("amax", "h2d", "gather", "convert", "delta", "send", "receive")
_EXITS = ("tx", "link out")
MAX_CHUNKS = 60_000
"""Above this the simulator makes chunks larger; the predicted time hardly depends on it."""
MAX_PACKETS, MOST_PACKETS_PER_CHUNK = 180_000, 8
"""Chunks are sent in packets. With one for each, large Chunks of 256 senders would wait for each other at receivers, as
no network makes them wait: 1.17 s instead of 0.87 for 1T parameters. From three on, the time hardly depends on it."""


class Barrier(enum.StrEnum):
    """What every sender must have finished before any may start the next phase."""

    PREPARED = "prepared"
    WRITTEN = "written"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How the update is run."""

    mode: ReceiverMode | None = None
    """Where versions land; None: as the plan says."""
    offloaded: bool = False
    """Whether the trainer's weights are in host memory when the update starts."""
    skew_s: float = 0.0
    """Senders start spread over this long."""
    barrier: Barrier = Barrier.PREPARED
    """What a later phase waits for."""
    delta_density: float | None = None
    """Fraction of the engine's elements that change between versions; None: versions are sent whole."""

    def applied_to(self, plan: Plan) -> Plan:
        """The plan that a controller would make for such an update."""
        delta = plan.settings.delta if self.delta_density is None else DeltaPolicy.ON
        settings = replace(plan.settings, mode=self.mode or plan.settings.mode, delta=delta)
        return plan if settings == plan.settings else replace(plan, settings=settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """Work of every sender in one phase beyond converting: seconds, spread over its Chunks."""

    h2d_s: Floats
    """Seconds its host→device copies take."""
    gather_s: Floats
    """Seconds its gather stage is busy."""
    gather_nic_s: Floats
    """Seconds of these in which its NIC is busy too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The simulator's prediction of one update."""

    predicted_s: float
    """From publish to the last engine's commit."""
    transfer_s: float
    """From publish to the last byte."""
    pause_s: float
    """How long an engine is paused."""
    wire_bytes: int
    """Bytes that cross the network; those inside a link domain do not."""
    stages: dict[str, float]
    """Busy seconds of each stage on the rank where it is longest. Stages overlap: they do not add up."""
    num_chunks: int
    recorder: Recorder | None = field(default=None, repr=False)


def simulate(
    plan: Plan,
    *,
    options: Options | None = None,
    costs: StageCosts | None = None,
    phase_of_row: Ints | None = None,
    prepare: list[Prepare] | None = None,
    record: bool = False,
) -> Prediction:
    """Predict one update. `phase_of_row` and `prepare` describe systems that work in phases and gather.

    >>> from weft.core.case import Case, plan_case
    >>> plan = plan_case(Case(model="qwen2.5-0.5b", trainer="fsdp4", engine="tp2"))
    >>> prediction = simulate(plan)
    >>> 0 < prediction.predicted_s < 0.1
    True
    """
    options, costs = options or Options(), costs or StageCosts()
    plan = options.applied_to(plan)
    chunk_bytes = 0 if _is_small(plan) else plan.total_bytes // MAX_CHUNKS
    schedule = make_schedule(plan, phase_of_row=phase_of_row, chunk_bytes=chunk_bytes)
    update = _SimulatedUpdate(plan, schedule, options, costs, prepare, has_windows=not chunk_bytes)
    return update.prediction(Recorder() if record else None)


def _is_small(plan: Plan) -> bool:
    """Whether there are not too many Chunks to simulate each."""
    return bool((plan.pair_bytes / plan.links.chunk_bytes).sum() <= MAX_CHUNKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPrediction:
    """What one rank of an update would take alone: no other rank uses its NIC, or those of its peers."""

    stages: dict[str, float]
    """Seconds of its own stages."""
    wire_s: float
    """Seconds its NIC is busy."""
    predicted_s: float
    """From the first stage to the last byte written; on engine ranks, until the version is committed."""


def simulate_rank(
    plan: Plan, *, side: str, rank: int, options: Options | None = None, costs: StageCosts | None = None
) -> RankPrediction:
    """Predict the work of one trainer or engine rank, without control messages and exchanges with others."""
    options, costs = options or Options(), costs or StageCosts()
    plan = options.applied_to(plan)
    schedule = make_schedule(plan)
    mine = (schedule.sender if side == "trainer" else schedule.receiver) == rank
    update = _SimulatedUpdate(plan, schedule.only(mine), options, costs, None)
    return update.of_trainer(rank) if side == "trainer" else update.of_engine(rank)


@dataclass(frozen=True, slots=True)
class _StopKind:
    """One kind of stop: which of these resources each Chunk uses, and for how long (0: not at all)."""

    name: str
    key: Ints
    seconds: NDArray[np.floating[Any]]


class _SimulatedUpdate:
    """One simulated update: the journeys of its Chunks, and their result."""

    def __init__(
        self,
        plan: Plan,
        schedule: Schedule,
        options: Options,
        costs: StageCosts,
        prepare: list[Prepare] | None,
        *,
        has_windows: bool = True,
    ) -> None:
        """`has_windows`: whether Chunks are small enough for engines' windows."""
        topology = plan.topology
        self._plan, self._schedule, self._options, self._costs = plan, schedule, options, costs
        reached = topology.nic.efficiency
        self._tx_rate = topology.port_rate(topology.port_of(topology.trainer_device)) * reached
        self._rx_rate = topology.port_rate(topology.port_of(topology.engine_device)) * reached
        self._copy_rate = topology.host.device_gb_per_s * 1e9
        self._sent_ratio = _sent_ratio(plan, options.delta_density)
        self._is_drained = self._lands_in_window() & (has_windows and options.delta_density is None)
        """Chunks that land in a window; patches do not."""
        self._amax_s = _amax_s(plan, self._copy_rate, costs)
        num_phases = int(schedule.phase.max(initial=0)) + 1
        self._work = prepare or [self._own_work()] * num_phases
        stages = self._stage_kinds()
        self._num_stages = len(stages)
        self._kinds = stages + self._network_kinds()

    def _lands_in_window(self) -> NDArray[np.bool_]:
        """Chunks that are packed, on links with a window."""
        schedule = self._schedule
        num_slots = self._plan.links.num_slots[schedule.sender, schedule.receiver]
        return (schedule.packed_bytes > 0) & (num_slots > 0)

    def _place_of(self) -> Ints:
        """The Chunk whose place in the window each one takes: so many before it on its link as there are places."""
        schedule, links = self._schedule, self._plan.links
        place_of = np.full(schedule.num_chunks, -1, dtype=np.int64)
        drained = np.flatnonzero(self._is_drained)
        pair = schedule.sender[drained] * self._plan.topology.num_engines + schedule.receiver[drained]
        order = np.argsort(pair, kind="stable")
        drained, pair = drained[order], pair[order]
        num_slots = links.num_slots[schedule.sender[drained], schedule.receiver[drained]]
        earlier = np.arange(len(drained)) - num_slots
        has_earlier = (earlier >= 0) & (pair[np.maximum(earlier, 0)] == pair)
        place_of[drained[has_earlier]] = drained[earlier[has_earlier]]
        return place_of

    def _own_work(self) -> Prepare:
        """weft's own work: every weight that is sent is read from host memory once; nothing is gathered."""
        plan, host = self._plan, self._plan.topology.host
        none = np.zeros(plan.topology.num_trainers)
        read = np.minimum(plan.tx_bytes * _source_ratio(plan), plan.trainer.rank_bytes())
        h2d_s = read / (host.pinned_gb_per_s * 1e9) if self._options.offloaded else none
        return Prepare(h2d_s=h2d_s, gather_s=none, gather_nic_s=none)

    def _stage_kinds(self) -> list[_StopKind]:
        """Stops on a Chunk's sender, before it is written."""
        schedule, costs, sender = self._schedule, self._costs, self._schedule.sender
        is_delta = self._options.delta_density is not None
        packed = schedule.num_bytes if is_delta else schedule.packed_bytes  # patches are made from a packed image
        convert_s = packed * _source_ratio(self._plan) / (self._copy_rate * costs.convert_of_copy)
        delta_s = schedule.num_bytes * float(is_delta) / (self._copy_rate * costs.encode_of_copy)
        return [
            _StopKind("h2d", sender, self._spread([work.h2d_s for work in self._work])),
            _StopKind("gather", sender, self._spread([work.gather_s for work in self._work])),
            _StopKind("tx", self._tx_port, self._spread([work.gather_nic_s for work in self._work])),
            _StopKind("convert", sender, convert_s),
            _StopKind("delta", sender, delta_s),
        ]

    @property
    def _tx_port(self) -> Ints:
        """Port each Chunk leaves through, if it goes over the network."""
        topology = self._plan.topology
        return topology.port_of(topology.trainer_device)[self._schedule.sender]

    def _network_kinds(self) -> list[_StopKind]:
        """Stops of a Chunk on its way: links inside a domain, or ports and the limits of hosts."""
        topology, schedule = self._plan.topology, self._schedule
        sender, receiver = schedule.sender, schedule.receiver
        size = schedule.num_bytes * self._sent_ratio
        local = topology.is_local[sender, receiver]
        wired = np.where(local, 0.0, size)
        crossing = np.where(topology.changes_rail[sender, receiver], wired, 0.0)
        num_writes = np.ones(len(size)) if self._options.delta_density is not None else schedule.num_writes
        gaps_s = np.where(local, 0.0, num_writes * topology.nic.gap_us * 1e-6)
        src_host = topology.host_of(topology.trainer_device)[sender]
        dst_host = topology.host_of(topology.engine_device)[receiver]
        dst_port = topology.port_of(topology.engine_device)[receiver]
        link_s = (size - wired) / topology.link_bytes_per_s
        return [
            _StopKind("link out", topology.trainer_device[sender], link_s),
            _StopKind("link in", topology.engine_device[receiver], link_s),
            _StopKind("tx", self._tx_port, np.maximum(wired / self._tx_rate[sender], gaps_s)),
            _StopKind("uplink out", src_host, wired / topology.uplink_bytes_per_s),
            _StopKind("cross-rail", src_host, crossing / topology.cross_rail_bytes_per_s),
            _StopKind("uplink in", dst_host, wired / topology.uplink_bytes_per_s),
            _StopKind("rx", dst_port, wired / self._rx_rate[receiver]),
        ]

    def _spread(self, seconds: list[Floats]) -> Floats:
        """Seconds of every phase and sender, divided over the sender's Chunks of that phase."""
        schedule = self._schedule
        key = schedule.phase * self._plan.topology.num_trainers + schedule.sender
        return np.asarray(np.concatenate(seconds)[key] / np.bincount(key)[key], dtype=np.float64)

    def _journeys(self) -> Journeys:
        """The stops of all Chunks, in order; those that take no time are left out."""
        schedule, kinds = self._schedule, self._kinds
        seconds = np.stack([kind.seconds for kind in kinds], axis=1)
        chunk, column = np.nonzero(seconds)
        names = [kind.name for kind in kinds]
        line = np.array([names.index(name) for name in names])  # kinds of one name share their resources
        keys = np.stack([kind.key for kind in kinds], axis=1)[chunk, column]
        _, resource = np.unique(line[column] * (keys.max(initial=0) + 1) + keys, return_inverse=True)
        first = np.searchsorted(chunk, np.arange(schedule.num_chunks + 1))
        if self._options.barrier is Barrier.PREPARED:
            is_gate = column == names.index("gather")
        else:
            is_gate = np.isin(np.arange(len(chunk)), first[1:] - 1)
        local = self._plan.topology.is_local[schedule.sender, schedule.receiver]
        num_packets = min(max(MAX_PACKETS // max(schedule.num_chunks, 1), 1), MOST_PACKETS_PER_CHUNK)
        return Journeys(
            sender=schedule.sender,
            phase=schedule.phase,
            due=schedule.phase + schedule.before + schedule.turn * schedule.share / num_packets,
            share=schedule.share,
            latency_s=np.where(local, 0.0, self._plan.topology.nic.latency_us * 1e-6),
            first=first,
            resource=resource,
            seconds=seconds[chunk, column],
            is_stage=column < self._num_stages,
            is_gate=is_gate,
            num_packets=num_packets,
            drain_s=np.where(self._is_drained, schedule.num_bytes / self._copy_rate, 0.0),
            drained_by=schedule.receiver,
            place_of=self._place_of(),
        )

    def prediction(self, recorder: Recorder | None) -> Prediction:
        """Run the update, add verification and commit, and sum up."""
        plan, costs, options = self._plan, self._costs, self._options
        golden = (np.arange(plan.topology.num_trainers) * 0.6180339887) % 1.0
        journeys = self._journeys()
        opens_s = np.asarray(golden * options.skew_s + costs.control_s + self._amax_s, dtype=np.float64)
        served = serve(journeys, num_slots=self._schedule.num_slots, opens_s=opens_s)
        transfer_s = float(served.arrived_s.max(initial=0.0))
        landed_s = float(served.drained_s.max(initial=0.0))
        verify_s, commit_s = self._after_transfer(plan.rx_bytes, self._drained_bytes)
        control_s = costs.control_s * (costs.num_control_rounds - 1)
        predicted_s = landed_s + verify_s + commit_s + control_s
        if recorder is not None:
            self._record_chunks(recorder, journeys, served)
            self._record_commit(recorder, landed_s, verify_s, commit_s)
        return Prediction(
            predicted_s=predicted_s,
            transfer_s=transfer_s,
            pause_s=predicted_s if plan.settings.mode is ReceiverMode.IN_PLACE else commit_s + costs.control_s,
            wire_bytes=int(np.where(plan.topology.is_local, 0, plan.pair_bytes).sum() * self._sent_ratio),
            stages=self._stages(verify_s, commit_s),
            num_chunks=self._schedule.num_chunks,
            recorder=recorder,
        )

    def of_trainer(self, rank: int) -> RankPrediction:
        """The stages of a trainer, and when its last byte has arrived; Chunks of others are not among these."""
        amax_s = _amax_read_s(self._plan, self._copy_rate)
        journeys = self._journeys()
        opens_s = np.full(self._plan.topology.num_trainers, amax_s)
        served = serve(journeys, num_slots=self._schedule.num_slots, opens_s=opens_s)
        seconds = {kind.name: float(kind.seconds.sum()) for kind in self._kinds[: self._num_stages]}
        stages = {"amax": amax_s} | {name: seconds[name] for name in ("h2d", "convert", "delta")}
        wire_s = sum(float(kind.seconds.sum()) for kind in self._kinds[self._num_stages :] if kind.name in _EXITS)
        return RankPrediction(
            stages={name: s for name, s in stages.items() if s > 0},
            wire_s=wire_s,
            predicted_s=float(served.arrived_s.max(initial=0.0)),
        )

    def of_engine(self, rank: int) -> RankPrediction:
        """What an engine rank does when everything has arrived, and when it has committed."""
        verify_s, commit_s = self._after_transfer(self._plan.rx_bytes[[rank]], self._drained_bytes[[rank]])
        entries = ("rx", "link in")
        wire_s = sum(float(kind.seconds.sum()) for kind in self._kinds[self._num_stages :] if kind.name in entries)
        return RankPrediction(
            stages={"verify": verify_s, "commit": commit_s}, wire_s=wire_s, predicted_s=wire_s + verify_s + commit_s
        )

    @property
    def _drained_bytes(self) -> NDArray[np.int64]:
        """What every engine rank drains from its window."""
        schedule, num_engines = self._schedule, self._plan.topology.num_engines
        drained = np.bincount(schedule.receiver, schedule.num_bytes * self._is_drained, minlength=num_engines)
        return drained.astype(np.int64)

    def _after_transfer(self, received: Ints, drained: Ints) -> tuple[float, float]:
        """Seconds of verification and of the commit on the slowest of some engine ranks, from their bytes.

        What is drained is digested on the way.
        """
        plan, costs, mode = self._plan, self._costs, self._plan.settings.mode
        largest, left = (float(num_bytes.max(initial=0)) for num_bytes in (received, received - drained))
        verify_s = left * self._sent_ratio / (self._copy_rate * costs.digest_of_copy)
        apply_s = largest * _apply_ratio(plan, self._options.delta_density) / (self._copy_rate * costs.apply_of_copy)
        if self._options.delta_density is not None and mode is not ReceiverMode.PATCH:
            verify_s += apply_s  # patches are applied to staged, or paused, weights before the commit
        commit_s = {
            ReceiverMode.IN_PLACE: 0.0,
            ReceiverMode.SHADOW: largest / self._copy_rate,
            ReceiverMode.PATCH: apply_s,
        }[mode]
        return verify_s, commit_s

    def _stages(self, verify_s: float, commit_s: float) -> dict[str, float]:
        """Seconds of each stage on the rank where it is longest."""
        topology, sender = self._plan.topology, self._schedule.sender
        wired = np.where(topology.is_local, 0, self._plan.pair_bytes) * self._sent_ratio
        stages = {
            "amax": np.array([self._amax_s]),
            "send": _port_seconds(topology.port_of(topology.trainer_device), wired.sum(axis=1), self._tx_rate),
            "receive": _port_seconds(topology.port_of(topology.engine_device), wired.sum(axis=0), self._rx_rate),
        }
        for kind in self._kinds[: self._num_stages]:
            if kind.name in _STAGE_ORDER:
                stages[kind.name] = np.bincount(sender, weights=kind.seconds, minlength=1)
        longest = {name: float(stages[name].max()) for name in _STAGE_ORDER}
        return {name: s for name, s in longest.items() if s > 0} | {"verify": verify_s, "commit": commit_s}

    def _record_chunks(self, recorder: Recorder, journeys: Journeys, served: Served) -> None:
        """Spans of every Chunk: its stages, and its write from the first byte that leaves to the last that arrives."""
        schedule, names = self._schedule, [kind.name for kind in self._kinds]
        seconds = np.stack([kind.seconds for kind in self._kinds], axis=1)
        for chunk, column, begin_s, lasts_s in zip(
            *(values.tolist() for values in np.nonzero(seconds)),
            served.begin_s.tolist(),
            journeys.seconds.tolist(),
            strict=True,
        ):
            is_write = names[column] in _EXITS and column >= self._num_stages
            if not is_write and names[column] not in _STAGE_ORDER:
                continue
            recorder.span(
                "write" if is_write else names[column],
                member=f"trainer {int(schedule.sender[chunk])}",
                lane="nic" if is_write else names[column],
                start_s=begin_s,
                end_s=float(served.arrived_s[chunk]) if is_write else begin_s + lasts_s,
                num_bytes=int(schedule.num_bytes[chunk]),
                peer=f"engine {int(schedule.receiver[chunk])}",
            )

    def _record_commit(self, recorder: Recorder, landed_s: float, verify_s: float, commit_s: float) -> None:
        for engine in range(self._plan.topology.num_engines):
            member = f"engine {engine}"
            verified = landed_s + verify_s
            recorder.span("verify", member=member, lane="main", start_s=landed_s, end_s=verified)
            recorder.span("commit", member=member, lane="main", start_s=verified, end_s=verified + commit_s)


def _sent_ratio(plan: Plan, density: float | None) -> float:
    """Bytes on the wire per byte of weights."""
    if density is None or not plan.num_routes:
        return 1.0
    sent = plan.row_bytes * plan.fan_out
    itemsize = plan.recipe.engine.itemsize[plan.dst]
    patches = sum(
        patch_bytes(float(sent[itemsize == width].sum()) / width, density, width=int(width))
        for width in np.unique(itemsize)
    )
    return float(patches / sent.sum())


def _apply_ratio(plan: Plan, density: float | None) -> float:
    """Seconds of applying patches of this density, over those of 1% of BF16, which are measured."""
    if density is None or not plan.num_routes:
        return 1.0
    sent = plan.row_bytes * plan.fan_out
    itemsize = plan.recipe.engine.itemsize[plan.dst]
    traffic = sum(
        float(sent[itemsize == width].sum()) * apply_traffic(density, width=int(width)) for width in np.unique(itemsize)
    )
    return float(traffic / sent.sum() / apply_traffic(0.01, width=2))


def _port_seconds(ports: NDArray[np.int64], num_bytes: Floats, rate: Floats) -> Floats:
    """Seconds every port is busy, as each of its ranks sees it."""
    _, port = np.unique(ports, return_inverse=True)
    return np.asarray(np.bincount(port, weights=num_bytes)[port] / rate, dtype=np.float64)


def _source_ratio(plan: Plan) -> float:
    """Source bytes read per byte sent."""
    if not plan.num_routes:
        return 1.0
    dst_bytes = plan.row_bytes
    source = np.array([DTYPE_BYTES[tensor.dtype] for tensor in plan.trainer.tensors])[
        plan.trainer.tensor_of[plan.shard]
    ]
    itemsize = plan.recipe.engine.itemsize[plan.dst]
    return float((dst_bytes // itemsize * source).sum() / dst_bytes.sum())


def _amax_s(plan: Plan, copy_rate: float, costs: StageCosts) -> float:
    """Partial maxima of a sender's own weights, then a round in which holders of cut blocks exchange them."""
    if plan.gathered or not (plan.recipe.op == Op.QUANTIZE).any():
        return 0.0
    read_s = _amax_read_s(plan, copy_rate)
    nic = plan.topology.nic
    exchange_s = plan.amax_bytes / plan.topology.num_trainers / (nic.line_bytes_per_s * nic.efficiency)
    return read_s + exchange_s + costs.control_s


def _amax_read_s(plan: Plan, copy_rate: float) -> float:
    """A sender's own weights, read once."""
    if plan.gathered or not (plan.recipe.op == Op.QUANTIZE).any():
        return 0.0
    return float(plan.trainer.rank_bytes().max()) / (2 * copy_rate)
