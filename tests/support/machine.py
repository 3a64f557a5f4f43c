"""Whether the machine stood still, as rented ones do: then a test learnt nothing about deadlines, and is repeated.

A process of its own wakes every few milliseconds and says when it was late, when the hypervisor gave the processors to
somebody else, or when processes waited for the disk, as they do after the machine has put their programs out of memory.
Busy processes beside the tests do not count: with those, tests must pass.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from pathlib import Path

BEAT_S = 0.02
LATE_S = 0.5
"""A beat that is later than this was not late because of other processes on the machine."""
LOOK_S = 1.0
CLOSE_S = 5.0
STOLEN_SHARE = 0.25
"""Of the processors' time, within `LOOK_S`."""
DISK_SHARE = 0.5
"""Of `LOOK_S`, in which any process could not go on before the disk had answered."""
_DISK_PRESSURE = Path("/proc/pressure/io")


class Machine:
    """Watches the machine from now on."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self._said = self._process.stdout
        os.set_blocking(self._said.fileno(), False)

    def stood_still(self) -> str:
        """What happened since the last question, "" if nothing did."""
        said = b""
        while select.select([self._said], [], [], 0.0)[0] and (more := self._said.read()):
            said += more
        return said.decode().strip().replace("\n", "; ")

    def stands_still(self) -> str:
        """The same, and what is just ending: it is said a moment later."""
        time.sleep(2 * LOOK_S)
        return self.stood_still()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:  # a process the tests have left holds its input
            self._process.kill()
            self._process.wait()
        self._said.close()


def _stolen_s() -> float:
    """Processor time that the hypervisor kept."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return int(fields[8]) / os.sysconf("SC_CLK_TCK")


def _disk_s() -> float:
    """How long any process has waited for the disk; kernels without pressure figures never say."""
    try:
        some = _DISK_PRESSURE.read_text().split("\n", 1)[0]
    except OSError:
        return 0.0
    return int(some.rsplit("total=", 1)[1]) / 1e6


def _watch() -> None:
    num_cores = os.cpu_count() or 1
    beat, looked, stolen, disk = time.monotonic(), time.monotonic(), _stolen_s(), _disk_s()
    while not select.select([sys.stdin], [], [], BEAT_S)[0]:
        now = time.monotonic()
        if (late_s := now - beat - BEAT_S) > LATE_S:
            print(f"it stood still for {late_s:.1f} s", flush=True)
        if now - looked > LOOK_S:
            share = (_stolen_s() - stolen) / num_cores / (now - looked)
            if share > STOLEN_SHARE:
                print(f"it was given {1 - share:.0%} of its processors", flush=True)
            if (waited_s := _disk_s() - disk) > DISK_SHARE * (now - looked):
                print(f"processes waited {waited_s:.1f} s for the disk", flush=True)
            looked, stolen, disk = now, _stolen_s(), _disk_s()
        beat = time.monotonic()


if __name__ == "__main__":
    _watch()
