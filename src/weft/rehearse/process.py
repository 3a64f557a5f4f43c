"""A process of a rehearsal: some members, and an engine thread that polls the receivers among them.

It is asked through a pipe: `(method, arguments)`, and answers `(True, value)` or `(False, what went wrong)`.
"""

from __future__ import annotations

import gc
import resource
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from weft.core.case import Case, lay_out
from weft.errors import TransferTimeout, WeftError
from weft.rehearse.members import RehearsedReceiver, RehearsedSender, rehearsed_place
from weft.rehearse.transport import Board, CountingTransport
from weft.rehearse.weights import EngineWeights, TrainerWeights
from weft.runtime.memory import trim_heap
from weft.runtime.weights import Weights

STEP_S = 0.02
"""How long a step of an engine lasts."""
SWITCH_S = 0.1
"""How long a thread may keep the interpreter while others wait for it. With Python's 5 ms hundreds of waiting threads
spend most of the processor's time asking for it, and some get it only after minutes."""
Name = tuple[str, int]
"""Side and rank of a member."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TroupeSetup:
    """What a process of members receives at its start."""

    case: Case
    members: tuple[Name, ...]
    board: Board


class Troupe:
    """The members of one process."""

    def __init__(self, setup: TroupeSetup) -> None:
        self._setup = setup
        raise_file_limit()
        sides = lay_out(setup.case)
        self._topology = sides.topology
        trainers, engines = TrainerWeights(sides), EngineWeights(sides)
        self._weights: dict[Name, Weights] = {
            name: (trainers if name[0] == "trainer" else engines).of(name[1]) for name in setup.members
        }
        self._transports: dict[Name, CountingTransport] = {}
        self.senders: list[RehearsedSender] = []
        self.receivers: list[RehearsedReceiver] = []
        self._engines = threading.Thread(target=self._step, daemon=True)
        self._failure: WeftError | None = None
        del sides, trainers, engines
        gc.collect()
        trim_heap()
        gc.freeze()  # hundreds of thousands of shards that stay: collections can skip them

    def join(self, *, address: str) -> None:
        """Let all members join."""
        turn = threading.Lock()
        for name, weights in self._weights.items():
            side, rank = name
            transport = CountingTransport(f"{side} {rank}", self._setup.board, writer=rank)
            self._transports[name] = transport
            place = rehearsed_place(self._topology, side, rank)
            if side == "trainer":
                self.senders.append(
                    RehearsedSender(address, rank=rank, weights=weights, transport=transport, place=place, turn=turn)
                )
            else:
                self.receivers.append(
                    RehearsedReceiver(address, rank=rank, weights=weights, transport=transport, place=place, turn=turn)
                )
        self._engines.start()

    def wait_compiled(self, *, num_plans: int, timeout_s: float) -> list[dict[str, Any]]:
        """Wait until every member has compiled so many parts; returns what each was shipped, and the time it took."""
        deadline = time.monotonic() + timeout_s
        found = []
        members: list[RehearsedSender | RehearsedReceiver] = [*self.senders, *self.receivers]
        for name, member in zip(self._names(), members, strict=True):
            if not member.log.wait(num_plans, max(deadline - time.monotonic(), 0.0)):
                raise TransferTimeout(f"{name[0]} {name[1]} has no compiled plan after {timeout_s:.0f} s")
            log = member.log
            found.append({"side": name[0], "shipped_bytes": log.shipped_bytes, "compile_s": log.compile_s})
        return found

    def _names(self) -> list[Name]:
        return sorted(self._weights, key=lambda name: name[0] != "trainer")

    def publish(self, *, version: int, timeout_s: float) -> dict[str, int]:
        """Publish a version on all trainers here and wait for its commit; returns its counts."""
        before = self._counted()
        publications = [sender.publish(version=version) for sender in self.senders]
        for publication in publications:
            publication.wait_committed(timeout_s)
        deadline = time.monotonic() + timeout_s
        while any(receiver.version != version for receiver in self.receivers):
            if self._failure is not None:
                raise self._failure
            if time.monotonic() > deadline:
                raise TransferTimeout(f"an engine rank does not serve version {version} after {timeout_s:.0f} s")
            time.sleep(STEP_S)
        return {name: count - before[name] for name, count in self._counted().items()}

    def _counted(self) -> dict[str, int]:
        transports = self._transports.values()
        return {
            "num_writes": sum(transport.num_writes for transport in transports),
            "num_bytes": sum(transport.num_bytes for transport in transports),
        }

    def _step(self) -> None:
        """The engines: all count steps by one clock, and commit at the agreed step."""
        try:
            while True:
                time.sleep(STEP_S)
                for receiver in self.receivers:
                    update = receiver.poll(step=int(time.monotonic() / STEP_S))
                    if update is not None:
                        update.commit()
        except WeftError as error:
            self._failure = error


def serve(pipe: Connection, setup: TroupeSetup) -> None:
    """The process: answer requests until the pipe ends."""
    sys.setswitchinterval(SWITCH_S)
    try:
        troupe = Troupe(setup)
        pipe.send((True, None))
    except WeftError as error:
        pipe.send((False, str(error)))
        return
    while (asked := _next(pipe)) is not None:
        method, arguments = asked
        try:
            pipe.send((True, getattr(troupe, method)(**arguments)))
        except Exception as error:  # the caller decides what it means
            pipe.send((False, f"{type(error).__name__}: {error}"))


def _next(pipe: Connection) -> tuple[str, dict[str, Any]] | None:
    try:
        return pipe.recv()
    except EOFError:
        return None


def raise_file_limit() -> None:
    """Every member has a socket and a few descriptors of its own."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def divided(members: Sequence[Name], num_processes: int) -> list[tuple[Name, ...]]:
    """Members for each process, both sides evenly."""
    return [tuple(members[first::num_processes]) for first in range(min(num_processes, len(members)))]
