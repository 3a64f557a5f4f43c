"""The controller: knows the members, chooses their transports, makes the plan, and decides every version once, for all.

    consumes      Join, Opened, Blocked, Want, Written, Stopped, At, Paused, Ready, Failed, Committed, Beat, Leave
    produces      Welcome, Refused, Unknown, Open, CutOff, SendPlan, ReceivePlan, Expect, Go, Verify, Boundary,
                  Decide, Alive
    waits for     messages, a tenth of a second at most                  unblocked by   the network, `close`

One thread owns the socket and all state; nothing is shared. This file has its loop: who joins, who is lost, and which
message goes where. `rounds` gives members their plan, `versions` decides what is written and served. A restarted
controller learns from members, as they rejoin, which versions were decided. Members are incarnations: an older process
of a rank never replaces a newer one. Everything a member says is checked (`admission`); a member that fails a check is
refused, and no other.

    with Controller(num_trainers=2, num_engine_ranks=2) as controller:
        Sender(controller.address, rank=0, …)
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from weft.config import TransferSettings
from weft.core.assign import Policy
from weft.core.plans.plan import Plan
from weft.core.topology import Cluster
from weft.core.version import CommitPolicy, VersionLedger
from weft.errors import ProtocolError, VersionError, WeftError
from weft.runtime.control.channel import BURST_SPIN_S, SPIN_S, Invalid
from weft.runtime.control.member_id import MemberId
from weft.runtime.control.messages import (
    PROTOCOL,
    Alive,
    At,
    Beat,
    Blocked,
    Committed,
    CutOff,
    Failed,
    Join,
    Leave,
    Opened,
    Paused,
    Ready,
    Refused,
    Reopened,
    Stopped,
    ToController,
    Unknown,
    Want,
    Welcome,
    Written,
)
from weft.runtime.control.security import Security, server_keys
from weft.runtime.control.server import Server
from weft.runtime.controller.admission import (
    check_committed,
    check_endpoints,
    check_join,
    check_numbers,
    check_side,
    check_step,
    check_version,
)
from weft.runtime.controller.attendance import Numbers
from weft.runtime.controller.journal import Journal
from weft.runtime.controller.membership import Member, Membership
from weft.runtime.controller.planner import Planner
from weft.runtime.controller.planning import Planning
from weft.runtime.controller.rounds import Rounds
from weft.runtime.controller.timeline import Timelines
from weft.runtime.controller.transfer import Transfer
from weft.runtime.controller.versions import Surroundings, Versions

log = logging.getLogger(__name__)
POLL_S = 0.1
MAX_AT_ONCE = 1000
"""Messages handled before clocks are checked."""
MANY, GATHER_S = 32, 0.05
"""Where so many members must report before a version can go on, their reports are looked at together, this much later
at most."""


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
    serves: dict[str, int | None]
    """The version that each engine rank has reported; None where its weights are torn."""
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
    cpu_s: float
    """Processor time of its thread for messages other than heartbeats: reading, deciding, answering."""
    num_plans: int
    """Plans that were made."""
    plan_s: float
    """How long the last one took."""
    ship_s: float
    """How long it took from then until members had their parts."""
    writes_per_version: int
    """One-sided writes of a version that is sent whole."""
    slow_hosts: dict[str, float]
    """Hosts that carry less than they report, and what part of it; members are named, not hosts."""
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
        any_place: bool = False,
        rebalance: bool = False,
        events: Path | str | None = None,
        security: Security | None = None,
    ) -> None:
        """`commit_policy` and `quorum`: how many engines a version needs. `settings` are shipped to every member.

        `policy` says which trainer sends where several hold the same bytes; `topology`, a preset or a .toml file, what
        kind of hosts members are on. `ignore` are trainer tensors no engine has, by name or pattern (`visual.*`).
        `plan`, instead of these three: a plan, or the file of one, to follow; members that differ from it are refused.
        `any_place`: they may be on other hosts and GPUs than it says.
        `rebalance`: plan again when a host is found to carry less than it reports, so that others send what they can.
        `events`: a file to append a line to for every member, plan and version; `weft why`, `weft trace` and `weft
        dashboard` show it.
        `security`: its own key, `controller.key` by default, and the keys it admits; without it, `address` must be on
        loopback.
        """
        check_numbers(num_trainers=num_trainers, num_engine_ranks=num_engine_ranks, ranks_per_engine=ranks_per_engine)
        engines = dict.fromkeys(range(num_engine_ranks // ranks_per_engine), ranks_per_engine)
        ledger = VersionLedger(num_trainers=num_trainers, engines=engines, policy=commit_policy, quorum=quorum)
        numbers = Numbers(
            num_trainers=num_trainers,
            num_engine_ranks=num_engine_ranks,
            ranks_per_engine=ranks_per_engine,
            needed_engines=len(engines) if commit_policy is CommitPolicy.ALL else quorum,
        )
        self._membership = Membership(numbers)
        planning = Planning.of(
            policy=policy,
            topology=topology,
            ignore=ignore,
            plan=plan,
            any_place=any_place,
            rebalance=rebalance,
            transfer=(settings or TransferSettings()).paced(num_trainers + num_engine_ranks),
        )
        self._settings = planning.transfer
        planning.check_members(
            num_trainers=num_trainers, num_engine_ranks=num_engine_ranks, ranks_per_engine=ranks_per_engine
        )
        self._journal = Journal(None if events is None else Path(events))
        self._timelines = Timelines(self._journal)
        self._name = secrets.token_hex(8)
        self._next_look, self._num_beats, self._cpu_s = 0.0, 0, 0.0
        self._status = ""
        """What has to happen before versions can be written."""
        self._stalled: set[MemberId] = set()
        """Members given up because the engine's thread did not respond; they rejoin when it does."""
        self._unsendable: dict[str, str] = {}
        """Connections to which a message could not be sent, and why."""
        self._stop = threading.Event()
        keys = server_keys(security)
        self._server = Server(
            address, messages=ToController, protocol=PROTOCOL, objection=self._membership.objection, keys=keys
        )
        self.address = self._server.address
        self._planner = Planner(planning, self._settings, ranks_per_engine=ranks_per_engine, wake=self._server.wake)
        self._versions = Versions(
            self._membership,
            self._settings,
            ledger,
            needed_engines=numbers.needed_engines,
            surroundings=self._surroundings(),
        )
        self._rounds = Rounds(
            self._membership,
            self._planner,
            self._server,
            self._versions,
            rebalances=rebalance,
            journal=self._journal,
            send=self._send,
            refuse=self._refuse,
        )
        self._record_start()
        self._thread = threading.Thread(target=self._run, name="weft-controller", daemon=True)
        self._thread.start()

    def _record_start(self) -> None:
        """The first line of this controller: it is in the file when the controller can be used."""
        self._journal.write(
            controller=self._name,
            trainers=self._membership.num["trainer"],
            engine_ranks=self._membership.num["engine"],
            ranks_per_engine=self._membership.ranks_per_engine,
            mode=self._settings.mode,
            digest=self._settings.digest,
            delta=self._settings.delta,
        )
        self._journal.write_due()

    def _surroundings(self) -> Surroundings:
        """What versions need of this controller."""
        return Surroundings(
            send=self._send,
            lose=self._lose,
            give_up=self._give_up_stalled,
            next_round=self._next_round,
            served=self._served,
            hurry=self._hurry,
        )

    def _next_round(self) -> None:
        """No version is under way."""
        self._rounds.plan_if_possible()

    def _served(self, transfer: Transfer) -> None:
        """Every engine serves a version."""
        self._rounds.look_at_rates(transfer)

    def _hurry(self, is_soon: bool) -> None:
        """How long to poll before sleeping."""
        self._server.spin_s = BURST_SPIN_S if is_soon else SPIN_S

    @property
    def committed(self) -> int | None:
        """The last version that was decided to be committed."""
        return self._versions.committed

    def statistics(self) -> ControllerStatistics:
        """A snapshot, for observers in this process."""
        rounds, versions, plan = self._rounds, self._versions, self._rounds.plan
        return ControllerStatistics(
            members=tuple(map(str, sorted(self._membership.members.copy()))),
            lost={str(member): how for member, how in self._membership.lost.copy().items()},
            links=rounds.link_counts,
            plan_digest=rounds.plan_digest,
            bytes_per_version=plan.total_bytes if plan is not None else 0,
            committed=versions.committed,
            serves=versions.serves,
            num_committed=versions.counts["committed"],
            num_aborted=versions.counts["aborted"],
            last_abort=versions.last_abort,
            last_version_s=versions.last_version_s,
            last_wire_bytes=versions.last_wire_bytes,
            last_magnitude_bytes=versions.last_magnitude_bytes,
            num_beats=self._num_beats,
            cpu_s=self._cpu_s,
            num_plans=self._planner.num_plans,
            plan_s=rounds.plan_s,
            ship_s=rounds.ship_s,
            writes_per_version=0 if rounds.parts is None else rounds.parts.num_writes,
            slow_hosts=rounds.slow_hosts.by_members,
            channel=asdict(self._server.statistics()),
        )

    def wait_planned(self, timeout_s: float = 60.0) -> bool:
        """Wait until all members have joined and have their part of the plan; False if that takes too long."""
        return self._rounds.planned.wait(timeout_s)

    def close(self) -> None:
        """Stop; members notice its silence."""
        self._stop.set()
        self._thread.join(10.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._gather()
                for number in range(MAX_AT_ONCE):  # a member with unread messages is not silent: read before clocks
                    received = self._server.receive(0.0 if number else POLL_S)
                    if received is None:
                        break
                    self._handle_safely(received.sender, received.message)
                    if not isinstance(received.message, Beat):
                        self._cpu_s += time.thread_time() - received.thread_s
                self._journal.write_due()
                self._rounds.take_planned()
                self._look_at_clocks_safely()
        finally:
            self._planner.close()
            self._server.close()
            self._journal.close()

    def _gather(self) -> None:
        """While nothing can be done before all of many members have reported, let their reports come together."""
        num_expected = self._versions.num_expected
        if num_expected >= MANY:
            self._server.gather(num_expected, GATHER_S)

    def _send(self, member: MemberId, message: Any) -> None:
        """Send to a member, if it has joined."""
        known = self._membership.members.get(member)
        if known is None:
            return
        self._timelines.told(member, message)
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
        known = self._membership.behind(connection)
        if known is None:
            if not isinstance(message, Leave):
                self._turn_out(connection, self._membership.name_of(connection))
            return
        member, known.last_heard = known.member, time.monotonic()
        try:
            check_side(known.join.side, message)
            self._timelines.heard(member, message)
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
                self._num_beats += 1
                status = self._status or self._membership.left_out(member)
                self._send(member, Alive(controller=self._name, status=status))
            case Opened():
                self._rounds.opened(known, message)
            case Failed(version=version, reason=reason):
                check_version(version)
                self._versions.failed(member, known.join, version, reason)
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
                self._versions.wanted(rank, version)
            case Written():
                self._versions.written(rank, message)
            case Stopped():
                self._versions.stopped(member, known.join, message)
            case Reopened(endpoints=endpoints):
                check_endpoints(member, endpoints)
                self._versions.reopened(endpoints)

    def _engine_report(self, member: MemberId, known: Member, message: Any) -> None:
        rank = known.join.rank
        match message:
            case Blocked():
                self._membership.block(known, message)
                self._versions.answer_trainers()
            case At(version=version, step=step):
                self._versions.check_known(member, version, "is at a step of")
                check_step(step)
                self._versions.at(rank, version, step)
            case Paused(version=version):
                self._versions.check_known(member, version, "pauses for")
                self._versions.paused(rank, version)
            case Ready(version=version):
                self._versions.ready(rank, version)
            case Committed(version=version):
                self._versions.check_known(member, version, "serves")
                check_committed(rank, message, self._membership.num["trainer"])
                self._versions.committed_by(rank, version)

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

    def _look_at_clocks_safely(self) -> None:
        """A bug in what happens when time has passed does not stop the controller: members would get no answer."""
        try:
            self._look_at_clocks()
        except Exception:
            log.exception("internal error while looking at the clocks")

    def _look_at_clocks(self) -> None:
        """Ten times a second: what is too late, and what members should know."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + POLL_S
        self._status = self._rounds.status
        for connection in self._server.stuck(self._settings.silence_s):
            self._expel(connection, "does not read its messages")
        while self._unsendable:
            connection, reason = self._unsendable.popitem()
            self._expel(connection, f"cannot be sent its part of the plan: {reason}")
        for connection, reason in self._server.revoked().items():
            self._revoke(connection, reason)
        for member, silent_s in self._membership.silent_for(self._settings.silence_s).items():
            self._lose(member, f"has been silent for {silent_s:.1f} s")
        self._versions.look_at_clocks()

    def _give_up_stalled(self, member: MemberId, why: str) -> None:
        if member in self._membership.members:
            self._stalled.add(member)
            self._lose(member, why)

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
        self._membership.settled.discard(incarnation)
        self._membership.abandoned.update(join.abandoned)
        self._versions.joined(join)
        welcome = Welcome(
            controller=self._name,
            incarnation=incarnation,
            settings=self._settings,
            ranks_per_engine=self._membership.ranks_per_engine,
            num_trainers=self._membership.num["trainer"],
            records=self._journal.is_open,
        )
        self._send(member, welcome)
        self._versions.welcomed(join)
        self._journal.write(
            member=str(member), state="joined", host=join.place.host, device=join.place.device, served=join.last
        )
        log.info("%s joined (%d of %d)", member, len(self._membership.members), sum(self._membership.num.values()))
        self._rounds.joined(join)

    def _replace(self, member: MemberId, connection: str) -> None:
        """A member joins again: the same process, or a newer one in its place."""
        old = self._membership.members[member].connection
        self._lose(member, "joined again")
        if old != connection:
            self._server.send(old, Refused(reason=f"another process has joined as {member}"))

    def _lose(self, member: MemberId, how: str, *, is_settled: bool = True) -> None:
        """A member is gone: abort what depends on it, and plan again when it comes back.

        `is_settled`: whether a trainer that was not told to write is known not to.
        """
        known = self._membership.remove(member, how)
        if known is None:
            return
        log.warning("%s %s", member, how)
        self._journal.write(member=str(member), state="lost", reason=how)
        self._rounds.look_at_members()
        self._rounds.planned.clear()
        self._versions.lost(known, how, is_settled=is_settled)
