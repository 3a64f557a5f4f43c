"""Waiting for what happens elsewhere, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable

LOOK_S = 0.05


def wait_until(happened: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < deadline, f"not in {timeout_s} s: {what}"
        time.sleep(LOOK_S)
