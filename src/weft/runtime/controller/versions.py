"""Versions, from the first trainer's wish until every engine serves them: who may write, what is decided, who was told.

    consumes      Want, Written, Stopped, Reopened, At, Paused, Ready, Failed, Committed, and members that are lost
    produces      Reconnect, Expect, Go, LeftOut, Verify, Boundary, Decide

A version is open from the first Want until every engine has committed it, or until it was aborted and every trainer
that was writing has stopped: only then may the next one be written. What is decided follows from `core/version.py`.
Belongs to the controller's thread.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.config import DeltaPolicy, DigestPolicy, ReceiverMode, TransferSettings
from weft.core.version import Decision, VersionLedger
from weft.errors import ProtocolError, VersionError, WeftError
from weft.runtime.compile.member_plans import MemberPlans, Owed
from weft.runtime.control.member_id import MemberId
from weft.runtime.control.messages import (
    STEPS_AHEAD,
    Boundary,
    Decide,
    Expect,
    Go,
    Join,
    LeftOut,
    Reconnect,
    Stopped,
    Verify,
    Written,
)
from weft.runtime.controller.admission import check_written, claim, unbelievable
from weft.runtime.controller.commits import Commits
from weft.runtime.controller.membership import Member, Membership
from weft.runtime.controller.transfer import Transfer
from weft.transport.base import Endpoint

log = logging.getLogger(__name__)
Refuse = Callable[[MemberId, WeftError], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What versions need of the controller."""

    send: Callable[[MemberId, Any], None]
    lose: Callable[[MemberId, str], None]
    """A member is gone, and why."""
    give_up: Callable[[MemberId, str], None]
    """The same for a member whose thread does not respond: it may join again when it does."""
    next_round: Callable[[], None]
    """No version is under way: members may get another plan."""
    served: Callable[[Transfer], None]
    """Every engine serves a version."""
    hurry: Callable[[bool], None]
    """Whether messages are expected soon."""


class Versions:
    """All versions of a controller, one after the other."""

    def __init__(
        self,
        membership: Membership,
        settings: TransferSettings,
        ledger: VersionLedger,
        *,
        needed_engines: int,
        surroundings: Surroundings,
    ) -> None:
        """`needed_engines`: how many a version needs."""
        self._membership, self._settings, self._ledger = membership, settings, ledger
        self.needed_engines = needed_engines
        around = surroundings
        self._send, self._lose, self._give_up = around.send, around.lose, around.give_up
        self._next_round, self._served, self._hurry = around.next_round, around.served, around.hurry
        self.parts: MemberPlans | None = None
        """The plan in force, or being opened."""
        self._is_rebuilt = False
        self._transfer: Transfer | None = None
        self._wants: dict[int, int] = {}
        self._holds: dict[int, int | None] = {}
        """Engine rank → the version it serves; None where its weights are torn."""
        self._commits = Commits()
        self._steps: dict[int, tuple[int, int]] = {}
        """Engine rank → the last version it learned of, and the step it had reached then."""
        self._committers: set[int] = set()
        """Engine ranks that commit the last version that was committed."""
        self.counts: Counter[str] = Counter()
        """Versions that were `committed` and `aborted`."""
        self.last_abort, self.last_version_s = "", 0.0
        self.last_wire_bytes, self.last_magnitude_bytes = 0, 0

    @property
    def is_idle(self) -> bool:
        """Whether none is under way."""
        return self._transfer is None

    @property
    def num_expected(self) -> int:
        """Members that must all have written, or verified, the version under way before anything is decided."""
        transfer = self._transfer
        if transfer is None or transfer.is_decided or transfer.unpaused:
            return 0
        return len(transfer.writers) or len(transfer.engines) - self._ledger.num_ready

    @property
    def committed(self) -> int | None:
        """The last one that was decided to be committed."""
        return self._ledger.committed

    @property
    def serves(self) -> dict[str, int | None]:
        """The version that each engine rank has reported; None where its weights are torn."""
        return {str(MemberId.engine(rank)): version for rank, version in sorted(self._holds.copy().items())}

    def joined(self, join: Join) -> None:
        """A member has joined, with what it knows of versions."""
        if join.pending is not None:
            self._commits.owe([join.rank], version=join.pending, since=time.monotonic())
        if join.side == "engine":
            self._holds[join.rank] = join.holds

    def welcomed(self, join: Join) -> None:
        """A member may be told now what was decided while it could not be reached."""
        if self._is_rebuilt and join.side == "engine":
            self._commit_what_is_ready(join)

    def _commit_what_is_ready(self, join: Join) -> None:
        """An engine rank that holds the last committed version and has not heard of the decision commits it, too."""
        committed = self._ledger.committed
        if committed is None or join.rank not in self._committers:
            return
        if join.ready != committed or join.pending is not None or join.last == committed:
            return
        self._commits.owe([join.rank], version=committed, since=time.monotonic())
        self._send(join.member, Decide(version=committed, commit=True))

    def lost(self, known: Member, how: str, *, is_settled: bool) -> None:
        """A member is gone: abort what depends on it. `is_settled`: a trainer that was not told to write does not."""
        rank, transfer = known.join.rank, self._transfer
        if known.join.side == "trainer":
            self._wants.pop(rank, None)
            if transfer is not None and rank in transfer.writers:
                transfer.writers.discard(rank)
                transfer.has_bytes = True
            elif is_settled:
                self._membership.settled.add(known.incarnation)
        else:
            self._commits.forget(rank)
            if transfer is not None:
                transfer.drop(self._membership.ranks_of(rank // self._membership.ranks_per_engine))
        self.apply(self._fail(known.join, how))
        self._leave_out(known.join, transfer)
        self.finish()
        self.answer_trainers()

    def forget_members(self) -> None:
        """All members are gone; one that rejoins reports what it has not committed."""
        self._wants.clear()
        self._commits.clear()

    def wanted(self, trainer: int, version: int) -> None:
        """A trainer wants to write a version."""
        self._ledger.check_number(version)
        self._wants[trainer] = version
        self.answer_trainers()

    def ready(self, rank: int, version: int) -> None:
        """An engine rank holds a complete version."""
        self.apply(self._ready(rank, version))

    def rebuild(self, refuse: Refuse) -> bool:
        """Once, when all have joined: if an earlier controller died, only the members know of versions.

        Before anything is opened: a version that some engines were told to commit is committed by the others as well.
        False if a member was removed because its report cannot be true.
        """
        if self._is_rebuilt:
            return True
        joins = {member: known.join for member, known in self._membership.members.items()}
        liars = unbelievable(joins)
        for member, what in liars.items():
            refuse(member, ProtocolError(what))
        if liars:
            return False
        self._is_rebuilt = True
        engines = self._membership.joins("engine")
        known = [version for join in engines.values() for version in (join.last, join.pending) if version is not None]
        committed = max(known, default=None)
        told = [version for join in joins.values() for version in (join.last, join.seen) if version is not None]
        self._ledger.restore(committed=committed, last_decided=max([*known, *told], default=-1))
        self._committers = {rank for rank in engines if self._can_commit(rank, committed, engines)}
        for join in engines.values():
            self._commit_what_is_ready(join)
        return True

    def _can_commit(self, rank: int, version: int | None, engines: Mapping[int, Join]) -> bool:
        """Whether all ranks of an engine hold a version: one that has dropped it was told that it is not committed."""
        ranks = self._membership.ranks_of(rank // self._membership.ranks_per_engine)
        return all(version in (each.last, each.pending, each.ready) for each in map(engines.__getitem__, ranks))

    def look_at_clocks(self) -> None:
        """What is too late."""
        self._drop_stalled()
        self._drop_writers_that_do_not_stop()
        transfer = self._transfer
        if transfer is not None and transfer.aborted is not None and time.monotonic() > transfer.abort_deadline:
            transfer.has_bytes = True  # must be assumed
            self._tell_engines(transfer, transfer.aborted)
        if transfer is not None and not transfer.is_decided and time.monotonic() > transfer.deadline:
            num_trainers, version_s = self._membership.num["trainer"], self._settings.version_s
            self.apply(self._ledger.timed_out(transfer.lateness(num_trainers=num_trainers, version_s=version_s)))

    def check_known(self, member: MemberId, version: int, what: str) -> None:
        """Raise if a member names a version that was not published and that it did not join with."""
        if 0 <= version <= self._ledger.last_decided:
            return
        newest = self._transfer.version if self._transfer is not None else -1
        told = claim(self._membership.members[member].join)
        if not 0 <= version <= max(newest, self._ledger.last_decided, -1 if told is None else told):
            raise ProtocolError(f"{member} {what} version {version}, which was not published")

    def _drop_stalled(self) -> None:
        """Engines that do not commit, pause or open must not hold up others: all ranks of such an engine must go."""
        now, settings = time.monotonic(), self._settings
        late = {
            rank: f"did not commit version {version} in {settings.commit_s:.1f} s"
            for rank, version in self._commits.owing_since(now - settings.commit_s).items()
        }
        transfer = self._transfer
        if transfer is not None and not transfer.is_decided and now > transfer.pause_deadline:
            why = f"did not pause for version {transfer.version} in {settings.pause_s:.1f} s"
            late |= dict.fromkeys(transfer.unpaused, why)
        late |= self._late_to_open(now)
        for rank, why in late.items():
            for other in self._membership.ranks_of(rank // self._membership.ranks_per_engine):
                self._give_up(
                    MemberId.engine(other), why if other == rank else f"shares an engine with rank {rank}, which {why}"
                )
        if self._commits.ranks:  # the version may no longer wait for them
            self.finish()
            self.answer_trainers()

    def _late_to_open(self, now: float) -> dict[int, str]:
        """Engine ranks whose thread does not open memory, if others can go on without them: nobody else gains from it,
        and an engine may take long to start."""
        late = self._membership.waiting_since(now - self._settings.pause_s)
        if not late or not self._membership.can_do_without(late):
            return {}
        return dict.fromkeys(late, f"waited {self._settings.pause_s:.1f} s for its engine's thread to open memory")

    def _drop_writers_that_do_not_stop(self) -> None:
        """After an abort, trainers say when they have stopped; one that does not must not hold up the next version."""
        transfer, stop_s = self._transfer, self._settings.version_s
        if transfer is None or not transfer.is_decided or time.monotonic() < transfer.decided_at + stop_s:
            return
        for trainer in sorted(transfer.writers):
            why = f"did not stop writing version {transfer.version} in {stop_s:.1f} s"
            self._lose(MemberId.trainer(trainer), why)

    def retire(self) -> None:
        """Forget a version that no member depends on any more."""
        transfer = self._transfer
        if transfer is not None and transfer.aborted is not None and not transfer.writers:
            self._tell_engines(transfer, transfer.aborted)
        if transfer is not None and transfer.is_decided and not transfer.writers and not self._waits_for_commits():
            self._transfer = None
            self._hurry(False)

    def answer_trainers(self) -> None:
        """Answer trainers that want to write, if the last version is finished."""
        self.retire()
        self._next_round()
        if not self._wants:
            return
        if not self._can_transfer():
            self._turn_away()
            return
        for trainer, version in sorted(self._wants.items()):
            transfer = self._transfer
            if transfer is None:
                if not self._waits_for_commits():
                    del self._wants[trainer]
                    self._open(trainer, version)
            elif version < transfer.version:
                del self._wants[trainer]
                self._refuse(
                    trainer, version, f"version {transfer.version} is under way; version numbers must increase"
                )
            elif version == transfer.version and not transfer.is_decided:
                del self._wants[trainer]  # all trainers are told to write it

    def _can_transfer(self) -> bool:
        """Whether every trainer, and enough engines, have their part of the current plan."""
        trainers = len(self._membership.open_ranks("trainer")) == self._membership.num["trainer"]
        return self._membership.has_plan and trainers and len(self._free_engines()) >= self.needed_engines

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
        lately = time.monotonic() - self._settings.beat_s
        return self._commits.owes_after(lately) or len(self._free_engines()) < self.needed_engines

    def _open(self, trainer: int, version: int) -> None:
        """Open the version that a trainer wants, for all trainers: each writes it when it has published it, too."""
        try:
            self._ledger.take_part(self._free_engines(), num_ranks=self._membership.ranks_per_engine)
            self._ledger.publish(trainer=trainer, version=version)
            for other in set(range(self._membership.num["trainer"])) - {trainer}:
                self._ledger.publish(trainer=other, version=version)
        except VersionError as error:
            self._refuse(trainer, version, str(error))
            return
        self._send_writers(self._begin(version))

    def _refuse(self, trainer: int, version: int, reason: str) -> None:
        """A trainer cannot write the version it wants."""
        self._send(MemberId.trainer(trainer), Decide(version=version, commit=False, reason=reason))

    def _begin(self, version: int) -> Transfer:
        ranks = {rank for engine in self._free_engines() for rank in self._membership.ranks_of(engine)}
        now = time.monotonic()
        self._transfer = Transfer(
            version=version,
            began=now,
            deadline=now + self._settings.version_s,
            engines=ranks,
            unpaused=set(ranks) if self._settings.mode is ReceiverMode.IN_PLACE else set(),
            pause_deadline=now + self._settings.pause_s,
            waiting=set(range(self._membership.num["trainer"])),
        )
        self._hurry(True)
        expect = Expect(version=version)
        for rank in sorted(ranks):
            self._send(MemberId.engine(rank), expect)
        return self._transfer

    def _send_writers(self, transfer: Transfer) -> None:
        if transfer.unpaused or transfer.is_decided:
            return
        if not transfer.waiting:
            return
        if transfer.go is None:
            engines = sorted(transfer.takers)
            transfer.told.update(engines)
            holds = [self._holds.get(rank) for rank in engines]
            transfer.go = Go(version=transfer.version, engines=engines, holds=holds, whole=transfer.is_second_round)
        for trainer in sorted(transfer.waiting):
            transfer.writers.add(trainer)
            self._send(MemberId.trainer(trainer), transfer.go)
        transfer.waiting.clear()

    def _turn_away(self) -> None:
        """While a member that is needed is lost, or waits, no version can be written: tell all trainers at once."""
        who, found = self._membership, self._membership.attendance
        needed = {member: f"{member} {who.lost[member]}" for member in found.missing if member in who.lost}
        obstacles = needed | who.blocked
        if not obstacles:
            return
        reason = ", ".join(obstacles[member] for member in sorted(obstacles))
        if needed and found.why:
            reason += f"; {found.why}"
        wants, self._wants = self._wants, {}
        for trainer, version in sorted(wants.items()):
            try:
                self._ledger.refuse(version, reason)
            except VersionError as error:  # far beyond the one that was refused before
                self._refuse(trainer, version, str(error))
            else:
                self._refuse(trainer, version, reason)

    def at(self, rank: int, version: int, step: int) -> None:
        """An engine rank reports its step; when all ranks of its engine have, they learn where to meet."""
        self._steps[rank] = version, step
        ranks = self._membership.ranks_of(rank // self._membership.ranks_per_engine)
        if all(self._steps.get(other, (None, 0))[0] == version for other in ranks):
            boundary = Boundary(version=version, step=max(self._steps[other][1] for other in ranks) + STEPS_AHEAD)
            for other in ranks:
                self._send(MemberId.engine(other), boundary)

    def paused(self, rank: int, version: int) -> None:
        """An engine rank stands still for a version in place."""
        transfer = self._transfer
        if transfer is not None and transfer.version == version:
            transfer.unpaused.discard(rank)
            self._send_writers(transfer)

    def written(self, trainer: int, message: Written) -> None:
        """A trainer has written all it owes."""
        version, transfer = message.version, self._transfer
        if transfer is None or transfer.version != version:
            self.check_known(MemberId.trainer(trainer), version, "has written")
            return  # it had already ended
        if trainer not in transfer.writers:
            if transfer.is_decided:
                return  # it was lost while it wrote, which aborted the version, and has joined again
            raise ProtocolError(f"trainer {trainer} has written version {version} without being told to")
        transfer.num_met += check_written(trainer, message, transfer.asked, self._owed(trainer, transfer))
        transfer.writers.discard(trainer)
        transfer.finished.add(trainer)
        transfer.has_bytes = True
        transfer.reported.append((trainer, message.reports))
        transfer.magnitude_bytes += message.magnitude_bytes
        if not transfer.is_decided:
            self._finish_writing(transfer, trainer, message)
        if transfer.is_decided:
            self.answer_trainers()

    def _finish_writing(self, transfer: Transfer, trainer: int, message: Written) -> None:
        """A trainer has written; engines it could not reach are lost, and the others verify when all have written."""
        is_written = self._ledger.written(trainer=trainer, version=transfer.version)
        known = set(transfer.dropped)  # they may have joined again
        for loss in message.losses:
            if loss.engine in known:
                continue
            self._lose(MemberId.engine(loss.engine), f"could not be written to by trainer {trainer}: {loss.reason}")
        for rank in message.whole:
            transfer.whole.update(self._membership.ranks_of(rank // self._membership.ranks_per_engine))
        if not is_written or transfer.is_decided:
            return
        if not transfer.is_second_round and transfer.whole & transfer.takers:
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

    def _owed(self, trainer: int, transfer: Transfer) -> Owed | None:
        """The bytes a trainer writes to each engine rank; None where patches, of any length, are written."""
        if self.parts is None or (self._settings.delta is DeltaPolicy.ON and not transfer.is_second_round):
            return None
        return self.parts.owed(trainer)

    def stopped(self, member: MemberId, join: Join, message: Stopped) -> None:
        """A trainer is not writing a version that it was told to write: stop waiting for it."""
        version, transfer = message.version, self._transfer
        if transfer is None or transfer.version != version:
            self.check_known(member, version, "has stopped")
            return
        transfer.writers.discard(join.rank)
        transfer.has_bytes |= message.has_written
        self._membership.abandoned.update(message.abandoned)
        if not transfer.is_decided:
            log.warning("%s stopped writing version %d: %s", member, version, message.reason)
            self.apply(self._fail(join, message.reason))
        self.answer_trainers()

    def reopened(self, endpoints: Sequence[Endpoint]) -> None:
        """Engine ranks hear where credits reach a trainer now, before they hear of another version."""
        if self.parts is None or not self.parts.has_windows:
            return
        for rank in self._membership.joins("engine"):
            for endpoint in endpoints:
                self._send(MemberId.engine(rank), Reconnect(endpoint=endpoint))

    def _verify(self, transfer: Transfer) -> None:
        """Everything is written: let engines verify it, or, where that is not required, trust the writers' reports."""
        if self._takes_their_word(transfer):
            for rank in sorted(transfer.engines):
                self.apply(self._ready(rank, transfer.version))
            return
        for rank, reports in transfer.links.by_engine(sorted(transfer.engines - transfer.dropped)).items():
            self._send(MemberId.engine(rank), Verify(version=transfer.version, reports=reports))

    def _takes_their_word(self, transfer: Transfer) -> bool:
        """Without a digest, engines could only count again what writers report as landed."""
        settings, parts = self._settings, self.parts
        if settings.digest is DigestPolicy.ON or settings.delta is DeltaPolicy.ON or parts is None:
            return False
        if parts.has_windows:
            return False  # what was written has to be drained
        if self.needed_engines < self._membership.num["engine"] // self._membership.ranks_per_engine:
            return False  # with a quorum, the first ready engines would leave the others behind
        return transfer.num_met == self._membership.num["trainer"] or transfer.is_sent_whole(parts.wire_bytes)

    def failed(self, member: MemberId, join: Join, version: int, reason: str) -> None:
        """A member cannot do its part of a version."""
        transfer = self._transfer
        if join.side == "engine" and (transfer is None or transfer.is_decided):
            if self._commits.done(join.rank, version):  # it will not commit what was decided
                log.warning("%s could not commit version %d: %s", member, version, reason)
                self._holds[join.rank] = None
            self.finish()
        if transfer is None or transfer.version != version or transfer.is_decided:
            if join.side == "trainer" and self._wants.get(join.rank) == version:
                del self._wants[join.rank]
            self.answer_trainers()  # the next version may have waited for this
            return
        log.warning("%s failed version %d: %s", member, version, reason)
        if join.side == "trainer":  # a trainer that is writing reports when it has stopped
            transfer.waiting.discard(join.rank)
        else:
            transfer.drop(self._membership.ranks_of(join.rank // self._membership.ranks_per_engine))
        self.apply(self._fail(join, reason))
        self._leave_out(join, transfer)
        self.answer_trainers()

    def _leave_out(self, join: Join, transfer: Transfer | None) -> None:
        """A version goes on without an engine rank: trainers wait neither for its pause nor for room in its window."""
        if join.side == "trainer" or transfer is None or transfer.is_decided:
            return
        for trainer in sorted(transfer.writers):
            self._send(MemberId.trainer(trainer), LeftOut(version=transfer.version, engines=[join.rank]))
        self._send_writers(transfer)

    def _fail(self, join: Join, reason: str) -> Decision | None:
        if join.side == "trainer":
            return self._ledger.trainer_failed(join.rank, reason)
        return self._ledger.engine_failed(join.rank // self._membership.ranks_per_engine, f"rank {join.rank}: {reason}")

    def committed_by(self, rank: int, version: int) -> None:
        """An engine rank serves a version."""
        if not self._commits.done(rank, version):
            return  # it reported this when it joined
        log.debug("engine %d serves version %d", rank, version)
        self._holds[rank] = version
        if not self._waits_for_commits():
            self.finish()
            self.answer_trainers()

    def finish(self) -> None:
        """When every engine serves a version, tell the trainers."""
        transfer = self._transfer
        if transfer is None or not transfer.is_commit or self._waits_for_commits():
            return
        transfer.is_commit = False
        self.counts["committed"] += 1
        self.last_version_s = time.monotonic() - transfer.began
        self.last_wire_bytes, self.last_magnitude_bytes = transfer.links.total_bytes, transfer.magnitude_bytes
        log.info("version %d is served everywhere (%.1f ms)", transfer.version, self.last_version_s * 1e3)
        decide = Decide(version=transfer.version, commit=True)
        for rank in self._membership.joins("trainer"):
            self._send(MemberId.trainer(rank), decide)
        self._served(transfer)

    def apply(self, decision: Decision | None) -> None:
        """Tell all members what was decided."""
        transfer = self._transfer
        if decision is None or transfer is None or transfer.version != decision.version:
            return
        transfer.is_decided, transfer.is_commit, transfer.decided_at = True, decision.commit, time.monotonic()
        commits = {rank for engine in decision.engines for rank in self._membership.ranks_of(engine)}
        told = commits & set(self._membership.joins("engine"))
        self._commits.owe(told, version=decision.version, since=time.monotonic())
        if decision.commit:
            self._committers = commits
        if decision.commit or not any(self._is_live(transfer, rank) for rank in transfer.engines):
            self._tell_engines(transfer, decision)
        else:  # whether engines are torn is known once the writers have stopped, which they do when they hear of it
            transfer.aborted = decision
            transfer.abort_deadline = time.monotonic() + self._settings.silence_s
        if decision.commit:
            self.finish()
        else:
            self._abort(decision)
        self.answer_trainers()

    def _is_live(self, transfer: Transfer, rank: int) -> bool:
        """Whether the version reaches the live weights of an engine rank before it is decided."""
        second = self._settings.mode is ReceiverMode.PATCH and transfer.is_second_round
        return self._settings.mode is ReceiverMode.IN_PLACE or (second and rank in transfer.whole)

    def _tell_engines(self, transfer: Transfer, decision: Decision) -> None:
        """What was decided, and whether engines that do not commit hold torn weights."""
        transfer.aborted = None
        commits = {rank for engine in decision.engines for rank in self._membership.ranks_of(engine)}
        commit = Decide(version=decision.version, commit=True)
        for rank in transfer.engines & set(self._membership.joins("engine")):
            message = commit
            if rank not in commits:
                is_torn = transfer.has_bytes and rank in transfer.told and self._is_live(transfer, rank)
                if is_torn:
                    self._holds[rank] = None
                reason = decision.reason or "its engine was dropped"
                message = Decide(version=decision.version, commit=False, torn=is_torn, reason=reason)
            self._send(MemberId.engine(rank), message)

    def _abort(self, decision: Decision) -> None:
        self.counts["aborted"] += 1
        self.last_abort = decision.reason
        log.warning("version %d was aborted: %s", decision.version, decision.reason)
        abort = Decide(version=decision.version, commit=False, reason=decision.reason)
        for rank in self._membership.joins("trainer"):
            self._send(MemberId.trainer(rank), abort)
        self._wants = {rank: version for rank, version in self._wants.items() if version != decision.version}

    def _ready(self, rank: int, version: int) -> Decision | None:
        """An engine rank holds a complete version; returns what that decides, if anything."""
        engine, number = divmod(rank, self._membership.ranks_per_engine)
        return self._ledger.ready(engine=engine, rank=number, version=version)
