"""`weft bench slice`: the exact work of one rank of a case on one device, beside what the simulator predicts for it.

The rank has its real shards and its real boxes; all others are memory on the same device, behind a link that is paced
at the NIC's rate, or not at all. Stages are those of paced versions: the copies that stand for the network would slow
them down otherwise.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from weft.bench.slice.engine import EngineSlice
from weft.bench.slice.trainer import SliceVersion, TrainerSlice
from weft.config import DeltaPolicy, DigestPolicy, ReceiverMode, TransferSettings
from weft.core.plans.plan import Plan
from weft.devices import CPU
from weft.errors import ConfigError
from weft.sim.simulator import Options, RankPrediction, simulate_rank

Say = Callable[[str], None]
MoveVersion = Callable[[float], SliceVersion]
"""Moves a version over a NIC of some rate."""
WARM_UP = 2
WIRE, H2D = "wire", "h2d"
CHECKED_BYTES = 2 << 30
"""How much of what a trainer sends is made again by the CPU, and compared."""
DENSITY = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceStage:
    """One stage of the rank: how long it is busy with a version."""

    stage: str
    measured_ms: float
    predicted_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceReport:
    """What one rank of a case does for a version."""

    name: str
    side: str
    rank: int
    device: str
    delta: bool
    stages: tuple[SliceStage, ...]
    non_wire_ms: float
    """All stages but the wire and the copies of offloaded weights, which overlap."""
    wire_ms: float
    """Bytes on the wire at the NIC's rate."""
    wire_bytes: int
    nic_gb_per_s: float
    unpaced_s: float
    """A version over links as fast as the device's memory."""
    paced_s: float
    """A version behind the NIC."""
    predicted_s: float
    exact: bool
    """Whether it landed, or was committed, byte for byte as it should be."""
    checked_bytes: int

    def to_json(self) -> dict[str, Any]:
        """As one object."""
        return asdict(self)


def measure(
    plan: Plan,
    *,
    name: str,
    side: str,
    rank: int | None,
    device: str,
    offloaded: bool,
    delta: bool,
    repeat: int,
    say: Say,
) -> SliceReport:
    """Measure one rank; None: the one with the most bytes."""
    busiest = plan.tx_bytes if side == "trainer" else plan.rx_bytes
    rank = int(np.argmax(busiest)) if rank is None else rank
    _check(plan, side, rank, delta=delta)
    defaults = TransferSettings()
    settings = TransferSettings(
        chunk_bytes=defaults.chunk_bytes_on(device),
        staging_bytes=defaults.staging_bytes_on(device),
        mode=ReceiverMode.SHADOW,
        delta=DeltaPolicy.ON if delta else DeltaPolicy.OFF,
        digest=DigestPolicy.OFF if side == "trainer" else DigestPolicy.ON,
        anchor_every=1_000_000,
        version_s=300.0,
    )
    plan = replace(plan, settings=settings.planned)  # as the controller would make it
    options = Options(offloaded=offloaded, delta_density=DENSITY if delta else None)
    expected = simulate_rank(plan, side=side, rank=rank, options=options)
    run = _Run(plan, side, rank, device, settings, repeat, say)
    found = run.trainer(offloaded=offloaded) if side == "trainer" else run.engine()
    return _report(name, run, found, expected, delta=delta)


def _check(plan: Plan, side: str, rank: int, *, delta: bool) -> None:
    count = plan.topology.num_trainers if side == "trainer" else plan.topology.num_engines
    if not 0 <= rank < count:
        raise ConfigError(f"{side} {rank} does not exist", hint=f"ranks are 0 to {count - 1}")
    if delta and side == "engine":
        raise ConfigError("patches are measured on trainers only", hint="leave --delta out, or use --side trainer")


@dataclass(frozen=True, slots=True)
class _Found:
    """Medians of a rank."""

    stages: dict[str, float]
    unpaced_s: float
    paced_s: float
    wire_bytes: int
    exact: bool
    checked_bytes: int


@dataclass(frozen=True, slots=True)
class _Run:
    """One rank that is measured."""

    plan: Plan
    side: str
    rank: int
    device: str
    settings: TransferSettings
    repeat: int
    say: Say

    @property
    def nic_bytes_per_s(self) -> float:
        """What the rank's NICs carry."""
        topology = self.plan.topology
        devices = topology.trainer_device if self.side == "trainer" else topology.engine_device
        port = topology.port_of(devices[self.rank : self.rank + 1])
        return float(topology.port_rate(port)[0] * topology.nic.efficiency)

    def trainer(self, *, offloaded: bool) -> _Found:
        """A trainer's stages and writes."""
        self.say(f"trainer {self.rank}: preparing its shards and boxes")
        mine = TrainerSlice(self.plan, self.rank, self.settings, self.device, is_offloaded=offloaded)
        mine.fill(torch.device(self.device))
        steps = iter(range(1, 1 << 20))

        def send(bytes_per_s: float) -> SliceVersion:
            if self.settings.delta is DeltaPolicy.ON:
                mine.change(next(steps))
            return mine.send(bytes_per_s)

        times = self._times(send)
        self.say("making the same bytes on the CPU")
        reference = TrainerSlice(
            self.plan, self.rank, self.settings, CPU, most_bytes=CHECKED_BYTES, planned_for=self.device
        )
        is_exact = _is_equal(mine, reference)
        checked = min(reference.landed_bytes, mine.landed_bytes)
        mine.close()
        reference.close()
        return _Found(*times, exact=is_exact, checked_bytes=checked)

    def engine(self) -> _Found:
        """What an engine rank does with what arrives."""
        self.say(f"engine {self.rank}: preparing its weights and landing area")
        mine = EngineSlice(self.plan, self.rank, self.settings, self.device)
        mine.fill()
        times = self._times(mine.receive)
        mine.close()
        return _Found(*times, exact=mine.is_exact, checked_bytes=times[3])

    def _times(self, move: MoveVersion) -> tuple[dict[str, float], float, float, int]:
        """Medians: stages and seconds unpaced, seconds behind the NIC; and bytes on the wire."""
        self.say("versions as fast as the memory")
        fast = [move(float("inf")) for _ in range(WARM_UP + self.repeat)][WARM_UP:]
        self.say("versions behind the NIC")
        paced = [move(self.nic_bytes_per_s) for _ in range(self.repeat)]
        stages = {name: statistics.median(each.stages.get(name, 0.0) for each in paced) for name in paced[-1].stages}
        return (
            {name: s for name, s in stages.items() if name not in ("write", "post")},
            statistics.median(each.seconds for each in fast),
            statistics.median(each.seconds for each in paced),
            paced[-1].num_bytes,
        )


def _is_equal(mine: TrainerSlice, reference: TrainerSlice) -> bool:
    """Whether a whole version of the same weights lands alike on the CPU."""
    reference.copy_from(mine)
    mine.send(also_whole=True)
    reference.send()
    return mine.equals(reference)


def _report(name: str, run: _Run, found: _Found, expected: RankPrediction, *, delta: bool) -> SliceReport:
    names = [*found.stages, *(stage for stage in expected.stages if stage not in found.stages)]
    stages = [
        SliceStage(
            stage=stage,
            measured_ms=found.stages.get(stage, 0.0) * 1e3,
            predicted_ms=expected.stages.get(stage, 0.0) * 1e3,
        )
        for stage in names
    ]
    wire_ms = found.wire_bytes / run.nic_bytes_per_s * 1e3
    stages.append(SliceStage(stage=WIRE, measured_ms=wire_ms, predicted_ms=expected.wire_s * 1e3))
    return SliceReport(
        name=name,
        side=run.side,
        rank=run.rank,
        device=run.device,
        delta=delta,
        stages=tuple(stages),
        non_wire_ms=sum(each.measured_ms for each in stages if each.stage not in (WIRE, H2D)),
        wire_ms=wire_ms,
        wire_bytes=found.wire_bytes,
        nic_gb_per_s=run.nic_bytes_per_s / 1e9,
        unpaced_s=found.unpaced_s,
        paced_s=found.paced_s,
        predicted_s=expected.predicted_s,
        exact=found.exact,
        checked_bytes=found.checked_bytes,
    )
