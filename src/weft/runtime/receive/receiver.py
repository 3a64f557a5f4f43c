"""The engine rank's side: versions arrive while the engine generates, are verified, and become visible by `commit`.

    with Receiver("tcp://ctl:7070", rank=0, weights=weights) as receiver:
        while serving:
            engine_step()
            if (update := receiver.poll()) is not None:      # staged, verified, decided
                update.commit()                              # the only pause

consumes      Open, CutOff, Expect, Verify, Boundary, Decide from the controller; bytes that land; the engine's `poll`
              and `commit`
produces      Opened, Blocked, At, Paused, Ready, Failed, Committed
waits for     in `commit` in place: the decision        unblocked by   Decide, a lost controller, a deadline

Mode `shadow`: writers only ever touch staging memory, so nothing in the engine changes before `commit`, and a late
write of an aborted version cannot reach live weights. Mode `in_place`: `poll` hands out the update before it is
written; `commit` lets the writers into the live weights and returns when the version is complete, verified and decided.
If that fails after writing began, the receiver is *poisoned*: the weights are neither the old nor the new version, and
`version` raises until a complete version is committed.

All ranks of one engine commit at the same step: each must call `poll` exactly once per step. When a version is decided,
each rank reports its step and promises not to advance more than two steps without hearing the boundary, which lies
beyond the step of the furthest rank.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

from weft.config import DeltaPolicy
from weft.devices import DeviceWork, device_work
from weft.errors import IntegrityError, ProtocolError, TransferTimeout, TransportError, WeftError
from weft.runtime.control.member import ControlThread, Duties
from weft.runtime.control.messages import (
    At,
    Boundary,
    Committed,
    CutOff,
    Decide,
    Expect,
    Failed,
    Join,
    Open,
    Paused,
    Ready,
    ReceivePlan,
    Reconnect,
    TrainerSource,
    Verify,
)
from weft.runtime.control.security import Security, client_keys
from weft.runtime.receive.exposure import Exposure
from weft.runtime.receive.following import Following
from weft.runtime.receive.landing import Landing
from weft.runtime.receive.modes import Mode
from weft.runtime.receive.opening import MemoryOpener, OpenerContext
from weft.runtime.receive.rank_state import Ending, RankState, Turn
from weft.runtime.receive.reachable import ReachableMemory
from weft.runtime.receive.reservation import Reservation
from weft.runtime.transports import OpenTransports
from weft.runtime.weights import Weights
from weft.transport.base import Endpoint, Transport
from weft.transport.host import ProcessIdentity

log = logging.getLogger(__name__)
SETTLE_LOOK_S = 0.005


class Update:
    """A version that may become visible now."""

    def __init__(self, version: int, receiver: Receiver) -> None:
        self.version = version
        self._receiver = receiver

    def commit(self, timeout_s: float = 120.0) -> bool:
        """Make the version visible; the engine must not serve meanwhile.

        Returns False if an update in place was called off before anything was written. Raises IntegrityError if it
        failed after that: the receiver is then poisoned.
        """
        return self._receiver._commit(self.version, timeout_s)


class Receiver:
    """Joins the controller as an engine rank.

    >>> import numpy as np
    >>> import weft
    >>> trained, served = np.ones(4, np.float32), np.zeros(4, np.float32)
    >>> with (
    ...     weft.Controller(num_trainers=1, num_engine_ranks=1) as controller,
    ...     weft.Sender(controller.address, rank=0, weights=weft.Weights.from_arrays({"w": trained})) as sender,
    ...     weft.Receiver(controller.address, rank=0, weights=weft.Weights.from_arrays({"w": served})) as receiver,
    ... ):
    ...     publication = sender.publish(version=1)      # in the trainer's process
    ...     update = receiver.wait(60.0)                 # or `poll()` between two steps
    ...     before = served.copy()                       # the update is staged and verified, not visible
    ...     committed = update.commit()
    >>> before.tolist(), served.tolist(), receiver.version
    ([0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0], 1)
    """

    def __init__(
        self,
        address: str,
        *,
        rank: int,
        weights: Weights,
        transport: Transport[Any] | None = None,
        on_wanted: Callable[[int | None], None] | None = None,
        security: Security | None = None,
        reservation: Reservation | None = None,
    ) -> None:
        """`transport`: for tests; otherwise the controller chooses.

        `security`: the keys to join with, `engine.key` by default. `reservation`: memory versions may land in.

        `on_wanted` is for engines with a driver that lets all ranks commit together and does not call `poll` at every
        step: it is called, on another thread, when the engine's thread should commit (with the version that is ready)
        or call `poll` (with None). Ranks then do not agree on a step.
        """
        keys = client_keys(security, "engine")
        self._member, self._rank = f"engine {rank}", rank
        self._on_wanted = on_wanted or (lambda _: None)
        self._counts_steps = on_wanted is None
        self._transports = OpenTransports(
            self._member, rank=rank, device=weights.device, controller=address, given=transport
        )
        self._memory = ReachableMemory(weights, self._transports, reservation)
        self._place = self._transports.place(shareable=weights.rehome is not None)
        self._exposure = Exposure(self._place)
        self._work = self._device_work(weights.device)
        self._following = Following(self._member, weights.device, self._transports, self._work)
        self._changed = threading.Condition()
        self._state = RankState()
        self._is_idle = False
        """Whether the engine's thread is waiting in `take`."""
        self._pause_began = 0.0
        self.last_pause_s = 0.0
        """How long the engine had to stand still for the version it serves."""
        self._engine_task: Callable[[], None] | None = None
        """Work on the engine's own tensors, done by the engine's thread in `poll` or `wait`."""
        self._is_stalled = False
        """Whether the controller waited for the engine's thread in vain; the receiver rejoins only when it is back."""
        self._error: WeftError | None = None
        self._refusal: WeftError | None = None
        """Why there was no plan; `poll` and `wait` raise it once, and the receiver waits for other trainers."""
        self._control = ControlThread(address, self._member, self._duties(), keys)
        around = OpenerContext(
            place=self._place,
            changed=self._changed,
            settings=lambda: self._control.settings,
            post=self._control.post,
            ask_thread=self._ask_thread,
        )
        self._opening = MemoryOpener(
            self._member, self._memory, self._exposure, self._following, self._state, self._work, around
        )
        self._control.start()

    def _device_work(self, device: str) -> DeviceWork:
        """What copies and digests; rehearsals have weights that must not be touched."""
        return device_work(device)

    @property
    def _mode(self) -> Mode:
        """How versions reach the live weights."""
        return self._opening.mode

    @property
    def version(self) -> int | None:
        """The version that is visible, if any was committed. Raises IntegrityError while the weights are torn."""
        if self._state.poison is not None:
            raise IntegrityError(
                f"{self._member} holds torn weights: {self._state.poison}", hint="serve again after the next commit"
            )
        return self._state.served

    @property
    def pending(self) -> int | None:
        """A version that `wait` would hand out, if there is one."""
        return self._state.pending

    @property
    def decided_within_s(self) -> float:
        """How long a version in place may take once the engine stands still, whatever happens to other members."""
        return self._control.settings.version_s + 2 * self._control.settings.silence_s

    @property
    def is_poisoned(self) -> bool:
        """Whether an update in place failed half-way; nothing may be served before the next commit."""
        return self._state.poison is not None

    def poll(self, *, step: int | None = None) -> Update | None:
        """A version that may be committed now, if there is one.

        Raises if the receiver has failed; raises once if trainers and engines did not match, then waits for other
        trainers.

        Never waits, except where other ranks of the same engine must agree on the step and are far behind.
        `step` is the engine's own step number, where calls of `poll` do not count it.
        """
        with self._changed:
            self._raise_error()
            self._do_engine_task()
            self._state.advance(step)
            if not self._may_commit_now():
                return None
            assert self._state.pending is not None
            return Update(self._state.pending, self)

    def wait(self, timeout_s: float = 60.0) -> Update:
        """The next version; raises TransferTimeout. For engines with nothing else to do: this counts as no step."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._do_engine_task()
            while not self._is_there():
                if not self._changed.wait(max(deadline - time.monotonic(), 0.0)):
                    raise self._late(timeout_s)
                self._do_engine_task()
            self._raise_error()
            assert self._state.pending is not None
            return Update(self._state.pending, self)

    def take(self, timeout_s: float = 60.0) -> int:
        """Wait for the next version and serve it; for engines that stand still until it arrives.

        In place, writers need not wait for the engine's thread: it is known to be here. Raises as `wait` and `commit`.
        """
        deadline = time.monotonic() + timeout_s
        while not self._mode.is_in_place(whole=False):  # before there is a plan it is not known that all versions are
            update = self.wait(max(deadline - time.monotonic(), 0.0))
            if update.commit(timeout_s):
                return update.version
        self._work.synchronize()  # what the engine queued still reads the old weights
        with self._changed:
            while True:
                self._is_idle = True
                try:
                    version = self._take_in_place(deadline, timeout_s)
                finally:
                    self._is_idle = False
                if version is not None:  # otherwise called off before anything was written
                    return version

    def _take_in_place(self, deadline: float, timeout_s: float) -> int | None:
        """With the lock held: let the next version in and wait for its end; None if it was called off."""
        state = self._state
        if state.pending is not None and not state.is_paused:  # it was announced before
            self._pause(state.pending)
        while not state.is_paused and state.ending is None:
            self._raise_error()
            self._do_engine_task()
            is_late = not self._changed.wait(max(deadline - time.monotonic(), 0.0))
            if is_late and not state.is_paused and state.ending is None:
                raise self._late(timeout_s)
        version = state.ending.version if state.ending is not None else state.pending
        assert version is not None
        return version if self._see_end(version, max(deadline - time.monotonic(), 0.0)) else None

    def _late(self, timeout_s: float) -> TransferTimeout:
        obstacle = self._control.obstacle()
        why = f": {obstacle}" if obstacle is not None else ""
        return TransferTimeout(f"{self._member} received no version in {timeout_s:.1f} s{why}")

    def _is_there(self) -> bool:
        """Whether `wait` is over. In place a rank that waits may pause before its engine has agreed on a step."""
        agreed = self._state.has_agreed or self._is_in_place
        failed = self._error is not None or self._refusal is not None
        return failed or (self._state.pending is not None and agreed)

    def _do_engine_task(self) -> None:
        """With the lock held: the engine's thread is here."""
        self._is_stalled = False
        task, self._engine_task = self._engine_task, None
        if task is None:
            return
        try:
            task()
        except (WeftError, MemoryError, OSError, RuntimeError) as cause:
            self._error = error = self._opening.explained(cause)
            self._control.leave(str(error))
            if error is cause:
                raise
            raise error from cause

    def _may_commit_now(self) -> bool:
        """With the lock held: whether the engine's ranks have agreed on this step."""
        if self._state.may_commit() is not Turn.UNKNOWN:
            return self._state.may_commit() is Turn.NOW
        timeout_s = self._control.settings.version_s
        known = self._changed.wait_for(
            lambda: self._state.may_commit() is not Turn.UNKNOWN or self._error is not None, timeout_s
        )
        self._raise_error()
        if not known:
            raise TransferTimeout(f"the ranks of {self._member}'s engine did not agree on a step in {timeout_s:.1f} s")
        return self._state.may_commit() is Turn.NOW

    def _commit(self, version: int, timeout_s: float) -> bool:
        with self._changed:
            self._raise_error()
            in_place = self._is_in_place
            is_new = self._state.served is None or version > self._state.served
            if in_place and is_new and self._state.pending != version:
                return False  # called off between poll and commit
            if self._state.pending != version:
                raise ProtocolError(f"version {version} is not waiting to be committed on {self._member}")
            self._pause_began = time.monotonic()
            self._work.synchronize()  # what the engine queued still reads the old weights
            if in_place:
                return self._receive_in_place(version, timeout_s)
            try:
                self._make_visible(version)
            except Exception as error:
                self._call_off()
                self._control.post(Failed(version=version, reason=f"{type(error).__name__}: {error}"))
                raise
            self._serve(version)
        return True

    def _make_visible(self, version: int) -> None:
        """With the lock held. An interruption half-way leaves torn weights."""
        try:
            self._mode.make_visible(version, whole=self._state.is_whole)
        except BaseException:
            self._state.tear(f"version {version} was only partly made visible")
            raise

    def _serve(self, version: int) -> None:
        """With the lock held: the version is visible now."""
        self._state.serve(version)
        self._has_served(version)

    def _has_served(self, version: int) -> None:
        self.last_pause_s = time.monotonic() - self._pause_began
        self._control.listen_closely(for_now=False)
        arrivals = self._following.reports(version) if self._control.is_recorded else []
        self._control.post(Committed(version=version, pause_s=round(self.last_pause_s, 6), arrivals=arrivals))

    def _receive_in_place(self, version: int, timeout_s: float) -> bool:
        """With the lock held: let the writers write and wait for the end; False if nothing was written."""
        self._pause(version)
        return self._see_end(version, timeout_s)

    def _pause(self, version: int) -> None:
        """With the lock held: the engine stands still, writers may write."""
        self._opening.expose()
        self._state.pause()
        self._pause_began = time.monotonic()
        self._control.listen_closely(for_now=True)
        self._control.post(Paused(version=version))

    def _see_end(self, version: int, timeout_s: float) -> bool:
        """With the lock held: wait until the version is complete and decided; False if nothing was written."""
        settled = self._changed.wait_for(lambda: self._state.ending is not None or self._error is not None, timeout_s)
        ending = self._state.see_ending()
        if ending is not None and ending.commit:
            return True  # the next version may be pending already
        if ending is not None and not ending.torn:
            return False
        if ending is None:
            self._call_off()
        late = f"version {version} was not decided in {timeout_s:.1f} s"
        if not settled:
            self._control.post(Failed(version=version, reason=f"{self._member} gave up: {late}"))
        why = ending.reason if ending is not None else str(self._error or late)
        self._state.tear(why)
        raise IntegrityError(
            f"version {version} failed on {self._member} after writing had begun: {why}",
            hint="the weights are torn; serve again after the next commit",
        )

    def _call_off(self) -> None:
        self._state.call_off()
        self._control.listen_closely(for_now=False)

    def _raise_error(self) -> None:
        refusal, self._refusal = self._refusal, None
        error = self._error or refusal
        if error is not None:
            raise error

    def _duties(self) -> Duties:
        return Duties(
            join_message=self._join_message,
            joined=self._joined,
            handle=self._handle,
            stalled=self._stall,
            idle=self._idle,
            controller_lost=self._controller_lost,
            refused=self._refused,
            failed=self._failed,
        )

    def _stall(self, error: WeftError) -> None:
        """The controller has waited in vain: request the engine's thread."""
        self._stop_coming(error, torn=False)
        with self._changed:
            self._is_stalled, self._engine_task = True, None
            self._changed.notify_all()
        self._on_wanted(None)

    def _join_message(self) -> Join | None:
        """How to join, with what is known of versions."""
        with self._changed:
            if self._is_stalled:
                return None
            staged = not self._is_in_place
            return Join(
                side="engine",
                rank=self._rank,
                held=self._memory.weights.shards,
                place=self._place,
                process=ProcessIdentity.of(os.getpid()),
                age_s=self._control.age_s,
                incarnation=self._control.incarnation,
                last=self._state.served,
                seen=self._state.expected,
                pending=self._state.pending if staged else None,
                ready=self._state.ready if staged else None,
                holds=self._state.holds,
                offered=self._exposure.newest,
            )

    def _joined(self) -> None:
        """A controller that was restarted does not know where this rank stands."""
        with self._changed:
            step = self._state.step_to_repeat
            if self._state.pending is not None and step is not None:
                self._control.post(At(version=self._state.pending, step=step))

    def _handle(self, message: Any) -> None:
        """A message from the controller."""
        match message:
            case Open():
                self._opening.begin(message)
            case CutOff(incarnations=incarnations):
                self._opening.cut(set(incarnations))
            case ReceivePlan(sources=sources):
                self._follow_plan(sources)
            case Reconnect(endpoint=endpoint):
                self._reconnect(endpoint)
            case Expect(version=version, whole=whole):
                self._expect(version, whole=whole)
            case Verify(version=version, reports=reports):
                failed = self._following.sent(version, reports)
                if failed is not None:
                    self._control.post(failed)
            case Boundary(version=version, step=step):
                with self._changed:
                    if self._state.meet_at(version, step):
                        self._changed.notify_all()
            case Decide():
                self._decide(message)

    def _ask_thread(self, task: Callable[[], None]) -> None:
        """Let the engine's thread do something."""
        with self._changed:
            self._engine_task = task
            self._changed.notify_all()
        self._on_wanted(None)

    def _follow_plan(self, sources: Sequence[TrainerSource]) -> None:
        """Compile this rank's part of the plan."""
        memory = self._memory
        landing = Landing(sources, memory.weights, landing=memory.landing, window=memory.window, patches=memory.patches)
        for source in sources:
            try:
                if source.endpoint is not None:
                    self._transports[source.transport].connect(source.endpoint, [])
            except TransportError as error:  # no reason to leave: the next plan may be without that trainer
                landing.unreachable = f"credits cannot be returned to trainer {source.trainer}: {error}"
        self._following.plan(landing, from_host=memory.is_behind_host)
        self._mode.plan(landing.steps)

    def _reconnect(self, endpoint: Endpoint) -> None:
        """Return credits to where a trainer can be reached now; a version that needs them fails if that is nowhere."""
        if endpoint.transport not in self._transports:
            return
        try:
            self._transports[endpoint.transport].connect(endpoint, [])
        except TransportError as error:
            log.warning("%s cannot return credits to %s: %s", self._member, endpoint.member, error)

    def _expect(self, version: int, *, whole: bool) -> None:
        """A version is coming: follow it, and in place ask the engine to pause."""
        with self._changed:
            is_paused = self._state.expect(version, whole=whole)
        as_patches = self._control.settings.delta is DeltaPolicy.ON and not whole
        self._following.begin(version, as_patches=as_patches, whole=whole)
        if not as_patches:
            self._mode.forget()
        landing = self._following.landing
        if landing is not None and landing.unreachable:
            self._control.post(Failed(version=version, reason=landing.unreachable))
        elif self._is_in_place and not is_paused:
            self._hand_out(version)

    @property
    def _is_in_place(self) -> bool:
        """Whether the expected version changes the live weights before it is decided."""
        return self._mode.is_in_place(whole=self._state.is_whole)

    def _hand_out(self, version: int) -> None:
        """Let `poll` return a version, at a step all ranks of the engine agree on."""
        with self._changed:
            self._refusal = None
            step = self._state.hand_out(version, agrees=self._counts_steps and self._control.ranks_per_engine > 1)
            if self._is_idle:
                self._pause(version)  # trainers wait for this
            if step is not None:
                self._control.post(At(version=version, step=step))
            self._on_wanted(version)  # before a waiting caller can commit it
            if not self._is_idle:
                self._changed.notify_all()

    def _decide(self, decision: Decide) -> None:
        """A version was committed or aborted."""
        with self._changed:
            self._state.decide()
        if decision.commit:
            self._following.count()  # so that transports need not keep counts that are never read
        self._following.stop()
        if not self._is_in_place:
            if decision.commit:
                self._hand_out(decision.version)
            else:
                self._mode.forget()
            return
        with self._changed:
            if self._state.pending == decision.version:
                ending = Ending(
                    version=decision.version, commit=decision.commit, torn=decision.torn, reason=decision.reason
                )
                self._end_in_place(ending)
            elif decision.commit:
                self._control.post(Failed(version=decision.version, reason="it was given up before it was decided"))

    def _end_in_place(self, ending: Ending) -> None:
        """With the lock held: wakes the thread that waits in `commit`; an engine that has not paused need not pause."""
        if self._state.is_paused:
            self._is_idle = False
        if self._state.end_in_place(ending):
            if self._memory.is_live:
                self._exposure.forget_all()  # all have written; none may again before the next pause
            self._has_served(ending.version)
        else:
            self._control.listen_closely(for_now=False)
        self._changed.notify_all()

    def _idle(self) -> float | None:
        """Check on lost writers, and on what has landed."""
        again_s, look_s = self._follow_version(), self._opening.look()
        return min((each for each in (again_s, look_s) if each is not None), default=None)

    def _follow_version(self) -> float | None:
        """Process what has landed, and report."""
        again_s, report = self._following.look(self._mode, self._state.holds)
        if report is not None:
            if isinstance(report, Ready):
                with self._changed:
                    self._state.complete(report.version)
            self._control.post(report)
        return again_s

    def _controller_lost(self, error: WeftError) -> None:
        """An update in place may be torn."""
        self._stop_coming(error, torn=True)

    def _stop_coming(self, error: WeftError, *, torn: bool) -> None:
        """What was in flight is not finished; what was decided stays."""
        version = self._following.count()
        self._following.stop()
        with self._changed:
            if version is not None:
                self._state.complete(version)  # other ranks may have been told to commit it
            if self._state.pending is not None and self._is_in_place:
                self._end_in_place(Ending(version=self._state.pending, commit=False, torn=torn, reason=str(error)))

    def _refused(self, error: WeftError) -> None:
        """Trainers and engines did not match; the receiver joins again, and waits for other trainers."""
        with self._changed:
            self._refusal = error
            self._changed.notify_all()
        self._on_wanted(None)

    def _failed(self, error: WeftError) -> None:
        """The member cannot continue."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
        self._on_wanted(None)

    def settle(self, timeout_s: float) -> bool:
        """Wait until no version is under way, so that writers need not be kept out; False if one still is."""
        deadline = time.monotonic() + timeout_s
        while self._state.is_under_way and time.monotonic() < deadline:
            time.sleep(SETTLE_LOOK_S)
        return not self._state.is_under_way

    def close(self, reason: str = "") -> None:
        """Leave. `reason`: told to members that wait for this engine rank."""
        self._control.leave(reason)
        self._control.close()
        self._following.close()
        with self._changed:
            writers = self._exposure.alive() if self._state.is_under_way else ()
            self._memory.close(self._exposure.beyond_reach(writers, moved=False))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
