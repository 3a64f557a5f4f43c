"""What happened in a run, as plain values: the source of the live view, the report and the JSON summary."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One iteration of training."""

    number: int
    at_s: float
    """When it ended, since the run began."""
    reward: float
    """Mean of its samples."""
    staleness: float
    max_staleness: int
    mixed: float
    """Fraction of samples during which an update landed."""
    num_samples: int
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRecord:
    """One version's transfer to the engines; times since the run began."""

    number: int
    published_s: float
    released_s: float
    committed_s: float
    write_ms: float
    """How long the writes themselves took, on the first trainer."""
    num_bytes: int
    reason: str
    """Why it was given up; empty if it was not."""

    @property
    def transfer_ms(self) -> float:
        """From publish until every engine served it."""
        return (self.committed_s - self.published_s) * 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """One engine rank began to serve a version."""

    engine_rank: int
    version: int
    at_s: float
    pause_ms: float
    exact: bool | None


@dataclass(slots=True)
class Record:
    """Everything reported so far."""

    method: str
    verifies: bool
    """Whether versions are verified before they are committed."""
    began: float = field(default_factory=time.time)
    ended_s: float = 0.0
    iterations: list[Iteration] = field(default_factory=list)
    versions: list[VersionRecord] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)
    samples_of: dict[int, int] = field(default_factory=dict)
    """Engine → samples it made."""
    example: str = ""
    """A prompt and its newest answer, as readable text."""
    lost: dict[str, str] = field(default_factory=dict)
    """Engines that are gone, and how."""
    copy_ms: float = 0.0
    """How long copying an engine rank's weights once takes on its device: the limit of any transfer."""
    links: dict[str, int] = field(default_factory=dict)
    """`transport (reason)` and how many links use it; weft only."""

    def since(self, at: float) -> float:
        """Seconds since the run began."""
        return at - self.began

    @property
    def committed(self) -> list[VersionRecord]:
        """Versions that reached the engines."""
        return [version for version in self.versions if not version.reason]

    def summary(self, *, report: str = "") -> dict[str, Any]:
        """What `--json` prints."""
        rewards = [iteration.reward for iteration in self.iterations]
        few = max(1, min(5, len(rewards) // 4))
        seconds = self.ended_s or self.since(time.time())
        steady = self.iterations[1:]  # the first includes the start of processes
        spent_s = steady[-1].at_s - self.iterations[0].at_s if steady else 0.0
        transfers = [v.transfer_ms for v in self.committed[1:] or self.committed]  # the first waits for all members
        writes = quantiles([v.write_ms for v in self.committed[1:]])
        pauses = [c.pause_ms for c in self.commits if c.version] or [c.pause_ms for c in self.commits]
        return {
            "reward_first": _mean(rewards[:few]),
            "reward_last": _mean(rewards[-few:]),
            "seconds": seconds,
            "num_versions": len(self.committed),
            "all_verified": self.all_verified,
            "max_staleness": max((i.max_staleness for i in self.iterations), default=0),
            "transfer_ms": quantiles(transfers),
            "pause_ms": quantiles(pauses),
            "report": report,
            "method": self.method,
            "iterations": len(self.iterations),
            "staleness": _mean([i.staleness for i in self.iterations]),
            "mixed": _mean([i.mixed for i in self.iterations]),
            "samples_per_s": sum(i.num_samples for i in steady) / spent_s if spent_s else 0.0,
            "bytes_per_version": int(np.median([v.num_bytes for v in self.committed])) if self.committed else 0,
            "copy_ms": self.copy_ms,
            "write_ms": writes,
            "fraction_of_copy": self.copy_ms / writes["p50"] if writes["p50"] else 0.0,
            "num_aborted": len(self.versions) - len(self.committed),
            "exact": None if all(c.exact is None for c in self.commits) else all(c.exact for c in self.commits),
            "lost": dict(self.lost),
            "links": dict(self.links),
        }

    @property
    def all_verified(self) -> bool:
        """Whether every commit was verified, by digests before it or bit for bit after it."""
        return bool(self.commits) and all(
            commit.exact is not False and (self.verifies or commit.exact) for commit in self.commits
        )

    def to_json(self) -> dict[str, Any]:
        """Everything, for users who draw it themselves."""
        return asdict(self)


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Median and 95th percentile."""
    if not values:
        return {"p50": 0.0, "p95": 0.0}
    return {"p50": float(np.percentile(values, 50)), "p95": float(np.percentile(values, 95))}


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0
