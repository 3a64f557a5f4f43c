"""Engine ranks that were told to commit a version and have not done so: until when each has time."""

from __future__ import annotations

from collections.abc import Collection, Iterable


class Commits:
    """What engine ranks owe. Pure; times are given.

    commits = Commits()
    commits.owe([0, 1], version=7, deadline=30.0)
    commits.done(0, 7)                  # True
    commits.late(31.0)                  # {1: 7}
    """

    def __init__(self) -> None:
        self._owed: dict[int, tuple[int, float]] = {}

    def owe(self, ranks: Iterable[int], *, version: int, deadline: float) -> None:
        """These were told to commit a version."""
        for rank in ranks:
            self._owed[rank] = version, deadline

    def owes(self, rank: int, version: int) -> bool:
        """Whether a rank has not committed this version, and should."""
        return rank in self._owed and self._owed[rank][0] == version

    def done(self, rank: int, version: int) -> bool:
        """A rank has committed a version, or never will; whether that was owed."""
        if not self.owes(rank, version):
            return False
        del self._owed[rank]
        return True

    def forget(self, rank: int) -> None:
        """A rank is gone."""
        self._owed.pop(rank, None)

    def clear(self) -> None:
        """All are gone."""
        self._owed.clear()

    @property
    def ranks(self) -> Collection[int]:
        """Those that owe something."""
        return self._owed.keys()

    def late(self, now: float) -> dict[int, int]:
        """Ranks whose time is over, and the version each owes."""
        return {rank: version for rank, (version, deadline) in self._owed.items() if now > deadline}
