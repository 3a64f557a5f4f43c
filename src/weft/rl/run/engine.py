"""An engine rank: generates whenever it has a job, and takes new versions between any two tokens.

    consumes      RolloutJob, Hold, Receive, Stop            produces      Ask, Busy, SamplesMade, VersionServed
    waits for     an answer; other ranks of its engine; where versions are broadcast, the trainers
    unblocked by  a deadline

The first rank of an engine talks to the coordinator; the others follow it. All ranks poll equally often, so that
they change versions before the same token.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
import torch

from weft.errors import ProtocolError
from weft.rl.learn.generation import Sampling, generate
from weft.rl.learn.tasks import load_task
from weft.rl.model.architecture import load_architecture
from weft.rl.model.engine_model import EngineModel
from weft.rl.model.policy import DTYPES, policy_shapes
from weft.rl.run.links import Conversation, Links, ProcessGroup, device_of
from weft.rl.run.messages import (
    Ask,
    Busy,
    Hello,
    Hold,
    Receive,
    RolloutJob,
    Samples,
    SamplesMade,
    Stop,
    VersionServed,
    pack,
)
from weft.rl.run.methods import CollectiveReceiving, WeftReceiving
from weft.rl.run.verification import Expected
from weft.rl.settings import LoopSettings, Method

HOLD_S = 0.002
"""How long to wait before asking again."""
BUSY_S = 1.0
_KINDS: tuple[type[Any], ...] = (Hold, RolloutJob, Receive, Stop)


class LoopEngine:
    """One rank; `run` returns when the coordinator stops it."""

    def __init__(self, settings: LoopSettings, links: Links, *, rank: int, local_rank: int) -> None:
        self.settings, self.rank = settings, rank
        self._engine, self._number = divmod(rank, settings.ranks_per_engine)
        self._device = device_of(settings, local_rank)
        self._task = load_task(settings.task)
        architecture = load_architecture(settings.model, vocab_size=self._task.vocab_size)
        build = partial(
            EngineModel,
            architecture,
            dtype=settings.stored_dtype,
            rank=self._number,
            num_ranks=settings.ranks_per_engine,
        )
        self._model = build().to(self._device)
        self._talk = Conversation(links, f"engine {rank}", settings.timeout_s)
        self._talk.say(Hello(member=f"engine {rank}", copy_s=_copy_s(self._model)))
        name = f"engine {self._engine}"
        self._group = ProcessGroup(
            links.store(name, settings),
            self._number,
            settings.ranks_per_engine,
            timeout_s=settings.timeout_s,
            device=self._device,
        )
        self._receiving = self._make_receiving(links)
        self._expected = Expected(links.run_dir) if settings.check_bits else None
        self._fresh = build() if settings.check_bits else None
        self._last_said = time.monotonic()

    def _make_receiving(self, links: Links) -> WeftReceiving | CollectiveReceiving:
        settings = self.settings
        if settings.method is Method.WEFT:
            return WeftReceiving(links, self._model, self.rank)
        group = ProcessGroup(
            links.store("transfer", settings),
            1 + self.rank,
            1 + settings.num_engine_ranks,
            timeout_s=settings.timeout_s,
            device=self._device,
        )
        architecture = load_architecture(settings.model, vocab_size=self._task.vocab_size)
        return CollectiveReceiving(self._model, policy_shapes(settings, architecture), DTYPES[settings.dtype], group)

    def run(self) -> None:
        """Generate until the run is over."""
        while True:
            match self._next():
                case Hold():
                    self._between()
                    time.sleep(HOLD_S)
                case RolloutJob() as job:
                    self._work(job)
                case Receive(version=version):
                    assert isinstance(self._receiving, CollectiveReceiving)
                    self._served(self._receiving.receive(version))
                case Stop():
                    return
                case answer:
                    raise ProtocolError(f"engine {self.rank} asked for a job and got {answer}")

    def close(self) -> None:
        """Leave everything."""
        self._receiving.close()
        self._talk.close()

    def _next(self) -> Any:
        """The coordinator's answer, on all ranks of the engine."""
        answer = None
        words = torch.zeros(4, dtype=torch.int64, device=self._device)
        if self._number == 0:
            answer = self._talk.ask(Ask(engine=self._engine, version=self._receiving.version))
            self._last_said = time.monotonic()
            words = torch.tensor(_words(answer), dtype=torch.int64, device=self._device)
        if self._group.size == 1:
            return answer
        kind, *values = self._group.share(words).tolist()
        return answer or _message(kind, values)

    def _work(self, job: RolloutJob) -> None:
        rng = np.random.default_rng(job.seed)
        prompts = self._task.prompts(rng, job.count)
        answer_tokens = self.settings.max_new_tokens or self._task.answer_tokens
        sampling = Sampling(answer_tokens=answer_tokens, temperature=self.settings.temperature, seed=job.seed)
        made = generate(
            self._model,
            prompts,
            sampling,
            between=self._between,
            reduce=self._group.add_up,
            agree=self._group.share,
        )
        if self._number != 0:
            return
        samples = Samples(
            prompts=pack(prompts),
            answers=pack(made.tokens),
            rewards=pack(self._task.rewards(prompts, made.tokens)),
            logprobs=pack(made.logprobs),
            versions=pack(made.versions),
        )
        self._talk.say(SamplesMade(engine=self._engine, job=job.job, samples=samples))

    def _between(self) -> int:
        """Between two tokens: take a new version if there is one; returns the version that is served."""
        pause_s = self._receiving.update()
        if pause_s is not None:
            self._served(pause_s)
        now = time.monotonic()
        if self._number == 0 and now - self._last_said > BUSY_S:
            self._talk.say(Busy(engine=self._engine))
            self._last_said = now
        return self._receiving.version

    def _served(self, pause_s: float) -> None:
        at, version = time.time(), self._receiving.version
        exact = None
        if self._expected is not None and self._fresh is not None:
            exact = self._expected.equals(version, self._model, self._fresh)
        self._talk.say(VersionServed(engine_rank=self.rank, version=version, at=at, pause_s=pause_s, exact=exact))


def _copy_s(model: EngineModel) -> float:
    """Shortest time in which the device copies the weights once."""
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    device = model.embed.weight.device
    source, target = (torch.ones(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    times = []
    for _ in range(5):
        began = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times)


def _words(answer: Any) -> list[int]:
    """An answer as four numbers."""
    numbers = [] if isinstance(answer, Stop) else [getattr(answer, name) for name in answer.__struct_fields__]
    return [_KINDS.index(type(answer)), *numbers, *[0] * (3 - len(numbers))]


def _message(kind: int, values: list[int]) -> Any:
    """An answer from four numbers."""
    if _KINDS[kind] is RolloutJob:
        return RolloutJob(job=values[0], count=values[1], seed=values[2])
    return Receive(version=values[0]) if _KINDS[kind] is Receive else _KINDS[kind]()
