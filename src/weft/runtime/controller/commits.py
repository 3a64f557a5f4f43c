"""Engine ranks that were told to commit a version and have not done so, and since when.

commits = Commits()
commits.owe([0, 1], version=7, since=100.0)
commits.done(0, 7)                  # True
commits.owing_since(110.0)          # {1: 7}
commits.owes_after(110.0)           # False
"""

from __future__ import annotations

from collections.abc import Collection, Iterable


class Commits:
    """Commits that engine ranks owe. Pure; times are passed in."""

    def __init__(self) -> None:
        self._owed: dict[int, tuple[int, float]] = {}
        """Rank → the version, and when it was told; those told last come last."""

    def owe(self, ranks: Iterable[int], *, version: int, since: float) -> None:
        """These were told to commit a version."""
        for rank in ranks:
            self._owed.pop(rank, None)
            self._owed[rank] = version, since

    def owes(self, rank: int, version: int) -> bool:
        """Whether a rank has not committed this version, and should."""
        return rank in self._owed and self._owed[rank][0] == version

    def done(self, rank: int, version: int) -> bool:
        """A rank has committed a version, or never will; returns whether it was owed."""
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
        """Ranks that owe a commit."""
        return self._owed.keys()

    def owes_after(self, moment: float) -> bool:
        """Whether any rank was told at a moment, or later."""
        return bool(self._owed) and next(reversed(self._owed.values()))[1] >= moment

    def owing_since(self, moment: float) -> dict[int, int]:
        """Ranks that were told before a moment, and the version each owes."""
        return {rank: version for rank, (version, since) in self._owed.items() if since < moment}
