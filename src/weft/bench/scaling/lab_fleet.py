"""The processes of a benchmark on the hosts of a lab."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from weft.bench.fleet import END_S, Fleet
from weft.bench.worker import Setup
from weft.lab import Lab


class LabFleet(Fleet):
    """One process on each of some hosts; `hosts` says where each is."""

    def __init__(self, lab: Lab, setups: Mapping[tuple[str, int], Setup], hosts: Mapping[tuple[str, int], int]) -> None:
        self._lab, self._hosts = lab, hosts
        super().__init__(lambda pipe, setup: None, setups)

    def _launch(self, name: tuple[str, int], setup: Any) -> tuple[Connection, Any]:
        """A pipe is inherited: files and sockets of the machine's own are shared by all hosts of a lab."""
        ours, theirs = multiprocessing.Pipe()
        command = [sys.executable, "-m", "weft.bench.scaling.host", str(theirs.fileno())]
        process = self._lab.start(
            self._hosts[name],
            command,
            env={"TORCH_CPP_LOG_LEVEL": "ERROR"},  # hosts of a lab have no names
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        ours.send(setup)
        return ours, process

    @staticmethod
    def _end(process: Any) -> None:
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __exit__(self, error: type[BaseException] | None, *rest: Any) -> None:
        """Processes that are in the middle of a version would keep a run that failed, or was told to end, waiting."""
        if error is not None:
            self.kill()
        super().__exit__(error, *rest)
