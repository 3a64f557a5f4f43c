"""The objective: PPO with a clipped ratio, a value function, generalised advantages, entropy and KL terms.

Samples may come from older versions. There are three policies: the one that *behaved* (which the engine sampled
from), the *proximal* one (the trainer's before this iteration's first step) and the current one. The ratio
current/proximal is clipped; proximal/behaved weighs a sample and is bounded, so stale samples count for less where they
have become unlikely.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.rl.settings import LoopSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Samples of one iteration, with everything a step needs; all [samples, answer tokens] but `tokens`."""

    tokens: Tensor
    """[samples, prompt and answer]."""
    proximal: Tensor
    importance: Tensor
    advantages: Tensor
    returns: Tensor
    values: Tensor
    reference: Tensor | None
    """Log-probabilities of the policy the run began with, where there is a KL term."""

    def rows(self, index: Tensor) -> Scored:
        """A selection of the samples."""
        return Scored(
            tokens=self.tokens[index],
            proximal=self.proximal[index],
            importance=self.importance[index],
            advantages=self.advantages[index],
            returns=self.returns[index],
            values=self.values[index],
            reference=None if self.reference is None else self.reference[index],
        )


def answer_logprobs(logits: Tensor, answer: int, temperature: float) -> Tensor:
    """[samples, length, vocabulary]: log-probabilities of every token, where answers are made."""
    return torch.log_softmax(logits[:, -answer - 1 : -1] / temperature, dim=-1)


def taken(logprobs: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities of the answers' own tokens."""
    answers = tokens[:, -logprobs.shape[1] :]
    return logprobs.gather(-1, answers[..., None]).squeeze(-1)


def advantages(rewards: Tensor, values: Tensor, *, gamma: float, gae_lambda: float) -> Tensor:
    """Generalised advantage estimates; an answer ends with its last token."""
    found = torch.zeros_like(rewards)
    running = torch.zeros_like(rewards[:, 0])
    following = torch.zeros_like(running)
    for t in reversed(range(rewards.shape[1])):
        surprise = rewards[:, t] + gamma * following - values[:, t]
        running = surprise + gamma * gae_lambda * running
        found[:, t], following = running, values[:, t]
    return found


def loss(logits: Tensor, values: Tensor, batch: Scored, settings: LoopSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a step, and its metrics."""
    answer = batch.proximal.shape[1]
    logprobs = answer_logprobs(logits, answer, settings.temperature)
    current = taken(logprobs, batch.tokens)
    ratio = torch.exp(current - batch.proximal)
    clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
    gain = torch.minimum(ratio * batch.advantages, clipped * batch.advantages) * batch.importance
    entropy = -(logprobs.exp() * logprobs).sum(-1).mean()
    estimates = values[:, -answer - 1 : -1]
    near = batch.values + (estimates - batch.values).clamp(-settings.clip, settings.clip)
    error = torch.maximum((estimates - batch.returns) ** 2, (near - batch.returns) ** 2).mean()
    total = -gain.mean() + settings.value_coef * error - settings.entropy_coef * entropy
    if batch.reference is not None:
        gap = batch.reference - current
        total = total + settings.kl_coef * (torch.exp(gap) - gap - 1).mean()
    report = {
        "policy_loss": -gain.mean(),
        "value_loss": error,
        "entropy": entropy,
        "clipped": ((ratio - 1).abs() > settings.clip).float().mean(),
        "kl": (batch.proximal - current).mean(),
    }
    return total, {name: value.detach() for name, value in report.items()}
