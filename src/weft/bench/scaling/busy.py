"""How busy the cores of this machine are."""

from __future__ import annotations

from pathlib import Path


class BusyCores:
    """Since it was made."""

    def __init__(self) -> None:
        self._before = _ticks()

    def share(self) -> float:
        """Busy ticks of all cores, of all their ticks."""
        busy, total = (now - before for now, before in zip(_ticks(), self._before, strict=True))
        return busy / max(total, 1)


def _ticks() -> tuple[int, int]:
    """Busy ones, and all."""
    user, nice, system, idle, waiting, *rest = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9])
    busy = user + nice + system + sum(rest)
    return busy, busy + idle + waiting
