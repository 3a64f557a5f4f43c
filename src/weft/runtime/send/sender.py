"""The trainer rank's side: publish versions of its weights.

    with Sender("tcp://ctl:7070", rank=0, weights=weights) as sender:
        publication = sender.publish(version=1)      # returns at once
        publication.wait_released()                  # the weights may change again
        publication.wait_committed()                 # every engine serves version 1

consumes      versions from the trainer, plans and permissions from the controller
produces      one-sided writes; Written or, where it could not write everything, Failed, Reopened and then Stopped
waits for     Go, on the writer thread                    unblocked by   Go, Decide, a lost controller, deadlines
              room in engines' windows, on it, too        unblocked by   engines, LeftOut, the same

Publications are written one after the other, each when the controller allows it: when every engine has committed the
previous one.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from weft.config import DeltaPolicy
from weft.devices import device_work
from weft.errors import ProtocolError, TransferTimeout, VersionError, WeftError
from weft.events import Event, busy_seconds
from weft.runtime.control.member import ControlThread, Duties
from weft.runtime.control.messages import (
    Decide,
    Failed,
    Go,
    Join,
    LeftOut,
    Loss,
    Open,
    Opened,
    Reopened,
    SendPlan,
    Stopped,
    Want,
    Written,
)
from weft.runtime.control.security import Security, client_keys
from weft.runtime.control.write_reports import WriteReport, WriteReports
from weft.runtime.send.early_turn import EarlyTurn, WriteTurn
from weft.runtime.send.exchange import Exchange
from weft.runtime.send.job import Job, Parcel, Sent
from weft.runtime.send.mirror import Mirror
from weft.runtime.send.pipeline import run
from weft.runtime.send.program import SendProgram
from weft.runtime.send.stages import RunStages, send_version, send_whole
from weft.runtime.transports import OpenTransports
from weft.runtime.weights import Weights
from weft.transport.base import Transport
from weft.transport.host import ProcessIdentity

log = logging.getLogger(__name__)
_MASK = (1 << 64) - 1
JOIN_S = 60.0
DRAIN_S = 120.0
ASK_S = 0.01
"""Rank n asks for its turn n times this after publishing: by then, a lower rank's request has usually been answered."""


class Publication:
    """The sender's side of one version."""

    def __init__(self, version: int, why_late: Callable[[], str], queued: Callable[[], None]) -> None:
        """`why_late`: the end of the error of callers that have waited too long. `queued`: waits for the weights."""
        self.version, self._why_late, self._queued = version, why_late, queued
        self._is_awaited = False
        """Whether a caller waits until it is decided, and does nothing else."""
        self._released = threading.Event()
        self._ended = threading.Event()
        """Set when nothing is being written any more; patches release the weights before that."""
        self._decided = threading.Event()
        self._error: WeftError | None = None
        self._published_at = time.monotonic()
        self._go: Go | None = None
        self._go_at = 0.0
        self._may_write = threading.Event()
        """Set when it may be written, or no longer needs to be."""
        self.write_s: float | None = None
        """How long the writes took, once they are done."""
        self._jobs: list[Job] = []
        self._is_closing = False
        self._lock = threading.Lock()

    def _accept(self, go: Go, at: float) -> bool:
        """It may be written since a moment; False if it was given up before."""
        with self._lock:
            if self._decided.is_set():
                return False
            self._go, self._go_at = go, at
            self._may_write.set()
        return True

    @property
    def _late_s(self) -> float:
        """How long after it might have been written it was published."""
        return max(self._published_at - self._go_at, 0.0)

    def _next_round(self, timeout_s: float) -> Go | None:
        """Wait until it has to be written once more, whole; None if it is decided instead."""
        if not self._may_write.wait(timeout_s):
            raise TransferTimeout(f"version {self.version} was not decided {timeout_s:.1f} s after it was written")
        with self._lock:
            return None if self._decided.is_set() or self._is_closing else self._go

    def _end_round(self) -> None:
        """This round has been written."""
        with self._lock:
            if not self._decided.is_set() and not self._is_closing:
                self._may_write.clear()

    def _close(self) -> None:
        """The round that is being written is the last."""
        with self._lock:
            self._is_closing = True
            self._may_write.set()

    def _settle(self, error: WeftError | None) -> None:
        """It is committed, or has failed with an error. Wakes all waiters."""
        with self._lock:
            self._error = self._error or error
            self._decided.set()
        if error is not None and self._jobs:
            self._jobs[-1].stop(error)
        self._may_write.set()
        if self._go is None:  # and never will be
            self._released.set()
            self._ended.set()

    def _begin(self, job: Job) -> None:
        """It is being written now; giving it up stops the job."""
        self._jobs.append(job)
        if self._error is not None:
            job.stop(self._error)

    @property
    def events(self) -> tuple[Event, ...]:
        """What each stage did when: amax, convert, delta, write. Empty if nothing is converted on the way."""
        return tuple(event for job in self._jobs for event in job.flow.recorder.events)

    @property
    def num_writes(self) -> int:
        """One-sided writes over transports that use descriptors, as planned; 0 where the sender itself copies."""
        return sum(job.num_writes for job in self._jobs)

    @property
    def peak_staging_bytes(self) -> int:
        """Peak number of bytes converted or compared, but not yet written."""
        return max((job.peak_staging_bytes for job in self._jobs), default=0)

    def wait_released(self, timeout_s: float = 60.0) -> None:
        """Wait until the source memory may change again; raises the publication's error."""
        self._wait(self._released, timeout_s, "written")

    def wait_committed(self, timeout_s: float = 60.0) -> None:
        """Wait until every engine serves the version; raises VersionError if it was aborted.

        A publication that failed has ended when this raises: nothing reads the weights, and the next can be published.
        """
        self._is_awaited = True
        try:
            self._wait(self._decided, timeout_s, "committed everywhere")
        finally:
            self._is_awaited = False

    def _wait(self, event: threading.Event, timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        if not event.wait(timeout_s):
            raise TransferTimeout(f"version {self.version} was not {what} after {timeout_s:.1f} s{self._why_late()}")
        if self._error is None:
            return
        if not self._ended.wait(max(deadline - time.monotonic(), 0.0)):
            raise TransferTimeout(
                f"version {self.version} failed and is still being written after {timeout_s:.1f} s: {self._error}",
                hint="wait again: the weights are read until its writes have stopped",
            ) from self._error
        raise self._error

    def _check(self) -> None:
        """Raise why it was given up before it began, if it was."""
        if self._decided.is_set():
            raise self._error or VersionError(f"version {self.version} was decided before it was written")

    @property
    def is_decided(self) -> bool:
        """Whether it was committed everywhere, or failed."""
        return self._decided.is_set()

    @property
    def _has_ended(self) -> bool:
        """Whether it is decided and nothing is being written any more."""
        return self._decided.is_set() and self._ended.is_set()

    @property
    def is_released(self) -> bool:
        """Whether the source memory may change again."""
        return self._released.is_set()


class Sender:
    """Joins the controller as a trainer rank and writes what is published.

    >>> import numpy as np
    >>> import weft
    >>> trained, served = np.ones(4, np.float32), np.zeros(4, np.float32)
    >>> with (
    ...     weft.Controller(num_trainers=1, num_engine_ranks=1) as controller,
    ...     weft.Sender(controller.address, rank=0, weights=weft.Weights.from_arrays({"w": trained})) as sender,
    ...     weft.Receiver(controller.address, rank=0, weights=weft.Weights.from_arrays({"w": served})) as receiver,
    ... ):
    ...     publication = sender.publish(version=1)      # returns at once
    ...     committed = receiver.wait(60.0).commit()     # in the engine's process
    ...     publication.wait_committed(60.0)             # every engine serves version 1
    >>> served
    array([1., 1., 1., 1.], dtype=float32)
    """

    def __init__(
        self,
        address: str,
        *,
        rank: int,
        weights: Weights,
        through: str | None = None,
        transport: Transport[Any] | None = None,
        timeout_s: float = JOIN_S,
        security: Security | None = None,
    ) -> None:
        """`timeout_s`: how long a publication waits for the plan and for its turn. `transport`: for tests.

        `through`: the device offloaded weights are copied to for every version, and sent from: `cuda:0`.
        `security`: the keys to join with, `trainer.key` by default.
        """
        self._address, self._keys = address, client_keys(security, "trainer")
        self._member = f"trainer {rank}"
        self._rank, self._timeout_s = rank, timeout_s
        self._mirror = None if through is None else Mirror(weights, through)
        weights = weights if self._mirror is None else self._mirror.weights
        self._weights = weights
        self._transports = OpenTransports(
            self._member, rank=rank, device=weights.device, controller=address, given=transport
        )
        self._work = device_work(weights.device)
        self._lock = threading.Lock()
        self._error: WeftError | None = None
        self._program: SendProgram | None = None
        self._plan: SendPlan | None = None
        self._exchange: Exchange | None = None
        """The exchange with trainers that hold parts of the same FP8 blocks."""
        self._abandoned: set[int] = set()
        """Engine ranks to which writes may still be in flight, since the last plan they had a part in."""
        self._left_out: dict[int, dict[int, float]] = {}
        """Version → engine ranks that no longer take part in it, since when."""
        self._cut: frozenset[str] = frozenset()
        """Transports that were torn down and could not be reopened."""
        self._run_stages: RunStages = run
        """How stages are run: overlapping, unless a benchmark measures the gain from that."""
        self._publications: dict[int, Publication] = {}
        self._early = EarlyTurn()
        self._last: int | None = None
        self._last_begun: int | None = None
        """The highest version a controller let this trainer write."""
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"weft-{self._member}-write")
        self._control = ControlThread(address, self._member, self._duties(), self._keys)
        self._control.start()

    def publish(self, *, version: int) -> Publication:
        """Start sending a version; returns at once. The previous one must be released, but may still be in transit."""
        queued = self._work.queued()
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._last is not None and version <= self._last:
                raise VersionError(
                    f"version {version} after version {self._last}", hint="publish increasing version numbers"
                )
            finished = [v for v, p in self._publications.items() if p._has_ended]
            for old in finished:
                del self._publications[old]
            unreleased = [p.version for p in self._publications.values() if not p.is_released]
            if unreleased:
                raise VersionError(
                    f"version {unreleased[0]} still reads the weights",
                    hint="call wait_released() before the next publish",
                )
            self._last = version
            publication = self._publications[version] = Publication(version, self._why_late, queued)
            earlier = [p for p in self._publications.values() if p is not publication]
            turn = self._early.take(version)
        self._begin_turn(publication, turn)
        self._writer.submit(self._send, publication, earlier)
        return publication

    def _why_late(self) -> str:
        """What prevents transfers, at the end of an error; empty if nothing is known to."""
        obstacle = self._control.obstacle()
        return f": {obstacle}" if obstacle is not None else ""

    def _begin_turn(self, publication: Publication, turn: WriteTurn | None) -> None:
        """Use the turn another trainer asked for, or ask for one."""
        version = publication.version
        if turn is not None and turn.go.version == version:
            publication._accept(turn.go, turn.since)
            return
        if turn is not None:
            self._decline(turn.go.version, f"{self._member} published version {version} instead")
        if not self._asks_later:
            self._control.post(Want(version=version))

    @property
    def _asks_later(self) -> bool:
        """Whether this rank leaves it to lower ones to ask for a version's turn, for a while."""
        return self._rank > 0

    def _decline(self, version: int, reason: str) -> None:
        """A version that might be written will not be."""
        self._control.post(Stopped(version=version, reason=reason, has_written=False))

    def _batches(self) -> list[tuple[Transport[Any], Parcel]]:
        """What a version writes, through which transport; used by benchmarks."""
        links = self._program.links if self._program is not None else []
        return [
            (self._transports[link.transport], parcel)
            for link in links
            for parcel in (*link.direct, *(parcel for image in link.chunks[:1] for parcel in image.values()))
        ]

    def _wait_for_turn(self, publication: Publication, earlier: Sequence[Publication]) -> bool:
        """Wait until a version may be written, or no longer needs to be; ask for it, if lower ranks have not."""
        deadline = time.monotonic() + self._timeout_s
        while self._asks_later and not publication._may_write.wait(min(self._rank * ASK_S, self._timeout_s)):
            if all(other.is_decided for other in earlier):  # there is no turn before these have ended
                self._control.post(Want(version=publication.version))
                break
            if time.monotonic() > deadline:
                break
        return publication._may_write.wait(max(deadline - time.monotonic(), 0.0))

    def _send(self, publication: Publication, earlier: Sequence[Publication]) -> None:
        """On the writer thread: wait for the turn, write, report."""
        try:
            if not self._wait_for_turn(publication, earlier):
                raise TransferTimeout(
                    f"{self._member} was not allowed to write version {publication.version} "
                    f"in {self._timeout_s:.1f} s{self._why_late()}",
                    hint="have all members joined? has every engine committed the previous version?",
                )
            if publication._go is not None:
                publication._check()
                self._write_rounds(publication, publication._go)
        except WeftError as error:
            self._give_up(publication, error)
        except Exception as error:  # a bug in weft: nothing reads this thread's result, so it is reported here
            self._give_up(publication, ProtocolError(f"{self._member}: {type(error).__name__} while sending: {error}"))
        finally:
            publication._released.set()
            publication._ended.set()

    def _give_up(self, publication: Publication, error: WeftError) -> None:
        """Tell the controller and all waiters at once; then make sure that nothing is being written any more."""
        version = publication.version
        self._control.post(Failed(version=version, reason=str(error)))
        publication._settle(error)
        if not all(self._drain(job) for job in publication._jobs):
            self._failed(TransferTimeout(f"{self._member} cannot stop writing version {version}"))
            self._control.close()  # the controller must treat this writer as lost
            return
        self._reconnect()
        if publication._go is not None:
            has_written = any(job.tickets or job.has_written for job in publication._jobs)
            self._control.post(
                Stopped(version=version, reason=str(error), has_written=has_written, abandoned=sorted(self._abandoned))
            )

    def _reconnect(self) -> None:
        """Reopen transports that had to be torn down to stop writing. Never raises: the controller waits for Stopped.

        There is no new plan meanwhile: the controller has not yet heard that this trainer stopped. Engine ranks that
        were cut off are left alone until there is: connecting to a host that is cut off can take minutes.
        """
        cut = self._transports.close_cut()
        if not cut or self._program is None or self._plan is None:
            return
        self._abandoned |= {link.engine for link in self._program.links if link.peer in cut.get(link.transport, ())}
        self._forget_plan()
        self._cut = frozenset(cut)
        try:
            self._reopen()
        except Exception as error:  # this host may be cut off, or out of memory; the next version tries again
            log.warning("%s cannot reopen %s: %s", self._member, ", ".join(sorted(cut)), error)

    def _reopen(self) -> None:
        """Open what was torn down, unless it is open again. Raises TransportError while this host is cut off."""
        if self._cut and self._plan is not None:
            self._transports.open(self._cut, self._control.settings)
            self._follow(self._plan)
            self._control.post(Reopened(endpoints=[self._transports[name].endpoint for name in sorted(self._cut)]))
            self._cut = frozenset()

    def _follow(self, plan: SendPlan) -> None:
        """Get ready to send as planned."""
        self._forget_plan()
        self._plan = plan
        self._program = SendProgram(
            plan,
            self._transports,
            self._control.settings,
            self._weights,
            mirror=self._mirror,
            without=self._abandoned,
        )
        if self._exchange is not None:
            self._exchange.follow(plan.round, self._program.cut_blocks, plan.holders)

    def _write_rounds(self, publication: Publication, go: Go) -> None:
        """Write everything. With patches a second round may follow, before anything is decided."""
        publication._end_round()
        self._write(publication, go)
        if self._control.settings.delta is DeltaPolicy.OFF:
            return
        settings = self._control.settings
        rounds_s, commit_s = 2 * settings.version_s, settings.pause_s + settings.commit_s
        again = publication._next_round(rounds_s + commit_s + 2 * settings.silence_s)
        if again is not None:
            self._write(publication, again)

    def _write(self, publication: Publication, go: Go) -> None:
        """Write one round, and report it."""
        began = time.monotonic()
        deadline = began + self._control.settings.version_s
        left_out = self._left_out.setdefault(go.version, {})
        job = Job(go, deadline, member=self._member, on_released=publication._released.set, left_out=left_out)
        publication._begin(job)
        publication._queued()  # what the trainer queued before publishing must be in memory
        self._reopen()
        assert self._program is not None
        if go.whole:
            sent = send_whole(self._program, job, self._run_stages)
        else:
            tell = job.agree  # no other trainer has parts of its blocks
            if self._exchange is not None:
                self._exchange.begin(job)
                tell = self._exchange.found
            sent = send_version(self._program, job, tell, self._run_stages)
        if self._transports.has_cut or not all(ticket.done for ticket in job.tickets):
            late = "; ".join(s.loss for s in sent.values() if s.loss)
            raise TransferTimeout(f"{self._member} could not write all of version {go.version} in time: {late}")
        job.flow.check()  # writes that were cancelled must not be reported as lost engines
        written = self._report(job, sent, late_s=publication._late_s)
        publication.write_s = time.monotonic() - began
        publication._released.set()  # before any caller can hear that it is committed
        self._control.listen_closely(for_now=publication._is_awaited)
        self._control.post(written)

    def _report(self, job: Job, sent: dict[int, Sent], *, late_s: float) -> Written:
        """What was written, and what could not be; nothing of engine ranks that the controller has left out."""
        sent = {engine: s for engine, s in sent.items() if engine not in job.left_out}
        reports = [
            WriteReport(engine, s.num_bytes, s.digest & _MASK, s.sizes_in_order, s.seconds)
            for engine, s in sent.items()
            if not s.loss and not s.needs_whole
        ]
        losses = [Loss(engine=engine, reason=s.loss) for engine, s in sent.items() if s.loss]
        whole = [engine for engine, s in sent.items() if s.needs_whole and not s.loss]
        return Written(
            version=job.go.version,
            reports=WriteReports.of(reports),
            losses=losses,
            whole=whole,
            magnitude_bytes=job.magnitude_bytes,
            stages=busy_seconds(job.flow.recorder.events),
            late_s=late_s,
        )

    @staticmethod
    def _drain(job: Job) -> bool:
        """Wait for the end of writes that were given up: until then no other version may use their memory."""
        job.cancel()
        deadline = time.monotonic() + DRAIN_S
        while not all(ticket.done for ticket in job.tickets):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True

    def _duties(self) -> Duties:
        """Nothing is resent after rejoining: a trainer joins only while it is not writing."""
        return Duties(
            join_message=self._join_message,
            handle=self._handle,
            controller_lost=self._controller_lost,
            refused=self._failed,  # a trainer that does not match has to be restarted
            failed=self._failed,
        )

    def _join_message(self) -> Join | None:
        """How to join; not while a write is in flight, which a new controller would not know of."""
        if any(p._go is not None and not p._ended.is_set() for p in list(self._publications.values())):
            return None
        self._early.clear()
        self._left_out.clear()  # of versions that another controller opened
        return Join(
            side="trainer",
            rank=self._rank,
            held=self._weights.shards,
            place=self._transports.place(shareable=True),
            process=ProcessIdentity.of(os.getpid()),
            age_s=self._control.age_s,
            incarnation=self._control.incarnation,
            last=self._last_begun,
            abandoned=sorted(self._abandoned),
        )

    def _handle(self, message: Any) -> None:
        """A message from the controller."""
        match message:
            case Open():
                self._open(message)
            case SendPlan():
                self._abandoned -= {target.engine for target in message.targets}  # they have closed that memory
                self._cut = frozenset()  # all is open
                self._follow(message)
            case Go(version=version):
                self._go(version, message)
            case LeftOut(version=version, engines=engines):
                self._left_out.setdefault(version, {}).update(dict.fromkeys(engines, time.monotonic()))
            case Decide(version=version, commit=commit, reason=reason):
                for old in [number for number in list(self._left_out) if number <= version]:
                    self._left_out.pop(old, None)
                if self._early.withdraw(version):
                    self._decline(version, f"{self._member} had not published it")
                self._control.listen_closely(for_now=False)
                publication = self._publications.get(version)
                if commit and self._program is not None:
                    self._program.committed(version)
                if publication is not None:
                    aborted = VersionError(f"version {version} was aborted: {reason}")
                    publication._settle(None if commit else aborted)

    def _go(self, version: int, message: Go) -> None:
        """A version's turn. If it was given up it is not written, and the controller is told at once."""
        self._last_begun, now = version, time.monotonic()
        self._control.make_way()
        with self._lock:
            if self._last is None or version > self._last:
                self._early.keep(message, now)  # it was asked for by another trainer
                return
        publication = self._publications.get(version)
        if publication is None or not publication._accept(message, now):
            error = publication._error if publication is not None else None
            self._decline(version, f"{self._member} gave it up: {error or 'it is no longer published'}")

    def _open(self, message: Open) -> None:
        self._transports.pass_host(message.through_host)
        self._transports.is_near = message.is_near
        self._transports.open(message.transports, self._control.settings)
        self._end_exchange()
        if message.asking is not None:
            silence_s = self._control.settings.silence_s
            self._exchange = Exchange(
                self._member, message.asking, controller=self._address, keys=self._keys, silence_s=silence_s
            )
        magnitudes = None if self._exchange is None else self._exchange.server
        offers = self._transports.offers(())
        self._control.post(Opened(round=message.round, offers=offers, magnitudes=magnitudes))

    def _end_exchange(self) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.close()

    def _forget_plan(self) -> None:
        """A new plan: release what was kept for the old one."""
        program, self._program = self._program, None
        if program is not None:
            program.close()

    def _controller_lost(self, error: WeftError) -> None:
        """Versions under way have failed; later ones may work when the controller is back."""
        self._early.clear()
        for publication in list(self._publications.values()):
            publication._settle(error)

    def _failed(self, error: WeftError) -> None:
        """The member cannot continue."""
        with self._lock:
            self._error = self._error or error
        for publication in list(self._publications.values()):
            publication._settle(error)

    def close(self) -> None:
        """Leave; a write in flight is finished first, versions that were not begun are dropped."""
        for publication in list(self._publications.values()):
            if publication._go is None:
                publication._settle(ProtocolError(f"{self._member} was closed"))
            publication._close()
        self._writer.shutdown(wait=True)
        unpublished = self._early.version
        if unpublished is not None:
            self._decline(unpublished, f"{self._member} was closed before it published it")
        self._control.close()
        self._end_exchange()
        self._forget_plan()
        self._transports.close_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
