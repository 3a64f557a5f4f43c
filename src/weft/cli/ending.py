"""Commands that clean up before they end, whichever signal ends them."""

from __future__ import annotations

import signal
import sys
from typing import Any, NoReturn

SIGNALS = signal.SIGTERM, signal.SIGHUP


def clean_up_when_told_to_end() -> None:
    """SIGTERM and SIGHUP leave all contexts of this process, which others do not disturb. `nohup` keeps its meaning."""
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


def _end(number: int, _: Any) -> NoReturn:
    for each in SIGNALS:
        signal.signal(each, lambda *_: None)
    sys.exit(128 + number)
