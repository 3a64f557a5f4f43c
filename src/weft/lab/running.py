"""One command on every host of a lab, until all have ended or one has failed."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from weft.errors import WeftError
from weft.lab.lab import Lab

END_S = 5.0
"""How long processes may take to end when they are told to."""
LOOK_S = 0.05


def run_everywhere(lab: Lab, command: Sequence[str], *, say: Callable[[int, str], None]) -> None:
    """Run a command on every host; `say` gets each line it prints. Raises WeftError naming the host that failed."""
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
    processes = [lab.start(host, command, **options) for host in range(len(lab.spec.hosts))]
    readers = [
        threading.Thread(target=_read, args=(host, process, say), daemon=True) for host, process in enumerate(processes)
    ]
    for reader in readers:
        reader.start()
    try:
        _wait(processes)
    finally:
        _end(processes)
        deadline = time.monotonic() + END_S
        for reader in readers:  # what a process has started may still hold its pipe
            reader.join(max(deadline - time.monotonic(), 0.0))


def _read(host: int, process: subprocess.Popen[bytes], say: Callable[[int, str], None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        say(host, line.decode(errors="replace").rstrip("\n"))


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    while True:
        codes = [process.poll() for process in processes]
        for host, code in enumerate(codes):
            if code:
                raise WeftError(f"the command on host {host} exited with {code}", hint="it was stopped on the others")
        if all(code == 0 for code in codes):
            return
        time.sleep(LOOK_S)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + END_S
    for process in processes:
        try:
            process.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(END_S)
