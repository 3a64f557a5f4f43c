"""`weft bench transfer --device cuda:0`: versions between processes that share one GPU, compared with its own copy.

The limit of a row is a perfect pass: the bytes that must be read and written, at the rate of the device's own copy
in the same run. Where one side has its weights in CPU memory it is what crosses the bus, at the rate of a copy between
pinned memory and the device. Times run from `publish` until the engine, which waits in `take`, has committed. Every
version is compared with what it should be, bit for bit.
"""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from weft.bench.fleet import Fleet
from weft.bench.on_gpu.members import GpuSetup, load_layers, model_bytes, serve
from weft.bench.payload import whole_shapes
from weft.config import DeltaPolicy, DigestPolicy, ReceiverMode, TransferSettings
from weft.devices import CPU
from weft.errors import ConfigError
from weft.runtime.controller.controller import Controller

Say = Callable[[str], None]
DEFAULT_MODEL = "qwen3-30b-a3b"
PRECISIONS = ("bf16", "fp8")
SPARE_BYTES = 3 << 30
"""GPU memory left for Chunks, tables and comparisons."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMethod:
    """One set of weft's settings."""

    mode: ReceiverMode
    digest: DigestPolicy
    delta: DeltaPolicy = DeltaPolicy.OFF

    @property
    def name(self) -> str:
        """The name that is shown."""
        digest = "" if self.digest is DigestPolicy.ON else ", digest off"
        return f"weft {self.mode}{', 1% changed' if self.delta is DeltaPolicy.ON else ''}{digest}"

    def moved_bytes(self, trainer: int, engine: int) -> int:
        """What a perfect pass reads and writes; `trainer`, `engine`: bytes of the weights there."""
        if self.delta is DeltaPolicy.ON:
            return trainer + engine  # the new numbers, and those the engine has
        return trainer + engine * (2 if self.digest is DigestPolicy.ON else 1)

    def needed_bytes(self, engine: int) -> int:
        """GPU memory needed on top of the weights."""
        if self.delta is DeltaPolicy.ON:
            return 2 * engine + engine // 4
        return engine if self.mode is ReceiverMode.SHADOW else 0


METHODS = (
    GpuMethod(mode=ReceiverMode.IN_PLACE, digest=DigestPolicy.OFF),
    GpuMethod(mode=ReceiverMode.IN_PLACE, digest=DigestPolicy.ON),
    GpuMethod(mode=ReceiverMode.SHADOW, digest=DigestPolicy.ON),
    GpuMethod(mode=ReceiverMode.PATCH, digest=DigestPolicy.ON, delta=DeltaPolicy.ON),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRow:
    """One method."""

    method: str
    precision: str
    trainer_bytes: int
    engine_bytes: int
    seconds: float
    """Median, from publish to committed."""
    each_s: tuple[float, ...]
    limit_s: float
    fraction_of_limit: float
    write_s: float | None = None
    """The writes alone, without the time to decide the version."""
    pause_s: float | None = None
    wire_bytes: int | None = None
    stages_s: dict[str, float] | None = None
    """How long each stage was busy in the last version; they overlap."""
    verified: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReport:
    """The results of one run."""

    model: str
    num_layers: int
    num_tensors: int
    engine: str
    device: str
    copy_gb_per_s: float
    """Bytes read and written per second by the device's own copy."""
    bus_gb_per_s: float | None
    """Bytes per second between pinned host memory and the device, in the direction that was measured."""
    rows: tuple[GpuRow, ...]
    missing: dict[str, str]
    """What was not measured, and why."""

    def to_json(self) -> dict[str, Any]:
        """As one object."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCase:
    """What is moved."""

    model: str
    num_layers: int | None
    num_parts: int
    """Tensor-parallel size of the engine."""
    device: str
    host_side: str | None = None
    """`trainer` or `engine`: has its weights in CPU memory; None: neither."""

    def fleet(self, precision: str) -> Fleet:
        """One trainer, and the ranks of one engine."""
        ends: dict[tuple[str, int], Any] = {("engine", rank): None for rank in range(self.num_parts)}
        ends["trainer", 0], ends["engine", 0] = multiprocessing.get_context("spawn").Pipe()
        return Fleet(
            serve,
            {
                (side, rank): GpuSetup(
                    side=side,
                    rank=rank,
                    model=self.model,
                    num_layers=self.num_layers,
                    device=CPU if side == self.host_side else self.device,
                    gpu=self.device,
                    num_parts=self.num_parts,
                    precision=precision,
                    handles=end,
                )
                for (side, rank), end in ends.items()
            },
        )


def measure(
    case: GpuCase, *, precisions: Sequence[str], modes: Sequence[str], repeat: int, baseline: bool, say: Say
) -> GpuReport:
    """Run every method that fits into the memory."""
    if unknown := set(precisions) - set(PRECISIONS):
        raise ConfigError(f"unknown precision `{unknown.pop()}`", hint=f"use {' or '.join(PRECISIONS)}")
    if case.host_side not in (None, "trainer", "engine"):
        raise ConfigError(f"unknown side `{case.host_side}`", hint="use trainer or engine")
    model = load_layers(case.model, case.num_layers)
    rows: list[GpuRow] = []
    missing: dict[str, str] = {}
    rates, bus_rates = [], []
    for precision in precisions:
        say(f"{case.model}: starting a trainer and {case.num_parts} ranks of an engine in {precision}")
        with case.fleet(precision) as fleet:
            run = _PrecisionRun(case, fleet, precision, model_bytes(model), repeat, say)
            rates.append(run.copy_bytes_per_s)
            bus_rates.append(run.bus_bytes_per_s)
            wanted = [method for method in METHODS if method.mode in modes]
            rows += [row for method in wanted if (row := run.weft(method, missing)) is not None]
            if baseline and precision == "bf16" and case.num_parts == 1 and case.host_side is None:
                rows.append(run.without_weft())
    return GpuReport(
        model=case.model,
        num_layers=model.num_layers,
        num_tensors=len(whole_shapes(model)),
        engine=f"tp{case.num_parts}{'' if case.host_side is None else f', {case.host_side} in CPU memory'}",
        device=_device_name(case.device),
        copy_gb_per_s=statistics.median(rates) / 1e9,
        bus_gb_per_s=None if case.host_side is None else statistics.median(bus_rates) / 1e9,
        rows=tuple(rows),
        missing=missing,
    )


class _PrecisionRun:
    """The processes of one precision."""

    def __init__(self, case: GpuCase, fleet: Fleet, precision: str, trainer_bytes: int, repeat: int, say: Say) -> None:
        self._case, self._fleet, self._precision, self._repeat, self._say = case, fleet, precision, repeat, say
        self._trainer_bytes = trainer_bytes
        self._engine_bytes = sum(fleet.call("engine", "num_bytes"))
        self._gpu_side = "engine" if case.host_side == "trainer" else "trainer"
        self.copy_bytes_per_s = fleet.call(self._gpu_side, "copy_bytes_per_s")[0]
        self.bus_bytes_per_s = fleet.call(self._gpu_side, "bus_bytes_per_s", is_read=self._gpu_side == "engine")[0]
        self._version, self._steps = 0, 0

    def weft(self, method: GpuMethod, missing: dict[str, str]) -> GpuRow | None:
        """Publish some versions and compare each; None, with the reason in `missing`, if the memory is too small."""
        needed = (0 if self._case.host_side else method.needed_bytes(self._engine_bytes)) + SPARE_BYTES
        free = self._fleet.call(self._gpu_side, "free_bytes")[0]
        if needed > free:
            why = f"needs {needed / 1e9:.0f} GB on top of the weights, {free / 1e9:.0f} GB are free"
            missing[f"{method.name}, {self._precision}"] = why
            return None
        self._say(f"{self._case.model}, {self._precision}: {method.name}")
        settings = TransferSettings(
            mode=method.mode,
            digest=method.digest,
            delta=method.delta,
            transport="cuda_ipc" if self._case.host_side is None else "auto",
            anchor_every=1000,
            version_s=120.0,
            silence_s=30.0,
        )
        with Controller(
            num_trainers=1,
            num_engine_ranks=self._case.num_parts,
            ranks_per_engine=self._case.num_parts,
            settings=settings,
        ) as controller:
            found = list(self._versions(controller, is_delta=method.delta is DeltaPolicy.ON))
            wire_bytes = controller.statistics().last_wire_bytes
            for side in ("trainer", "engine"):
                self._fleet.call(side, "shut")
        return self._row(method, found, wire_bytes)

    def _versions(self, controller: Controller, *, is_delta: bool) -> Iterator[_MeasuredVersion]:
        """The first one opens and compiles."""
        for side in ("engine", "trainer"):
            self._fleet.call(side, "open", address=controller.address)
        for number in range(1 + self._repeat):
            if number and is_delta:
                self._steps += 1
                self._fleet.call("trainer", "change_some", step=self._steps)
            else:
                self._version, self._steps = self._version + 1, 0
                self._fleet.call("trainer", "fill", version=self._version)
                self._fleet.call("engine", "spoil")
            receiving = self._fleet.ask("engine", "receive")
            publishing = self._fleet.ask("trainer", "publish", version=number, start=self._fleet.soon())
            pauses, ((seconds, write_s, stages),) = self._fleet.answers(receiving, publishing)
            is_right = all(self._fleet.call("engine", "verify", version=self._version, steps=self._steps))
            yield _MeasuredVersion(seconds, write_s, max(pauses), stages, is_right)

    def _row(self, method: GpuMethod, found: list[_MeasuredVersion], wire_bytes: int) -> GpuRow:
        others = found[1:]
        seconds = statistics.median(version.seconds for version in others)
        limit_s = method.moved_bytes(self._trainer_bytes, self._engine_bytes) / self.copy_bytes_per_s
        if self._case.host_side is not None:
            limit_s = wire_bytes / self.bus_bytes_per_s
        return GpuRow(
            method=method.name,
            precision=self._precision,
            trainer_bytes=self._trainer_bytes,
            engine_bytes=self._engine_bytes,
            seconds=seconds,
            each_s=tuple(version.seconds for version in others),
            limit_s=limit_s,
            fraction_of_limit=limit_s / seconds,
            write_s=statistics.median(version.write_s for version in others),
            pause_s=statistics.median(version.pause_s for version in others),
            wire_bytes=wire_bytes,
            stages_s=others[-1].stages_s,
            verified=all(version.is_right for version in found),
        )

    def without_weft(self) -> GpuRow:
        """A handle and a copy for every tensor, with torch alone."""
        self._say(f"{self._case.model}: a CUDA-IPC copy for every tensor")
        times, is_right = [], True
        for _ in range(1 + self._repeat):
            self._version, self._steps = self._version + 1, 0
            self._fleet.call("trainer", "fill", version=self._version)
            self._fleet.call("engine", "spoil")
            copying = self._fleet.ask("engine", "copy_all")
            times += self._fleet.call("trainer", "hand_over", start=self._fleet.soon())
            self._fleet.answers(copying)
            is_right &= all(self._fleet.call("engine", "verify", version=self._version, steps=0))
        seconds = statistics.median(times[1:])
        limit_s = (self._trainer_bytes + self._engine_bytes) / self.copy_bytes_per_s
        return GpuRow(
            method="torch, a CUDA-IPC copy for every tensor",
            precision=self._precision,
            trainer_bytes=self._trainer_bytes,
            engine_bytes=self._engine_bytes,
            seconds=seconds,
            each_s=tuple(times[1:]),
            limit_s=limit_s,
            fraction_of_limit=limit_s / seconds,
            verified=is_right,
        )


@dataclass(frozen=True, slots=True)
class _MeasuredVersion:
    seconds: float
    write_s: float
    pause_s: float
    stages_s: dict[str, float]
    is_right: bool


def _device_name(device: str) -> str:
    import torch  # noqa: PLC0415

    return str(torch.cuda.get_device_name(device))
