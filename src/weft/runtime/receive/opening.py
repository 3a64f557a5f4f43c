"""Opening, round by round, what trainers write into; and keeping lost writers out of it.

consumes      Open, CutOff, and the passing of time
produces      Opened, Blocked
waits for     writers that were lost, and a version that is decided but not committed; never blocks

A request to open waits until no writer that was lost can reach the memory that will be used: until its process has
ended, or the memory was moved, given up or put into quarantine. In place only the engine's thread opens.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from weft.config import DeltaPolicy, ReceiverMode, TransferSettings
from weft.devices import DeviceWork
from weft.errors import ConfigError, TransportError, WeftError
from weft.runtime.control.messages import Blocked, Open, Writer
from weft.runtime.receive.exposure import Exposure, has_ended, named
from weft.runtime.receive.following import Following
from weft.runtime.receive.modes import MODES, Mode, Shadow
from weft.runtime.receive.rank_state import RankState
from weft.runtime.receive.reachable import ReachableMemory
from weft.runtime.receive.reservation import OutOfReserve
from weft.transport.registry import Place

LOOK_S = 0.1
"""How long to wait between looks at writers that were lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenerContext:
    """What opening needs of the receiver."""

    place: Place
    changed: threading.Condition
    """Protects the rank's state."""
    settings: Callable[[], TransferSettings]
    post: Callable[[Any], None]
    """Tells the controller."""
    ask_thread: Callable[[Callable[[], None]], None]
    """Lets the engine's thread do something."""


class MemoryOpener:
    """What one engine rank has open, and for whom."""

    def __init__(
        self,
        member: str,
        memory: ReachableMemory,
        exposure: Exposure,
        following: Following,
        state: RankState,
        work: DeviceWork,
        around: OpenerContext,
    ) -> None:
        self._member, self._memory, self._exposure = member, memory, exposure
        self._following, self._state, self._work, self._around = following, state, work, around
        self.mode: Mode = Shadow(work)
        """How versions reach the live weights."""
        self._writers: list[Writer] = []
        """Trainers of the present round."""
        self._request: Open | None = None
        """A request to open that waits for lost writers, or for a commit."""
        self._next_look = 0.0
        self._blocked: tuple[int, str] | None = None
        """What was reported about waiting, and in which round."""

    def begin(self, message: Open) -> None:
        """Open for another round, now or as soon as that is possible."""
        self._request = message
        self._open_if_possible()

    def expose(self) -> None:
        """The trainers of this round may write from now on."""
        self._exposure.offer(self._writers)

    def look(self) -> float | None:
        """Check on lost writers; returns the seconds until the next look, None where there are none."""
        if self._request is None and not self._memory.num_quarantined:
            return None
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_S
            self._memory.release_quarantine(lambda writer: has_ended(writer, self._around.place))
            self._open_if_possible()
        return LOOK_S

    def cut(self, incarnations: set[int]) -> None:
        """Some trainers have lost their right to write: close everything now, and open again in the next round."""
        revoked = [writer for writer in self._writers if writer.incarnation in incarnations]
        if not revoked:
            return
        self._exposure.offer(revoked)
        self._exposure.revoke(incarnations)
        self._following.stop()
        self._memory.close_transports(self._exposure.beyond_reach(revoked, moved=False))

    def explained(self, error: Exception) -> WeftError:
        """What callers are told of an error while memory was opened."""
        if isinstance(error, WeftError):
            return error
        if isinstance(error, OutOfReserve):
            return self._too_large(error)
        return TransportError(f"{self._member} cannot open memory: {type(error).__name__}: {error}")

    def _open_if_possible(self) -> None:
        """Open when no writer that was lost can reach the memory that will be used; otherwise look again later."""
        message = self._request
        if message is None:
            return
        if self._state.pending is not None and not self.mode.is_in_place(whole=self._state.is_whole):
            return  # what was decided is laid out for the old plan: it is committed first
        unsettled = self._exposure.unsettled(message.writers, message.settled)
        if (unsettled or message.abandoned) and not self._keep_out(unsettled):
            return
        try:
            self._open(message)
        except (MemoryError, OSError, RuntimeError) as error:
            if not self._memory.num_quarantined:
                if isinstance(error, OutOfReserve):
                    raise self._too_large(error) from error
                raise
            self._block(f"no memory to land in while a lost writer can still reach the old memory: {error}")

    def _too_large(self, error: OutOfReserve) -> ConfigError:
        mode = self._around.settings().mode
        needed = -(-error.num_bytes // 10**6)
        less = "choose a mode that needs less (in_place, patch)"
        if mode is not ReceiverMode.SHADOW:
            less = "lower window_bytes or patch_share of the controller"
        hint = f"start the engine with WEFT_RESERVE={needed}MB, or {less}"
        return ConfigError(f"{self._member} in mode {mode}: {error}", hint=hint)

    def _keep_out(self, unsettled: Sequence[Writer]) -> bool:
        """Take memory out of the reach of lost writers; False if that has to wait."""
        can_move = self._memory.weights.rehome is not None
        beyond = self._exposure.beyond_reach(unsettled, moved=self._memory.is_live and can_move)
        if beyond and self._memory.is_live:
            self._block(f"{named(beyond)} was lost and could still write into the live weights")
            return False
        with self._around.changed:
            if self._state.pending is not None:
                return False  # what was decided is in that memory: it is committed first
            self._following.end_old()
            self._forget_coming()
            self._memory.close_transports(beyond)
            if self._memory.give_up(beyond):
                self.mode.forget()
        self._exposure.forget_all()
        return True

    def _block(self, reason: str) -> None:
        """No version can come before lost writers have ended; the controller hears why, once."""
        message = self._request
        assert message is not None
        blocked = f"{self._member} is waiting: {reason}"
        if self._blocked != (message.round, blocked):
            self._blocked = message.round, blocked
            self._around.post(Blocked(round=message.round, reason=blocked))
        with self._around.changed:
            self._state.stay_torn(reason)

    def _forget_coming(self) -> None:
        """What is staged or in flight is overwritten from now on."""
        self._following.stop()
        self._following.landing = None
        with self._around.changed:
            self._state.overwrite()

    def _open(self, message: Open) -> None:
        """Open transports and prepare the memory that will be written."""
        settings = self._around.settings()
        self._memory.pass_host(message.through_host)
        self._memory.open_transports(message.transports, settings)
        self._writers = message.writers
        self._forget_coming()
        self._following.settings = settings
        if not isinstance(self.mode, MODES[settings.mode]):
            self.mode = MODES[settings.mode](self._work)
        if settings.delta is DeltaPolicy.ON:
            self._memory.make_room_for_patches(message.patch_bytes)
        if self.mode.reserve(self._memory, message):
            self._offer(message.round)
        else:
            self._request_thread(message)
        self._request = None

    def _request_thread(self, message: Open) -> None:
        """Only the engine's thread may open; the controller hears what this rank waits for."""
        reason = f"{self._member} is waiting for its engine's thread to open memory"
        self._around.post(Blocked(round=message.round, reason=reason, by_thread=True))
        self._around.ask_thread(lambda: self._open_live(message))

    def _offer(self, number: int) -> None:
        """From now on a trainer may write at any time, without another message from the controller."""
        self.expose()
        self._around.post(self._memory.offer(number))

    def _open_live(self, message: Open) -> None:
        """On the engine's thread: nothing runs that could look at its tensors while they move."""
        rehome = not self._memory.is_open and "shm" in message.transports
        self._memory.land_in_live(window_bytes=message.landing_bytes, rehome=rehome)
        self._around.post(self._memory.offer(message.round))
