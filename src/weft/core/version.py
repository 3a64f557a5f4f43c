"""The life of a version, as a pure state machine: published → written → ready everywhere → committed, or aborted.

The controller feeds it the members' reports and carries out its decisions. One version is open at a time. Trainers
publish it and report that they have written it; then engine ranks report that they hold it whole and verified
(*ready*); when enough engines are ready it is decided, once and for all: commit or abort. If a required member fails
before the decision, the version is aborted everywhere and the last committed one keeps serving. After the decision
nothing can undo it. A version that was refused to one trainer is decided as well: it never opens for the others.

    ledger = VersionLedger(num_trainers=2, engines={0: 2}, policy=CommitPolicy.ALL)
    ledger.publish(trainer=0, version=7)
    ledger.publish(trainer=1, version=7)
    ledger.written(trainer=0, version=7)             # False: trainer 1 is still writing
    ledger.written(trainer=1, version=7)             # True
    ledger.ready(engine=0, rank=0, version=7)        # None: rank 1 is missing
    ledger.ready(engine=0, rank=1, version=7)        # Decision(version=7, commit=True, engines=(0,))
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from weft.errors import VersionError

MAX_VERSION = 1 << 62
MAX_STEP = 1 << 32
"""How far a version may lie beyond the last one: a wrong number must not make all later versions look old."""
MAX_FIRST = 1 << 48
"""The highest number the first version may have."""


class CommitPolicy(enum.StrEnum):
    """How many engines a version needs."""

    ALL = "all"
    """Every engine; one that fails aborts the version."""
    QUORUM = "quorum"
    """A number of engines; those that fail are dropped while enough are left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What happens to a version, on which engines."""

    version: int
    commit: bool
    engines: tuple[int, ...]
    """Engines that commit; empty for an abort."""
    reason: str = ""


@dataclass(slots=True)
class _OpenVersion:
    """The version that is being transferred."""

    version: int
    published: set[int] = field(default_factory=set)
    written: set[int] = field(default_factory=set)
    ready: set[tuple[int, int]] = field(default_factory=set)


class VersionLedger:
    """The state of all versions. Every method that may decide returns the decision or None."""

    def __init__(
        self,
        *,
        num_trainers: int,
        engines: Mapping[int, int],
        policy: CommitPolicy = CommitPolicy.ALL,
        quorum: int = 0,
    ) -> None:
        """`engines` maps each engine to its number of ranks; `quorum` is the least number of engines to commit on."""
        if num_trainers < 1 or not engines or min(engines.values()) < 1:
            raise VersionError(f"{num_trainers} trainers and engines {dict(engines)} cannot share versions")
        if policy is CommitPolicy.QUORUM and not 1 <= quorum <= len(engines):
            raise VersionError(
                f"a quorum of {quorum} out of {len(engines)} engines", hint=f"expected 1 to {len(engines)}"
            )
        self._num_trainers = num_trainers
        self._engines = dict(engines)
        self._needed = len(engines) if policy is CommitPolicy.ALL else quorum
        self._policy = policy
        self._open: _OpenVersion | None = None
        self._committed: int | None = None
        self._last_decided = -1
        self._last_refusal = (-1, "")

    @property
    def last_decided(self) -> int:
        """The highest version that was committed, aborted or refused; -1 before any was."""
        return self._last_decided

    @property
    def committed(self) -> int | None:
        """The version engines serve, if any was committed."""
        return self._committed

    @property
    def open_version(self) -> int | None:
        """The version being transferred, if any."""
        return self._open.version if self._open else None

    @property
    def num_ready(self) -> int:
        """Engine ranks that hold the version being transferred."""
        return len(self._open.ready) if self._open else 0

    @property
    def engines(self) -> tuple[int, ...]:
        """Engines that are still members."""
        return tuple(sorted(self._engines))

    def check_number(self, version: int) -> None:
        """Raise unless this could be a version's number."""
        most = MAX_FIRST if self._last_decided < 0 else min(self._last_decided + MAX_STEP, MAX_VERSION)
        if not 0 <= version <= most:
            raise VersionError(f"version {version} after version {self._last_decided}", hint=f"expected 0 to {most}")

    def publish(self, *, trainer: int, version: int) -> None:
        """A trainer offers a version; the first one opens it."""
        if not 0 <= trainer < self._num_trainers:
            raise VersionError(f"unknown trainer {trainer}: there are {self._num_trainers}")
        self.check_number(version)
        if self._open is None:
            if version <= self._last_decided:
                refused, reason = self._last_refusal
                raise VersionError(
                    reason
                    if version == refused
                    else f"trainer {trainer} published version {version}, but version {self._last_decided} was decided "
                    "already",
                    hint="version numbers must increase",
                )
            self._open = _OpenVersion(version)
        if version != self._open.version:
            raise VersionError(
                f"trainer {trainer} published version {version} while version {self._open.version} is open",
                hint="all trainers must publish the same versions in the same order",
            )
        if trainer in self._open.published:
            raise VersionError(f"trainer {trainer} published version {version} twice")
        self._open.published.add(trainer)

    def written(self, *, trainer: int, version: int) -> bool:
        """A trainer has written its part of the version. Returns whether all trainers have."""
        if self._open is None or version != self._open.version or trainer not in self._open.published:
            raise VersionError(f"trainer {trainer} has written version {version}, which it must not write")
        if trainer in self._open.written:
            raise VersionError(f"trainer {trainer} has written version {version} twice")
        self._open.written.add(trainer)
        return self.is_written

    def write_again(self, version: int) -> None:
        """What was written is not enough for some engines: all trainers write once more before any is ready."""
        if self._open is None or version != self._open.version or not self.is_written or self._open.ready:
            raise VersionError(f"version {version} cannot be written again")
        self._open.written.clear()

    @property
    def is_written(self) -> bool:
        """Whether all trainers have written the open version."""
        return self._open is not None and len(self._open.written) == self._num_trainers

    def ready(self, *, engine: int, rank: int, version: int) -> Decision | None:
        """An engine rank holds the version, whole and verified. Late reports of decided versions are ignored."""
        if self._open is None or version != self._open.version:
            if version > self._last_decided:
                raise VersionError(
                    f"engine {engine} rank {rank} is ready with version {version}, which no trainer published"
                )
            return None
        if engine not in self._engines:
            return None
        if not 0 <= rank < self._engines[engine]:
            raise VersionError(f"engine {engine} has no rank {rank}")
        if not self.is_written:
            missing = sorted(set(range(self._num_trainers)) - self._open.written)
            raise VersionError(
                f"engine {engine} rank {rank} is ready with version {version} before trainers {missing} have written it"
            )
        self._open.ready.add((engine, rank))
        return self._commit_if_enough() if self._is_ready(engine) else None

    def _ready_engines(self) -> tuple[int, ...]:
        return tuple(engine for engine in self.engines if self._is_ready(engine))

    def _is_ready(self, engine: int) -> bool:
        ranks = range(self._engines[engine])
        return self._open is not None and all((engine, rank) in self._open.ready for rank in ranks)

    def _commit_if_enough(self) -> Decision | None:
        """Commit when every engine that is left is ready, and they are enough."""
        ready = self._ready_engines()
        if self._open is None or len(ready) < max(self._needed, 1) or len(ready) < len(self._engines):
            return None
        version = self._open.version
        self._open, self._committed, self._last_decided = None, version, version
        return Decision(version=version, commit=True, engines=ready)

    def _abort(self, reason: str) -> Decision | None:
        if self._open is None:
            return None
        version = self._open.version
        self._open, self._last_decided, self._last_refusal = None, version, (version, reason)
        return Decision(version=version, commit=False, engines=(), reason=reason)

    def refuse(self, version: int, reason: str) -> None:
        """A version cannot be written now: it is decided for all trainers without having been open."""
        if self._open is None and version > self._last_decided:
            self.check_number(version)
            self._last_decided, self._last_refusal = version, (version, reason)

    def trainer_failed(self, trainer: int, reason: str) -> Decision | None:
        """A trainer cannot finish the open version."""
        return self._abort(f"trainer {trainer}: {reason}")

    def engine_failed(self, engine: int, reason: str) -> Decision | None:
        """An engine cannot take the open version, or is gone. With a quorum it is dropped while enough are left."""
        if engine not in self._engines:
            return None
        if self._policy is CommitPolicy.ALL or len(self._engines) - 1 < self._needed:
            return self._abort(f"engine {engine}: {reason}")
        del self._engines[engine]
        return self._commit_if_enough()

    def timed_out(self, reason: str) -> Decision | None:
        """The deadline of the open version has passed: engines that are not ready are dropped, or it is aborted."""
        ready = self._ready_engines()
        if self._policy is CommitPolicy.ALL or len(ready) < self._needed:
            return self._abort(reason)
        self._engines = {engine: self._engines[engine] for engine in ready}
        return self._commit_if_enough()

    def restore(self, *, committed: int | None, last_decided: int) -> None:
        """Restores what members know of versions, after a restart of the controller."""
        if self._open is not None:
            raise VersionError(f"version {self._open.version} is open")
        self._committed, self._last_decided = committed, max(last_decided, self._last_decided)

    def take_part(self, engines: Sequence[int], *, num_ranks: int) -> None:
        """Engines (of so many ranks) that take part from the next version on; with a quorum the others are left out."""
        for engine in set(engines) - set(self._engines):
            self.join(engine=engine, num_ranks=num_ranks)
        if self._policy is CommitPolicy.QUORUM and self._open is None and len(engines) >= self._needed:
            self._engines = {engine: self._engines[engine] for engine in engines}

    def join(self, *, engine: int, num_ranks: int) -> None:
        """A new or returning engine takes part from the next version on."""
        if self._open is not None:
            raise VersionError(f"engine {engine} cannot join while version {self._open.version} is open")
        if engine in self._engines or num_ranks < 1:
            raise VersionError(f"engine {engine} with {num_ranks} ranks cannot join")
        self._engines[engine] = num_ranks
        if self._policy is CommitPolicy.ALL:
            self._needed = len(self._engines)
