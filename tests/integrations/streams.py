"""Clients that ask a server for one answer after the other, and what their answers must be."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence

from tests.integrations.engine_server import Answer
from tests.support.waiting import wait_until

STOP_S = 60.0


class Stream(threading.Thread):
    """A client that goes on until it is told to stop, or something fails."""

    def __init__(
        self, generate: Callable[[list[int], int], Answer], prompts: Sequence[list[int]], num_tokens: int
    ) -> None:
        super().__init__(daemon=True)
        self._generate, self._prompts, self._num_tokens = generate, prompts, num_tokens
        self._is_over = threading.Event()
        self.answers: list[Answer] = []
        self.errors: list[Exception] = []

    def run(self) -> None:
        for prompt in itertools.cycle(self._prompts):
            if self._is_over.is_set():
                return
            try:
                self.answers.append(self._generate(list(prompt), self._num_tokens))
            except Exception as error:
                self.errors.append(error)
                return

    def stop(self) -> list[Answer]:
        """End after the answer that is on its way; all answers. Raises what a request raised."""
        self._is_over.set()
        self.join(STOP_S)
        assert not self.is_alive()
        for error in self.errors:
            raise error
        return self.answers


def check_spans(answers: Sequence[Answer], num_tokens: int) -> None:
    """Every token has one version."""
    for answer in answers:
        assert len(answer.tokens) == num_tokens
        borders = [0, *(end for _, _, end in answer.spans)]
        assert [start for _, start, _ in answer.spans] == borders[:-1]
        assert borders[-1] == num_tokens


def spans_by(answers: Sequence[Answer], seed_of: Callable[[str], int]) -> dict[int, list[tuple[list[int], list[int]]]]:
    """What was said with the weights of each seed: what stood before, and the tokens; everything once."""
    found: dict[int, list[tuple[list[int], list[int]]]] = {}
    for answer in answers:
        for version, start, end in answer.spans:
            said = answer.prompt + answer.tokens[:start], answer.tokens[start:end]
            spans = found.setdefault(seed_of(version), [])
            if said not in spans:
                spans.append(said)
    return found


def wait_for_answers(streams: Sequence[Stream], more: int, timeout_s: float) -> None:
    """Until every stream has got so many answers more, or one has failed."""
    wanted = [len(stream.answers) + more for stream in streams]

    def have_come() -> bool:
        pairs = zip(streams, wanted, strict=True)
        return any(stream.errors for stream in streams) or all(len(stream.answers) >= num for stream, num in pairs)

    wait_until(have_come, timeout_s, f"{more} more answers of every stream")
