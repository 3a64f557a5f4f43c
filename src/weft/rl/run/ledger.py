"""Which engine generates what, and how stale it may be: pure bookkeeping of jobs and samples.

Iteration i is trained on batch i, with the policy after i updates. An engine may begin a job of batch i only if it
serves version i - s or later: no sample is ever more than s versions older than the policy it trains.

    ledger = Ledger(batch_size=256, num_jobs=2, staleness=1, seed=0, num_batches=100)
    ledger.next_job(engine=0, version=0)          # Job: of batch 0
    ledger.made(job, samples)                     # the last one: batch 0 is whole
    ledger.batch(0)                               # its samples, in the order of the jobs
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from weft.rl.run.messages import RolloutJob, Samples


@dataclass(slots=True)
class _Work:
    """One job, its engine and its samples."""

    iteration: int
    number: int
    """Inside its batch."""
    job: RolloutJob
    engine: int | None = None
    samples: Samples | None = None


@dataclass(slots=True)
class Ledger:
    """Jobs of all batches; they are handed out in order."""

    batch_size: int
    num_jobs: int
    """Of each batch."""
    staleness: int | None
    """None: engines are never updated; they may then run as far ahead as `ahead` batches."""
    seed: int
    num_batches: int
    ahead: int = 2
    trained: int = 0
    """Iterations that have ended."""
    _waiting: deque[_Work] = field(default_factory=deque)
    _given: dict[int, _Work] = field(default_factory=dict)
    _batches: dict[int, list[_Work]] = field(default_factory=dict)
    _next_batch: int = 0

    def start_at(self, iteration: int) -> None:
        """Resume at an iteration: earlier ones are already trained. Called before engines serve anything."""
        if iteration > self.trained:
            self.trained = self._next_batch = iteration
            self._waiting.clear()
            self._batches.clear()

    def next_job(self, *, engine: int, version: int) -> RolloutJob | None:
        """The next job for an engine that serves a version; None if there is none for it now."""
        if not self._waiting:
            self._open_batch()
        if not self._waiting or not self._is_fresh_enough(version, self._waiting[0].iteration):
            return None
        work = self._waiting.popleft()
        work.engine = engine
        self._given[work.job.job] = work
        return work.job

    def _is_fresh_enough(self, version: int, iteration: int) -> bool:
        if version < 0:
            return False
        if self.staleness is None:
            return iteration <= self.trained + self.ahead
        return version >= iteration - self.staleness

    def _open_batch(self) -> None:
        """Cut the next batch into jobs."""
        if self._next_batch >= self.num_batches:
            return
        iteration, self._next_batch = self._next_batch, self._next_batch + 1
        borders = np.linspace(0, self.batch_size, min(self.num_jobs, self.batch_size) + 1).astype(int)
        works = []
        for number, count in enumerate(np.diff(borders)):
            name = iteration * self.num_jobs + number
            seed = int(np.random.SeedSequence([self.seed, iteration, number]).generate_state(1)[0])
            works.append(_Work(iteration, number, RolloutJob(job=name, count=int(count), seed=seed)))
        self._batches[iteration] = works
        self._waiting.extend(works)

    def made(self, job: int, samples: Samples) -> int | None:
        """A job is done; returns its iteration if its batch is now whole. Samples that are not expected are ignored."""
        work = self._given.pop(job, None)
        if work is None:
            return None
        work.samples = samples
        return work.iteration if self.is_whole(work.iteration) else None

    def is_whole(self, iteration: int) -> bool:
        """Whether all samples of an iteration are there."""
        works = self._batches.get(iteration)
        return works is not None and all(work.samples is not None for work in works)

    def batch(self, iteration: int) -> list[Samples]:
        """All samples of an iteration, in the order of their jobs."""
        return [work.samples for work in self._batches[iteration] if work.samples is not None]

    def finished(self, iteration: int) -> None:
        """An iteration was trained; its samples are no longer needed."""
        self.trained = max(self.trained, iteration + 1)
        self._batches.pop(iteration, None)

    def lost(self, engine: int) -> int:
        """An engine is gone: others get its jobs first. Returns how many."""
        mine = sorted((work for work in self._given.values() if work.engine == engine), key=lambda work: work.job.job)
        for work in reversed(mine):
            del self._given[work.job.job]
            work.engine = None
            self._waiting.appendleft(work)
        return len(mine)
