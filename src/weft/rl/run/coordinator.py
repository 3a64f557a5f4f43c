"""The coordinator: hands out jobs, collects samples, keeps the record. One for each run, next to weft's controller.

    consumes      Hello, Ask, Busy, SamplesMade, Take, Trained, BroadcastOffer, VersionSent, VersionServed, Done,
                  MemberFailed
    produces      RolloutJob, Hold, Receive, SampleBatch, Again, Stop
    waits for     messages, a twentieth of a second at most              unblocked by   the network, `close`

One thread owns the socket and all state. An engine that falls silent is lost: its jobs go to others. The run ends when
every trainer is done and engines have the final policy, when a member fails that cannot be replaced, or when no engine
is left.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Self

import numpy as np

from weft.errors import ProtocolError
from weft.rl.learn.tasks import load_task
from weft.rl.run.ledger import Ledger
from weft.rl.run.messages import (
    Again,
    Ask,
    BroadcastOffer,
    Busy,
    Done,
    Hello,
    Hold,
    MemberFailed,
    Receive,
    SampleBatch,
    Samples,
    SamplesMade,
    Stop,
    Take,
    ToCoordinator,
    Trained,
    VersionSent,
    VersionServed,
    pack,
    unpack,
)
from weft.rl.run.record import Commit, Iteration, Record, VersionRecord
from weft.rl.settings import LoopSettings, Method
from weft.runtime.control.security import Security, server_keys
from weft.runtime.control.server import Server
from weft.runtime.controller.controller import ControllerStatistics

POLL_S = 0.05
MAX_JOB = 512
"""Most samples of one job."""
FINAL_TRIES = 3
"""How often the final policy is sent again if it was given up."""


class Coordinator:
    """Runs in a thread of the process that makes it."""

    def __init__(
        self,
        settings: LoopSettings,
        address: str = "tcp://127.0.0.1:*",
        *,
        transfers: Callable[[], ControllerStatistics] | None = None,
        security: Security | None = None,
    ) -> None:
        """`transfers`: the statistics of weft's controller."""
        self._settings, self._transfers = settings, transfers
        self._task = load_task(settings.task)
        num_jobs = max(settings.num_engines, -(-settings.batch // MAX_JOB))
        self._ledger = Ledger(
            batch_size=settings.batch,
            num_jobs=num_jobs,
            staleness=None if settings.freeze_engines else settings.allowed_staleness,
            seed=settings.seed,
            num_batches=settings.iterations,
        )
        self.record = Record(method=settings.method, verifies=settings.method is Method.WEFT)
        self._heard: dict[int, float] = {}
        """Engine → when it last sent a message."""
        self._takes: dict[int, tuple[str, int]] = {}
        """Trainer rank → its connection and the iteration it waits for."""
        self._was_given_up = False
        """Whether the newest version whose end is known did not reach the engines."""
        self._offered: int | None = None
        self._done: dict[int, str] = {}
        """Trainer rank → the connection of a trainer that has nothing left to do."""
        self._final_tries = FINAL_TRIES
        self._requests: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stop = threading.Event()
        self.ended = threading.Event()
        self.failure = ""
        self._server = Server(address, messages=ToCoordinator, keys=server_keys(security))
        self.address = self._server.address
        self._thread = threading.Thread(target=self._run, name="weft-coordinator", daemon=True)
        self._thread.start()

    def fail(self, reason: str) -> None:
        """End the run with a failure; from any thread."""
        self._requests.put(lambda: self._fail(reason))

    def lose(self, engine: int, how: str) -> None:
        """An engine is gone; from any thread."""
        self._requests.put(lambda: self._lose(engine, how))

    def close(self) -> None:
        """Stop; members that still ask are left to their deadlines."""
        self._stop.set()
        self._thread.join(10.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                received = self._server.receive(POLL_S)
                while received is not None:
                    self._handle_safely(received.sender, received.message)
                    received = self._server.receive(0.0)
                while not self._requests.empty():
                    self._requests.get()()
                self._look_at_clocks()
        finally:
            self._server.close()

    def _handle_safely(self, sender: str, message: Any) -> None:
        try:
            self._handle(sender, message)
        except Exception as error:  # a defect, or invalid samples: no other thread would notice
            self._fail(f"{type(error).__name__} while handling {type(message).__name__}: {error}")

    def _handle(self, sender: str, message: Any) -> None:
        match message:
            case Hello(iteration=iteration, copy_s=copy_s):
                self._ledger.start_at(iteration)
                self.record.copy_ms = max(self.record.copy_ms, copy_s * 1e3)
            case Ask(engine=engine) | Busy(engine=engine) | SamplesMade(engine=engine):
                self._heard[engine] = time.monotonic()
                self._engine_says(sender, message)
            case VersionServed():
                self._served(message)
            case MemberFailed(member=member, reason=reason):
                self._member_failed(member, reason)
                self._server.send(sender, Stop(reason=reason))
            case _:
                self._trainer_says(sender, message)

    def _engine_says(self, sender: str, message: Any) -> None:
        match message:
            case Ask(engine=engine, version=version):
                self.record.lost.pop(f"engine {engine}", None)  # it was silent, not gone
                self._server.send(sender, self._answer(engine, version))
            case SamplesMade(engine=engine, job=job, samples=samples):
                self._made(engine, job, samples)

    def _trainer_says(self, sender: str, message: Any) -> None:
        match message:
            case Take(rank=rank, iteration=iteration):
                self._takes[rank] = sender, iteration
                self._give_out()
            case Trained(iteration=iteration, metrics=metrics):
                self._trained(iteration, metrics)
            case BroadcastOffer(version=version):
                self._offered = version
            case VersionSent():
                self._sent(message)
            case Done(rank=rank):
                self._done[rank] = sender
                self._let_go_or_send_again()

    def _answer(self, engine: int, version: int) -> Any:
        if self.ended.is_set():
            return Stop(reason=self.failure)
        if self._offered is not None and version < self._offered:
            return Receive(version=self._offered)
        job = self._ledger.next_job(engine=engine, version=version)
        return Hold() if job is None else job

    def _made(self, engine: int, job: int, samples: Samples) -> None:
        count = self.record.samples_of.get(engine, 0)
        self.record.samples_of[engine] = count + samples.answers.shape[0]
        prompt, answer = (self._task.text(unpack(tokens)[0]) for tokens in (samples.prompts, samples.answers))
        self.record.example = f"{prompt} {answer}"
        if self._ledger.made(job, samples) is not None:
            self._give_out()

    def _give_out(self) -> None:
        """Answer trainers whose samples are complete."""
        for rank, (sender, iteration) in list(self._takes.items()):
            if self.ended.is_set():
                self._server.send(sender, Stop(reason=self.failure))
            elif self._ledger.is_whole(iteration):
                mine = share(self._ledger.batch(iteration), rank, self._settings.num_trainers)
                self._server.send(sender, SampleBatch(iteration=iteration, samples=mine))
            else:
                continue
            del self._takes[rank]
        self._send_again()

    def _send_again(self) -> None:
        """If the newest version was given up and all trainers wait for samples, let them send it again."""
        if self._was_given_up and len(self._takes) == self._settings.num_trainers:
            self._was_given_up = False
            for sender, _ in self._takes.values():
                self._server.send(sender, Again())

    def _let_go_or_send_again(self) -> None:
        """Once all trainers are done: the final policy, too, is sent again if it was given up."""
        if len(self._done) < self._settings.num_trainers and not self.ended.is_set():
            return
        if self._was_given_up and self._final_tries and not self.ended.is_set():
            self._was_given_up = False
            self._final_tries -= 1
            self._answer_done(Again())
        else:
            self._end()

    def _answer_done(self, answer: Again | Stop) -> None:
        for sender in self._done.values():
            self._server.send(sender, answer)
        self._done.clear()

    def _trained(self, iteration: int, metrics: dict[str, float]) -> None:
        batch = self._ledger.batch(iteration)
        versions = np.concatenate([unpack(samples.versions) for samples in batch])
        rewards = np.concatenate([unpack(samples.rewards).sum(axis=1) for samples in batch])
        age = iteration - versions.min(axis=1)
        self.record.iterations.append(
            Iteration(
                number=iteration,
                at_s=self.record.since(time.time()),
                reward=float(rewards.mean()),
                staleness=float(age.mean()),
                max_staleness=int(age.max()),
                mixed=float((versions.min(axis=1) != versions.max(axis=1)).mean()),
                num_samples=len(rewards),
                metrics=metrics,
            )
        )
        self._ledger.finished(iteration)

    def _sent(self, message: VersionSent) -> None:
        self._was_given_up = bool(message.reason)
        self._send_again()
        num_bytes = message.num_bytes
        if self._transfers is not None and self._settings.method is Method.WEFT:
            statistics = self._transfers()
            num_bytes, self.record.links = statistics.last_wire_bytes, statistics.links
        self.record.versions.append(
            VersionRecord(
                number=message.version,
                published_s=self.record.since(message.published_at),
                released_s=self.record.since(message.released_at),
                committed_s=self.record.since(message.committed_at),
                write_ms=message.write_s * 1e3,
                num_bytes=num_bytes,
                reason=message.reason,
            )
        )

    def _served(self, message: VersionServed) -> None:
        self.record.commits.append(
            Commit(
                engine_rank=message.engine_rank,
                version=message.version,
                at_s=self.record.since(message.at),
                pause_ms=message.pause_s * 1e3,
                exact=message.exact,
            )
        )
        if message.exact is False:
            self._fail(f"engine rank {message.engine_rank} does not hold version {message.version} bit for bit")

    def _look_at_clocks(self) -> None:
        now = time.monotonic()
        for engine, heard in list(self._heard.items()):
            if now - heard > self._settings.silence_s:
                self._lose(engine, f"has been silent for {now - heard:.0f} s")

    def _member_failed(self, member: str, reason: str) -> None:
        side, _, rank = member.partition(" ")
        if side == "engine":
            self._lose(int(rank) // self._settings.ranks_per_engine, f"failed: {reason}")
        else:
            self._fail(f"{member} failed: {reason}")

    def _lose(self, engine: int, how: str) -> None:
        if f"engine {engine}" in self.record.lost or self.ended.is_set():
            return
        self._heard.pop(engine, None)
        self.record.lost[f"engine {engine}"] = how
        self._ledger.lost(engine)
        if self._settings.method is not Method.WEFT:
            self._fail(f"engine {engine} {how}; a broadcast needs all members")
        elif not self.record.committed:
            self._fail(f"engine {engine} {how} before the first commit: until then all engines are needed")
        elif len(self.record.lost) == self._settings.num_engines:
            self._fail("no engine is left: " + ", ".join(f"{name} {why}" for name, why in self.record.lost.items()))

    def _fail(self, reason: str) -> None:
        self.failure = self.failure or reason
        self._end()

    def _end(self) -> None:
        self.record.ended_s = self.record.ended_s or self.record.since(time.time())
        self.ended.set()
        self._give_out()
        self._answer_done(Stop(reason=self.failure))


def share(batch: list[Samples], rank: int, num_ranks: int) -> Samples:
    """One trainer's rows of a batch."""
    whole = {
        name: np.concatenate([unpack(getattr(part, name)) for part in batch]) for name in Samples.__struct_fields__
    }
    size = len(whole["answers"]) // num_ranks
    if size * num_ranks != len(whole["answers"]):
        raise ProtocolError(f"{len(whole['answers'])} samples do not divide among {num_ranks} trainers")
    return Samples(**{name: pack(rows[rank * size : (rank + 1) * size]) for name, rows in whole.items()})
