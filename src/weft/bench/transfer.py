"""`weft bench transfer`: every method over the same tensors and processes, compared with the machine's limits.

For each case (tensor-parallel engine, replicas) trainers hold FSDP2 shards of a real model, engine ranks their parts. A
method's time runs from the first `publish` until the last engine has committed (for baselines: loaded). Afterwards
every element is compared. Times are medians; the plain copy is measured between the methods, so that a machine that
slows down lowers its limit too.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from weft.bench import baselines, payload
from weft.bench.fleet import Fleet
from weft.bench.prediction import Rates, predict
from weft.bench.worker import start_fleet
from weft.config import DeltaPolicy, DigestPolicy, ReceiverMode, TransferSettings
from weft.core.models.model import Model
from weft.errors import ConfigError
from weft.runtime.controller.controller import Controller
from weft.transport.registry import is_installed

Say = Callable[[str], None]
WARM_UP = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferCase:
    """The members of a case."""

    name: str
    num_trainers: int
    num_engine_ranks: int
    num_parts: int
    """Tensor-parallel size of an engine; 1: every engine rank is a replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferRow:
    """One method in one case."""

    case: str
    method: str
    transport: str
    bytes: int
    seconds: float
    gb_per_s: float = 0.0
    fraction_of_limit: float = 0.0
    """Of the plain memory copy in the same run."""
    predicted_s: float | None = None
    verified: bool | None = None
    """None for limits, which move no weights."""
    mode: str = ""
    digest: str = ""
    pause_ms: float | None = None
    """How long an engine is paused."""
    engine_limit_gb_per_s: float | None = None
    """Rate of the bare engine: kernel writes, bare NIXL; in shared memory with the digest, a copy and one digest."""
    fraction_of_engine_limit: float | None = None
    write_ms: float | None = None
    """The writes alone, without the time to decide the version."""
    wire_bytes: int | None = None
    """Bytes on the wire, where they are fewer than `bytes`."""
    stages_ms: dict[str, float] | None = None
    """With patches: how long each stage of the slowest trainer was busy in the last version. Stages overlap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The results of one run."""

    model: str
    limit_gb_per_s: float
    """The plain copy of the first case."""
    control_ms: float
    """A version of a few bytes, 2 trainers and 2 engines: what a version costs beyond its bytes."""
    rows: tuple[TransferRow, ...]

    def to_json(self) -> dict[str, Any]:
        """As one object."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Variant:
    """One set of weft's settings."""

    transport: str
    mode: ReceiverMode
    digest: DigestPolicy
    num_threads: int = 1
    delta: DeltaPolicy = DeltaPolicy.OFF

    @property
    def name(self) -> str:
        changed = f", delta of {1 / payload.PERIOD:.0%}" if self.delta is DeltaPolicy.ON else ""
        return f"weft {self.mode}{changed}" + ("" if self.digest is DigestPolicy.ON else ", digest off")


@dataclass(slots=True)
class _CaseRun:
    """One case in progress."""

    case: TransferCase
    model: Model
    repeat: int
    say: Say
    fleet: Fleet
    total: int
    modes: tuple[str, ...] = tuple(ReceiverMode)
    version: int = 0
    small_steps: int = 0
    copies: list[float] = field(default_factory=list)
    rates: Rates = field(default_factory=Rates)
    rows: list[TransferRow] = field(default_factory=list)


def cases(names: tuple[str, ...], *, num_trainers: int, num_engine_ranks: int) -> list[TransferCase]:
    """The cases by name."""
    known = {
        "tp": TransferCase(
            name=f"FSDP{num_trainers} → TP{num_engine_ranks}",
            num_trainers=num_trainers,
            num_engine_ranks=num_engine_ranks,
            num_parts=num_engine_ranks,
        ),
        "replicas": TransferCase(
            name=f"FSDP{num_trainers} → {num_engine_ranks} replicas",
            num_trainers=num_trainers,
            num_engine_ranks=num_engine_ranks,
            num_parts=1,
        ),
    }
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"unknown case `{unknown[0]}`", hint=f"use {' or '.join(known)}")
    return [known[name] for name in names]


def measure(
    model_name: str,
    wanted: list[TransferCase],
    *,
    repeat: int,
    baseline: bool,
    say: Say,
    modes: tuple[str, ...] = tuple(ReceiverMode),
) -> Report:
    """Run every method in every case."""
    model = payload.load_payload(model_name)
    rows: list[TransferRow] = []
    limits = []
    for case in wanted:
        say(f"{case.name}: starting {case.num_trainers} trainers and {case.num_engine_ranks} engine ranks")
        with start_fleet(
            num_trainers=case.num_trainers,
            num_engine_ranks=case.num_engine_ranks,
            num_parts=case.num_parts,
            model=model_name,
        ) as fleet:
            total = payload.total_bytes(model, num_engine_ranks=case.num_engine_ranks, num_parts=case.num_parts)
            run = _CaseRun(case, model, repeat, say, fleet, total, modes)
            _run_case(run, baseline=baseline)
            rows += _finished(run)
            limits.append(rows[-len(run.rows)].gb_per_s)
    say("control overhead")
    return Report(
        model=model_name,
        limit_gb_per_s=limits[0],
        control_ms=control_overhead_ms(),
        rows=tuple(rows),
    )


def _run_case(run: _CaseRun, *, baseline: bool) -> None:
    run.say(f"{run.case.name}: the plain copy")
    _copy_limit(run)
    _check_limit(run)
    run.rates = replace(run.rates, digest=min(run.fleet.call("trainer", "digest_rate", num_bytes=1 << 28)))
    for method in _methods():
        if method.mode not in run.modes:
            continue
        run.say(f"{run.case.name}: {method.name} over {method.transport}")
        _weft(run, method)
        _copy_limit(run)
    if baseline:
        _baselines(run)


def _methods() -> Iterator[_Variant]:
    on, off = DigestPolicy.ON, DigestPolicy.OFF
    for mode, digest in ((ReceiverMode.IN_PLACE, off), (ReceiverMode.IN_PLACE, on), (ReceiverMode.SHADOW, on)):
        yield _Variant("shm", mode, digest)
    for mode in (ReceiverMode.IN_PLACE, ReceiverMode.SHADOW, ReceiverMode.PATCH):
        yield _Variant("shm", mode, on, delta=DeltaPolicy.ON)
    yield _Variant("cma", ReceiverMode.IN_PLACE, off)
    yield _Variant("cma", ReceiverMode.IN_PLACE, on)
    if is_installed("nixl"):
        yield _Variant("nixl", ReceiverMode.IN_PLACE, off)
        yield _Variant("nixl", ReceiverMode.IN_PLACE, on)
        yield _Variant("nixl", ReceiverMode.PATCH, on, delta=DeltaPolicy.ON)


def _elapsed(spans: list[Any]) -> float:
    """From the first begin to the last end."""
    return max(span[1] for span in spans) - min(span[0] for span in spans)


def _copy_limit(run: _CaseRun) -> None:
    """The same number of bytes, copied by the same number of processes at once."""
    each = run.total // run.case.num_trainers
    for _ in range(WARM_UP + 2):
        spans = run.fleet.call("trainer", "copy_limit", num_bytes=each, start=run.fleet.soon())
        run.copies.append(_elapsed(spans))
    del run.copies[-3]  # the warm-up


def _check_limit(run: _CaseRun) -> None:
    """The same copy with one digest of the result: what a verified version costs at least."""
    each = run.total // run.case.num_trainers
    spans = [
        run.fleet.call("trainer", "check_limit", num_bytes=each, start=run.fleet.soon())
        for _ in range(WARM_UP + run.repeat)
    ]
    seconds = statistics.median(_elapsed(span) for span in spans[WARM_UP:])
    run.rates = replace(run.rates, checked=run.total / seconds)
    limit = "limit: copy, then one digest"
    run.rows.append(TransferRow(case=run.case.name, method=limit, transport="memory", bytes=run.total, seconds=seconds))


def _kernel_limit(run: _CaseRun) -> float:
    """Bytes per second of process_vm_writev, each trainer into a different engine rank."""
    each = run.total // run.case.num_trainers
    where = run.fleet.call("engine", "buffer", num_bytes=each)
    times = []
    for _ in range(WARM_UP + run.repeat):
        start = run.fleet.soon()
        arguments = [
            {"num_bytes": each, "pid": pid, "address": address, "start": start}
            for pid, address in (where[i % len(where)] for i in range(run.case.num_trainers))
        ]
        times.append(_elapsed(run.fleet.call_each("trainer", "kernel_limit", arguments)))
    return run.total / statistics.median(times[WARM_UP:])


def _weft(run: _CaseRun, method: _Variant) -> None:
    """Publish a few versions, and verify the last one."""
    settings = TransferSettings(
        mode=method.mode,
        digest=method.digest,
        transport=method.transport,
        num_threads=method.num_threads,
        delta=method.delta,
        anchor_every=1000,
        nixl_devices="lo",
    )
    if method.transport == "cma" and not run.rates.kernel:
        run.rates = replace(run.rates, kernel=_kernel_limit(run))
    with Controller(
        num_trainers=run.case.num_trainers,
        num_engine_ranks=run.case.num_engine_ranks,
        ranks_per_engine=run.case.num_parts,
        settings=settings,
    ) as controller:
        for side in ("engine", "trainer"):
            run.fleet.call(side, "open", address=controller.address)
        is_delta = method.delta is DeltaPolicy.ON
        found = [_one_version(run) for _ in range(WARM_UP)]  # with patches: an anchor
        found = [_one_version(run, small=is_delta) for _ in range(run.repeat)]
        times, pauses, writes = (statistics.median(column) for column in zip(*found, strict=True))
        verified = all(run.fleet.call("engine", "verify", version=run.version, steps=run.small_steps))
        wire_bytes = controller.statistics().last_wire_bytes if is_delta else None
        stages = _stages_ms(run) if is_delta else None
        if method.transport == "nixl" and not is_delta:
            bare = [_elapsed(run.fleet.call("trainer", "bare_nixl", start=run.fleet.soon())) for _ in range(run.repeat)]
            run.rates = replace(run.rates, nixl=run.total / statistics.median(bare))
        for side in ("trainer", "engine"):
            run.fleet.call(side, "shut")
    checked = run.rates.checked if method.digest is DigestPolicy.ON else 0.0
    engine_limit = {"shm": checked, "cma": run.rates.kernel, "nixl": run.rates.nixl}.get(method.transport)
    engine_limit = None if is_delta else engine_limit
    run.rows.append(
        TransferRow(
            case=run.case.name,
            method=method.name,
            transport=method.transport,
            bytes=run.total,
            seconds=times,
            verified=verified,
            mode=method.mode,
            digest=method.digest,
            pause_ms=pauses * 1e3,
            write_ms=writes * 1e3,
            wire_bytes=wire_bytes,
            stages_ms=stages,
            engine_limit_gb_per_s=engine_limit / 1e9 if engine_limit else None,
            fraction_of_engine_limit=run.total / times / engine_limit if engine_limit else None,
        )
    )


def _stages_ms(run: _CaseRun) -> dict[str, float]:
    """Busy milliseconds of each stage, of the trainer where it is longest."""
    found = [sending["stages"] for sending in run.fleet.call("trainer", "last_sending")]
    return {name: 1e3 * max(stages[name] for stages in found) for name in found[0]}


def _one_version(run: _CaseRun, *, small: bool = False) -> tuple[float, float, float]:
    """Seconds from publish to committed, the longest pause of an engine rank, the longest write of a trainer."""
    if small:
        run.small_steps += 1
        run.fleet.call("trainer", "advance_some", step=run.small_steps)
    else:
        run.version += 1
        run.fleet.call("trainer", "advance")
        run.fleet.call("engine", "spoil")
    receiving = run.fleet.ask("engine", "receive")
    number = run.version + run.small_steps
    publishing = run.fleet.ask("trainer", "publish", version=number, start=run.fleet.soon())
    pauses, spans = run.fleet.answers(receiving, publishing)
    return _elapsed(spans), max(pauses), max(write_s for _, _, write_s in spans)


def _baselines(run: _CaseRun) -> None:
    for name, gather in (("broadcast from rank 0", False), ("gather to rank 0, broadcast", True)):
        run.say(f"{run.case.name}: {name} (Gloo)")

        def broadcast(gather: bool = gather) -> float:
            receiving = run.fleet.ask("engine", "broadcast")
            sending = run.fleet.ask("trainer", "broadcast", start=run.fleet.soon(), gather=gather)
            return _elapsed(run.fleet.answers(sending, receiving)[0])

        _baseline(run, name, "gloo", broadcast)
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="weft-bench-", suffix=".safetensors") as file:
        path = str(Path(file.name))
        run.say(f"{run.case.name}: a safetensors file in shared memory")

        def through_file() -> float:
            loading = run.fleet.ask("engine", "load_file", path=path)
            saving = run.fleet.ask("trainer", "save_file", path=path, start=run.fleet.soon())
            return _elapsed(run.fleet.answers(saving, loading)[0])

        _baseline(run, "safetensors file and reload", "file", through_file)
        baselines.remove_file(path)
        Path(path).touch()  # the context removes it


def _baseline(run: _CaseRun, name: str, transport: str, once: Callable[[], float]) -> None:
    times = []
    for _ in range(WARM_UP + max(run.repeat // 2, 1)):
        run.version += 1
        run.fleet.call("trainer", "advance")
        run.fleet.call("engine", "spoil")
        times.append(once())
    verified = all(run.fleet.call("engine", "verify", version=run.version, steps=run.small_steps))
    seconds = statistics.median(times[WARM_UP:])
    run.rows.append(
        TransferRow(
            case=run.case.name,
            method=name,
            transport=transport,
            bytes=run.total,
            seconds=seconds,
            verified=verified,
            pause_ms=seconds * 1e3,
        )
    )


def _finished(run: _CaseRun) -> list[TransferRow]:
    """All rows of a case with what depends on its limit, the limit first."""
    copy_s = statistics.median(run.copies)
    limit = run.total / copy_s
    rates = replace(run.rates, copy=limit)
    first = TransferRow(
        case=run.case.name, method="limit: plain copy", transport="memory", bytes=run.total, seconds=copy_s
    )
    run.rows.insert(0, first)
    return [
        replace(
            row,
            gb_per_s=row.bytes / row.seconds / 1e9,
            fraction_of_limit=row.bytes / row.seconds / limit,
            predicted_s=None
            if row.wire_bytes is not None
            else predict(
                run.model,
                run.case.num_trainers,
                run.case.num_engine_ranks,
                run.case.num_parts,
                rates,
                row.transport,
                row.mode,
                row.digest,
            ),
        )
        for row in run.rows
    ]


def control_overhead_ms(num_versions: int = 50) -> float:
    """Milliseconds per version of a few bytes between 2 trainers and 2 engines, in processes of their own."""
    with (
        start_fleet(num_trainers=2, num_engine_ranks=2, num_parts=1, model=payload.SMALLEST) as fleet,
        Controller(num_trainers=2, num_engine_ranks=2) as controller,
    ):
        for side in ("engine", "trainer"):
            fleet.call(side, "open", address=controller.address)
        times = []
        for version in range(1, num_versions + 1):
            receiving = fleet.ask("engine", "receive")
            publishing = fleet.ask("trainer", "publish", version=version, start=fleet.soon())
            times.append(_elapsed(fleet.answers(receiving, publishing)[1]))
        for side in ("trainer", "engine"):
            fleet.call(side, "shut")
        return statistics.median(times[WARM_UP:]) * 1e3
