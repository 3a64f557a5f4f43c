"""The tasks: their answers can be checked, and policies learn them from scratch.

A task makes prompts of one length and rewards answers token by token; the rewards of a perfect answer add up to 1.
`--task my.module:task` adds another: any object with the attributes of Task.

    task = load_task("sort")
    prompts = task.prompts(np.random.default_rng(0), 32)       # [32, prompt_tokens]
    rewards = task.rewards(prompts, answers)                   # [32, answer_tokens]
"""

from __future__ import annotations

import abc
import importlib
import sys
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from weft.errors import ConfigError

Tokens = NDArray[np.int64]
ALPHABET = "0123456789+=>()[]{}<"
VOCAB_SIZE = 32
"""Tokens the built-in tasks may use; the rest have no meaning."""
_OPENING, _CLOSING = "([{", ")]}"


class Task(Protocol):
    """What the loop needs of a task."""

    vocab_size: int
    """Tokens it uses; models may have more."""
    prompt_tokens: int
    answer_tokens: int

    def prompts(self, rng: np.random.Generator, count: int) -> Tokens:
        """Prompts, one a row."""

    def rewards(self, prompts: Tokens, answers: Tokens) -> NDArray[np.float32]:
        """What each token of each answer earns."""

    def text(self, tokens: Tokens) -> str:
        """A row as a person would read it."""


class AnswerTask(abc.ABC):
    """A task with one right answer of fixed length, of which every right token earns its share."""

    vocab_size = VOCAB_SIZE
    prompt_tokens: int
    answer_tokens: int

    @abc.abstractmethod
    def prompts(self, rng: np.random.Generator, count: int) -> Tokens:
        """Prompts, one a row."""

    @abc.abstractmethod
    def answers(self, prompts: Tokens) -> Tokens:
        """The right answers."""

    def rewards(self, prompts: Tokens, answers: Tokens) -> NDArray[np.float32]:
        """A share for every token that is right; what follows the answer earns nothing."""
        found = np.zeros(answers.shape, dtype=np.float32)
        length = min(self.answer_tokens, answers.shape[1])
        found[:, :length] = answers[:, :length] == self.answers(prompts)[:, :length]
        return found / np.float32(self.answer_tokens)

    def text(self, tokens: Tokens) -> str:
        """A row as a person would read it."""
        return "".join(ALPHABET[token] if 0 <= token < len(ALPHABET) else "·" for token in tokens)


class Sort(AnswerTask):
    """`5290>` is answered by `0259`."""

    def __init__(self, digits: int = 5) -> None:
        self.prompt_tokens, self.answer_tokens = digits + 1, digits

    def prompts(self, rng: np.random.Generator, count: int) -> Tokens:
        """Random digits and `>`."""
        return _followed_by(">", rng.integers(0, 10, (count, self.answer_tokens)))

    def answers(self, prompts: Tokens) -> Tokens:
        """The digits in order."""
        return np.sort(prompts[:, :-1], axis=1)


class Reverse(AnswerTask):
    """`5290<` is answered by `0925`."""

    def __init__(self, digits: int = 5) -> None:
        self.prompt_tokens, self.answer_tokens = digits + 1, digits

    def prompts(self, rng: np.random.Generator, count: int) -> Tokens:
        """Random digits and `<`."""
        return _followed_by("<", rng.integers(0, 10, (count, self.answer_tokens)))

    def answers(self, prompts: Tokens) -> Tokens:
        """The digits from last to first."""
        return prompts[:, -2::-1]


class Brackets(AnswerTask):
    """`([{=` is answered by `}])`."""

    def __init__(self, depth: int = 6) -> None:
        self.prompt_tokens, self.answer_tokens = depth + 1, depth

    def prompts(self, rng: np.random.Generator, count: int) -> Tokens:
        """Random opening brackets and `=`."""
        opening = np.array([ALPHABET.index(sign) for sign in _OPENING])
        return _followed_by("=", opening[rng.integers(0, len(opening), (count, self.answer_tokens))])

    def answers(self, prompts: Tokens) -> Tokens:
        """What closes them, innermost first."""
        closing = np.zeros(VOCAB_SIZE, dtype=np.int64)
        for opens, closes in zip(_OPENING, _CLOSING, strict=True):
            closing[ALPHABET.index(opens)] = ALPHABET.index(closes)
        return closing[prompts[:, -2::-1]]


class Add(AnswerTask):
    """`37+25=` is answered by `062`."""

    def __init__(self, digits: int = 2) -> None:
        self._digits = digits
        self.prompt_tokens, self.answer_tokens = 2 * digits + 2, digits + 1

    def prompts(self, rng: np.random.Generator, count: int) -> Tokens:
        """Two random numbers."""
        left, right = (rng.integers(0, 10, (count, self._digits)) for _ in range(2))
        return _followed_by("=", np.concatenate([_followed_by("+", left), right], axis=1))

    def answers(self, prompts: Tokens) -> Tokens:
        """The sum, with leading zeros."""
        powers = 10 ** np.arange(self._digits)[::-1]
        total = prompts[:, : self._digits] @ powers + prompts[:, self._digits + 1 : -1] @ powers
        return total[:, None] // 10 ** np.arange(self.answer_tokens)[::-1] % 10


def _followed_by(sign: str, tokens: Tokens) -> Tokens:
    return np.concatenate([tokens, np.full((len(tokens), 1), ALPHABET.index(sign))], axis=1)


TASKS: dict[str, type[AnswerTask]] = {"sort": Sort, "reverse": Reverse, "brackets": Brackets, "add": Add}


def load_task(name: str) -> Task:
    """A built-in task by name, or a user's task as `module:object`."""
    if name in TASKS:
        return TASKS[name]()
    module, _, attribute = name.partition(":")
    if not attribute:
        raise ConfigError(f"unknown task `{name}`", hint=f"use {', '.join(TASKS)}, or my.module:task")
    if "" not in sys.path:
        sys.path.insert(0, "")  # finds modules of the current folder, as `python -m` does
    try:
        task: Any = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a user's module may raise anything
        raise ConfigError(f"the task `{name}` cannot be loaded: {type(error).__name__}: {error}") from error
    wanted = ("vocab_size", "prompt_tokens", "answer_tokens", "prompts", "rewards", "text")
    missing = [attribute for attribute in wanted if not hasattr(task, attribute)]
    if missing:
        raise ConfigError(f"the task `{name}` has no {', '.join(missing)}", hint="see weft.rl.learn.tasks.Task")
    return task
