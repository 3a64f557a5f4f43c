"""The processes of a storm. Each is driven over a pipe by tuples (what, …) and tells its story the same way."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.process.storm import contents
from tests.process.storm.gate import WriteGate
from tests.process.storm.quantized import EngineNumbers, TrainerNumbers
from tests.process.storm.settings import StormSettings
from weft.config import TransferSettings
from weft.core.version import CommitPolicy
from weft.errors import WeftError
from weft.runtime.controller.controller import Controller
from weft.runtime.receive.receiver import Receiver, Update
from weft.runtime.send.sender import Publication, Sender
from weft.runtime.weights import Weights
from weft.transport.base import Memory

LOOK_S = 0.001
AGAIN_S = 0.01
CHECK_SHARE = 0.01
"""How often an engine compares everything it serves, per step."""


class Pipe:
    """The child's end; may be used by several threads."""

    def __init__(self, end: Any) -> None:
        self._end, self._lock = end, threading.Lock()

    def tell(self, what: str, *facts: Any) -> None:
        with self._lock, contextlib.suppress(OSError):  # the storm is over
            self._end.send((what, time.monotonic(), *facts))

    def ask(self, timeout_s: float | None = None) -> Any:
        """The next request, None if there is none in time; the end of the storm is a request too."""
        try:
            if timeout_s is not None and not self._end.poll(timeout_s):
                return None
            return self._end.recv()
        except (EOFError, OSError):
            return ("close",)


class Log(logging.Handler):
    """What weft logs is part of the story; a defect of its own is told as such."""

    def __init__(self, pipe: Pipe) -> None:
        super().__init__(logging.WARNING)
        self._pipe = pipe

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self._pipe.tell("crashed", "".join(traceback.format_exception(record.exc_info[1])))
        else:
            self._pipe.tell("log", record.getMessage())


def run(end: Any, body: Callable[..., None], *args: Any) -> None:
    """The body of a process; what it raises, in any thread, is told."""
    pipe = Pipe(end)
    logging.getLogger("weft").addHandler(Log(pipe))
    threading.excepthook = lambda raised: pipe.tell("crashed", "".join(traceback.format_exception(raised.exc_value)))
    try:
        body(pipe, *args)
    except Exception:
        pipe.tell("crashed", traceback.format_exc())


def controller(pipe: Pipe, port: int, settings: StormSettings) -> None:
    """A controller at a fixed port, so that one that is restarted is found."""
    with Controller(
        f"tcp://127.0.0.1:{port}",
        num_trainers=settings.num_trainers,
        num_engine_ranks=settings.num_engine_ranks,
        ranks_per_engine=settings.ranks_per_engine,
        commit_policy=CommitPolicy.QUORUM if settings.quorum else CommitPolicy.ALL,
        quorum=settings.quorum,
        settings=TransferSettings(**settings.transfer()),
    ) as made:
        pipe.tell("there")
        while (request := pipe.ask())[0] != "close":
            if request[0] == "planned":
                pipe.tell("planned", made.wait_planned(request[1]))
            else:
                known = made.statistics()
                pipe.tell("statistics", known.members, known.lost, known.committed, known.last_abort)


def trainer(pipe: Pipe, address: str, settings: StormSettings, rank: int) -> None:
    """Publishes the versions it is asked for, and tells how each ended and after how long."""
    is_fp8 = settings.precision == "fp8"
    mine = TrainerNumbers(settings, rank) if is_fp8 else contents.of_trainer(settings, rank)
    arrays = mine.empty()
    gate = WriteGate(pipe.tell)
    weights = Weights.from_arrays(arrays, parts=mine.parts)
    with Sender(address, rank=rank, weights=weights, timeout_s=settings.turn_s) as sender:
        pipe.tell("there")
        while (request := pipe.ask())[0] != "close":
            _, version, action = request
            began = time.monotonic()
            try:
                publication = _publish(sender, lambda v=version: mine.fill(arrays, v), version, settings, gate, action)
                publication.wait_released(settings.end_s)
                publication.wait_committed(settings.end_s)
                how = "committed"
            except WeftError as error:
                how = f"{type(error).__name__}: {error}"
            pipe.tell("published", version, how, time.monotonic() - began)


def _publish(
    sender: Sender, fill: Callable[[], None], version: int, settings: StormSettings, gate: WriteGate, action: str
) -> Publication:
    """One that failed may still read the weights: then the next waits."""
    gate.expect(version, action)
    deadline = time.monotonic() + settings.end_s
    while True:
        fill()
        try:
            return sender.publish(version=version)
        except WeftError as error:
            if "still reads" not in str(error) or time.monotonic() > deadline:
                raise
        time.sleep(AGAIN_S)


def engine(pipe: Pipe, address: str, settings: StormSettings, rank: int, seed: int) -> None:
    """Serves, and looks by itself whether what it serves is the version it says."""
    serving = _Serving(pipe, settings, rank, seed)
    with Receiver(address, rank=rank, weights=serving.weights()) as receiver:
        serving.receiver = receiver
        pipe.tell("there")
        while serving.step():
            pass


class _Serving:
    """An engine rank's loop."""

    receiver: Receiver

    def __init__(self, pipe: Pipe, settings: StormSettings, rank: int, seed: int) -> None:
        self._pipe, self._settings = pipe, settings
        is_fp8 = settings.precision == "fp8"
        self._mine = EngineNumbers(settings, rank) if is_fp8 else contents.of_engine(settings, rank)
        self._arrays = self._mine.empty()
        self._rng = random.Random(seed)
        self._must_hold = False
        self._held: Update | None = None
        self._last_error = ""
        self._last_committed = -1
        self._was_torn: int | None = None

    def weights(self) -> Weights:
        """The arrays; they can move into shared memory."""
        return replace(Weights.from_arrays(self._arrays, parts=self._mine.parts), rehome=self._rehome)

    def _rehome(self, allocate: Callable[[int], Memory]) -> Weights:
        memory = allocate(sum(array.nbytes for array in self._arrays.values()))
        at = 0
        for name, old in list(self._arrays.items()):
            room = np.frombuffer(memory.keep.buffer, dtype=old.dtype, count=old.size, offset=at)
            self._arrays[name] = room.reshape(old.shape)
            self._arrays[name][...] = old
            at += old.nbytes
        return self.weights()

    def step(self) -> bool:
        """One step of generation; False when the engine should end."""
        request = self._pipe.ask(LOOK_S)
        if request is not None and not self._answer(request):
            return False
        if self._held is None:
            self._poll()
        if self._held is not None and not self._must_hold:
            update, self._held = self._held, None
            self._commit(update)
        if self._rng.random() < CHECK_SHARE:
            self._check("serving")
        return True

    def _answer(self, request: tuple[Any, ...]) -> bool:
        match request[0]:
            case "close":
                return False
            case "hold":
                self._must_hold = True
            case "go_on":
                self._must_hold = False
            case "state":
                version, reason = self._served()
                self._check("asked")
                self._pipe.tell("state", version, reason)
            case "footprint":
                self._pipe.tell("footprint", *footprint())
        return True

    def _poll(self) -> None:
        """The clock in milliseconds is the step all ranks of the engine count."""
        try:
            self._held = self.receiver.poll(step=int(time.monotonic() * 1e3))
        except WeftError as error:
            self._complain(error)
        if self._held is not None:
            self._check("before a commit")
            self._pipe.tell("offered", self._held.version)

    def _commit(self, update: Update) -> None:
        try:
            done = update.commit(self._settings.end_s)
        except WeftError as error:
            self._pipe.tell("not_committed", update.version, f"{type(error).__name__}: {error}")
            return
        if done:
            if update.version <= self._last_committed:
                self._pipe.tell("backwards", update.version, self._last_committed)
            self._last_committed = update.version
            self._pipe.tell("committed", update.version)
            self._check("after a commit")
        else:
            self._pipe.tell("not_committed", update.version, "called off")

    def _complain(self, error: WeftError) -> None:
        if str(error) != self._last_error:
            self._last_error = str(error)
            self._pipe.tell("error", f"{type(error).__name__}: {error}")
        time.sleep(AGAIN_S)

    def _served(self) -> tuple[int | None, str]:
        """The version served now, or why none is."""
        try:
            return self.receiver.version, ""
        except WeftError as error:
            return None, str(error)

    def _check(self, when: str) -> None:
        """Compare everything with the version that is served, if one is."""
        version, reason = self._served()
        if reason or version is None:
            return
        found = self._mine.difference(self._arrays, version)
        if found is None:
            self._pipe.tell("checked", version)
        elif self._was_torn != version:
            self._was_torn = version
            self._pipe.tell("torn", version, found.num_wrong, f"{found.name}[{found.first}] on", when)


def footprint() -> tuple[int, int, int]:
    """Bytes (private ones and shared memory of its own), file descriptors and threads of this process."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    anonymous = next(int(line.split()[1]) << 10 for line in rollup.splitlines() if line.startswith("Anonymous:"))
    shared: dict[int, int] = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split()
        if len(fields) > 5 and fields[5].startswith("/memfd:"):
            first, last = (int(end, 16) for end in fields[0].split("-"))
            shared[int(fields[4])] = last - first
    fds = os.listdir("/proc/self/fd")
    for fd in fds:
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:"):
                about = os.stat(f"/proc/self/fd/{fd}")
                shared[about.st_ino] = about.st_size
    return anonymous + sum(shared.values()), len(fds), len(os.listdir("/proc/self/task"))
