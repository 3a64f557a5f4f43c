"""One rank of an engine whose driver (vLLM's engine core, SGLang's first scheduler) decides when all ranks commit.

consumes      versions from trainers (Receiver); calls from the driver, on the engine's own thread
produces      committed weights, processed by the engine's own code; the rank's status, for the driver
waits for     in `serve`: ranks of the same engine, in place also the writers; all with deadlines
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from weft.config import EngineSettings
from weft.errors import ConfigError, TransportError, VersionError, WeftError
from weft.runtime.receive.receiver import Receiver
from weft.runtime.receive.reservation import Reservation

log = logging.getLogger(__name__)

SETTLE_S = 5.0
"""How long going to sleep may wait for a version to end; otherwise its writers would have to be kept out."""
NOTICE_S = 5.0
"""How long a rank waits for a version another rank of its engine has heard of."""


class EngineRank:
    """Serves the versions its driver names. Errors are kept for the driver; the engine keeps serving what it has."""

    def __init__(self, rank: int, process: Callable[[], None]) -> None:
        """`process`: lets the engine convert what was committed into its own layout."""
        self.rank = rank
        self._process = process
        self._receiver: Receiver | None = None
        self._error = ""
        self._num_commits, self._pause_s = 0, 0.0
        self._must_process = False
        """Whether what is served still has to be converted into the engine's own layout."""
        self._is_torn = False
        """Whether a controller was left with torn weights, or the weights were discarded."""
        self._is_asleep = False
        self._discards = False
        """Whether the weights are lost while the engine sleeps."""
        self.reservation: Reservation | None = None
        """Memory versions may land in; None: whatever is free when a plan arrives."""

    @property
    def has_joined(self) -> bool:
        """Whether there is a controller."""
        return self._receiver is not None

    @property
    def wanted(self) -> int | None:
        """A version that should be served."""
        return None if self._receiver is None else self._receiver.pending

    def join(self, receiver: Receiver) -> None:
        """Serve what this receiver gets; its controller may differ from the previous one."""
        self.leave()
        self._receiver = receiver

    def leave(self, reason: str = "") -> None:
        """Leave the controller; the engine keeps serving what it has. `reason`: for members that wait for this rank."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            self._is_torn = self._is_torn or receiver.is_poisoned
            receiver.close(reason)
        if self.reservation is not None:
            self.reservation.hold()

    @property
    def is_asleep(self) -> bool:
        """Whether the engine's weights are not in their memory."""
        return self._is_asleep

    def fall_asleep(self, *, discards: bool) -> None:
        """Before the engine releases the memory of its weights: no writer may reach it from now on.

        `discards`: the weights are not restored when it wakes up.
        """
        if self._receiver is not None and not self._receiver.settle(SETTLE_S):
            log.warning("weft: engine %d goes to sleep while a version is being written", self.rank)
        self._is_asleep, self._discards = True, discards
        if self.reservation is not None:
            self.reservation.close()
            self.reservation = None
        self.leave("the engine is asleep")

    def stay_awake(self) -> None:
        """The engine could not go to sleep; its weights are unchanged."""
        self._is_asleep = self._discards = False

    def wake_up(self) -> None:
        """The weights have memory again, perhaps different memory; the rank has joined again."""
        self._is_torn = self._is_torn or self._discards
        self._is_asleep = self._discards = False

    def renew(self) -> None:
        """The engine has loaded complete weights by other means."""
        self._is_torn = False

    def joined(self) -> Receiver:
        """The receiver."""
        if self._is_asleep:
            raise VersionError(
                f"engine {self.rank} is asleep", hint="wake it up; it rejoins its controller automatically"
            )
        if self._receiver is None:
            hint = "set WEFT_CONTROLLER, or pass its address to init_weight_transfer_engine"
            raise VersionError("this engine has no controller yet", hint=hint)
        return self._receiver

    def tend(self) -> dict[str, Any]:
        """Do what the receiver needs from the engine's thread besides commits; notice what has failed."""
        return self.status() if self._is_asleep else self._reporting(lambda: self.joined().poll(step=0))

    def hears_of(self, version: int) -> bool:
        """Whether the version waits to be served here, or is served; it may still be in transit."""
        try:
            receiver = self.joined()
            return _serves(receiver, version) or receiver.wait(NOTICE_S).version == version
        except WeftError as error:
            self._error = str(error)
            return False

    def serve(self, version: int, timeout_s: float, *, is_asked: bool = False) -> dict[str, Any]:
        """Between two steps, on all ranks: serve a version that is decided. Returns `status`.

        `is_asked`: requested by the user, possibly before the version has arrived.
        """
        return self._reporting(lambda: self._serve(version, timeout_s, is_asked=is_asked))

    def _serve(self, version: int, timeout_s: float, *, is_asked: bool) -> None:
        receiver, deadline = self.joined(), time.monotonic() + timeout_s
        while not _serves(receiver, version):
            update = receiver.wait(max(deadline - time.monotonic(), 0.0)) if is_asked else receiver.poll(step=0)
            if update is None or not (is_asked or update.version == version):
                break  # called off
            if not update.commit(max(timeout_s, receiver.decided_within_s)):
                break  # called off before anything was written
            self._must_process, self._is_torn, self._num_commits = True, False, self._num_commits + 1
        self._make_layout(receiver)
        if _serves(receiver, version):
            self._error = ""
        elif is_asked:
            raise VersionError(f"version {version} was called off", hint="publish it again")

    def _make_layout(self, receiver: Receiver) -> None:
        if self._must_process:
            began = time.monotonic()
            self._process()
            self._must_process = False
            self._pause_s = receiver.last_pause_s + time.monotonic() - began

    def _reporting(self, work: Callable[[], object]) -> dict[str, Any]:
        try:
            work()
        except WeftError as problem:
            self._error = str(problem)
        except Exception as problem:  # in the engine's own processing: its weights are half converted
            log.exception("weft: processing failed")
            self._error = f"{type(problem).__name__}: {problem}"
        return self.status()

    def status(self) -> dict[str, Any]:
        """What this rank serves, and what has gone wrong since it was committed."""
        receiver = self._receiver
        poisoned = self._must_process or self._is_torn or (receiver is not None and receiver.is_poisoned)
        return {
            "rank": self.rank,
            "version": None if receiver is None or poisoned else receiver.version,
            "is_poisoned": poisoned,
            "error": self._error,
            "num_commits": self._num_commits,
            "pause_s": self._pause_s,
        }


def reserved(device: str, weight_bytes: int, settings: EngineSettings) -> Reservation | None:
    """Memory set aside for versions before the engine uses it for something else; None if none is."""
    num_bytes = settings.reserved_bytes(weight_bytes, device)
    if not num_bytes:
        return None
    try:
        return Reservation(device, num_bytes)
    except (MemoryError, OSError, TransportError) as error:
        raise ConfigError(
            f"{num_bytes / 1e9:.3f} GB cannot be reserved for versions: {error}",
            hint="give the engine less memory, or set WEFT_RESERVE to in_place, patch, or none",
        ) from error


def _serves(receiver: Receiver, version: int) -> bool:
    return not receiver.is_poisoned and receiver.version is not None and receiver.version >= version
