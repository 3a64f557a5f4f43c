"""Versions of one fleet on the hosts of a lab: timed, counted on the NICs, compared."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec

from weft.bench import payload
from weft.bench.prediction import HostsCase, plan_hosts, predict_plan
from weft.bench.scaling.busy import BusyCores
from weft.bench.scaling.lab_fleet import LabFleet
from weft.bench.scaling.rows import FleetShape, ScalingCase, ScalingRow
from weft.bench.worker import Setup
from weft.config import DeltaPolicy, TransferSettings
from weft.core.models.model import Model
from weft.core.plans.bound import balance
from weft.core.plans.plan import Plan
from weft.lab import Lab
from weft.runtime.control.keys import Grant, new_keys
from weft.runtime.control.security import KeysInMemory, Security

Say = Callable[[str], None]
PORT = 29600
VERSION_S = 300.0
REPLAN_VERSIONS = 4
"""After so many versions a controller has seen, and planned around, a slow host."""
CHANGED = 0.01
"""Fraction of elements that differ between versions sent as patches."""
HEADER_BYTES = 66
"""Of a packet of TCP with timestamps, as switches count it. Over slow NICs, packets are small."""
PATCH_SHARE = 0.01
"""What NICs carry while patches are measured: at their full rate the cores, not the NICs, would take longest."""


def start_fleet(lab: Lab, case: ScalingCase, fleet: FleetShape) -> LabFleet:
    """Receivers on the first hosts, then the controller, then the senders."""
    names = [("engine", rank) for rank in range(fleet.num_receivers)]
    names += [("controller", 0)]
    names += [("trainer", rank) for rank in range(fleet.num_senders)]
    hosts = {name: host for host, name in enumerate(names)}
    setups = {
        name: Setup(
            side=name[0],
            rank=name[1],
            num_trainers=fleet.num_senders,
            num_engine_ranks=fleet.num_receivers,
            num_parts=fleet.num_parts,
            model=payload.SMALL_MOE if fleet.shares_experts else case.model,
            shares_experts=fleet.shares_experts,
            port=PORT + fleet.num_senders,
            master=lab.address(hosts["trainer", 0]),
            precision=fleet.precision,
            layout=fleet.layout,
        )
        for name in names
    }
    return LabFleet(lab, setups, hosts)


class Run:
    """One fleet, while its processes run."""

    def __init__(
        self, case: ScalingCase, fleet: FleetShape, model: Model, lab: Lab, processes: LabFleet, repeat: int, say: Say
    ) -> None:
        self._case, self._fleet, self._model, self._lab = case, fleet, model, lab
        self._processes, self._repeat, self._say = processes, repeat, say
        self._version, self._small_steps = 0, 0
        self._nic_bytes_per_s = lab.spec.hosts[0].rates[0] / 8
        self.rows: list[ScalingRow] = []
        if self._is_fp8:
            processes.call("trainer", "fill_normal")

    @property
    def _is_fp8(self) -> bool:
        return self._fleet.precision == "fp8"

    def sockets(self) -> float:
        """Plain sockets between the same hosts, over all of their NICs; returns the bytes per second of one NIC."""
        total = self._plan_at(self._nic_bytes_per_s).total_bytes
        with self._plain_sockets():
            self._measure("plain sockets", lambda: self._stream(total), num_bytes=total, is_verified=False)
        return total / self.rows[-1].seconds / self._fleet.num_bound / self._case.num_nics

    def dense(self, socket_rate: float, *, method: str = "weft", rebalance: bool = False) -> None:
        """Whole versions. `socket_rate`: what plain sockets reached over one of their NICs."""
        plan = self._plan_at(socket_rate)
        with OpenFleet(self._processes, TransferSettings(transport="nixl", version_s=VERSION_S), rebalance=rebalance):
            if rebalance:
                for _ in range(REPLAN_VERSIONS):
                    self._whole_version()
            predicted, bound = predict_plan(plan), balance(plan).bound_s
            self._measure(method, self._whole_version, num_bytes=plan.total_bytes, predicted_s=predicted, bound_s=bound)

    def patches(self, socket_rate: float) -> None:
        """Versions in which one percent is new, over slower NICs. `socket_rate`: over one NIC at its full rate."""
        settings = TransferSettings(transport="nixl", version_s=VERSION_S, delta=DeltaPolicy.ON)
        with OpenFleet(self._processes, settings):
            self._whole_version()  # the first one is sent whole
            self._small_version()
            with self._slowed():
                plan = self._plan_at(socket_rate * PATCH_SHARE)
                predicted = predict_plan(plan, density=CHANGED)
                method = f"weft{self._kind}, {CHANGED:.0%} changed, NICs at {PATCH_SHARE:.0%}"
                self._measure(method, self._small_version, num_bytes=plan.total_bytes, predicted_s=predicted)

    @contextmanager
    def _slowed(self) -> Iterator[None]:
        """All NICs carry a fraction of their rate, inside this context."""
        hosts, rate = range(len(self._lab.spec.hosts)), self._nic_bytes_per_s
        self._nic_bytes_per_s = rate * PATCH_SHARE
        for host in hosts:
            self._lab.slow(host, f"{self._nic_bytes_per_s * 8 / 1e3:.0f}kbit")
        try:
            yield
        finally:
            self._nic_bytes_per_s = rate
            for host in hosts:
                self._lab.heal(host)

    def _wire_bytes(self) -> int:
        """Bytes of weights the last version put on the NICs, as weft counts them."""
        return int(self._processes.call("controller", "wire_bytes")[0])

    @property
    def _kind(self) -> str:
        return ", FP8 engines" if self._is_fp8 else ""

    def collectives(self, socket_rate: float) -> None:
        """All from rank 0 over the same NICs, of which Gloo uses one; once each: they take many times as long.

        The simulator knows rank 0 that sends whole weights to replicas, but no broadcast of Gloo, which is a tree.
        """
        total = self._plan_at(self._nic_bytes_per_s).total_bytes
        method, predicted = "rank 0 sends to each in turn (Gloo)", self._predict_each_in_turn(socket_rate)
        self._measure(method, self._each_in_turn, num_bytes=total, predicted_s=predicted, is_once=True)
        for method, gather in (
            ("broadcast from rank 0 (Gloo)", False),
            ("gather to rank 0, broadcast (Gloo)", True),
        ):
            once: Callable[[], float] = partial(self._broadcast, gather=gather)
            self._measure(method, once, num_bytes=total, is_once=True)

    def _predict_each_in_turn(self, nic_bytes_per_s: float) -> float:
        rank_0 = HostsCase(
            trainer="ddp1",
            num_trainers=1,
            engine="tp1",
            num_replicas=self._fleet.num_receivers,
            dtype="bf16",
            num_nics=1,
            nic_bytes_per_s=nic_bytes_per_s,
        )
        return predict_plan(plan_hosts(self._model, rank_0))

    def _plan_at(self, nic_bytes_per_s: float) -> Plan:
        fleet = self._fleet
        slow = (1.0,) * (fleet.num_senders - 1) + (fleet.slow_share,) if fleet.slow_share is not None else ()
        case = HostsCase(
            trainer=f"{fleet.layout}{fleet.num_senders}",
            num_trainers=fleet.num_senders,
            engine=f"{'ep' if fleet.shares_experts else 'tp'}{fleet.num_parts}",
            num_replicas=fleet.num_receivers // fleet.num_parts,
            dtype="fp8-block128" if self._is_fp8 else "bf16",
            num_nics=self._case.num_nics,
            nic_bytes_per_s=nic_bytes_per_s,
            host_speed=slow,
        )
        return plan_hosts(self._model, case)

    def _measure(
        self,
        method: str,
        once: Callable[[], float],
        *,
        num_bytes: int,
        predicted_s: float | None = None,
        bound_s: float | None = None,
        is_verified: bool = True,
        is_once: bool = False,
    ) -> None:
        self._say(f"{self._fleet.num_senders} to {self._fleet.num_receivers} hosts: {method}")
        if not is_once:
            once()
        before, busy = self._sent_bytes(), BusyCores()
        times = [once() for _ in range(1 if is_once else self._repeat)]
        cpu_share, sent = busy.share(), (self._sent_bytes() - before) // len(times)
        seconds = statistics.median(times)
        raw = self._fleet.num_bound * self._nic_bytes_per_s * self._case.num_nics
        planned = self._wire_bytes() if method.startswith("weft") else num_bytes
        self.rows.append(
            ScalingRow(
                method=method,
                num_senders=self._fleet.num_senders,
                num_receivers=self._fleet.num_receivers,
                nic_gb_per_s=self._nic_bytes_per_s / 1e9,
                num_nics=self._case.num_nics,
                seconds=seconds,
                gb_per_s=num_bytes / seconds / 1e9,
                fraction_of_nics=planned / seconds / raw,
                predicted_s=predicted_s,
                bound_s=bound_s,
                verified=self._is_right() if is_verified else None,
                cpu_share=cpu_share,
                sent_bytes=sent,
                planned_bytes=planned,
            )
        )

    def _is_right(self) -> bool:
        check = "verify_fp8" if self._is_fp8 else "verify"
        return all(self._processes.call("engine", check, version=self._version, steps=self._small_steps))

    def _sent_bytes(self) -> int:
        """Bytes that have left the senders' hosts, without the headers of packets."""
        first = self._fleet.num_receivers + 1
        hosts = range(first, first + self._fleet.num_senders)
        sent = [each for each in self._lab.traffic() if each.host in hosts]
        return sum(each.sent_bytes - each.sent_packets * HEADER_BYTES for each in sent)

    @contextmanager
    def _plain_sockets(self) -> Iterator[None]:
        """Open between all senders and all receivers, inside this context."""
        nics, receivers = range(self._case.num_nics), range(self._fleet.num_receivers)
        own = [{"addresses": [self._lab.address(host, nic) for nic in nics]} for host in receivers]
        sinks = self._processes.call_each("engine", "listen", own)
        self._processes.call("trainer", "connect", sinks=list(itertools.chain.from_iterable(sinks)))
        try:
            yield
        finally:
            self._processes.call("trainer", "disconnect")
            self._processes.call("engine", "stop_listening")

    def _stream(self, total: int) -> float:
        each = total // (self._fleet.num_senders * self._fleet.num_receivers * self._case.num_nics)
        return _elapsed(self._processes.call("trainer", "stream", num_bytes=each, start=self._processes.soon()))

    def _whole_version(self) -> float:
        self._advance()
        return self._published()

    def _small_version(self) -> float:
        self._small_steps += 1
        method = "advance_some_normal" if self._is_fp8 else "advance_some"
        self._processes.call("trainer", method, step=self._small_steps)
        return self._published()

    def _advance(self) -> None:
        """The next version; small steps are part of the versions before it."""
        self._version += 1
        if self._is_fp8:
            self._processes.call("trainer", "advance_normal", version=self._version)
        else:
            self._processes.call("trainer", "advance")
        self._processes.call("engine", "spoil")

    def _published(self) -> float:
        receiving = self._processes.ask("engine", "receive")
        number = self._version + self._small_steps
        publishing = self._processes.ask("trainer", "publish", version=number, start=self._processes.soon())
        _, spans = self._processes.answers(receiving, publishing)
        return _elapsed(spans)

    def _each_in_turn(self) -> float:
        self._advance()
        receiving = self._processes.ask("engine", "receive_whole")
        sending = self._processes.ask("trainer", "send_to_each", start=self._processes.soon())
        return _elapsed(self._processes.answers(sending, receiving)[0])

    def _broadcast(self, *, gather: bool) -> float:
        self._advance()
        receiving = self._processes.ask("engine", "broadcast")
        sending = self._processes.ask("trainer", "broadcast", start=self._processes.soon(), gather=gather)
        return _elapsed(self._processes.answers(sending, receiving)[0])


class OpenFleet:
    """Members joined to a controller, inside this context."""

    def __init__(self, processes: LabFleet, settings: TransferSettings, *, rebalance: bool = False) -> None:
        self._processes, self._settings, self._rebalance = processes, settings, rebalance

    def __enter__(self) -> None:
        own, theirs = new_keys(), {side: new_keys() for side in ("trainer", "engine")}
        grants = tuple(Grant(public=keys.public, side=side) for side, keys in theirs.items())
        (address,) = self._processes.call(
            "controller",
            "open",
            settings=msgspec.to_builtins(self._settings),
            security=Security(keys=KeysInMemory(own=own, grants=grants)),
            rebalance=self._rebalance,
        )
        for side, keys in theirs.items():
            security = Security(keys=KeysInMemory(own=keys, server_public=own.public))
            self._processes.call(side, "open", address=address, security=security)

    def __exit__(self, *_: Any) -> None:
        for side in ("trainer", "engine", "controller"):
            self._processes.call(side, "shut")


def _elapsed(spans: Sequence[Any]) -> float:
    """From the first begin to the last end."""
    return float(max(span[1] for span in spans) - min(span[0] for span in spans))
