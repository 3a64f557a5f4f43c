"""A trainer of several ranks, sharded by FSDP2, that publishes the weights of any seed."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
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

WAIT_S = 60.0


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


def rank_of_trainer(pipe: Any, rank: int, world: int, port: int, kind: str, address: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    model = make_model(kind, seed=0)
    for layer in model.model.layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (world,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    with weft.Sender(address, rank=rank, weights=checkpoint_weights(model), timeout_s=WAIT_S) as sender:
        while (request := _next(pipe)) is not None:
            version, seed = request
            fill(model, make_model(kind, seed))
            try:
                publication = sender.publish(version=version)
                publication.wait_committed(WAIT_S)
                pipe.send("committed")
            except weft.WeftError as error:
                pipe.send(error)
    dist.destroy_process_group()


def _next(pipe: Any) -> Any:
    assert pipe.poll(600.0), "nobody asks for anything"
    return pipe.recv()


class Trainer:
    """All ranks of one trainer."""

    def __init__(self, stack: ExitStack, kind: str, address: str, world: int = 2) -> None:
        port = free_port()
        self.ranks = [
            Process.started(stack, rank_of_trainer, rank, world, port, kind, address) for rank in range(world)
        ]

    def publish(self, version: int, seed: int) -> None:
        """Publish and wait until it is served; raises what a rank raised."""
        self.begin(version, seed)
        self.finish()

    def begin(self, version: int, seed: int) -> None:
        for rank in self.ranks:
            rank.ask((version, seed))

    def finish(self) -> None:
        answers = [rank.answer(2 * WAIT_S) for rank in self.ranks]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
