"""`weft bench pipeline`: the stages of sending over a link of limited rate, one after the other and overlapped.

One trainer, one FP8 engine. The link is as slow as all other stages together, so that without overlap a version takes
twice as long as its slowest stage alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from weft.bench.fleet import Fleet
from weft.bench.worker import start_fleet
from weft.config import MIB, DeltaPolicy, ReceiverMode, TransferSettings
from weft.runtime.controller.controller import Controller

Say = Callable[[str], None]
WARM_UP = 1
LINK_GB_PER_S = 20.0
"""Rate of the first run, which measures the other stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRow:
    """One kind of transfer."""

    what: str
    link_gb_per_s: float
    wire_bytes: int
    stages_s: dict[str, float]
    """Each stage alone: the sum over all chunks, nothing else running."""
    serial_s: float
    overlapped_s: float
    of_slowest_stage: float
    """Overlapped, as a multiple of the slowest stage alone."""
    of_serial: float
    peak_staging_bytes: int
    """Measured, in the overlapped runs."""
    watermark_bytes: int
    exact: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineReport:
    """The results of one run."""

    model: str
    rows: tuple[PipelineRow, ...]

    def to_json(self) -> dict[str, Any]:
        """As one object."""
        return asdict(self)


def measure(model: str, *, repeat: int, chunk_mib: int, staging_mib: int, say: Say) -> PipelineReport:
    """FP8, and patches of FP8."""
    rows = []
    say("starting a trainer and an FP8 engine")
    with start_fleet(num_trainers=1, num_engine_ranks=1, num_parts=1, model=model, precision="fp8") as fleet:
        fleet.call("trainer", "fill_normal")
        run = _FleetRun(fleet, say, repeat)
        for what, options in (
            ("FP8", {"mode": ReceiverMode.SHADOW}),
            ("patches of FP8", {"mode": ReceiverMode.PATCH, "delta": DeltaPolicy.ON, "anchor_every": 10_000}),
        ):
            settings = TransferSettings(
                chunk_bytes=chunk_mib * MIB,
                staging_bytes=staging_mib * MIB,
                **options,
            )
            rows.append(run.row(what, settings))
    return PipelineReport(model=model, rows=tuple(rows))


@dataclass(slots=True)
class _FleetRun:
    """A fleet and the version it has reached."""

    fleet: Fleet
    say: Say
    repeat: int
    version: int = 0
    steps: int = 0

    def row(self, what: str, settings: TransferSettings) -> PipelineRow:
        """Measure one kind of transfer."""
        self.say(f"{what}: how long every stage takes")
        found, wire_bytes = self._publish(settings, LINK_GB_PER_S * 1e9, in_turn=True)
        others = sum(seconds for name, seconds in found["stages"].items() if name != "write")
        rate = wire_bytes / others
        self.say(f"{what}: a link of {rate / 1e9:.2f} GB/s, stages in turn")
        serial, _ = self._publish(settings, rate, in_turn=True)
        self.say(f"{what}: a link of {rate / 1e9:.2f} GB/s, stages overlapped")
        overlapped, _ = self._publish(settings, rate, in_turn=False)
        slowest = max(serial["stages"].values())
        return PipelineRow(
            what=what,
            link_gb_per_s=rate / 1e9,
            wire_bytes=wire_bytes,
            stages_s=serial["stages"],
            serial_s=serial["seconds"],
            overlapped_s=overlapped["seconds"],
            of_slowest_stage=overlapped["seconds"] / slowest,
            of_serial=overlapped["seconds"] / serial["seconds"],
            peak_staging_bytes=overlapped["peak_staging_bytes"],
            watermark_bytes=settings.staging_bytes,
            exact=all(self.fleet.call("engine", "verify_fp8", version=self.version, steps=self.steps)),
        )

    def _advance(self, *, small: bool) -> None:
        if small:
            self.steps += 1
            self.fleet.call("trainer", "advance_some_normal", step=self.steps)
        else:
            self.version += 1
            self.fleet.call("trainer", "advance_normal", version=self.version)

    def _publish(self, settings: TransferSettings, bytes_per_s: float, *, in_turn: bool) -> tuple[dict[str, Any], int]:
        """Medians over some versions, and the bytes of the last."""
        found = []
        with Controller(num_trainers=1, num_engine_ranks=1, settings=settings) as controller:
            self.fleet.call("engine", "open", address=controller.address)
            self.fleet.call(
                "trainer", "open_limited", address=controller.address, bytes_per_s=bytes_per_s, in_turn=in_turn
            )
            for number in range(WARM_UP + self.repeat):
                self._advance(small=settings.delta is DeltaPolicy.ON and number >= WARM_UP)
                receiving = self.fleet.ask("engine", "receive")
                publishing = self.fleet.ask(
                    "trainer", "publish", version=self.version + self.steps, start=self.fleet.soon()
                )
                spans = self.fleet.answers(publishing, receiving)[0]
                found.append({"seconds": spans[0][2], **self.fleet.call("trainer", "last_sending")[0]})
            wire_bytes = controller.statistics().last_wire_bytes
            for side in ("trainer", "engine"):
                self.fleet.call(side, "shut")
        measured = found[WARM_UP:]
        stages = {name: statistics.median(f["stages"][name] for f in measured) for name in measured[0]["stages"]}
        return {
            "stages": stages,
            "seconds": statistics.median(f["seconds"] for f in measured),
            "peak_staging_bytes": max(f["peak_staging_bytes"] for f in measured),
        }, wire_bytes
