"""The processes of a rehearsal: started, asked, killed and replaced; they always end with the rehearsal."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Self

from weft.errors import TransferTimeout, WeftError
from weft.rehearse.probe import probe
from weft.rehearse.process import TroupeSetup, serve

ANSWER_S = 1800.0


@dataclass(slots=True)
class _Running:
    process: BaseProcess
    pipe: Connection


class Cast:
    """Processes by number; each is one TroupeSetup."""

    def __init__(self, setups: Sequence[TroupeSetup]) -> None:
        self._setups = setups
        self._context = multiprocessing.get_context("spawn")
        self._stack = ExitStack()
        self._running: dict[int, _Running] = {}
        self._probe: _Running | None = None
        self.start(range(len(setups)))

    def start(self, numbers: Sequence[int]) -> None:
        """Start processes, for the first time or again; returns when their members are ready to join."""
        for number in numbers:
            self._running[number] = self._run(serve, self._setups[number])
        self._collect(numbers)

    def kill(self, numbers: Sequence[int]) -> None:
        """End processes, as a crash does."""
        for number in numbers:
            self._running[number].process.kill()
            self._running.pop(number).process.join()

    def ask(self, method: str, numbers: Sequence[int] | None = None, **arguments: Any) -> list[Any]:
        """Call a method in several processes at once; returns their answers."""
        asked = list(self._running) if numbers is None else numbers
        for number in asked:
            self._running[number].pipe.send((method, arguments))
        return self._collect(asked)

    def processes(self) -> list[int]:
        """Their numbers, as the kernel knows them; for any thread."""
        running = [*self._running.copy().values(), *([self._probe] if self._probe is not None else [])]
        return [found.process.pid for found in running if found.process.pid is not None]

    def _run(self, target: Any, *arguments: Any) -> _Running:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=target, args=(theirs, *arguments), daemon=True)
        process.start()
        theirs.close()
        self._stack.callback(process.kill)
        return _Running(process, ours)

    def _collect(self, numbers: Sequence[int]) -> list[Any]:
        deadline = time.monotonic() + ANSWER_S
        values = []
        for number in numbers:
            pipe = self._running[number].pipe
            if not pipe.poll(max(deadline - time.monotonic(), 0.0)):
                raise TransferTimeout(f"process {number} of the rehearsal did not answer in {ANSWER_S:.0f} s")
            try:
                is_good, value = pipe.recv()
            except EOFError:
                raise WeftError(f"process {number} of the rehearsal has ended") from None
            if not is_good:
                raise WeftError(f"process {number} of the rehearsal failed: {value}")
            values.append(value)
        return values

    def watch(self, address: str) -> None:
        """Start measuring how long the controller is silent."""
        self._probe = self._run(probe, address)
        self.longest_silence_s()

    def longest_silence_s(self) -> float:
        """Longest silence since the last call."""
        assert self._probe is not None
        pipe = self._probe.pipe
        pipe.send(None)
        if not pipe.poll(ANSWER_S):
            raise TransferTimeout(f"the process that watches the controller did not answer in {ANSWER_S:.0f} s")
        return float(pipe.recv())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()
