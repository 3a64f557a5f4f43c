"""Why a version took as long as it did: the chain of waits that ended last, from what the controller recorded.

    explanation = explain(record)              # a line of the events file, see runtime/controller/timeline.py
    explanation.causes[0]                      # Cause(what="trainer 2 wrote to engine 1", seconds=1.2)
    explanation.sentence                       # "version 7 took 1.5 s: 80% trainer 2 wrote to engine 1 (…), …"

The chain is followed from the last trainer that had written: what it waited for before, what it did, what engines did
afterwards.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MIN_SHARE = 0.02
"""Causes of a smaller share are not mentioned in the sentence."""
MUCH_SLOWER = 0.7
"""A link with less than this part of the usual rate is called slow."""
_STAGES = {
    "h2d": "copied offloaded weights to its device",
    "amax": "exchanged the magnitudes of FP8 blocks",
    "convert": "converted weights",
    "delta": "compared weights with the version before",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One wait of the chain."""

    what: str
    member: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Where one version's time went."""

    version: int
    outcome: str
    seconds: float
    causes: tuple[Cause, ...]
    """In order of time; together they are the version's time."""
    sentence: str


def explain(record: Mapping[str, Any]) -> Diagnosis:
    """One version."""
    causes = tuple(cause for cause in _Chain(record).causes() if cause.seconds > 0)
    seconds = float(record["seconds"])
    return Diagnosis(
        version=int(record["version"]),
        outcome=str(record["outcome"]),
        seconds=seconds,
        causes=causes,
        sentence=_sentence(record, causes),
    )


def _sentence(record: Mapping[str, Any], causes: Sequence[Cause]) -> str:
    seconds = float(record["seconds"]) or 1.0
    longest = sorted(causes, key=lambda cause: -cause.seconds)
    named = [f"{cause.seconds / seconds:.0%} {cause.what}" for cause in longest if cause.seconds >= MIN_SHARE * seconds]
    end = f"; it was aborted: {record['reason']}" if record["outcome"] == "aborted" else ""
    return f"version {record['version']} took {_time(seconds)}: {', '.join(named)}{end}"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


class _Chain:
    """The moments of one version, by kind of message and member."""

    def __init__(self, record: Mapping[str, Any]) -> None:
        self._record = record
        self._last: dict[str, dict[str, float]] = {}
        self._first: dict[str, float] = {}
        for moment, kind, member in record["moments"]:
            self._last.setdefault(kind, {})[member] = moment
            self._first.setdefault(kind, moment)
        self._at = 0.0
        self._found: list[Cause] = []

    def causes(self) -> list[Cause]:
        """Waits in order; the rest of the time is messages."""
        writers = self._last.get("Written", {})
        if writers and not self._unwritten_by:
            self._until_written(max(writers, key=lambda member: writers[member]))
            self._after_written()
        else:
            self._unwritten()
        self._reach(float(self._record["seconds"]), "messages were on their way", "controller")
        return self._found

    @property
    def _unwritten_by(self) -> dict[str, float]:
        """Trainers that were told to write and have not, and when they were told."""
        writers = self._last.get("Written", {})
        return {trainer: moment for trainer, moment in self._last.get("Go", {}).items() if trainer not in writers}

    def _reach(self, moment: float, what: str, member: str) -> None:
        """What was waited for until a moment."""
        if moment > self._at:
            self._found.append(Cause(what=what, member=member, seconds=round(moment - self._at, 6)))
            self._at = moment

    def _until_written(self, trainer: str) -> None:
        self._until_told(trainer)
        self._reach(self._published(trainer), f"{trainer} had not published yet", trainer)
        what = self._doing(trainer)
        self._reach(self._last["Written"][trainer], f"{trainer} {what}", trainer)

    def _published(self, trainer: str) -> float:
        """When a trainer had published, if that was after it was told to write."""
        return self._last.get("Published", {}).get(trainer, 0.0)

    def _until_told(self, trainer: str) -> None:
        """From the first trainer's wish until one was told to write."""
        expected = self._first.get("Expect", self._at)
        self._reach(expected, "the previous version or a plan was not finished", "controller")
        paused = self._last.get("Paused", {})
        if paused:
            engine = max(paused, key=lambda member: paused[member])
            self._reach(paused[engine], f"{engine} had not paused", engine)
        self._reach(self._last.get("Go", {}).get(trainer, self._at), "messages were on their way", "controller")

    def _doing(self, trainer: str) -> str:
        """What a trainer was busy with for longest while it wrote."""
        stages = self._record["stages"].get(trainer, {})
        busiest = max(stages, key=lambda stage: stages[stage], default="write")
        return _STAGES.get(busiest) or self._writing(int(trainer.rpartition(" ")[2]))

    def _writing(self, trainer: int) -> str:
        mine = [(engine, size, took) for rank, engine, size, took in self._record["writes"] if rank == trainer and took]
        if not mine:
            return "wrote"
        engine, size, took = max(mine, key=lambda write: write[2])
        others = [n / s for rank, to, n, s in self._record["writes"] if (rank, to) != (trainer, engine) and s]
        rate, usual = size / took, statistics.median(others) if others else 0.0
        slow = f" ({rate / 1e6:.1f} MB/s, other links {usual / 1e6:.1f})" if rate < MUCH_SLOWER * usual else ""
        return f"wrote to engine {engine}{slow}"

    def _after_written(self) -> None:
        ready, committed = self._last.get("Ready", {}), self._last.get("Committed", {})
        if ready:
            engine = max(ready, key=lambda member: ready[member])
            self._reach(ready[engine], f"{engine} verified it", engine)
        told = [moment for member, moment in self._last.get("Decide", {}).items() if member.startswith("engine")]
        self._reach(min(told, default=self._at), "it was being decided", "controller")
        if committed:
            engine = max(committed, key=lambda member: committed[member])
            self._reach(committed[engine], f"{engine} had not switched to it", engine)

    def _unwritten(self) -> None:
        """Some trainer has not written all of it: it was aborted before."""
        self._reach(
            self._first.get("Expect", self._at), "the previous version or a plan was not finished", "controller"
        )
        paused = self._last.get("Paused", {})
        late = [engine for engine in self._last.get("Expect", {}) if engine not in paused]
        told = self._unwritten_by
        end = float(self._record["seconds"])
        if told:
            trainer = next(iter(told))
            self._reach(told[trainer], "engines had not paused", next(iter(paused), "controller"))
            self._reach(end, f"{', '.join(told)} had not written", trainer)
        elif late:
            self._reach(end, f"{', '.join(late)} had not paused", late[0])
