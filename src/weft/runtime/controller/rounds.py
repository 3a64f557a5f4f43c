"""Rounds: members that have all joined get a plan, open transports and memory for it, and their parts of it.

    consumes      memberships, Opened, what the planner's thread has made
    produces      Open, SendPlan, ReceivePlan; Refused for members that do not match

A round begins when all members have joined, or, with a quorum, enough of those that are planned for, and no version is
under way. Belongs to the controller's thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from weft.core.plans.bound import busy_by_bytes
from weft.core.plans.plan import Plan
from weft.errors import LayoutError, PlanError, ProtocolError, TransportUnavailable, WeftError
from weft.runtime.compile.member_plans import MemberPlans
from weft.runtime.control.member_id import MemberId
from weft.runtime.control.messages import Asking, Join, Open, Opened, Refused, Writer
from weft.runtime.control.server import Server
from weft.runtime.controller.admission import check_magnitudes, check_opened
from weft.runtime.controller.journal import Journal
from weft.runtime.controller.membership import Member, Membership
from weft.runtime.controller.planner import MemberPart, Planned, Planner, Shipped
from weft.runtime.controller.slow_hosts import SlowHosts
from weft.runtime.controller.transfer import Transfer
from weft.runtime.controller.versions import Versions
from weft.transport.registry import Choice

log = logging.getLogger(__name__)


class RefuseMember(Protocol):
    """Removes one member that sent invalid messages, or does not match the others."""

    def __call__(self, member: MemberId, error: WeftError, *, is_settled: bool = False) -> None:
        """`is_settled`: a trainer that is removed is known not to write."""


class Rounds:
    """The plan in force, and the next one."""

    def __init__(
        self,
        membership: Membership,
        planner: Planner,
        server: Server,
        versions: Versions,
        *,
        rebalances: bool,
        journal: Journal,
        send: Callable[[MemberId, Any], None],
        refuse: RefuseMember,
    ) -> None:
        self._membership, self._planner, self._server, self._versions = membership, planner, server, versions
        self._rebalances, self._journal, self._send, self._refuse = rebalances, journal, send, refuse
        self.links: dict[tuple[int, int], Choice] = {}
        self.plan: Plan | None = None
        self.plan_digest = ""
        self.parts: MemberPlans | None = None
        self._must_plan = False
        self.plan_s, self.ship_s, self._planned_at = 0.0, 0.0, 0.0
        self.planned = threading.Event()
        """Set while all members have their part of the plan in force."""
        self.slow_hosts = SlowHosts()

    @property
    def link_counts(self) -> dict[str, int]:
        """`transport (reason)` and how many links use it; for observers on any thread."""
        return dict(Counter(f"{choice.transport} ({choice.reason})" for choice in self.links.copy().values()))

    @property
    def status(self) -> str:
        """What has to happen before versions can be written."""
        return self._planner.status or self._membership.obstacle

    def plan_again(self) -> None:
        """The members have changed: a plan that is being made is for the previous ones."""
        self._must_plan = True
        self._planner.give_up()

    def joined(self, join: Join) -> None:
        """A member has joined: another round begins if it can take part."""
        if self.parts is not None and self.parts.is_for(join):
            self._membership.recognise([join.member])
        self.look_at_members()
        self.plan_if_possible()

    def look_at_members(self) -> None:
        """A member has joined, or is gone: the round goes on if it is as good as another one."""
        if self._membership.needs_round:
            self.plan_again()

    def plan_if_possible(self) -> None:
        """When enough members have joined and no version is under way: let them open transports, for a new plan, or
        for their old parts of the plan in force."""
        who = self._membership
        if not self._must_plan or who.attendance.missing or not (who.is_complete or who.needs_round):
            return
        self._versions.retire()
        if not self._versions.is_idle or not self._versions.rebuild(self._refuse):
            return
        self._must_plan = False
        who.begin_round()
        self.slow_hosts.begin()
        if not who.is_complete:
            self._ask_to_open()
            return
        joins = self._membership.joins("trainer"), self._membership.joins("engine")
        self._planner.plan(*joins, speeds=self.slow_hosts.planned)

    def take_planned(self) -> None:
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
        self.plan, self.plan_digest, self.parts = planned.plan, planned.digest, planned.parts
        self.links, self.plan_s = planned.links, planned.plan_s
        self._versions.parts = planned.parts
        self._membership.recognise(self._membership.members)
        self._ask_to_open()

    def _ask_to_open(self) -> None:
        """Those that take part in this round open what they need for their parts of the plan."""
        parts, self._planned_at = self.parts, time.monotonic()
        assert parts is not None
        self._membership.use(self.links)
        for known in self._membership.taking_part:
            transports = sorted(set(known.transports.values()))
            asking = parts.asking(known.join.rank) if known.join.side == "trainer" else None
            message = Open(
                round=self._membership.round,
                transports=transports,
                through_host=parts.through_host,
                is_near=known.join.place.host in parts.engine_hosts,
                asking=self._asking(asking),
            )
            if known.join.side == "engine":
                message = Open(
                    round=self._membership.round,
                    transports=transports,
                    through_host=parts.through_host,
                    writers=self._writers_of(known),
                    settled=sorted(self._membership.settled),
                    abandoned=known.join.rank in self._membership.abandoned,
                    landing_bytes=parts.opening(known.join.rank).landing_bytes,
                    patch_bytes=parts.opening(known.join.rank).patch_bytes,
                )
            self._send(known.member, message)

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

    def opened(self, known: Member, message: Opened) -> None:
        """A member has opened what it was asked to; when all have, they get their parts of the plan."""
        is_asked = message.round == self._membership.round and self._membership.takes_part(known.member)
        if not is_asked or self._planner.is_busy:
            return  # it belongs to an earlier round, or was not requested
        assert self.parts is not None
        if known.join.rank in self._membership.open_ranks(known.join.side):
            raise ProtocolError(f"{known.member} has opened its memory twice")
        needed = self.parts.opening(known.join.rank) if known.join.side == "engine" else None
        check_opened(known.join, message, set(known.transports.values()), needed)
        if known.join.side == "trainer":
            is_asked, has_keys = bool(self.parts.asking(known.join.rank)), self._server.has_keys
            check_magnitudes(known.join.rank, message, is_asked=is_asked, has_keys=has_keys)
        self._membership.open(known, message)
        if self._membership.has_opened:
            self._planner.ship(self.parts, self._membership.opened("trainer"), self._membership.opened("engine"))

    def _begin_round(self) -> None:
        """All that take part have opened, and were sent their parts of the plan."""
        who, plan = self._membership, self.plan
        assert plan is not None
        who.complete_round()
        self.ship_s = time.monotonic() - self._planned_at
        if who.is_complete:
            self.planned.set()
        log.info("plan %s: %d bytes per version", self.plan_digest[:16], plan.total_bytes)
        self._record_plan()
        for link, count in self.link_counts.items():
            log.info("%d links: %s", count, link)
        for line in who.hosts():
            log.info("%s", line)
        self._versions.answer_trainers()

    def _record_plan(self) -> None:
        """The plan in force, for those who read the journal."""
        if self.plan is None or self.parts is None or not self._journal.is_open:
            return
        self._journal.write(
            plan=self.plan_digest,
            bytes=self.plan.total_bytes,
            writes=self.parts.num_writes,
            plan_s=round(self.plan_s, 6),
            ship_s=round(self.ship_s, 6),
            wire_s=busy_by_bytes(self.plan),
            links=_link_facts(self.plan, self.links),
        )

    def _refuse_misfits(self, error: WeftError) -> None:
        """Members do not match: those that differ from the others are removed; all, if these are not known."""
        named = error.members if isinstance(error, LayoutError | TransportUnavailable) else ()
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
            self._membership.settled.add(known.incarnation)  # no version is under way
            self._journal.write(member=str(member), state="lost", reason=f"was refused: {error}")
        self._membership.remove_all()
        self._planner.give_up()
        self._versions.forget_members()

    def look_at_rates(self, transfer: Transfer) -> None:
        """Which hosts carried less than they report; plan around them, if that was asked for."""
        if self.slow_hosts.look(transfer.links, self._membership.members) and self._rebalances:
            log.warning("planning again for these rates")
            self.slow_hosts.plan_for_found()
            self.plan_again()


def _link_facts(plan: Plan, links: Mapping[tuple[int, int], Choice]) -> list[tuple[int, int, int, str, float]]:
    """Trainer, engine rank, bytes, transport, and the rate the slower of their NICs allows; 0 inside a host."""
    topology, moved = plan.topology, plan.pair_bytes
    out = topology.port_rate(topology.port_of(topology.trainer_device))
    into = topology.port_rate(topology.port_of(topology.engine_device))
    limit = np.where(topology.is_local, 0.0, np.minimum(out[:, None], into[None, :]))
    return [
        (
            int(trainer),
            int(engine),
            int(moved[trainer, engine]),
            links[trainer, engine].transport,
            float(limit[trainer, engine]),
        )
        for trainer, engine in zip(*np.nonzero(moved), strict=True)
    ]
