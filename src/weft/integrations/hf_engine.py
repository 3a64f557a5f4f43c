"""Hugging Face `transformers` as an engine: any causal model, kept fresh between two tokens.

    with HfEngine(model, "tcp://ctl:7070", rank=0) as engine:
        answer = engine.generate([1, 2, 3], max_new_tokens=64)
        answer.tokens, answer.spans            # which version made which tokens

Keys and values that older weights computed stay with the request that has them; the next one starts with none.
`EngineThread` runs one beside a server: it takes versions while nobody asks for anything.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Self

import torch

from weft.errors import ConfigError, IntegrityError, WeftError
from weft.integrations.hf import checkpoint_weights
from weft.runtime.control.security import Security
from weft.runtime.receive.receiver import Receiver

COMMIT_S = 120.0
IDLE_S = 0.005
"""How often an engine without requests looks for versions."""
CLOSE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Tokens that one version made: from `start` up to `end`, counted from the first new token."""

    version: int | None
    """None: the weights the engine was started with."""
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """New tokens, and the versions that made them."""

    tokens: list[int]
    spans: list[VersionSpan]


class HfEngine:
    """A model and its Receiver. Used by one thread."""

    def __init__(
        self, model: torch.nn.Module, controller: str, *, rank: int = 0, security: Security | None = None
    ) -> None:
        self._model: Any = model
        self._receiver = Receiver(controller, rank=rank, weights=checkpoint_weights(model), security=security)
        self.error: WeftError | None = None
        """What went wrong since the version that is served; that stays."""

    @property
    def version(self) -> int | None:
        """The version that is served. Raises IntegrityError while the weights are torn."""
        return self._receiver.version

    def attend(self) -> int | None:
        """Serve a version that is there; the version that is served then. Raises IntegrityError if that is torn."""
        try:
            update = self._receiver.poll()
            if update is not None and update.commit(COMMIT_S):
                self.error = None
        except WeftError as error:
            self.error = error
        return self._receiver.version

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], *, max_new_tokens: int, **options: Any) -> Answer:
        """An answer to one prompt; `options` are those of `transformers`' own `generate`."""
        longest = getattr(self._model.config, "max_position_embeddings", None)
        if not prompt or max_new_tokens < 1:
            raise ConfigError(f"a prompt of {len(prompt)} tokens and {max_new_tokens} new ones", hint="at least one")
        if longest is not None and len(prompt) + max_new_tokens > longest:
            raise ConfigError(f"{len(prompt)} + {max_new_tokens} tokens do not fit into the model's {longest}")
        versions = [self.attend()]

        def after_token(*_: Any) -> bool:
            versions.append(self.attend())
            return False

        device = next(self._model.parameters()).device
        tokens = torch.tensor([list(prompt)], device=device)
        found = self._model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=max_new_tokens,
            stopping_criteria=[after_token],
            **options,
        )
        new = found[0, tokens.shape[1] :].tolist()
        return Answer(tokens=new, spans=_spans(versions[: len(new)]))

    def close(self) -> None:
        """Leave the controller."""
        self._receiver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _spans(versions: Sequence[int | None]) -> list[VersionSpan]:
    starts = [i for i in range(len(versions)) if i == 0 or versions[i] != versions[i - 1]]
    ends = [*starts[1:], len(versions)]
    return [VersionSpan(version=versions[start], start=start, end=end) for start, end in zip(starts, ends, strict=True)]


@dataclass(frozen=True, slots=True)
class _Request:
    prompt: Sequence[int]
    options: dict[str, Any]
    answer: Future[Answer]


class EngineThread:
    """An engine on a thread of its own: answers requests in turn, and takes versions also when there are none."""

    def __init__(self, engine: HfEngine) -> None:
        self._engine = engine
        self._jobs: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="weft-hf-engine", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int | None:
        """The version that is served."""
        return self._engine.version

    @property
    def error(self) -> WeftError | None:
        """What went wrong since the version that is served."""
        return self._engine.error

    def ask(self, prompt: Sequence[int], **options: Any) -> Future[Answer]:
        """An answer, later."""
        job = _Request(prompt, options, Future())
        self._jobs.put(job)
        return job.answer

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=IDLE_S)
            except queue.Empty:
                with contextlib.suppress(IntegrityError):  # torn until the next version
                    self._engine.attend()
                continue
            if job is None:
                return
            if not job.answer.set_running_or_notify_cancel():
                continue
            try:
                job.answer.set_result(self._engine.generate(job.prompt, **job.options))
            except Exception as error:
                job.answer.set_exception(error)

    def close(self) -> None:
        """End after the request that is being answered."""
        self._jobs.put(None)
        self._thread.join(CLOSE_S)
        with contextlib.suppress(WeftError):
            self._engine.close()
