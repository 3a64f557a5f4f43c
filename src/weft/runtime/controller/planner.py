"""Planning on a thread of its own, while the controller's loop keeps answering members.

    consumes      what members reported when they joined, and what they have opened
    produces      Planned; later every member's part, and Shipped after the last
    waits for     something to do                             unblocked by   `plan`, `ship`, `close`

One thread works on one job at a time. Results wait until the loop takes them; those of a job that was given up because
a member joined or left are discarded. A plan is kept: members that return with the same weights in the same place get
their old parts, and nothing is planned again.

    planner = Planner(planning, settings, ranks_per_engine=8, wake=server.wake)
    planner.plan(trainers, engines)         # returns at once
    planner.take()                          # None, None, …, Planned(…)
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from weft.config import TransferSettings
from weft.core.plans.plan import Plan
from weft.errors import PlanError, WeftError
from weft.runtime.compile.member_plans import MemberPlans
from weft.runtime.control.held import forget_names
from weft.runtime.control.member_id import MemberId
from weft.runtime.control.messages import Join, Opened, ReceivePlan, SendPlan
from weft.runtime.controller.membership import choose_links
from weft.runtime.controller.planning import Planning
from weft.runtime.memory import trim_heap
from weft.transport.registry import Choice

log = logging.getLogger(__name__)
Joins = tuple[Mapping[int, Join], Mapping[int, Join]]
"""Trainers and engines, by rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan, and what follows from it for the members it was made for."""

    links: dict[tuple[int, int], Choice]
    plan: Plan
    digest: str
    parts: MemberPlans
    plan_s: float
    """How long it took to make."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberPart:
    """One member's part of the plan."""

    member: MemberId
    message: SendPlan | ReceivePlan


@dataclass(frozen=True, slots=True)
class Shipped:
    """Every member's part was made."""


Result = Planned | MemberPart | Shipped | WeftError


class Planner:
    """Makes plans and members' parts of them, on a thread of its own. Used by the controller's thread."""

    def __init__(
        self, planning: Planning, settings: TransferSettings, *, ranks_per_engine: int, wake: Callable[[], None]
    ) -> None:
        """`wake` is called whenever there is something to take."""
        self._planning, self._settings, self._ranks_per_engine = planning, settings, ranks_per_engine
        self._wake = wake
        self._jobs: queue.SimpleQueue[tuple[int, Iterator[Result]] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[int, Result]] = queue.SimpleQueue()
        self._number = 0
        """Number of the job whose results count."""
        self._what, self._began = "", 0.0
        self._kept: tuple[bytes, Planned] | None = None
        self.num_plans = 0
        """Plans that were made."""
        self._thread = threading.Thread(target=self._run, name="weft-planner", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether something is being made."""
        return bool(self._what)

    @property
    def status(self) -> str:
        """What is being done, and for how long; empty if nothing is."""
        return f"{self._what}, {time.monotonic() - self._began:.0f} s so far" if self._what else ""

    def plan(
        self,
        trainers: Mapping[int, Join],
        engines: Mapping[int, Join],
        *,
        speeds: Mapping[str, float] | None = None,
    ) -> None:
        """Plan for these members; the result is a Planned, or an error. `speeds`: of hosts that are slow."""
        num_shards = sum(len(join.held.table) for side in (trainers, engines) for join in side.values())
        forget_names()
        self._begin(f"planning: {num_shards:,} shards", self._plan((trainers, engines), dict(speeds or {})))

    def ship(self, parts: MemberPlans, trainers: Mapping[int, Opened], engines: Mapping[int, Opened]) -> None:
        """Make the parts of all members, from what they have opened."""
        self._begin(f"cutting the plan for {len(trainers) + len(engines)} members", _ship(parts, trainers, engines))

    def give_up(self) -> None:
        """Discard the job under way."""
        self._number += 1
        self._what = ""

    def take(self) -> Result | None:
        """The next result of the job under way, if there is one."""
        while True:
            try:
                number, result = self._results.get_nowait()
            except queue.Empty:
                return None
            if number == self._number:
                if not isinstance(result, MemberPart):
                    self._what = ""
                return result

    def close(self) -> None:
        """Stop soon; what is being made is not waited for."""
        self.give_up()
        self._jobs.put(None)

    def _begin(self, what: str, job: Iterator[Result]) -> None:
        self._number += 1
        self._what, self._began = what, time.monotonic()
        log.info("%s", what)
        self._jobs.put((self._number, job))

    # On the planner's thread

    def _run(self) -> None:
        while (begun := self._jobs.get()) is not None:
            with _uncollected():
                self._work_on(*begun)
            del begun
            trim_heap()

    def _work_on(self, number: int, job: Iterator[Result]) -> None:
        """A job to its end, unless it is given up."""
        while number == self._number and (result := _next(job)) is not None:
            self._results.put((number, result))
            self._wake()

    def _plan(self, joins: Joins, speeds: Mapping[str, float]) -> Iterator[Result]:
        """One Planned: the previous one if the members are the same."""
        key = _fingerprint(joins, speeds)
        if self._kept is not None and self._kept[0] == key:
            yield self._kept[1]
            return
        began = time.monotonic()
        trainers, engines = joins
        links = choose_links(trainers, engines, self._settings)
        plan, digest = self._planning.plan(trainers, engines, ranks_per_engine=self._ranks_per_engine, speeds=speeds)
        transports = {link: choice.transport for link, choice in links.items()}
        parts = MemberPlans(plan, digest, joins, transports, self._settings)
        planned = Planned(links=links, plan=plan, digest=digest, parts=parts, plan_s=time.monotonic() - began)
        self._kept = key, planned
        self.num_plans += 1
        yield planned


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Without the cyclic garbage collector: it stops every thread while it scans a plan's many objects, which took
    more than two seconds for a million shards. Planning makes hardly any cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _next(job: Iterator[Result]) -> Result | None:
    """The next result of a job; errors are results."""
    try:
        return next(job, None)
    except WeftError as error:
        return error
    except Exception as error:  # a bug in weft: no member is to blame
        log.exception("internal error while planning")
        return PlanError(f"{type(error).__name__} while planning: {error}")


def _ship(parts: MemberPlans, trainers: Mapping[int, Opened], engines: Mapping[int, Opened]) -> Iterator[Result]:
    """Parts in rank order; engines first, because they must know what comes."""
    for rank in engines:
        yield MemberPart(member=MemberId.engine(rank), message=parts.receive_plan(rank, trainers))
    for rank in trainers:
        yield MemberPart(member=MemberId.trainer(rank), message=parts.send_plan(rank, engines, trainers))
    yield Shipped()


def _fingerprint(joins: Joins, speeds: Mapping[str, float]) -> bytes:
    """What a plan depends on: the weights members hold, where they are, and which hosts are slow."""
    encoder, found = msgspec.msgpack.Encoder(), hashlib.blake2b(digest_size=16)
    found.update(encoder.encode(sorted(speeds.items())))
    for side in joins:
        for rank, join in side.items():
            facts: list[Any] = [rank, join.held, join.place]
            found.update(encoder.encode(facts))
    return found.digest()
