"""Versions from 1, 2, 4 … sending hosts to the hosts of one engine, beside plain sockets and collectives in one lab.

Trainers hold FSDP2 shards of a model, the engine's ranks its tensor-parallel parts; each is a host of its own, and so
is the controller. Times are medians; afterwards every element is compared. The limit are the NICs: of the senders, or
of the receivers where these are fewer.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from weft.bench import payload
from weft.bench.prediction import predict_hosts
from weft.bench.scaling.busy import BusyCores
from weft.bench.scaling.lab_fleet import LabFleet
from weft.bench.worker import Setup
from weft.config import DeltaPolicy, TransferSettings
from weft.core.models.model import Model
from weft.lab import Lab, alike
from weft.runtime.control.keys import Grant, new_keys
from weft.runtime.control.security import KeysInMemory, Security

Say = Callable[[str], None]
PORT = 29600
WARM_UP = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRow:
    """One method with so many senders."""

    method: str
    num_senders: int
    num_receivers: int
    nic_gb_per_s: float
    """The raw rate of one NIC."""
    num_nics: int
    seconds: float
    gb_per_s: float
    fraction_of_nics: float
    """Of the raw rate of all NICs that bound it: those of the senders, or of the receivers."""
    predicted_s: float | None = None
    """From the rate of plain sockets with as many senders."""
    verified: bool | None = None
    """None for plain sockets, which move no weights."""
    cpu_share: float = 0.0
    """How busy the machine's cores were: a network that waits for them is not measured."""
    sent_bytes: int = 0
    """Bytes on the NICs of the senders for one version, as the switches count them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingReport:
    """The results of one run."""

    model: str
    num_bytes: int
    """Bytes of one version."""
    nic: str
    rows: tuple[ScalingRow, ...]

    def to_json(self) -> dict[str, Any]:
        """As one object."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingCase:
    """What is measured."""

    model: str = payload.SMALL
    num_senders: tuple[int, ...] = (1, 2, 4, 8)
    num_receivers: int = 8
    nic: str = "100mbit"
    num_nics: int = 1


def measure(case: ScalingCase, *, repeat: int, baselines: bool, say: Say) -> ScalingReport:
    """Run every method with every number of senders."""
    model = payload.load_payload(case.model)
    total = payload.total_bytes(model, num_engine_ranks=case.num_receivers, num_parts=case.num_receivers)
    num_hosts = max(case.num_senders) + case.num_receivers + 1
    rows: list[ScalingRow] = []
    say(f"making a lab of {num_hosts} hosts")
    with Lab(alike(hosts=num_hosts, nic=case.nic, nics=case.num_nics)) as lab:
        for num_senders in case.num_senders:
            say(f"starting {num_senders} senders and {case.num_receivers} receivers")
            with _fleet(lab, case, num_senders) as fleet:
                run = _Run(case, model, lab, fleet, num_senders, total, repeat, say)
                rows += run.all(baselines=baselines)
    return ScalingReport(model=case.model, num_bytes=total, nic=case.nic, rows=tuple(rows))


def _fleet(lab: Lab, case: ScalingCase, num_senders: int) -> LabFleet:
    """Receivers on the first hosts, then the controller, then the senders."""
    names = [("engine", rank) for rank in range(case.num_receivers)]
    names += [("controller", 0)]
    names += [("trainer", rank) for rank in range(num_senders)]
    hosts = {name: host for host, name in enumerate(names)}
    setups = {
        name: Setup(
            side=name[0],
            rank=name[1],
            num_trainers=num_senders,
            num_engine_ranks=case.num_receivers,
            num_parts=case.num_receivers,
            model=case.model,
            port=PORT + num_senders,
            master=lab.address(hosts["trainer", 0]),
        )
        for name in names
    }
    return LabFleet(lab, setups, hosts)


@dataclass(slots=True)
class _Run:
    """One number of senders."""

    case: ScalingCase
    model: Model
    lab: Lab
    fleet: LabFleet
    num_senders: int
    total: int
    repeat: int
    say: Say
    version: int = 0
    small_steps: int = 0
    socket_rate: float = 0.0
    rows: list[ScalingRow] = field(default_factory=list)

    def all(self, *, baselines: bool) -> list[ScalingRow]:
        self._measure("plain sockets", self._sockets, verified=None)
        self.socket_rate = self.rows[-1].gb_per_s * 1e9 / self._num_bound
        with _Opened(self, TransferSettings(transport="nixl", version_s=300.0)):
            self._measure("weft", self._version)
        with _Opened(self, TransferSettings(transport="nixl", version_s=300.0, delta=DeltaPolicy.ON)):
            self._version()  # the first one is sent whole
            self._measure("weft, 1% changed", self._small_version, is_dense=False)
        if baselines:
            self._measure("broadcast from rank 0 (Gloo)", lambda: self._broadcast(gather=False))
            self._measure("gather to rank 0, broadcast (Gloo)", lambda: self._broadcast(gather=True))
        return self.rows

    @property
    def _num_bound(self) -> int:
        """Hosts whose NICs bound a version."""
        return min(self.num_senders, self.case.num_receivers)

    def _measure(
        self, method: str, once: Callable[[], float], *, verified: bool | None = True, is_dense: bool = True
    ) -> None:
        self.say(f"{self.num_senders} senders: {method}")
        for _ in range(WARM_UP):
            once()
        before, busy = self._sent_bytes(), BusyCores()
        times = [once() for _ in range(self.repeat)]
        cpu_share, sent = busy.share(), (self._sent_bytes() - before) // self.repeat
        if verified:
            verified = all(self.fleet.call("engine", "verify", version=self.version, steps=self.small_steps))
        seconds = statistics.median(times)
        nic = self.lab.spec.hosts[0].rates[0] / 8
        is_weft = method.startswith("weft") and is_dense
        self.rows.append(
            ScalingRow(
                method=method,
                num_senders=self.num_senders,
                num_receivers=self.case.num_receivers,
                nic_gb_per_s=nic / 1e9,
                num_nics=self.case.num_nics,
                seconds=seconds,
                gb_per_s=self.total / seconds / 1e9,
                fraction_of_nics=self.total / seconds / (self._num_bound * nic * self.case.num_nics),
                predicted_s=self._predicted() if is_weft else None,
                verified=verified,
                cpu_share=cpu_share,
                sent_bytes=sent,
            )
        )

    def _predicted(self) -> float:
        return predict_hosts(
            self.model,
            num_trainers=self.num_senders,
            num_engine_ranks=self.case.num_receivers,
            num_nics=self.case.num_nics,
            nic_bytes_per_s=self.socket_rate / self.case.num_nics,
        )

    def _sent_bytes(self) -> int:
        """Bytes that have left the senders' hosts."""
        first = self.case.num_receivers + 1
        hosts = range(first, first + self.num_senders)
        return sum(each.sent_bytes for each in self.lab.traffic() if each.host in hosts)

    def _sockets(self) -> float:
        each = self.total // (self.num_senders * self.case.num_receivers)
        sinks = self.fleet.call("engine", "listen", num_senders=self.num_senders, num_bytes=each)
        streaming = self.fleet.ask("trainer", "stream", sinks=sinks, num_bytes=each, start=self.fleet.soon())
        (spans,) = self.fleet.answers(streaming)
        self.fleet.call("engine", "collect")
        return _elapsed(spans)

    def _version(self) -> float:
        self._advance()
        return self._published()

    def _small_version(self) -> float:
        self.small_steps += 1
        self.fleet.call("trainer", "advance_some", step=self.small_steps)
        return self._published()

    def _advance(self) -> None:
        self.version += 1
        self.fleet.call("trainer", "advance")
        self.fleet.call("engine", "spoil")

    def _published(self) -> float:
        receiving = self.fleet.ask("engine", "receive")
        number = self.version + self.small_steps
        publishing = self.fleet.ask("trainer", "publish", version=number, start=self.fleet.soon())
        _, spans = self.fleet.answers(receiving, publishing)
        return _elapsed(spans)

    def _broadcast(self, *, gather: bool) -> float:
        self._advance()
        receiving = self.fleet.ask("engine", "broadcast")
        sending = self.fleet.ask("trainer", "broadcast", start=self.fleet.soon(), gather=gather)
        return _elapsed(self.fleet.answers(sending, receiving)[0])


class _Opened:
    """Members joined to a controller, inside this context."""

    def __init__(self, run: _Run, settings: TransferSettings) -> None:
        self._run, self._settings = run, settings

    def __enter__(self) -> None:
        own, theirs = new_keys(), {side: new_keys() for side in ("trainer", "engine")}
        grants = tuple(Grant(public=keys.public, side=side) for side, keys in theirs.items())
        fleet = self._run.fleet
        (address,) = fleet.call(
            "controller",
            "open",
            settings=msgspec.to_builtins(self._settings),
            security=Security(keys=KeysInMemory(own=own, grants=grants)),
        )
        for side, keys in theirs.items():
            security = Security(keys=KeysInMemory(own=keys, server_public=own.public))
            fleet.call(side, "open", address=address, security=security)

    def __exit__(self, *_: Any) -> None:
        for side in ("trainer", "engine", "controller"):
            self._run.fleet.call(side, "shut")


def _elapsed(spans: Sequence[Any]) -> float:
    """From the first begin to the last end."""
    return float(max(span[1] for span in spans) - min(span[0] for span in spans))
