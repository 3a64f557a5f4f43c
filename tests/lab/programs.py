"""Programs of tests.lab.members on the hosts of a lab."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from weft.lab import Lab


@contextlib.contextmanager
def program(lab: Lab, host: int, *arguments: str) -> Iterator[Any]:
    """A program of tests.lab.members on a host, which is killed at the end."""
    command = [sys.executable, "-m", "tests.lab.members", *arguments]
    quiet = {"UCX_LOG_LEVEL": "error"}  # UCX warns on the standard output
    with lab.start(host, command, env=quiet, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()
