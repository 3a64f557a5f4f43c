"""A whole system in one process: a controller, senders and receivers on threads of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from weft.config import TransferSettings
from weft.runtime.controller.controller import Controller
from weft.runtime.receive.receiver import Receiver
from weft.runtime.send.sender import Publication, Sender
from weft.runtime.weights import Weights

WAIT_S = 20.0


class Arena:
    """Trainers and engine ranks with these weights."""

    def __init__(
        self,
        trainers: Sequence[Weights],
        engines: Sequence[Weights],
        *,
        through: str | None = None,
        ignore: Sequence[str] = (),
        ranks_per_engine: int = 1,
        **settings: Any,
    ) -> None:
        self._stack = contextlib.ExitStack()
        defaults = {"beat_s": 0.5, "silence_s": 10.0, "version_s": WAIT_S}
        self.controller = self._stack.enter_context(
            Controller(
                num_trainers=len(trainers),
                num_engine_ranks=len(engines),
                ranks_per_engine=ranks_per_engine,
                settings=TransferSettings(**(defaults | settings)),
                ignore=ignore,
            )
        )
        address = self.controller.address
        self.receivers = [
            self._stack.enter_context(Receiver(address, rank=rank, weights=weights))
            for rank, weights in enumerate(engines)
        ]
        self.senders = [
            self._stack.enter_context(Sender(address, rank=rank, weights=weights, through=through, timeout_s=WAIT_S))
            for rank, weights in enumerate(trainers)
        ]

    def publish(self, version: int, on_released: Callable[[int], None] = lambda _: None) -> list[Publication]:
        """Publish, commit everywhere, and return the trainers' publications.

        `on_released` is called with a trainer's rank as soon as its weights may change.
        """
        publications = [sender.publish(version=version) for sender in self.senders]

        def release(rank: int) -> None:
            publications[rank].wait_released(WAIT_S)
            on_released(rank)

        with ThreadPoolExecutor(len(self.receivers) + len(self.senders)) as pool:  # in place engines pause together
            released = [pool.submit(release, rank) for rank in range(len(self.senders))]
            assert all(pool.map(lambda receiver: receiver.wait(WAIT_S).commit(WAIT_S), self.receivers))
            for future in released:
                future.result(WAIT_S)
        for publication in publications:
            publication.wait_committed(WAIT_S)
        return publications

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()
