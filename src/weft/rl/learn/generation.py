"""Sampling with a KV cache, token by token; an update may land between any two tokens.

    samples = generate(model, prompts, answer_tokens=5, between=engine.between_tokens, …)

Entries of an older version stay in the KV cache, as in engines that update without dropping requests. Each token is
recorded with the probability it was sampled with and the version that made it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.rl.learn.tasks import Tokens
from weft.rl.model.engine_model import EngineModel, Reduce


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """An engine's answers to some prompts; [samples, answer tokens]."""

    tokens: Tokens
    logprobs: NDArray[np.float32]
    """Of each token, when it was sampled."""
    versions: NDArray[np.int64]
    """The version that made each token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen."""

    answer_tokens: int
    temperature: float
    seed: int


@torch.inference_mode()
def generate(
    model: EngineModel,
    prompts: Tokens,
    sampling: Sampling,
    *,
    between: Callable[[], int],
    reduce: Reduce,
    agree: Callable[[Tensor], Tensor],
) -> Answers:
    """Answers to prompts of one length.

    `between` is called before every token, may change the weights, and returns their version. `reduce` sums the
    partial results of an engine's ranks, `agree` makes them choose the same tokens.
    """
    device = model.embed.weight.device
    new = torch.from_numpy(prompts).to(device)
    cache = model.cache(len(prompts), prompts.shape[1] + sampling.answer_tokens)
    rng = torch.Generator().manual_seed(sampling.seed)
    tokens, logprobs, versions = [], [], []
    for _ in range(sampling.answer_tokens):
        versions.append(between())
        logits = model(new, cache, reduce)
        known = torch.log_softmax(logits / sampling.temperature, dim=-1)
        noise = torch.rand(known.shape, generator=rng).to(device)
        chosen = agree((known - torch.log(-torch.log(noise.clamp(1e-9, 1 - 1e-7)))).argmax(-1))
        tokens.append(chosen)
        logprobs.append(known.gather(-1, chosen[:, None]).squeeze(-1))
        new = chosen[:, None]
    return Answers(
        tokens=torch.stack(tokens, 1).cpu().numpy(),
        logprobs=torch.stack(logprobs, 1).cpu().numpy(),
        versions=np.repeat(np.array([versions], dtype=np.int64), len(prompts), axis=0),
    )
