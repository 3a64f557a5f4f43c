"""The controller: knows the members, chooses their transports, makes the plan, and decides every version once, for all.

    consumes      Join, Opened, Blocked, Want, Written, Stopped, At, Paused, Ready, Failed, Committed, Beat, Leave
    produces      Welcome, Refused, Unknown, Open, CutOff, SendPlan, ReceivePlan, Expect, Go, Verify, Boundary,
                  Decide, Alive
    waits for     messages, a tenth of a second at most                  unblocked by   the network, `close`

One thread owns the socket and all state; nothing is shared. A version is open from the first Want until every engine
has committed it, or until it was aborted and every trainer that was writing has stopped: only then may the next one be
written. A restarted controller learns from members, as they rejoin, which versions were decided. Members are
incarnations: an older process of a rank never replaces a newer one. Everything a member says is checked (`admission`);
a member that fails a check is refused, and no other.

    with Controller(num_trainers=2, num_engine_ranks=2) as controller:
        Sender(controller.address, rank=0, …)
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from weft.config import DeltaPolicy, DigestPolicy, ReceiverMode, TransferSettings
from weft.core.assign import Policy
from weft.core.plans.plan import Plan
from weft.core.topology import Cluster
from weft.core.version import CommitPolicy, Decision, VersionLedger
from weft.errors import ConfigError, LayoutError, PlanError, ProtocolError, VersionError, WeftError
from weft.runtime.compile.member_plans import MemberPlans
from weft.runtime.control.channel import BURST_SPIN_S, SPIN_S, Invalid
from weft.runtime.control.member_id import MemberId
from weft.runtime.control.messages import (
    PROTOCOL,
    STEPS_AHEAD,
    Alive,
    Asking,
    At,
    Beat,
    Blocked,
    Boundary,
    Committed,
    CutOff,
    Decide,
    Expect,
    Failed,
    Go,
    Join,
    Leave,
    Open,
    Opened,
    Paused,
    Ready,
    Refused,
    Stopped,
    ToController,
    Unknown,
    Verify,
    Want,
    Welcome,
    Writer,
    WriteReport,
    Written,
)
from weft.runtime.control.security import Security, server_keys
from weft.runtime.control.server import Server
from weft.runtime.controller.admission import (
    check_join,
    check_magnitudes,
    check_opened,
    check_side,
    check_step,
    check_version,
    check_written,
    claim,
    unbelievable,
)
from weft.runtime.controller.commits import Commits
from weft.runtime.controller.membership import Member, Membership
from weft.runtime.controller.planner import MemberPart, Planned, Planner, Shipped
from weft.runtime.controller.planning import Planning
from weft.runtime.controller.transfer import Transfer
from weft.transport.registry import Choice

log = logging.getLogger(__name__)
POLL_S = 0.1
MAX_AT_ONCE = 1000
"""Messages handled before clocks are checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerStatistics:
    """A snapshot of what a controller knows."""

    members: tuple[str, ...]
    lost: dict[str, str]
    """Members that are gone, and why."""
    links: dict[str, int]
    """`transport (reason)` and how many links use it."""
    plan_digest: str
    bytes_per_version: int
    committed: int | None
    num_committed: int
    num_aborted: int
    last_abort: str
    last_version_s: float
    """From the first trainer's Want until the last engine had committed."""
    last_wire_bytes: int
    """Bytes trainers sent for it; patches are shorter than `bytes_per_version`."""
    last_magnitude_bytes: int
    """Bytes trainers exchanged for it, to agree on FP8 scales."""
    num_beats: int
    """Heartbeats that were answered."""
    num_plans: int
    """Plans that were made."""
    plan_s: float
    """How long the last one took."""
    ship_s: float
    """How long it took from then until members had their parts."""
    writes_per_version: int
    """One-sided writes of a version that is sent whole."""
    channel: dict[str, int]


class Controller:
    """Runs in a thread of the process that creates it; `address` is what members connect to.

    >>> import numpy as np
    >>> import weft
    >>> trained, served = np.ones(4, np.float32), np.zeros(4, np.float32)
    >>> with (
    ...     weft.Controller(num_trainers=1, num_engine_ranks=1) as controller,
    ...     weft.Sender(controller.address, rank=0, weights=weft.Weights.from_arrays({"w": trained})) as sender,
    ...     weft.Receiver(controller.address, rank=0, weights=weft.Weights.from_arrays({"w": served})) as receiver,
    ... ):
    ...     print(controller.wait_planned(60.0), controller.statistics().members)
    True ('engine 0', 'trainer 0')
    """

    def __init__(
        self,
        address: str = "tcp://127.0.0.1:*",
        *,
        num_trainers: int,
        num_engine_ranks: int,
        ranks_per_engine: int = 1,
        commit_policy: CommitPolicy = CommitPolicy.ALL,
        quorum: int = 0,
        settings: TransferSettings | None = None,
        policy: Policy | str | None = None,
        topology: Cluster | Path | str | None = None,
        ignore: Sequence[str] = (),
        plan: Plan | Path | str | None = None,
        security: Security | None = None,
    ) -> None:
        """`commit_policy` and `quorum`: how many engines a version needs. `settings` are shipped to every member.

        `policy` says which trainer sends where several hold the same bytes; `topology`, a preset or a .toml file, what
        kind of hosts members are on. `ignore` are trainer tensors no engine has, by name or pattern (`visual.*`).
        `plan`, instead of these three: a plan, or the file of one, to follow; members that differ from it are refused.
        `security`: its own key, `controller.key` by default, and the keys it admits; without it, `address` must be on
        loopback.
        """
        if num_trainers < 1 or num_engine_ranks < 1 or ranks_per_engine < 1 or num_engine_ranks % ranks_per_engine:
            raise ConfigError(
                f"invalid numbers of members: {num_trainers} trainers and {num_engine_ranks} engine ranks "
                f"in engines of {ranks_per_engine}",
                hint="at least one of each, and a whole number of engines",
            )
        engines = dict.fromkeys(range(num_engine_ranks // ranks_per_engine), ranks_per_engine)
        self._ledger = VersionLedger(num_trainers=num_trainers, engines=engines, policy=commit_policy, quorum=quorum)
        self._needed_engines = len(engines) if commit_policy is CommitPolicy.ALL else quorum
        self._membership = Membership(
            num_trainers=num_trainers, num_engine_ranks=num_engine_ranks, ranks_per_engine=ranks_per_engine
        )
        self._settings = settings or TransferSettings()
        planning = Planning.of(
            policy=policy, topology=topology, ignore=ignore, plan=plan, transfer=settings or TransferSettings()
        )
        planning.check_members(
            num_trainers=num_trainers, num_engine_ranks=num_engine_ranks, ranks_per_engine=ranks_per_engine
        )
        self._name = secrets.token_hex(8)
        self._planned_round = 0
        """The round whose plan members have."""
        self._links: dict[tuple[int, int], Choice] = {}
        self._plan: Plan | None = None
        self._plan_digest = ""
        self._parts: MemberPlans | None = None
        self._must_plan = False
        self._next_look = 0.0
        self._status = ""
        """What has to happen before versions can be written."""
        self._settled: set[int] = set()
        """Incarnations of trainers that are gone and were not writing."""
        self._abandoned: set[int] = set()
        """Engine ranks to which writes that a trainer gave up may still be in flight."""
        self._is_rebuilt = False
        self._transfer: Transfer | None = None
        self._wants: dict[int, int] = {}
        self._holds: dict[int, int | None] = {}
        """Engine rank → the version it serves; None where its weights are torn."""
        self._commits = Commits()
        self._stalled: set[MemberId] = set()
        """Members given up because the engine's thread did not respond; they rejoin when it does."""
        self._steps: dict[int, tuple[int, int]] = {}
        """Engine rank → the last version it learned of, and the step it had reached then."""
        self._unsendable: dict[str, str] = {}
        """Connections to which a message could not be sent, and why."""
        self._counts: Counter[str] = Counter()
        self._last_abort, self._last_version_s = "", 0.0
        self._last_wire_bytes, self._last_magnitude_bytes = 0, 0
        self._plan_s, self._ship_s, self._planned_at = 0.0, 0.0, 0.0
        self._planned = threading.Event()
        self._stop = threading.Event()
        keys = server_keys(security)
        self._server = Server(
            address, messages=ToController, protocol=PROTOCOL, objection=self._membership.objection, keys=keys
        )
        self.address = self._server.address
        self._planner = Planner(planning, self._settings, ranks_per_engine=ranks_per_engine, wake=self._server.wake)
        self._thread = threading.Thread(target=self._run, name="weft-controller", daemon=True)
        self._thread.start()

    @property
    def committed(self) -> int | None:
        """The last version that was decided to be committed."""
        return self._ledger.committed

    def statistics(self) -> ControllerStatistics:
        """A snapshot, for observers in this process."""
        links = Counter(f"{choice.transport} ({choice.reason})" for choice in self._links.copy().values())
        plan = self._plan
        return ControllerStatistics(
            members=tuple(map(str, sorted(self._membership.members.copy()))),
            lost={str(member): how for member, how in self._membership.lost.copy().items()},
            links=dict(links),
            plan_digest=self._plan_digest,
            bytes_per_version=plan.total_bytes if plan is not None else 0,
            committed=self._ledger.committed,
            num_committed=self._counts["committed"],
            num_aborted=self._counts["aborted"],
            last_abort=self._last_abort,
            last_version_s=self._last_version_s,
            last_wire_bytes=self._last_wire_bytes,
            last_magnitude_bytes=self._last_magnitude_bytes,
            num_beats=self._counts["beats"],
            num_plans=self._planner.num_plans,
            plan_s=self._plan_s,
            ship_s=self._ship_s,
            writes_per_version=0 if self._parts is None else self._parts.num_writes,
            channel=asdict(self._server.statistics()),
        )

    def wait_planned(self, timeout_s: float = 60.0) -> bool:
        """Wait until all members have joined and have their part of the plan; False if that takes too long."""
        return self._planned.wait(timeout_s)

    def close(self) -> None:
        """Stop; members notice its silence."""
        self._stop.set()
        self._thread.join(10.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    # The loop

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                for number in range(MAX_AT_ONCE):  # a member with unread messages is not silent: read before clocks
                    received = self._server.receive(0.0 if number else POLL_S)
                    if received is None:
                        break
                    self._handle_safely(received.sender, received.message)
                self._take_planned_safely()
                self._look_at_clocks()
        finally:
            self._planner.close()
            self._server.close()

    def _send(self, member: MemberId, message: Any) -> None:
        """Send to a member, if it has joined."""
        known = self._membership.members.get(member)
        if known is None:
            return
        try:
            self._server.send(known.connection, message)
        except ProtocolError as error:  # too large: callers are in the middle of something
            self._unsendable[known.connection] = str(error)

    def _handle_safely(self, connection: str, message: Any) -> None:
        """A message that triggers a bug costs its sender the membership, and does not stop the controller."""
        try:
            self._handle(connection, message)
        except Exception as error:
            log.exception("internal error while handling %s from %s", type(message).__name__, connection)
            self._expel(connection, f"triggered a bug in the controller: {type(error).__name__}: {error}")

    def _handle(self, connection: str, message: Any) -> None:
        if isinstance(message, Invalid):
            self._expel(connection, f"sent an invalid message: {message.reason}")
            return
        if isinstance(message, Join):
            self._join(connection, message)
            return
        member, known = self._membership.name_of(connection), self._membership.behind(connection)
        if known is None:
            if not isinstance(message, Leave):
                self._turn_out(connection, member)
            return
        known.last_heard = time.monotonic()
        try:
            check_side(known.join.side, message)
            self._report(member, known, message)
        except (ProtocolError, VersionError) as error:
            self._refuse(member, error)

    def _refuse(self, member: MemberId, error: WeftError, *, is_settled: bool = False) -> None:
        """One member sent invalid messages, or does not match the others: only it is removed."""
        log.warning("%s: %s", member, error)
        self._send(member, Refused(reason=str(error), hint=error.hint or ""))
        self._lose(member, f"was refused: {error}", is_settled=is_settled)

    def _turn_out(self, connection: str, member: MemberId) -> None:
        """Answer a process that is not a member: one that was replaced must end, others may join again."""
        if member in self._membership.members:
            reason = f"another process has joined as {member}"
            self._server.send(connection, Refused(reason=reason, hint="each rank must be one process"))
        else:
            stalled = self._membership.lost.get(member, "") if member in self._stalled else ""
            self._server.send(connection, Unknown(controller=self._name, stalled=stalled))

    def _report(self, member: MemberId, known: Member, message: Any) -> None:
        match message:
            case Beat():
                self._counts["beats"] += 1
                self._send(member, Alive(controller=self._name, status=self._status))
            case Opened():
                self._opened(known, message)
            case Failed(version=version, reason=reason):
                check_version(version)
                self._failed(member, known.join, version, reason)
            case Leave(reason=reason):
                self._lose(member, f"left: {reason}" if reason else "left")
            case _ if known.join.side == "trainer":
                self._trainer_report(member, known, message)
            case _:
                self._engine_report(member, known, message)

    def _trainer_report(self, member: MemberId, known: Member, message: Any) -> None:
        rank = known.join.rank
        match message:
            case Want(version=version):
                self._ledger.check_number(version)
                self._wants[rank] = version
                self._answer_trainers()
            case Written():
                self._written(rank, message)
            case Stopped():
                self._stopped(member, known.join, message)

    def _engine_report(self, member: MemberId, known: Member, message: Any) -> None:
        rank = known.join.rank
        match message:
            case Blocked(round=number, reason=reason):
                known.blocked = reason if number == self._membership.round else ""
                self._answer_trainers()
            case At(version=version, step=step):
                self._check_known(member, version, "is at a step of")
                check_step(step)
                self._at(rank, version, step)
            case Paused(version=version):
                self._check_known(member, version, "pauses for")
                self._paused(rank, version)
            case Ready(version=version):
                self._apply(self._ready(rank, version))
            case Committed(version=version):
                self._check_known(member, version, "serves")
                self._engine_committed(rank, version)

    def _check_known(self, member: MemberId, version: int, what: str) -> None:
        """Raise if a member names a version that was not published and that it did not join with."""
        newest = self._transfer.version if self._transfer is not None else -1
        told = claim(self._membership.members[member].join)
        if not 0 <= version <= max(newest, self._ledger.last_decided, -1 if told is None else told):
            raise ProtocolError(f"{member} {what} version {version}, which was not published")

    def _expel(self, connection: str, how: str) -> None:
        """End a connection; the member behind it, if any, is lost."""
        self._server.send(connection, Refused(reason=f"it {how}"))
        self._server.forget(connection)
        if self._membership.behind(connection) is not None:
            self._lose(self._membership.name_of(connection), how, is_settled=False)

    def _revoke(self, connection: str, reason: str) -> None:
        """A member has lost its right to take part: engines close at once what a trainer could write to."""
        known = self._membership.behind(connection)
        self._expel(connection, f"was refused: {reason}")
        if known is not None and known.join.side == "trainer":
            for engine in self._membership.joins("engine"):
                self._send(MemberId.engine(engine), CutOff(incarnations=[known.incarnation]))

    def _look_at_clocks(self) -> None:
        """Ten times a second: what is too late, and what members should know."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + POLL_S
        self._status = self._planner.status or self._membership.obstacle
        for connection in self._server.stuck(self._settings.silence_s):
            self._expel(connection, "does not read its messages")
        while self._unsendable:
            connection, reason = self._unsendable.popitem()
            self._expel(connection, f"cannot be sent its part of the plan: {reason}")
        for connection, reason in self._server.revoked().items():
            self._revoke(connection, reason)
        for member, silent_s in self._membership.silent_for(self._settings.silence_s).items():
            self._lose(member, f"has been silent for {silent_s:.1f} s")
        self._drop_stalled()
        transfer = self._transfer
        if transfer is not None and transfer.aborted is not None and time.monotonic() > transfer.abort_deadline:
            transfer.has_bytes = True  # must be assumed
            self._tell_engines(transfer, transfer.aborted)
        if transfer is not None and not transfer.is_decided and time.monotonic() > transfer.deadline:
            num_trainers, version_s = self._membership.num["trainer"], self._settings.version_s
            self._apply(self._ledger.timed_out(transfer.lateness(num_trainers=num_trainers, version_s=version_s)))

    def _drop_stalled(self) -> None:
        """Engines that do not commit, or do not pause, must not hold up others: all ranks of such an engine must go."""
        now, settings = time.monotonic(), self._settings
        late = {
            rank: f"did not commit version {version} in {settings.commit_s:.1f} s"
            for rank, version in self._commits.owing_since(now - settings.commit_s).items()
        }
        transfer = self._transfer
        if transfer is not None and not transfer.is_decided and now > transfer.pause_deadline:
            why = f"did not pause for version {transfer.version} in {settings.pause_s:.1f} s"
            late |= dict.fromkeys(transfer.unpaused, why)
        for rank, why in late.items():
            for other in self._membership.ranks_of(rank // self._membership.ranks_per_engine):
                self._give_up_stalled(
                    MemberId.engine(other), why if other == rank else f"shares an engine with rank {rank}, which {why}"
                )
        if self._commits.ranks:  # the version may no longer wait for them
            self._finish()
            self._answer_trainers()

    def _give_up_stalled(self, member: MemberId, why: str) -> None:
        if member in self._membership.members:
            self._stalled.add(member)
            self._lose(member, why)

    # Members

    def _join(self, connection: str, join: Join) -> None:
        member = join.member
        try:
            if member != self._membership.name_of(connection):
                raise ProtocolError(f"{self._membership.name_of(connection)} wants to join as {member}")
            check_join(join)
            incarnation = self._membership.incarnation_of(join)
        except WeftError as error:
            log.warning("%s: %s", member, error)
            self._server.send(connection, Refused(reason=str(error), hint=error.hint or ""))
            return
        if member in self._membership.members:
            self._replace(member, connection)
        self._membership.add(connection, join, incarnation)
        self._stalled.discard(member)
        self._settled.discard(incarnation)
        self._abandoned.update(join.abandoned)
        if join.pending is not None:
            self._commits.owe([join.rank], version=join.pending, since=time.monotonic())
        if join.side == "engine":
            self._holds[join.rank] = join.holds
        welcome = Welcome(
            controller=self._name,
            incarnation=incarnation,
            settings=self._settings,
            ranks_per_engine=self._membership.ranks_per_engine,
            num_trainers=self._membership.num["trainer"],
        )
        self._send(member, welcome)
        log.info("%s joined (%d of %d)", member, len(self._membership.members), sum(self._membership.num.values()))
        self._plan_again()
        self._plan_if_possible()

    def _plan_again(self) -> None:
        """The members have changed: a plan that is being made is for the previous ones."""
        self._must_plan = True
        self._planner.give_up()

    def _replace(self, member: MemberId, connection: str) -> None:
        """A member joins again: the same process, or a newer one in its place."""
        old = self._membership.members[member].connection
        self._lose(member, "joined again")
        if old != connection:
            self._server.send(old, Refused(reason=f"another process has joined as {member}"))

    def _plan_if_possible(self) -> None:
        """When all members have joined and no version is under way: let them open transports, for a new plan."""
        if not self._must_plan or not self._membership.is_complete:
            return
        self._retire()
        if self._transfer is not None or not self._rebuild():
            return
        self._must_plan = False
        self._membership.begin_round()
        self._planner.plan(self._membership.joins("trainer"), self._membership.joins("engine"))

    def _take_planned_safely(self) -> None:
        """A plan that triggers a bug costs the members this round, and does not stop the controller."""
        try:
            self._take_planned()
        except Exception as error:
            log.exception("internal error while following a plan")
            self._refuse_all(PlanError(f"triggered a bug in the controller: {type(error).__name__}: {error}"))

    def _take_planned(self) -> None:
        """Take the planner's result, for the members that have joined."""
        while (found := self._planner.take()) is not None:
            match found:
                case Planned():
                    self._open(found)
                case MemberPart(member=member, message=message):
                    self._send(member, message)
                case Shipped():
                    self._begin_round()
                case WeftError():
                    self._refuse_misfits(found)

    def _open(self, planned: Planned) -> None:
        """Members match: let them open transports and memory for the plan."""
        self._plan, self._plan_digest, self._parts = planned.plan, planned.digest, planned.parts
        self._links, self._planned_at = planned.links, time.monotonic()
        self._plan_s = planned.plan_s
        self._membership.use(planned.links)
        for member, known in self._membership.members.items():
            transports = sorted(set(known.transports.values()))
            asking = planned.parts.asking(known.join.rank) if known.join.side == "trainer" else None
            message = Open(
                round=self._membership.round,
                transports=transports,
                through_host=planned.parts.through_host,
                asking=self._asking(asking),
            )
            if known.join.side == "engine":
                message = Open(
                    round=self._membership.round,
                    transports=transports,
                    through_host=planned.parts.through_host,
                    writers=self._writers_of(known),
                    settled=sorted(self._settled),
                    abandoned=known.join.rank in self._abandoned,
                    landing_bytes=planned.parts.opening(known.join.rank).landing_bytes,
                    patch_bytes=planned.parts.opening(known.join.rank).patch_bytes,
                )
            self._send(member, message)

    def _asking(self, trainers: list[int] | None) -> list[Asking] | None:
        """Trainers that will connect to another, and the keys they are known by."""
        if trainers is None:
            return None
        connections = {trainer: self._membership.members[MemberId.trainer(trainer)].connection for trainer in trainers}
        return [Asking(trainer=trainer, key=self._server.key_of(at)) for trainer, at in connections.items()]

    def _writers_of(self, engine: Member) -> list[Writer]:
        """The trainers an engine rank offers its memory to."""
        return [
            Writer(
                rank=known.join.rank,
                incarnation=known.incarnation,
                process=known.join.process,
                place=known.join.place,
                transport=engine.transports[known.join.rank],
            )
            for known in self._membership.members.values()
            if known.join.side == "trainer"
        ]

    def _opened(self, known: Member, message: Opened) -> None:
        if message.round != self._membership.round or self._planner.is_busy:
            return  # it belongs to an earlier round, or was not requested
        assert self._parts is not None
        needed = self._parts.opening(known.join.rank) if known.join.side == "engine" else None
        check_opened(known.join, message, set(known.transports.values()), needed)
        if known.join.side == "trainer":
            is_asked, has_keys = bool(self._parts.asking(known.join.rank)), self._server.has_keys
            check_magnitudes(known.join.rank, message, is_asked=is_asked, has_keys=has_keys)
        self._membership.open(known, message)
        if self._membership.has_opened:
            self._planner.ship(self._parts, self._membership.opened("trainer"), self._membership.opened("engine"))

    def _begin_round(self) -> None:
        """All members have opened, and were sent their parts of the plan."""
        who, plan = self._membership, self._plan
        assert plan is not None
        self._planned_round = who.round
        self._ship_s = time.monotonic() - self._planned_at
        self._settled.clear()  # engines have heard of them
        self._abandoned.clear()
        self._planned.set()
        log.info("plan %s: %d bytes per version", self._plan_digest[:16], plan.total_bytes)
        for link, count in self.statistics().links.items():
            log.info("%d links: %s", count, link)
        for line in who.hosts():
            log.info("%s", line)
        self._answer_trainers()

    def _refuse_misfits(self, error: WeftError) -> None:
        """Members do not match: those that differ from the others are removed; all, if these are not known."""
        named = error.members if isinstance(error, LayoutError) else ()
        if not named:
            self._refuse_all(error)
        for member in [member for member in self._membership.members if str(member) in named]:
            self._refuse(member, error, is_settled=True)

    def _refuse_all(self, error: WeftError) -> None:
        """Both sides hear why they do not match. Engines keep serving, and may wait for other trainers."""
        log.error("no plan: %s", error)
        for member, known in self._membership.members.items():
            may_return = known.join.side == "engine"
            self._send(member, Refused(reason=str(error), hint=error.hint or "", may_return=may_return))
            self._settled.add(known.incarnation)  # no version is under way
        self._membership.remove_all()
        self._planner.give_up()
        self._wants.clear()
        self._commits.clear()  # a member that rejoins reports what it has not committed

    def _rebuild(self) -> bool:
        """Once, when all have joined: if an earlier controller died, only the members know of versions.

        Before anything is opened: a version that some engines were told to commit is committed by the others as well.
        False if a member was removed because its report cannot be true.
        """
        if self._is_rebuilt:
            return True
        joins = {member: known.join for member, known in self._membership.members.items()}
        liars = unbelievable(joins)
        for member, what in liars.items():
            self._refuse(member, ProtocolError(what))
        if liars:
            return False
        self._is_rebuilt = True
        engines = self._membership.joins("engine")
        known = [version for join in engines.values() for version in (join.last, join.pending) if version is not None]
        committed = max(known, default=None)
        told = [version for join in joins.values() for version in (join.last, join.seen) if version is not None]
        self._ledger.restore(committed=committed, last_decided=max([*known, *told], default=-1))
        for rank, join in engines.items():
            if committed is not None and join.ready == committed and join.pending is None and join.last != committed:
                self._commits.owe([rank], version=committed, since=time.monotonic())
                self._send(MemberId.engine(rank), Decide(version=committed, commit=True))
        return True

    def _lose(self, member: MemberId, how: str, *, is_settled: bool = True) -> None:
        """A member is gone: abort what depends on it, and plan again when it comes back.

        `is_settled`: whether a trainer that was not told to write is known not to.
        """
        known = self._membership.remove(member, how)
        if known is None:
            return
        log.warning("%s %s", member, how)
        self._plan_again()
        self._planned.clear()
        rank, transfer = known.join.rank, self._transfer
        if known.join.side == "trainer":
            self._wants.pop(rank, None)
            if transfer is not None and rank in transfer.writers:
                transfer.writers.discard(rank)
                transfer.has_bytes = True
            elif is_settled:
                self._settled.add(known.incarnation)
        else:
            self._commits.forget(rank)
            if transfer is not None:
                transfer.drop(self._membership.ranks_of(rank // self._membership.ranks_per_engine))
        self._apply(self._fail(known.join, how))
        if self._transfer is not None:
            self._send_writers(self._transfer)
        self._finish()
        self._answer_trainers()

    # Versions

    def _retire(self) -> None:
        """Forget a version that no member depends on any more."""
        transfer = self._transfer
        if transfer is not None and transfer.aborted is not None and not transfer.writers:
            self._tell_engines(transfer, transfer.aborted)
        if transfer is not None and transfer.is_decided and not transfer.writers and not self._waits_for_commits():
            self._transfer = None
            self._server.spin_s = SPIN_S

    def _answer_trainers(self) -> None:
        """Answer trainers that want to write, if the last version is finished."""
        self._retire()
        self._plan_if_possible()
        if not self._wants:
            return
        if not self._can_transfer():
            self._turn_away()
            return
        for trainer, version in sorted(self._wants.items()):
            transfer = self._transfer
            if transfer is not None and (version != transfer.version or transfer.is_decided):
                continue
            if transfer is None and self._waits_for_commits():
                continue
            del self._wants[trainer]
            self._offer(trainer, version)

    def _can_transfer(self) -> bool:
        """Whether every trainer, and enough engines, have their part of the current plan."""
        planned = self._plan is not None and self._planned_round == self._membership.round
        trainers = len(self._membership.open_ranks("trainer")) == self._membership.num["trainer"]
        return planned and trainers and len(self._free_engines()) >= self._needed_engines

    def _free_engines(self) -> list[int]:
        """Engines that can take a version: all their ranks are present, open, and have committed the previous one."""
        owing = {rank // self._membership.ranks_per_engine for rank in self._commits.ranks}
        return [engine for engine in self._membership.live_engines() if engine not in owing]

    def _waits_for_commits(self) -> bool:
        """Whether the next version waits for engines that have not committed the last one.

        If enough others have, engines that are late by more than a heartbeat are left out of the next.
        """
        if not self._commits.ranks:
            return False
        lagging = self._commits.owing_since(time.monotonic() - self._settings.beat_s)
        return len(lagging) < len(self._commits.ranks) or len(self._free_engines()) < self._needed_engines

    def _offer(self, trainer: int, version: int) -> None:
        """A trainer's turn: open the version, or join the others that write it."""
        try:
            if self._transfer is None:
                self._ledger.take_part(self._free_engines(), num_ranks=self._membership.ranks_per_engine)
            self._ledger.publish(trainer=trainer, version=version)
        except VersionError as error:
            self._send(MemberId.trainer(trainer), Decide(version=version, commit=False, reason=str(error)))
            return
        if self._transfer is None:
            self._begin(version)
        assert self._transfer is not None
        self._transfer.waiting.add(trainer)
        self._send_writers(self._transfer)

    def _begin(self, version: int) -> None:
        ranks = {rank for engine in self._free_engines() for rank in self._membership.ranks_of(engine)}
        now = time.monotonic()
        self._transfer = Transfer(
            version=version,
            began=now,
            deadline=now + self._settings.version_s,
            engines=ranks,
            unpaused=set(ranks) if self._settings.mode is ReceiverMode.IN_PLACE else set(),
            pause_deadline=now + self._settings.pause_s,
        )
        self._server.spin_s = BURST_SPIN_S
        for rank in sorted(ranks):
            self._send(MemberId.engine(rank), Expect(version=version))

    def _send_writers(self, transfer: Transfer) -> None:
        if transfer.unpaused or transfer.is_decided:
            return
        engines = sorted(transfer.takers)
        if transfer.waiting:
            transfer.told.update(engines)
        holds = [self._holds.get(rank) for rank in engines]
        go = Go(version=transfer.version, engines=engines, holds=holds, whole=transfer.is_second_round)
        for trainer in sorted(transfer.waiting):
            transfer.writers.add(trainer)
            self._send(MemberId.trainer(trainer), go)
        transfer.waiting.clear()

    def _turn_away(self) -> None:
        """While a member is lost, or waits, no version can be written: say so at once, to all trainers."""
        obstacles = {
            member: f"{member} {how}" for member, how in self._membership.lost.items()
        } | self._membership.blocked
        if not obstacles:
            return
        reason = ", ".join(obstacles[member] for member in sorted(obstacles))
        for trainer, version in sorted(self._wants.items()):
            self._ledger.refuse(version, reason)
            self._send(MemberId.trainer(trainer), Decide(version=version, commit=False, reason=reason))
        self._wants.clear()

    def _at(self, rank: int, version: int, step: int) -> None:
        """An engine rank reports its step; when all ranks of its engine have, they learn where to meet."""
        self._steps[rank] = version, step
        ranks = self._membership.ranks_of(rank // self._membership.ranks_per_engine)
        if all(self._steps.get(other, (None, 0))[0] == version for other in ranks):
            boundary = max(self._steps[other][1] for other in ranks) + STEPS_AHEAD
            for other in ranks:
                self._send(MemberId.engine(other), Boundary(version=version, step=boundary))

    def _paused(self, rank: int, version: int) -> None:
        transfer = self._transfer
        if transfer is not None and transfer.version == version:
            transfer.unpaused.discard(rank)
            self._send_writers(transfer)

    def _written(self, trainer: int, message: Written) -> None:
        version, transfer = message.version, self._transfer
        if transfer is None or transfer.version != version:
            self._check_known(MemberId.trainer(trainer), version, "has written")
            return  # it had already ended
        if trainer not in transfer.writers:
            raise ProtocolError(f"trainer {trainer} has written version {version} without being told to")
        check_written(trainer, message, transfer.asked, self._owed(trainer, transfer))
        transfer.writers.discard(trainer)
        transfer.finished.add(trainer)
        transfer.has_bytes = True
        transfer.parts += message.parts
        transfer.magnitude_bytes += message.magnitude_bytes
        if not transfer.is_decided:
            self._finish_writing(transfer, trainer, message)
        self._answer_trainers()

    def _finish_writing(self, transfer: Transfer, trainer: int, message: Written) -> None:
        """A trainer has written; engines it could not reach are lost, and the others verify when all have written."""
        is_written = self._ledger.written(trainer=trainer, version=transfer.version)
        for loss in message.losses:  # if the engine is alive, it joins again
            self._lose(MemberId.engine(loss.engine), f"could not be written to by trainer {trainer}: {loss.reason}")
        for rank in message.whole:
            transfer.whole.update(self._membership.ranks_of(rank // self._membership.ranks_per_engine))
        if not is_written or transfer.is_decided:
            return
        if transfer.whole & transfer.engines and not transfer.is_second_round:
            self._send_whole(transfer)
        else:
            self._verify(transfer)

    def _send_whole(self, transfer: Transfer) -> None:
        """Patches do not suffice for some engines: these get the version whole, and pause for it in mode `patch`."""
        pauses = self._settings.mode is ReceiverMode.PATCH
        now = time.monotonic()
        transfer.begin_second_round(deadline=now + self._settings.version_s, pauses=pauses)
        transfer.pause_deadline = now + self._settings.pause_s
        self._ledger.write_again(transfer.version)
        for rank in sorted(transfer.whole):
            self._send(MemberId.engine(rank), Expect(version=transfer.version, whole=True))
        self._send_writers(transfer)

    def _owed(self, trainer: int, transfer: Transfer) -> dict[int, int] | None:
        """The bytes a trainer writes to each engine rank; None where patches, of any length, are written."""
        if self._parts is None or (self._settings.delta is DeltaPolicy.ON and not transfer.is_second_round):
            return None
        return self._parts.owed(trainer)

    def _stopped(self, member: MemberId, join: Join, message: Stopped) -> None:
        """A trainer is not writing a version that it was told to write: stop waiting for it."""
        version, transfer = message.version, self._transfer
        if transfer is None or transfer.version != version:
            self._check_known(member, version, "has stopped")
            return
        transfer.writers.discard(join.rank)
        transfer.has_bytes |= message.has_written
        self._abandoned.update(message.abandoned)
        if not transfer.is_decided:
            log.warning("%s stopped writing version %d: %s", member, version, message.reason)
            self._apply(self._fail(join, message.reason))
        self._answer_trainers()

    def _verify(self, transfer: Transfer) -> None:
        """Everything is written: let engines verify it, or, where that is not required, trust the writers' reports."""
        if self._takes_their_word(transfer):
            for rank in sorted(transfer.engines):
                self._apply(self._ready(rank, transfer.version))
            return
        parts: dict[int, list[WriteReport]] = {rank: [] for rank in transfer.engines}
        for part in transfer.parts:
            if part.engine in parts:
                parts[part.engine].append(part)
        for rank in sorted(parts):
            self._send(MemberId.engine(rank), Verify(version=transfer.version, parts=parts[rank]))

    def _ready(self, rank: int, version: int) -> Decision | None:
        """An engine rank holds a complete version; returns what that decides, if anything."""
        engine, number = divmod(rank, self._membership.ranks_per_engine)
        return self._ledger.ready(engine=engine, rank=number, version=version)

    def _takes_their_word(self, transfer: Transfer) -> bool:
        """Without a digest, engines could only count again what writers report as landed."""
        settings, parts = self._settings, self._parts
        if settings.digest is DigestPolicy.ON or settings.delta is DeltaPolicy.ON or parts is None:
            return False
        if parts.has_windows:
            return False  # what was written has to be drained
        if self._needed_engines < self._membership.num["engine"] // self._membership.ranks_per_engine:
            return False  # with a quorum, the first ready engines would leave the others behind
        return transfer.is_sent_whole(parts.wire_bytes)

    def _failed(self, member: MemberId, join: Join, version: int, reason: str) -> None:
        transfer = self._transfer
        if join.side == "engine" and (transfer is None or transfer.is_decided):
            if self._commits.done(join.rank, version):  # it will not commit what was decided
                log.warning("%s could not commit version %d: %s", member, version, reason)
                self._holds[join.rank] = None
            self._finish()
        if transfer is None or transfer.version != version or transfer.is_decided:
            if join.side == "trainer" and self._wants.get(join.rank) == version:
                del self._wants[join.rank]
            self._answer_trainers()  # the next version may have waited for this
            return
        log.warning("%s failed version %d: %s", member, version, reason)
        if join.side == "trainer":  # a trainer that is writing reports when it has stopped
            transfer.waiting.discard(join.rank)
        self._apply(self._fail(join, reason))
        self._answer_trainers()

    def _fail(self, join: Join, reason: str) -> Decision | None:
        if join.side == "trainer":
            return self._ledger.trainer_failed(join.rank, reason)
        return self._ledger.engine_failed(join.rank // self._membership.ranks_per_engine, f"rank {join.rank}: {reason}")

    def _engine_committed(self, rank: int, version: int) -> None:
        if not self._commits.done(rank, version):
            return  # it reported this when it joined
        log.debug("engine %d serves version %d", rank, version)
        self._holds[rank] = version
        self._finish()
        self._answer_trainers()

    def _finish(self) -> None:
        """When every engine serves a version, tell the trainers."""
        transfer = self._transfer
        if transfer is None or not transfer.is_commit or self._waits_for_commits():
            return
        transfer.is_commit = False
        self._counts["committed"] += 1
        self._last_version_s = time.monotonic() - transfer.began
        self._last_wire_bytes, self._last_magnitude_bytes = transfer.wire_bytes, transfer.magnitude_bytes
        log.info("version %d is served everywhere (%.1f ms)", transfer.version, self._last_version_s * 1e3)
        for rank in self._membership.joins("trainer"):
            self._send(MemberId.trainer(rank), Decide(version=transfer.version, commit=True))

    def _apply(self, decision: Decision | None) -> None:
        """Tell all members what was decided."""
        transfer = self._transfer
        if decision is None or transfer is None or transfer.version != decision.version:
            return
        transfer.is_decided, transfer.is_commit = True, decision.commit
        commits = {rank for engine in decision.engines for rank in self._membership.ranks_of(engine)}
        told = commits & set(self._membership.joins("engine"))
        self._commits.owe(told, version=decision.version, since=time.monotonic())
        if decision.commit or not any(self._is_live(transfer, rank) for rank in transfer.engines):
            self._tell_engines(transfer, decision)
        else:  # whether engines are torn is known once the writers have stopped, which they do when they hear of it
            transfer.aborted = decision
            transfer.abort_deadline = time.monotonic() + self._settings.silence_s
        if decision.commit:
            self._finish()
        else:
            self._abort(decision)
        self._answer_trainers()

    def _is_live(self, transfer: Transfer, rank: int) -> bool:
        """Whether the version reaches the live weights of an engine rank before it is decided."""
        second = self._settings.mode is ReceiverMode.PATCH and transfer.is_second_round
        return self._settings.mode is ReceiverMode.IN_PLACE or (second and rank in transfer.whole)

    def _tell_engines(self, transfer: Transfer, decision: Decision) -> None:
        """What was decided, and whether engines that do not commit hold torn weights."""
        transfer.aborted = None
        commits = {rank for engine in decision.engines for rank in self._membership.ranks_of(engine)}
        for rank in transfer.engines & set(self._membership.joins("engine")):
            message = Decide(version=decision.version, commit=True)
            if rank not in commits:
                is_torn = transfer.has_bytes and rank in transfer.told and self._is_live(transfer, rank)
                if is_torn:
                    self._holds[rank] = None
                reason = decision.reason or "its engine was dropped"
                message = Decide(version=decision.version, commit=False, torn=is_torn, reason=reason)
            self._send(MemberId.engine(rank), message)

    def _abort(self, decision: Decision) -> None:
        self._counts["aborted"] += 1
        self._last_abort = decision.reason
        log.warning("version %d was aborted: %s", decision.version, decision.reason)
        for rank in self._membership.joins("trainer"):
            message = Decide(version=decision.version, commit=False, reason=decision.reason)
            self._send(MemberId.trainer(rank), message)
        self._wants = {rank: version for rank, version in self._wants.items() if version != decision.version}
