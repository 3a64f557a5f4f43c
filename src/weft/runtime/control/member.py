"""What senders and receivers share: a thread that owns the control channel, joins, and hands messages on.

consumes      messages from the controller, messages from the member's own threads
produces      calls of the member's `Duties`, on this thread
waits for     the network, until the next beat at most        unblocked by   the network, `post`, `close`

The member sends heartbeats whatever this thread does: while it opens memory, compiles a plan or takes in what has
landed, which may take minutes, it leaves the channel to a second thread that only sends heartbeats.

A controller that falls silent is reported once. When it is back it no longer knows the member and says so; the member
then joins again, with what it knows of versions, so that the controller can rebuild its state.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from weft.config import TransferSettings
from weft.errors import PeerLost, ProtocolError, WeftError
from weft.runtime.control.channel import BURST_SPIN_S, SPIN_S, Reset
from weft.runtime.control.client import Client
from weft.runtime.control.keys import ClientKeys
from weft.runtime.control.messages import PROTOCOL, Alive, Beat, Join, Leave, Refused, ToMember, Unknown, Welcome

CLOSE_S = 10.0
GOODBYE_S = 0.05
LONG_S = 1.0
"""Work that takes longer than this is named in the errors of waiting callers."""
_WORK = {"Open": "opening memory", "SendPlan": "compiling its part of the plan"}
_WORK["ReceivePlan"] = _WORK["SendPlan"]
"""What a member does for messages that take long to handle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Duties:
    """What a member does when something happens; called on the control thread."""

    join_message: Callable[[], Join | None]
    """How to join now; None while the member cannot join."""
    handle: Callable[[Any], None]
    """A message from the controller."""
    controller_lost: Callable[[WeftError], None]
    """The controller is silent; it may come back."""
    refused: Callable[[WeftError], None]
    """The members did not match; this one waits for others."""
    failed: Callable[[WeftError], None]
    """The member cannot continue."""
    stalled: Callable[[WeftError], None] = lambda _: None
    """The controller gave up on this member because its engine's thread did not respond; nothing is written to it."""
    joined: Callable[[], None] = lambda: None
    """The controller has answered."""
    idle: Callable[[], float | None] = lambda: None
    """Called between messages; returns the seconds until the next call, None for any time."""


class ControlThread:
    """Owns a member's channel; other threads post messages through it."""

    def __init__(self, address: str, member: str, duties: Duties, keys: ClientKeys | None = None) -> None:
        self._client = Client(address, member=member, messages=ToMember, protocol=PROTOCOL, keys=keys)
        self._address, self._duties = address, duties
        self.settings = TransferSettings()
        """The controller's settings, once it has answered."""
        self.ranks_per_engine, self.num_trainers = 1, 1
        self.is_recorded = False
        """Whether the controller records what arrives."""
        self.incarnation = 0
        """The controllers' number for this process among those of its rank; 0 before one has answered."""
        self._made = time.monotonic()
        self._must_join = True
        self._is_joined = False
        """Whether the controller has answered; messages posted before wait."""
        self._was_answered = False
        """Whether any controller has answered at this address, ever."""
        self._last_heard = time.monotonic()
        self._is_lost = False
        self._status = ""
        """What the controller is doing, or waiting for, before versions can be written."""
        self._work, self._work_began = "", 0.0
        """What this thread is doing while it does not listen."""
        self._channel = threading.Lock()
        """Held by the thread that uses the client: this one, except while it is at work."""
        self._has_lent = False
        """Whether this thread is at work, and does not hold the channel."""
        self._outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"weft-{member}", daemon=True)
        self._beating = threading.Thread(target=self._keep_beating, name=f"weft-{member}-beat", daemon=True)

    def start(self) -> None:
        """Begin listening, and join."""
        self._thread.start()
        self._beating.start()

    @property
    def age_s(self) -> float:
        """How long ago the member was created."""
        return time.monotonic() - self._made

    def post(self, message: Any) -> None:
        """Send a message soon, from any thread; at once from this one, where it is handling another."""
        self._outgoing.put(message)
        if self._stop.is_set():
            return
        if self._has_lent and threading.current_thread() is self._thread:
            with self._channel:
                if self._is_joined:
                    self._send_all()
        else:
            self._client.wake()

    def listen_closely(self, *, for_now: bool) -> None:
        """Whether a message is expected any moment and nothing else needs the processor."""
        self._client.spin(BURST_SPIN_S if for_now else SPIN_S)

    def make_way(self) -> None:
        """Another thread needs the interpreter: wait for messages asleep, until `listen_closely` is called."""
        self._client.spin(0.0)

    def obstacle(self) -> str | None:
        """What currently prevents transfers, as far as is known; for the errors of waiting callers."""
        if not self._was_answered:
            return f"no controller answers at `{self._address}`"
        if not self._is_joined:
            return f"{self._client.member} is not joined to the controller at `{self._address}`"
        work, busy_s = self._work, time.monotonic() - self._work_began
        if work and busy_s > LONG_S:
            return f"{self._client.member} has been {work} for {busy_s:.0f} s"
        return f"the controller says: {self._status}" if self._status else None

    def leave(self, reason: str = "") -> None:
        """Say goodbye and stop soon, from any thread."""
        if not self._stop.is_set():
            self.post(Leave(reason=reason))
            self._stop.set()

    def close(self) -> None:
        """Say goodbye and stop."""
        self.leave()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        with self._channel:
            self._run_to_end()

    def _run_to_end(self) -> None:
        """With the channel."""
        try:
            self._loop()
        except WeftError as error:
            self._duties.failed(error)
            self._say_why(error)
        except Exception as error:  # the member's owner and the controller must hear of it, not only this thread
            failure = ProtocolError(f"{self._client.member} cannot continue: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._duties.failed(failure)
            self._say_why(failure)
            if not isinstance(error, OSError | MemoryError):  # a bug in weft, not a fault of the machine
                raise
        finally:
            self._stop.set()
            self._client.close()

    def _say_why(self, error: WeftError) -> None:
        """Tell the controller, if it still listens, so that no member waits for this one."""
        if self._is_joined:
            with contextlib.suppress(WeftError, MemoryError):
                self._client.send(Leave(reason=str(error)))
                self._client.drain(GOODBYE_S)

    def _loop(self) -> None:
        next_beat, again_s = 0.0, None
        while True:
            stopping = self._stop.is_set()
            if self._is_joined:
                self._send_all()
            if stopping:
                self._client.drain(GOODBYE_S)  # let the goodbye leave before the socket closes
                return
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + self.settings.beat_s
                self._beat(now)
            left_s = next_beat - now
            message = self._receive(left_s if again_s is None else min(left_s, again_s))
            if message is not None:
                self._take(message)
            with self._at_work("taking in what has landed"):
                again_s = self._duties.idle()

    def _receive(self, timeout_s: float) -> Any:
        """The next message. Waits of less than ZeroMQ's millisecond are slept."""
        message = self._client.receive(0.0 if timeout_s < 1e-3 else timeout_s)
        if message is None and 0 < timeout_s < 1e-3:
            time.sleep(timeout_s)
        return message

    def _beat(self, now: float) -> None:
        if self._must_join:
            join = self._duties.join_message()
            if join is not None:
                self._must_join = False
                self._client.send(join)
        elif not self._client.is_blocked:  # otherwise the controller does not read: noticed by its silence
            self._client.send(Beat())
        silent_s = now - self._last_heard
        if silent_s > self.settings.silence_s and not self._is_lost:
            self._is_lost = True
            self._forget_all()
            what, hint = f"no controller answers at `{self._address}`", "is it running, and is the address right?"
            if self._was_answered:
                what = f"the controller at `{self._address}` has not answered for {silent_s:.1f} s"
                hint = "members rejoin automatically when it is back"
            self._duties.controller_lost(PeerLost(what, hint=hint))

    def _take(self, message: Any) -> None:
        self._last_heard = time.monotonic()
        self._is_lost, self._was_answered = False, True
        match message:
            case Welcome():
                self.settings, self.incarnation = message.settings, message.incarnation
                self.ranks_per_engine, self.num_trainers = message.ranks_per_engine, message.num_trainers
                self.is_recorded = message.records
                self._is_joined, self._status = True, ""
                self._duties.joined()
            case Alive(status=status):
                self._status = status
            case Unknown() | Reset():
                stalled = message.stalled if isinstance(message, Unknown) else ""
                if stalled:
                    self._forget_all()
                    self._duties.stalled(PeerLost(f"the controller gave up on {self._client.member}: it {stalled}"))
                elif self._is_joined:
                    self._forget_all()
                    what = f"the controller at `{self._address}` was restarted, or gave up on {self._client.member}"
                    self._duties.controller_lost(PeerLost(what, hint="members rejoin automatically"))
                self._must_join, self._is_joined = True, False
            case Refused(reason=reason, hint=hint, may_return=may_return):
                error = ProtocolError(f"the controller refused {self._client.member}: {reason}", hint=hint or None)
                if not may_return:
                    raise error
                self._forget_all()
                self._must_join, self._is_joined = True, False
                self._duties.refused(error)
            case _:
                name = type(message).__name__
                with self._at_work(_WORK.get(name, f"handling {name}")):
                    self._duties.handle(message)

    @contextlib.contextmanager
    def _at_work(self, what: str) -> Iterator[None]:
        """Leave the channel to the heartbeat thread."""
        self._work, self._work_began = what, time.monotonic()
        self._has_lent = True
        self._channel.release()
        try:
            yield
        finally:
            self._channel.acquire()
            self._has_lent = False
            self._work, now = "", time.monotonic()
            if now - self._work_began > self.settings.beat_s:
                self._last_heard = now  # this thread did not listen: the controller may well have answered

    def _keep_beating(self) -> None:
        """On a thread of its own: send heartbeats while the other one is at work."""
        while not self._stop.wait(self.settings.beat_s):
            if not self._channel.acquire(blocking=False):
                continue
            try:
                if self._is_joined and not self._stop.is_set() and not self._client.is_blocked:
                    self._client.send(Beat())
            finally:
                self._channel.release()

    def _forget_all(self) -> None:
        """Drop what was meant for a controller that is gone."""
        while not self._outgoing.empty():
            self._outgoing.get_nowait()

    def _send_all(self) -> None:
        while True:
            try:
                self._client.send(self._outgoing.get_nowait())
            except queue.Empty:
                return
