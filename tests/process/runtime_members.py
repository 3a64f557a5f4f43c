"""Trainer and engine processes for runtime tests: weights both sides can derive from a seed, driven over a pipe."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from typing import Any

import numpy as np

from weft.errors import WeftError
from weft.runtime.receiver import Receiver
from weft.runtime.sender import Sender
from weft.runtime.weights import Part, Weights

SHAPES = {"a": (64, 48), "b": (7, 5), "c": (1000,), "d": (33, 16)}
ANSWER_S = 30.0


def checkpoint(version: int) -> dict[str, np.ndarray]:
    """The whole weights of a version."""
    rng = np.random.default_rng(version)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def box(name: str, rank: int, num_ranks: int, dim: int) -> tuple[slice, ...]:
    """One rank's part of a tensor along a dimension (PyTorch's uneven rule)."""
    size = SHAPES[name][dim]
    step = -(-size // num_ranks)
    cut = slice(min(rank * step, size), min((rank + 1) * step, size))
    return tuple(cut if d == dim else slice(0, n) for d, n in enumerate(SHAPES[name]))


def parts_of(rank: int, num_ranks: int, dim: int) -> tuple[dict[str, tuple[slice, ...]], dict[str, Part]]:
    boxes = {name: box(name, rank, num_ranks, min(dim, len(shape) - 1)) for name, shape in SHAPES.items()}
    parts = {name: Part(shape=SHAPES[name], lo=tuple(s.start for s in cut)) for name, cut in boxes.items()}
    return boxes, parts


def _trainer(pipe: Any, address: str, rank: int, num_ranks: int) -> None:
    boxes, parts = parts_of(rank, num_ranks, dim=0)
    arrays = {name: np.zeros_like(value[boxes[name]], order="C") for name, value in checkpoint(0).items()}
    weights = Weights.from_arrays(arrays, parts=parts)
    with Sender(address, rank=rank, weights=weights, timeout_s=20.0) as sender:
        while (version := pipe.recv()) is not None:
            for name, value in checkpoint(version).items():
                arrays[name][...] = value[boxes[name]]
            try:
                publication = sender.publish(version=version)
                publication.wait_released(20.0)
                publication.wait_committed(20.0)
                pipe.send("committed")
            except WeftError as error:
                pipe.send(f"{type(error).__name__}: {error}")


def _engine(pipe: Any, address: str, rank: int, num_ranks: int) -> None:
    boxes, parts = parts_of(rank, num_ranks, dim=1)
    arrays = {name: np.zeros_like(value[boxes[name]], order="C") for name, value in checkpoint(0).items()}
    weights = Weights.from_arrays(arrays, parts=parts)
    with Receiver(address, rank=rank, weights=weights) as receiver:
        while True:
            update = receiver.poll()
            if update is not None:
                update.commit()
            if pipe.poll(0.001):
                request = pipe.recv()
                if request is None:
                    break
                pipe.send((receiver.version, {name: array.copy() for name, array in arrays.items()}))


class Member:
    """One member process."""

    def __init__(self, side: str, address: str, rank: int, num_ranks: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        target = {"trainer": _trainer, "engine": _engine}[side]
        self._process = context.Process(target=target, args=(theirs, address, rank, num_ranks), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, request: Any) -> None:
        self._pipe.send(request)

    def answer(self, timeout_s: float = ANSWER_S) -> Any:
        assert self._pipe.poll(timeout_s), "the member does not answer"
        return self._pipe.recv()

    def kill(self) -> None:
        self._process.kill()
        self._process.join(ANSWER_S)

    def stall(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)

    def close(self) -> None:
        if self._process.is_alive():
            with contextlib.suppress(OSError):
                self._pipe.send(None)
            self._process.join(ANSWER_S)
        self._process.kill()
        self._pipe.close()
