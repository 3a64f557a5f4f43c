"""A trainer rank: takes samples, improves the policy by PPO, publishes every version to the engines.

    consumes      SampleBatch           produces      Take, Trained, BroadcastOffer, VersionSent, Done; versions
    waits for     samples; the release of the weights before a step; other trainers      unblocked by   a deadline

With weft the next iteration's samples are scored while the last version is still in flight; only the first step of the
optimizer waits until the weights have been read.
"""

from __future__ import annotations

import datetime
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from weft.errors import PeerLost, ProtocolError
from weft.rl.learn import checkpoint, ppo
from weft.rl.learn.optimizer import MasterAdamW
from weft.rl.learn.tasks import load_task
from weft.rl.model.architecture import load_architecture
from weft.rl.model.policy import Actor, build_actor, layers_of
from weft.rl.run.links import Conversation, Links, ProcessGroup, device_of
from weft.rl.run.messages import Again, BroadcastOffer, Done, Hello, SampleBatch, Samples, Stop, Take, Trained, unpack
from weft.rl.run.methods import CollectiveSending, SendingMethod, WeftSending, full_tensors
from weft.rl.run.verification import Expected
from weft.rl.settings import LoopSettings, Method, Precision, Wrapping

AGAIN_S = 0.2
"""Wait before a version that was given up is sent again."""


class LoopTrainer:
    """One rank; `run` returns when all iterations are done."""

    def __init__(self, settings: LoopSettings, links: Links, *, rank: int, local_rank: int) -> None:
        self.settings, self.rank = settings, rank
        self._device = device_of(settings, local_rank)
        _join_trainers(settings, links, rank, self._device)
        task = load_task(settings.task)
        self._answer = settings.max_new_tokens or task.answer_tokens
        actor = build_actor(settings, load_architecture(settings.model, vocab_size=task.vocab_size))
        actor = actor.to(self._device)
        self._reference = _frozen_copy(settings, actor)
        self._policy = actor.policy
        self._model = _wrapped(settings, actor, self._device)
        self._optimizer = MasterAdamW(actor.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
        self._iteration = 0
        if settings.resume:
            self._iteration = checkpoint.load(settings, self._optimizer, rank)
        self._talk = Conversation(links, f"trainer {rank}", settings.timeout_s)
        self._talk.say(Hello(member=f"trainer {rank}", iteration=self._iteration))
        self._sending = self._make_sending(links)
        self._expected = Expected(links.run_dir) if settings.check_bits else None
        self._rng = torch.Generator().manual_seed(settings.seed * 1000 + rank)

    def _make_sending(self, links: Links) -> SendingMethod:
        settings = self.settings
        if settings.method is Method.WEFT:
            return WeftSending(settings, links, self._policy, self.rank)
        group = None
        if self.rank == 0:
            store = links.store("transfer", settings)
            size = 1 + settings.num_engine_ranks
            group = ProcessGroup(store, 0, size, timeout_s=settings.timeout_s, device=self._device)
        return CollectiveSending(
            settings, self._policy, self.rank, group, lambda version: self._talk.say(BroadcastOffer(version=version))
        )

    def run(self) -> None:
        """All iterations."""
        self._publish(self._iteration)
        while self._iteration < self.settings.iterations:
            began = time.monotonic()
            samples = self._take()
            waited = time.monotonic()
            metrics = self._improve(self._score(samples))
            self._iteration += 1
            metrics |= {"wait_s": waited - began, "train_s": time.monotonic() - waited}
            if self.rank == 0:
                self._talk.say(Trained(iteration=self._iteration - 1, metrics=metrics))
            if not self.settings.freeze_engines:
                self._publish(self._iteration)
            self._save()
            self._report()
        self._finish()

    def _finish(self) -> None:
        """Wait until engines have the final policy."""
        while True:
            self._sending.wait_released()
            self._report(wait=True)
            match self._talk.ask(Done(rank=self.rank)):
                case Again():
                    self._publish_again()
                case _:
                    return

    def close(self) -> None:
        """Leave everything."""
        self._sending.close()
        self._talk.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _publish(self, version: int) -> None:
        if self._expected is not None:
            self._expected.keep(version, full_tensors(self._policy), writes=self.rank == 0)
            dist.barrier()
        self._sending.publish(version)

    def _publish_again(self) -> None:
        time.sleep(AGAIN_S)
        self._sending.publish_again()

    def _report(self, *, wait: bool = False) -> None:
        reports = self._sending.reports(wait=wait)
        if self.rank == 0:
            for sent in reports:
                self._talk.say(sent)

    def _save(self) -> None:
        every = self.settings.checkpoint_every
        if every and self._iteration % every == 0:
            checkpoint.save(self.settings, self._optimizer, self.rank, self._iteration)

    def _take(self) -> Samples:
        self._talk.say(Take(rank=self.rank, iteration=self._iteration))
        while True:
            match self._talk.listen(meanwhile=self._report):
                case SampleBatch(iteration=iteration, samples=samples) if iteration == self._iteration:
                    return samples
                case Again():
                    self._publish_again()
                case Stop(reason=reason):
                    raise PeerLost(f"the run was stopped: {reason or 'it is over'}")
                case answer:
                    raise ProtocolError(f"trainer {self.rank} asked for iteration {self._iteration} and got {answer}")

    @torch.no_grad()
    def _score(self, samples: Samples) -> ppo.Scored:
        """What a step needs of each sample."""
        settings = self.settings
        arrays = {name: unpack(getattr(samples, name)) for name in ("prompts", "answers", "rewards", "logprobs")}
        tokens = self._tensor(np.concatenate([arrays["prompts"], arrays["answers"]], axis=1))
        logits, values = self._model(tokens)
        proximal = self._logprobs(logits, tokens)
        values = values[:, -self._answer - 1 : -1]
        gains = ppo.advantages(
            self._tensor(arrays["rewards"]), values, gamma=settings.gamma, gae_lambda=settings.gae_lambda
        )
        importance = torch.exp(proximal - self._tensor(arrays["logprobs"])).clamp(max=settings.max_importance)
        reference = None
        if self._reference is not None:
            reference = self._logprobs(self._reference(tokens)[0], tokens)
        return ppo.Scored(
            tokens=tokens,
            proximal=proximal,
            importance=importance,
            advantages=_normalised(gains),
            returns=gains + values,
            values=values,
            reference=reference,
        )

    def _logprobs(self, logits: Tensor, tokens: Tensor) -> Tensor:
        return ppo.taken(ppo.answer_logprobs(logits, self._answer, self.settings.temperature), tokens)

    def _tensor(self, array: Any) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    def _improve(self, batch: ppo.Scored) -> dict[str, float]:
        """Several epochs over the samples; the first step waits until the weights may change."""
        settings, num_samples = self.settings, len(batch.tokens)
        found: dict[str, Tensor] = {}
        is_released = False
        self._optimizer.lr = settings.lr * (1 - (1 - settings.last_lr) * self._iteration / settings.iterations)
        for _ in range(settings.ppo_epochs):
            order = torch.randperm(num_samples, generator=self._rng).to(self._device)
            for rows in order.chunk(settings.minibatches):
                part = batch.rows(rows)
                logits, values = self._model(part.tokens)
                total, found = ppo.loss(logits, values, part, settings)
                total.backward()  # type: ignore[no-untyped-call]
                norm = nn.utils.clip_grad_norm_(self._optimizer.parameters, settings.max_grad_norm)
                if not is_released:
                    self._sending.wait_released()
                    is_released = True
                self._optimizer.step()
        importance = (batch.importance - 1).abs().mean()
        found |= {"grad_norm": norm, "importance_off": importance}
        return {name: float(value) for name, value in found.items()}


def _join_trainers(settings: LoopSettings, links: Links, rank: int, device: str) -> None:
    """The group inside which trainers train."""
    if device != "cpu":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if device == "cpu" else "nccl",
        store=links.store("trainers", settings),
        rank=rank,
        world_size=settings.num_trainers,
        timeout=datetime.timedelta(seconds=settings.timeout_s),
    )


def _wrapped(settings: LoopSettings, actor: Actor, device: str) -> nn.Module:
    """The model as trainers share it."""
    if settings.trainer is Wrapping.DDP:
        return DistributedDataParallel(actor, device_ids=None if device == "cpu" else [device])
    mesh = init_device_mesh(device.partition(":")[0], (settings.num_trainers,))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if settings.dtype is Precision.BF16 else None)
    for layer in layers_of(actor.policy):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(actor, mesh=mesh, mp_policy=policy)
    return actor


def _frozen_copy(settings: LoopSettings, actor: Actor) -> Actor | None:
    """The policy the run began with, where a KL term needs it."""
    if not settings.kl_coef:
        return None
    architecture = load_architecture(settings.model, vocab_size=load_task(settings.task).vocab_size)
    copy = build_actor(settings, architecture).to(next(actor.parameters()).device)
    return copy.requires_grad_(False)


def _normalised(gains: Tensor) -> Tensor:
    """Zero mean and unit deviation over the samples of all trainers."""
    sums = torch.stack([gains.sum(), (gains**2).sum(), torch.tensor(float(gains.numel()), device=gains.device)])
    dist.all_reduce(sums)
    mean = sums[0] / sums[2]
    deviation = (sums[1] / sums[2] - mean**2).clamp(min=0.0).sqrt()
    return (gains - mean) / (deviation + 1e-6)
