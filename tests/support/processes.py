"""Processes that tests drive over pipes; what goes wrong there is raised here."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

END_S = 30.0
"""For a process to end when it was asked to."""
PRELOADED = ("tests.process.runtime_members", "tests.process.storm.members", "tests.contract.targets")


def quick_context() -> Any:
    """Processes that start in milliseconds: copies of one that has imported the runtime, and nothing of this one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED])
    return context


def stop_here() -> None:
    """Stop this process before its next line; sent to the process, another thread may take the signal much later."""
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


class Process:
    """A process that runs `target(pipe, *args)`."""

    def __init__(self, target: Callable[..., None], *args: Any, daemon: bool = True) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(theirs, target, *args), daemon=daemon)
        self._process.start()
        theirs.close()

    @classmethod
    def started(cls, stack: ExitStack, target: Callable[..., None], *args: Any, daemon: bool = True) -> Process:
        process = cls(target, *args, daemon=daemon)
        stack.callback(process.close)
        return process

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def ask(self, request: Any) -> None:
        self._pipe.send(request)

    def answer(self, timeout_s: float) -> Any:
        assert self._pipe.poll(timeout_s), f"the process does not answer in {timeout_s} s"
        answer = self._pipe.recv()
        assert not isinstance(answer, Failure), answer.trace
        return answer

    def died(self, timeout_s: float) -> bool:
        """Wait for its end; whether it was killed."""
        self._process.join(timeout_s)
        return (self._process.exitcode or 0) < 0

    def kill(self) -> None:
        self._process.kill()
        self._process.join(END_S)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it has ended already
            self._pipe.send(None)
        self._process.join(END_S)
        self._process.kill()
        self._process.join(END_S)
        self._process.close()
        self._pipe.close()


@dataclass(frozen=True, slots=True)
class Failure:
    """What a process raised."""

    trace: str


def _run(pipe: Any, target: Callable[..., None], *args: Any) -> None:
    try:
        target(pipe, *args)
    except Exception:
        with contextlib.suppress(OSError):  # nobody listens any more
            pipe.send(Failure(traceback.format_exc()))
