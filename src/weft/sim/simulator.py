"""Runs a Schedule over a Topology: when does the last engine have its last byte?

Every Chunk passes the stages of its sender in order (host→device copy, gather for systems that gather, convert), then
its sender's NIC and its receiver's NIC, or the link inside a domain. Each is a resource that serves one Chunk at a
time; different stages overlap. A Chunk may start only when one of its sender's slots is free. NICs charge a gap per
write and bytes over the rate they really reach.

    prediction = simulate(plan)
    prediction.predicted_s, prediction.pause_s, prediction.stages
"""

from __future__ import annotations

import enum
import heapq
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from weft.config import ReceiverMode
from weft.core.boxes import Ints
from weft.core.layout import DTYPE_BYTES
from weft.core.plan import Plan
from weft.core.recipe import Op
from weft.core.schedule import Schedule, make_schedule
from weft.events import Recorder
from weft.sim.costs import StageCosts
from weft.sim.delta_size import patch_bytes

Floats = NDArray[np.float64]
_STAGE_ORDER = ("amax", "h2d", "gather", "convert", "delta", "send", "receive")
MAX_CHUNKS = 60_000
"""Above this the simulator makes chunks larger; the predicted time hardly depends on it."""


class Barrier(enum.StrEnum):
    """What every sender must have finished before any may start the next phase."""

    PREPARED = "prepared"
    WRITTEN = "written"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How the update is run."""

    mode: ReceiverMode = ReceiverMode.SHADOW
    offloaded: bool = False
    """Whether the trainer's weights are in host memory when the update starts."""
    skew_s: float = 0.0
    """Senders start spread over this long."""
    barrier: Barrier = Barrier.PREPARED
    """What a later phase waits for."""
    delta_density: float | None = None
    """Fraction of the engine's elements that change between versions; None: versions are sent whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """Work of every sender in one phase beyond converting: seconds, spread over its Chunks."""

    h2d_s: Floats
    """Seconds its host→device copies take."""
    gather_s: Floats
    """Seconds its gather stage is busy."""
    gather_nic_s: Floats
    """Seconds of those that its NIC is busy too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the simulator expects of one update."""

    predicted_s: float
    """From publish to the last engine's commit."""
    transfer_s: float
    """From publish to the last byte."""
    pause_s: float
    """How long an engine does not generate."""
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
    """Predict one update. `phase_of_row` and `prepare` describe systems that work in phases and gather."""
    options, costs = options or Options(), costs or StageCosts()
    sized = plan.settings
    if plan.total_bytes > MAX_CHUNKS * sized.chunk_bytes:
        coarse = plan.total_bytes // MAX_CHUNKS
        sized = replace(sized, chunk_bytes=coarse, max_staging_bytes=max(sized.max_staging_bytes, 2 * coarse))
    schedule = make_schedule(replace(plan, settings=sized), phase_of_row=phase_of_row)
    run = _Run(plan, schedule, options, costs, Recorder() if record else None)
    num_phases = int(schedule.phase.max()) + 1 if schedule.num_chunks else 0
    for phase in range(num_phases):
        run.phase(phase, prepare[phase] if prepare else None)
    return run.prediction()


class _Line:
    """A resource that serves one chunk at a time: a direction of a NIC port, a link, a host's limit."""

    def __init__(self, keys: NDArray[np.int64], rate: Floats | float) -> None:
        _, positions = np.unique(keys, return_inverse=True)
        self._of = positions.tolist()
        self._rate = np.broadcast_to(np.asarray(rate, dtype=np.float64), len(keys)).tolist()
        self._free = [0.0] * (max(self._of, default=0) + 1)

    def free_at(self, rank: int) -> float:
        """When the rank's resource can take the next chunk."""
        return self._free[self._of[rank]]

    def serve(self, rank: int, start_s: float, size: float, least_s: float = 0.0) -> float:
        """Keep the rank's resource busy with some bytes, for at least `least_s`; returns the end."""
        begin = max(start_s, self._free[self._of[rank]])
        end = self._free[self._of[rank]] = begin + max(size / self._rate[rank], least_s)
        return end


class _Run:
    """State of one simulated update: when every resource is next free."""

    def __init__(
        self, plan: Plan, schedule: Schedule, options: Options, costs: StageCosts, recorder: Recorder | None
    ) -> None:
        topology, host = plan.topology, plan.topology.host
        self._plan, self._schedule, self._options, self._costs = plan, schedule, options, costs
        self._recorder = recorder
        num_trainers = topology.num_trainers
        trainers, engines = topology.trainer_device, topology.engine_device
        reached = topology.nic.efficiency
        self._tx_rate = topology.port_rate(topology.port_of(trainers)) * reached
        self._rx_rate = topology.port_rate(topology.port_of(engines)) * reached
        self._tx = _Line(topology.port_of(trainers), self._tx_rate)
        self._rx = _Line(topology.port_of(engines), self._rx_rate)
        self._link_out = _Line(trainers, topology.link_bytes_per_s)
        self._link_in = _Line(engines, topology.link_bytes_per_s)
        self._uplink_out = _Line(topology.host_of(trainers), topology.uplink_bytes_per_s)
        self._uplink_in = _Line(topology.host_of(engines), topology.uplink_bytes_per_s)
        self._cross = _Line(topology.host_of(trainers), topology.cross_rail_bytes_per_s)
        self._stage_free = {stage: [0.0] * num_trainers for stage in ("h2d", "gather", "convert", "delta")}
        self._busy: dict[str, Floats] = {}
        self._copy_rate = host.device_gb_per_s * 1e9
        convert_rate = self._copy_rate * costs.convert_of_copy
        is_delta = options.delta_density is not None
        packed = schedule.num_bytes if is_delta else schedule.packed_bytes  # patches are made from a packed image
        self._convert_s = packed * _source_ratio(plan) / convert_rate
        self._delta_s = schedule.num_bytes * float(is_delta) / (self._copy_rate * costs.encode_of_copy)
        self._sent_ratio = _sent_ratio(plan, options.delta_density)
        self._num_writes = np.ones_like(schedule.num_writes) if is_delta else schedule.num_writes
        golden = (np.arange(num_trainers) * 0.6180339887) % 1.0
        amax_s = _amax_s(plan, self._copy_rate, costs)
        self._opens = (golden * options.skew_s + costs.control_s + amax_s).tolist()
        self._done: list[list[float]] = [[] for _ in range(num_trainers)]
        self._gather_end = 0.0
        self._write_end = 0.0
        self._busy["amax"] = np.array([amax_s])

    def phase(self, phase: int, prepare: Prepare | None) -> None:
        """Run all chunks of one phase; later phases open when this one's work allows."""
        schedule = self._schedule
        queues = [[i for i in schedule.of(s) if schedule.phase[i] == phase] for s in range(len(self._opens))]
        work = prepare or self._own_work()
        h2d = _spread(work.h2d_s, queues)
        gather = _spread(work.gather_s, queues)
        nic = _spread(work.gather_nic_s, queues)
        position = [0] * len(queues)
        waiting = [(self._prepared(queue[0], h2d[s], gather[s]), s) for s, queue in enumerate(queues) if queue]
        heapq.heapify(waiting)
        while waiting:
            ready, s = heapq.heappop(waiting)
            self._write(queues[s][position[s]], ready, nic[s])
            position[s] += 1
            if position[s] < len(queues[s]):
                heapq.heappush(waiting, (self._prepared(queues[s][position[s]], h2d[s], gather[s]), s))
        for stage, seconds in (("h2d", work.h2d_s), ("gather", work.gather_s)):
            self._busy[stage] = self._busy.get(stage, np.zeros_like(seconds)) + seconds
        opens = self._gather_end if self._options.barrier is Barrier.PREPARED else self._write_end
        self._opens = [max(own, opens) for own in self._opens]

    def _own_work(self) -> Prepare:
        """weft's own way: every weight that is sent at all is read from host memory once; nothing is gathered."""
        plan, host = self._plan, self._plan.topology.host
        none = np.zeros(plan.topology.num_trainers)
        read = np.minimum(plan.tx_bytes * _source_ratio(plan), plan.trainer.rank_bytes())
        h2d_s = read / (host.pinned_gb_per_s * 1e9) if self._options.offloaded else none
        return Prepare(h2d_s=h2d_s, gather_s=none, gather_nic_s=none)

    def _prepared(self, chunk: int, h2d_s: float, gather_s: float) -> float:
        """When a chunk is ready to be written."""
        s = int(self._schedule.sender[chunk])
        done, slots = self._done[s], self._schedule.num_slots
        start = self._opens[s]
        if len(done) >= slots:
            start = max(start, done[len(done) - slots])
        for stage, seconds in (
            ("h2d", h2d_s),
            ("gather", gather_s),
            ("convert", float(self._convert_s[chunk])),
            ("delta", float(self._delta_s[chunk])),
        ):
            if seconds:
                free = self._stage_free[stage]
                begin = max(start, free[s])
                start = free[s] = begin + seconds
                self._span(stage, s, chunk, begin, start, lane=stage)
                if stage == "gather":
                    self._gather_end = max(self._gather_end, start)
        return start

    def _write(self, chunk: int, ready: float, gather_nic_s: float) -> None:
        """Send a chunk through every resource between its sender and its receiver; they work on it together."""
        schedule, topology = self._schedule, self._plan.topology
        s, r = int(schedule.sender[chunk]), int(schedule.receiver[chunk])
        size = float(schedule.num_bytes[chunk]) * self._sent_ratio
        if topology.is_local[s, r]:
            begin = max(ready, self._link_out.free_at(s))
            end = max(self._link_out.serve(s, begin, size), self._link_in.serve(r, begin, size))
        else:
            begin = max(ready, self._tx.free_at(s))
            gaps_s = float(self._num_writes[chunk]) * topology.nic.gap_us * 1e-6
            wire_s = max(size / float(self._tx_rate[s]), gaps_s)
            end = max(
                self._tx.serve(s, begin, size, gather_nic_s + wire_s),
                self._rx.serve(r, begin, size),
                self._uplink_out.serve(s, begin, size),
                self._uplink_in.serve(r, begin, size),
            )
            if topology.changes_rail[s, r]:
                end = max(end, self._cross.serve(s, begin, size))
            end += topology.nic.latency_us * 1e-6
        self._done[s].append(end)
        self._write_end = max(self._write_end, end)
        self._span("write", s, chunk, begin, end, lane="nic")

    def _span(self, name: str, sender: int, chunk: int, start_s: float, end_s: float, *, lane: str) -> None:
        if self._recorder is not None:
            self._recorder.span(
                name,
                member=f"trainer {sender}",
                lane=lane,
                start_s=start_s,
                end_s=end_s,
                num_bytes=int(self._schedule.num_bytes[chunk]),
                peer=f"engine {int(self._schedule.receiver[chunk])}",
            )

    def prediction(self) -> Prediction:
        """Add verification and commit, and sum up."""
        plan, costs = self._plan, self._costs
        largest = float(plan.rx_bytes.max()) if plan.num_routes else 0.0
        verify_s = largest * self._sent_ratio / (self._copy_rate * costs.digest_of_copy)
        in_place = self._options.mode is ReceiverMode.IN_PLACE
        apply_s = largest / (self._copy_rate * costs.apply_of_copy)
        if self._options.delta_density is not None and self._options.mode is not ReceiverMode.PATCH:
            verify_s += apply_s  # patches are applied to staged, or paused, weights before the commit
        commit_s = {
            ReceiverMode.IN_PLACE: 0.0,
            ReceiverMode.SHADOW: largest / self._copy_rate,
            ReceiverMode.PATCH: apply_s,
        }[self._options.mode]
        transfer_s = self._write_end
        control_s = costs.control_s * (costs.num_control_rounds - 1)
        predicted_s = transfer_s + verify_s + commit_s + control_s
        self._record_commit(transfer_s, verify_s, commit_s)
        return Prediction(
            predicted_s=predicted_s,
            transfer_s=transfer_s,
            pause_s=predicted_s if in_place else commit_s + costs.control_s,
            wire_bytes=int(np.where(plan.topology.is_local, 0, plan.pair_bytes).sum() * self._sent_ratio),
            stages=self._stages(verify_s, commit_s),
            num_chunks=self._schedule.num_chunks,
            recorder=self._recorder,
        )

    def _stages(self, verify_s: float, commit_s: float) -> dict[str, float]:
        topology, schedule = self._plan.topology, self._schedule
        wired = np.where(topology.is_local, 0, self._plan.pair_bytes) * self._sent_ratio
        convert_s = np.bincount(schedule.sender, weights=self._convert_s, minlength=topology.num_trainers)
        delta_s = np.bincount(schedule.sender, weights=self._delta_s, minlength=topology.num_trainers)
        stages = {
            "convert": np.asarray(convert_s, dtype=np.float64),
            "delta": np.asarray(delta_s, dtype=np.float64),
            "send": _port_seconds(topology.port_of(topology.trainer_device), wired.sum(axis=1), self._tx_rate),
            "receive": _port_seconds(topology.port_of(topology.engine_device), wired.sum(axis=0), self._rx_rate),
            **self._busy,
        }
        longest = {name: float(stages[name].max()) for name in _STAGE_ORDER if name in stages}
        return {name: s for name, s in longest.items() if s > 0} | {"verify": verify_s, "commit": commit_s}

    def _record_commit(self, transfer_s: float, verify_s: float, commit_s: float) -> None:
        if self._recorder is None:
            return
        for engine in range(self._plan.topology.num_engines):
            member = f"engine {engine}"
            verified = transfer_s + verify_s
            self._recorder.span("verify", member=member, lane="main", start_s=transfer_s, end_s=verified)
            self._recorder.span("commit", member=member, lane="main", start_s=verified, end_s=verified + commit_s)


def _spread(seconds: Floats, queues: list[list[int]]) -> list[float]:
    """Every sender's seconds divided over its chunks."""
    return [float(total) / max(len(queue), 1) for total, queue in zip(seconds, queues, strict=True)]


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
    read_s = float(plan.trainer.rank_bytes().max()) / (2 * copy_rate)
    nic = plan.topology.nic
    exchange_s = plan.amax_bytes / plan.topology.num_trainers / (nic.line_bytes_per_s * nic.efficiency)
    return read_s + exchange_s + costs.control_s
