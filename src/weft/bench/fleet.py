"""The processes of a benchmark: started, asked, and always ended with it."""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Self

from weft.errors import TransferTimeout, WeftError

ANSWER_S = 300.0
END_S = 10.0
START_S = 0.05
"""How far in the future a common start lies."""


class Fleet:
    """Trainers and engine ranks of one case, as processes."""

    def __init__(self, serve: Callable[[Connection, Any], None], setups: Mapping[tuple[str, int], Any]) -> None:
        """`serve` runs in each process, with one of the setups: of each side and rank."""
        self.num_trainers = sum(side == "trainer" for side, _ in setups)
        self._serve = serve
        self._pipes: dict[tuple[str, int], Connection] = {}
        self._processes: list[Any] = []
        for name, setup in setups.items():
            self._pipes[name], process = self._launch(name, setup)
            self._processes.append(process)
        self._collect(list(self._pipes))

    def _launch(self, name: tuple[str, int], setup: Any) -> tuple[Connection, Any]:
        """Start a process; returns its pipe."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=self._serve, args=(theirs, setup), daemon=True, name=f"{name[0]} {name[1]}")
        process.start()
        theirs.close()
        return ours, process

    @staticmethod
    def _end(process: Any) -> None:
        """Wait for a process that was told to end, or kill it."""
        process.join(END_S)
        process.kill()
        process.join()

    def ask(self, side: str, method: str, **arguments: Any) -> list[tuple[str, int]]:
        """Call a method on all of one side; `answers` collects the results."""
        return self.ask_these([key for key in self._pipes if key[0] == side], method, **arguments)

    def ask_these(self, keys: Sequence[tuple[str, int]], method: str, **arguments: Any) -> list[tuple[str, int]]:
        """Call a method in some processes."""
        for key in keys:
            self._pipes[key].send((method, arguments))
        return list(keys)

    def outcomes(self, keys: Sequence[tuple[str, int]], *, within_s: float) -> list[tuple[bool, Any] | None]:
        """Whether each process succeeded, and its result or error; None for those that do not answer in time."""
        deadline = time.monotonic() + within_s
        return [
            self._pipes[key].recv() if self._pipes[key].poll(max(deadline - time.monotonic(), 0.0)) else None
            for key in keys
        ]

    def kill(self) -> None:
        """End all processes at once, whatever they are doing."""
        for process in self._processes:
            process.kill()

    def answers(self, *asked: list[tuple[str, int]]) -> list[list[Any]]:
        """The answers of the asked processes, in order; raises if one of them failed."""
        return [self._collect(keys) for keys in asked]

    def call(self, side: str, method: str, **arguments: Any) -> list[Any]:
        """Ask and wait."""
        return self._collect(self.ask(side, method, **arguments))

    def call_each(self, side: str, method: str, arguments: list[dict[str, Any]]) -> list[Any]:
        """Ask each process of a side with its own arguments, and wait."""
        keys = [key for key in self._pipes if key[0] == side]
        for key, mine in zip(keys, arguments, strict=True):
            self._pipes[key].send((method, mine))
        return self._collect(keys)

    @staticmethod
    def soon() -> float:
        """A moment that all processes can wait for."""
        return time.monotonic() + START_S

    def _collect(self, keys: list[tuple[str, int]]) -> list[Any]:
        values = []
        deadline = time.monotonic() + ANSWER_S
        for side, rank in keys:
            pipe = self._pipes[side, rank]
            if not pipe.poll(max(deadline - time.monotonic(), 0.0)):
                raise TransferTimeout(f"{side} {rank} of the benchmark did not answer in {ANSWER_S:.0f} s")
            try:
                is_good, value = pipe.recv()
            except EOFError:
                raise WeftError(f"{side} {rank} of the benchmark has ended") from None
            if not is_good:
                raise WeftError(f"{side} {rank} of the benchmark failed: {value}")
            values.append(value)
        return values

    def close(self) -> None:
        """End all processes."""
        for pipe in self._pipes.values():
            try:
                pipe.send(None)
            except OSError:
                continue
        for process in self._processes:
            self._end(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def answer_requests(pipe: Connection, member: Any) -> None:
    """In a process: answers `(method, arguments)` with `(ok, value)` until told to stop."""
    pipe.send((True, None))
    while (request := pipe.recv()) is not None:
        method, arguments = request
        try:
            pipe.send((True, getattr(member, method)(**arguments)))
        except Exception as error:
            pipe.send((False, f"{type(error).__name__}: {error}"))


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
