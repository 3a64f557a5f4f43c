"""The controller: knows the members, makes the plan, and decides every version once, for all.

    consumes      Join, Want, Written, Ready, Failed, Committed, Beat, Leave      from members
    produces      Refused, SendPlan, ReceivePlan, Go, Verify, Decide              to members
    waits for     messages, a tenth of a second at most                          unblocked by   the network, `close`

One thread owns the socket and all state; nothing is shared. A version is open from the first Go until every engine
has committed it, or until it was aborted and every trainer that was writing has stopped: only then may the next one be
written.

    with Controller(num_trainers=2, num_engine_ranks=2) as controller:
        Sender(controller.address, rank=0, …)
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Self

from weft.core import plan_file
from weft.core.plan import Plan
from weft.core.topology import Cluster, load_topology
from weft.core.version import CommitPolicy, Decision, VersionLedger
from weft.errors import VersionError, WeftError
from weft.runtime.channel import Server
from weft.runtime.messages import (
    PROTOCOL,
    Beat,
    Committed,
    Decide,
    Failed,
    Go,
    Join,
    Leave,
    Part,
    Ready,
    Refused,
    ToController,
    Verify,
    Want,
    Written,
)
from weft.runtime.parts import plan_members, receive_plan, send_plan

log = logging.getLogger(__name__)
POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How long the controller waits."""

    silence_s: float = 5.0
    """A member that was not heard of for this long is lost."""
    version_s: float = 60.0
    """A version that is not decided in this time is aborted."""


@dataclass(slots=True)
class _Member:
    join: Join
    last_heard: float


@dataclass(slots=True)
class _Transfer:
    """The version that is being written, or waits to be committed everywhere."""

    version: int
    deadline: float
    writers: set[int] = field(default_factory=set)
    """Trainers that were told to go and have not reported back."""
    finished: set[int] = field(default_factory=set)
    """Trainers that have written all they owe."""
    parts: list[Part] = field(default_factory=list)
    uncommitted: set[int] | None = None
    """Engine ranks that still have to commit; None before the decision."""

    @property
    def retired(self) -> bool:
        return self.uncommitted is not None and not self.uncommitted and not self.writers


class Controller:
    """Runs in a thread of the process that makes it; `address` is what members need to know."""

    def __init__(
        self,
        address: str = "tcp://127.0.0.1:*",
        *,
        num_trainers: int,
        num_engine_ranks: int,
        ranks_per_engine: int = 1,
        cluster: Cluster | None = None,
        timing: Timing | None = None,
        **security: Any,
    ) -> None:
        self._server = Server(address, messages=ToController, **security)
        self.address = self._server.address
        self._num = {"trainer": num_trainers, "engine": num_engine_ranks}
        self._ranks_per_engine = ranks_per_engine
        self._cluster = cluster or load_topology("h100-ib400")
        self._timing = timing or Timing()
        self._members: dict[str, _Member] = {}
        self._lost: dict[str, str] = {}
        """Members that are gone, and how; until they join again."""
        engines = dict.fromkeys(range(num_engine_ranks // ranks_per_engine), ranks_per_engine)
        self._ledger = VersionLedger(num_trainers=num_trainers, engines=engines, policy=CommitPolicy.ALL)
        self._plan: Plan | None = None
        self._transfer: _Transfer | None = None
        self._wants: dict[int, int] = {}
        self._committed: int | None = None
        self._planned = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weft-controller", daemon=True)
        self._thread.start()

    @property
    def committed(self) -> int | None:
        """The last version that was committed, for observers in this process."""
        return self._committed

    def wait_planned(self, timeout_s: float = 60.0) -> bool:
        """Wait until all members are there and have their part of the plan; False when they are not in time."""
        return self._planned.wait(timeout_s)

    def close(self) -> None:
        """Stop; members notice by its silence."""
        self._stop.set()
        self._thread.join(10.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                received = self._server.receive(POLL_S)
                if received is not None:
                    self._handle(received.member, received.message)
                self._look_at_clocks()
        finally:
            self._server.close()

    def _handle(self, member: str, message: Any) -> None:
        if isinstance(message, Join):
            self._join(member, message)
            return
        known = self._members.get(member)
        if known is None:
            self._server.send(member, Refused(reason=f"{member} is not a member", hint="join first"))
            return
        known.last_heard = time.monotonic()
        try:
            self._report(member, known.join, message)
        except VersionError as error:
            log.warning("%s: %s", member, error)
            self._server.send(member, Refused(reason=str(error), hint=error.hint or ""))

    def _report(self, member: str, join: Join, message: Any) -> None:
        match message:
            case Beat():
                return
            case Want(version=version):
                self._wants[join.rank] = version
                self._let_go()
            case Written(version=version, parts=parts):
                self._written(join.rank, version, parts)
            case Ready(version=version):
                engine, rank = divmod(join.rank, self._ranks_per_engine)
                self._apply(self._ledger.ready(engine=engine, rank=rank, version=version))
            case Failed(version=version, reason=reason):
                self._failed(member, join, version, reason)
            case Committed(version=version):
                self._engine_committed(join.rank, version)
            case Leave():
                self._lose(member, "left")

    def _join(self, member: str, join: Join) -> None:
        if (
            join.protocol != PROTOCOL
            or not 0 <= join.rank < self._num[join.side]
            or member != f"{join.side} {join.rank}"
        ):
            reason = f"{member} (protocol {join.protocol}, {join.side} rank {join.rank}) does not fit {self._num}"
            self._server.send(member, Refused(reason=reason, hint="check ranks and the installed weft version"))
            return
        if member in self._members:
            self._lose(member, "was restarted")
        self._members[member] = _Member(join, time.monotonic())
        self._lost.pop(member, None)
        if len(self._members) == sum(self._num.values()):
            self._make_plan()

    def _joins(self, side: str) -> dict[int, Join]:
        joins = [known.join for known in self._members.values() if known.join.side == side]
        return {join.rank: join for join in sorted(joins, key=lambda join: join.rank)}

    def _make_plan(self) -> None:
        trainers, engines = self._joins("trainer"), self._joins("engine")
        try:
            plan = plan_members(trainers, engines, self._cluster, ranks_per_engine=self._ranks_per_engine)
        except WeftError as error:
            log.error("no plan: %s", error)
            for member in list(self._members):
                self._server.send(member, Refused(reason=str(error), hint=error.hint or ""))
            self._members.clear()
            return
        self._plan = plan
        digest = plan_file.digest(plan)
        for rank in trainers:
            self._server.send(f"trainer {rank}", send_plan(plan, digest, rank, trainers, engines))
        for rank in engines:
            self._server.send(f"engine {rank}", receive_plan(plan, digest, rank))
        self._planned.set()
        log.info("plan %s: %d bytes per version", digest[:16], plan.total_bytes)

    def _let_go(self) -> None:
        """Answer trainers that want to write, if the last version is out of the way."""
        if self._transfer is not None and self._transfer.retired:
            self._transfer = None
        if self._plan is None:
            self._turn_away()
            return
        for trainer, version in sorted(self._wants.items()):
            transfer = self._transfer
            if transfer is not None and (version != transfer.version or transfer.uncommitted is not None):
                continue
            del self._wants[trainer]
            try:
                self._ledger.publish(trainer=trainer, version=version)
            except VersionError as error:
                refusal = Decide(version=version, commit=False, reason=f"{error}: versions must grow")
                self._server.send(f"trainer {trainer}", refusal)
                continue
            if transfer is None:
                self._transfer = transfer = _Transfer(version, time.monotonic() + self._timing.version_s)
            transfer.writers.add(trainer)
            self._server.send(f"trainer {trainer}", Go(version=version))

    def _turn_away(self) -> None:
        """While a member is lost no version can be written: say so at once instead of letting trainers wait."""
        if not self._lost:
            return
        reason = ", ".join(f"{member} {how}" for member, how in sorted(self._lost.items()))
        for trainer, version in self._wants.items():
            self._server.send(f"trainer {trainer}", Decide(version=version, commit=False, reason=reason))
        self._wants.clear()

    def _written(self, trainer: int, version: int, parts: list[Part]) -> None:
        transfer = self._transfer
        if transfer is None or transfer.version != version:
            return
        transfer.writers.discard(trainer)
        transfer.finished.add(trainer)
        transfer.parts += parts
        if transfer.uncommitted is None and len(transfer.finished) == self._num["trainer"]:
            self._ask_to_verify(transfer)
        self._let_go()

    def _ask_to_verify(self, transfer: _Transfer) -> None:
        for engine in range(self._num["engine"]):
            mine = [part for part in transfer.parts if part.engine == engine]
            digest = sum(part.digest for part in mine) % (1 << 64)
            num_bytes = sum(part.num_bytes for part in mine)
            self._server.send(f"engine {engine}", Verify(version=transfer.version, num_bytes=num_bytes, digest=digest))

    def _failed(self, member: str, join: Join, version: int, reason: str) -> None:
        if self._transfer is None or self._transfer.version != version:
            return
        log.warning("%s failed version %d: %s", member, version, reason)
        if join.side == "trainer":
            self._transfer.writers.discard(join.rank)
        self._apply(self._fail(join, reason))
        self._let_go()

    def _fail(self, join: Join, reason: str) -> Decision | None:
        if join.side == "trainer":
            return self._ledger.trainer_failed(join.rank, reason)
        return self._ledger.engine_failed(join.rank // self._ranks_per_engine, f"rank {join.rank}: {reason}")

    def _engine_committed(self, engine: int, version: int) -> None:
        transfer = self._transfer
        if transfer is not None and transfer.version == version and transfer.uncommitted is not None:
            transfer.uncommitted.discard(engine)
            self._let_go()

    def _apply(self, decision: Decision | None) -> None:
        """Tell everybody what was decided."""
        transfer = self._transfer
        if decision is None or transfer is None or transfer.version != decision.version:
            return
        transfer.uncommitted = set(self._joins("engine")) if decision.commit else set()
        if decision.commit:
            self._committed = decision.version
        message = Decide(version=decision.version, commit=decision.commit, reason=decision.reason)
        for member in self._members:
            self._server.send(member, message)
        self._let_go()

    def _lose(self, member: str, how: str) -> None:
        """A member is gone: abort what depends on it, and plan again when it comes back."""
        known = self._members.pop(member, None)
        if known is None:
            return
        log.warning("%s %s", member, how)
        self._lost[member] = how
        self._plan = None
        self._planned.clear()
        rank = known.join.rank
        if known.join.side == "trainer":
            self._wants.pop(rank, None)
        if self._transfer is not None and known.join.side == "trainer":
            self._transfer.writers.discard(rank)
        if self._transfer is not None and self._transfer.uncommitted is not None and known.join.side == "engine":
            self._transfer.uncommitted.discard(rank)
        self._apply(self._fail(known.join, how))
        self._let_go()

    def _look_at_clocks(self) -> None:
        now = time.monotonic()
        for member, known in list(self._members.items()):
            silent_s = now - known.last_heard
            if silent_s > self._timing.silence_s:
                self._lose(member, f"was not heard of for {silent_s:.1f} s")
        transfer = self._transfer
        if transfer is not None and transfer.uncommitted is None and now > transfer.deadline:
            reason = f"version {transfer.version} was not ready everywhere after {self._timing.version_s:.1f} s"
            transfer.writers.clear()
            self._apply(self._ledger.timed_out(reason))
