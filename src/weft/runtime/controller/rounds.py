"""Rounds: members that have all joined get a plan, open transports and memory for it, and their parts of it.

    consumes      complete memberships, Opened, what the planner's thread has made
    produces      Open, SendPlan, ReceivePlan; Refused for members that do not match

A round begins when all members have joined and no version is under way. It ends without engines that are lost after
they were asked to open, if enough are left for versions. Belongs to the controller's thread.
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
from weft.runtime.control.messages import Asking, Open, Opened, Refused, Writer
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

    def plan_if_possible(self) -> None:
        """When all members have joined and no version is under way: let them open transports, for a new plan."""
        if not self._must_plan or not self._membership.is_complete:
            return
        self._versions.retire()
        if not self._versions.is_idle or not self._versions.rebuild(self._refuse):
            return
        self._must_plan = False
        self._membership.begin_round()
        self.slow_hosts.begin()
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
        self.links, self._planned_at = planned.links, time.monotonic()
        self._versions.parts = planned.parts
        self.plan_s = planned.plan_s
        self._membership.use(planned.links)
        engine_hosts = {join.place.host for join in self._membership.joins("engine").values()}
        for member, known in self._membership.members.items():
            transports = sorted(set(known.transports.values()))
            asking = planned.parts.asking(known.join.rank) if known.join.side == "trainer" else None
            message = Open(
                round=self._membership.round,
                transports=transports,
                through_host=planned.parts.through_host,
                is_near=known.join.place.host in engine_hosts,
                asking=self._asking(asking),
            )
            if known.join.side == "engine":
                message = Open(
                    round=self._membership.round,
                    transports=transports,
                    through_host=planned.parts.through_host,
                    writers=self._writers_of(known),
                    settled=sorted(self._membership.settled),
                    abandoned=known.join.rank in self._membership.abandoned,
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

    def opened(self, known: Member, message: Opened) -> None:
        """A member has opened what it was asked to."""
        is_asked = message.round == self._membership.round and self._membership.was_asked(known)
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
        self.ship_if_possible()

    def ship_if_possible(self) -> None:
        """When all have opened that are left, they get their parts of the plan."""
        who = self._membership
        is_over = who.rest_has_opened and who.can_end_round(needed_engines=self._versions.needed_engines)
        if is_over and self.parts is not None and not self._planner.is_busy:
            self._planner.ship(self.parts, who.opened("trainer"), who.opened("engine"))

    def _begin_round(self) -> None:
        """Members have opened, and were sent their parts of the plan."""
        who, plan = self._membership, self.plan
        assert plan is not None
        who.has_plan = True
        self.ship_s = time.monotonic() - self._planned_at
        if who.has_opened:
            who.settled.clear()  # engines have heard of them
            who.abandoned.clear()
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
