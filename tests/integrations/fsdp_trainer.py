"""A trainer of several ranks, sharded by FSDP2, that publishes the weights of any seed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import weft
from tests.integrations.tiny_models import make_model
from tests.support.processes import Process
from weft.integrations.hf import checkpoint_weights

WAIT_S = 120.0
SEEDS = (1, 2, 3)
READY_S = 180.0
"""For processes to import everything and make a model, with an engine busy beside them."""


def patient(*, silence_s: float = 60.0, **more: Any) -> weft.TransferSettings:
    """For tests that are not about silence: engines spin, and on two cores others get no processor for seconds."""
    return weft.TransferSettings(silence_s=silence_s, version_s=WAIT_S, **more)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def fill(model: torch.nn.Module, whole: torch.nn.Module) -> None:
    """Give a sharded model the values of a whole one."""
    values = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if isinstance(tensor, DTensor):
                tensor.copy_(distribute_tensor(values[name], tensor.device_mesh, tensor.placements))
            else:
                tensor.copy_(values[name])


def rank_of_trainer(pipe: Any, rank: int, world: int, port: int) -> None:
    """Train any kind of model for any controller, one after the other."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    while (request := _next(pipe)) is not None:
        kind, address = request
        _train(pipe, rank, sharded(kind, world), kind, address)
    dist.destroy_process_group()


def sharded(kind: str, world: int) -> torch.nn.Module:
    model = make_model(kind, seed=0)
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _train(pipe: Any, rank: int, model: torch.nn.Module, kind: str, address: str) -> None:
    values = {seed: make_model(kind, seed) for seed in SEEDS}
    with weft.Sender(address, rank=rank, weights=checkpoint_weights(model), timeout_s=WAIT_S) as sender:
        pipe.send("ready")
        while (request := _next(pipe)) is not None:
            version, seed, dies = request
            fill(model, values[seed])
            if dies:
                sender._write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            try:
                publication = sender.publish(version=version)
                publication.wait_committed(WAIT_S)
                pipe.send("committed")
            except weft.WeftError as error:
                pipe.send(Refusal(str(error), getattr(error, "problems", ())))


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a version was not served."""

    message: str
    problems: tuple[str, ...]


def _next(pipe: Any) -> Any:
    assert pipe.poll(600.0), "nobody asks for anything"
    return pipe.recv()


class Trainer:
    """All ranks of one trainer."""

    def __init__(self, stack: ExitStack, world: int = 2) -> None:
        port = free_port()
        self.ranks = [Process.started(stack, rank_of_trainer, rank, world, port) for rank in range(world)]

    @contextmanager
    def training(self, kind: str, address: str) -> Iterator[Trainer]:
        """Join a controller with a model; leave it afterwards."""
        for rank in self.ranks:
            rank.ask((kind, address))
        for rank in self.ranks:
            assert rank.answer(READY_S) == "ready"
        try:
            yield self
        finally:
            for rank in self.ranks:
                with contextlib.suppress(OSError):  # it was killed
                    rank.ask(None)

    def publish(self, version: int, seed: int) -> None:
        """Publish and wait until it is served."""
        refusals = self.try_to_publish(version, seed)
        assert not refusals, refusals

    def try_to_publish(self, version: int, seed: int) -> list[Refusal]:
        self.ask_to_publish(version, seed)
        return self.refusals()

    def ask_to_publish(self, version: int, seed: int) -> None:
        for rank in self.ranks:
            rank.ask((version, seed, False))

    def refusals(self) -> list[Refusal]:
        """Of the version that was asked for."""
        answers = [rank.answer(2 * WAIT_S) for rank in self.ranks]
        return [answer for answer in answers if isinstance(answer, Refusal)]

    def die_writing(self, version: int, seed: int) -> None:
        """Publish, and lose the last rank when all of them may write: its part does not come."""
        for rank in self.ranks:
            rank.ask((version, seed, rank is self.ranks[-1]))
        assert self.ranks[-1].died(WAIT_S)
