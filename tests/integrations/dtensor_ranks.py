"""Ranks of a torch process group (Gloo, loopback) that report what `weights_of` says about their sharded parameters."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from weft.integrations.torch import weights_of
from weft.runtime.weights import Held


class Net(torch.nn.Module):
    """Sizes that do not divide evenly, a tied head, a vector, a scalar-like tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(33, 12)
        self.up = torch.nn.Linear(12, 20)
        self.down = torch.nn.Linear(20, 12, bias=False)
        self.norm = torch.nn.Parameter(torch.empty(5))
        self.head = torch.nn.Linear(12, 33, bias=False)
        self.head.weight = self.embed.weight


def full_model(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    net = Net()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return net


def _wrap(kind: str, net: Net, world: int) -> torch.nn.Module:
    if kind == "ddp":
        return torch.nn.parallel.DistributedDataParallel(net)
    if kind == "fsdp":
        return fully_shard(net, mesh=init_device_mesh("cpu", (world,)))
    if kind == "hsdp":
        return fully_shard(net, mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard")))
    if kind == "fsdp_tp":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return fully_shard(net, mesh=mesh["dp"])
    raise ValueError(kind)


def _placed(placements: Sequence[Placement], mesh_shape: tuple[int, ...]) -> torch.nn.Module:
    """One tensor, distributed by torch itself."""
    whole = torch.arange(11 * 7, dtype=torch.float32).reshape(11, 7)
    module = torch.nn.Module()
    tensor = distribute_tensor(whole, init_device_mesh("cpu", mesh_shape), placements)
    module.register_parameter("w", torch.nn.Parameter(tensor))
    return module


PLACEMENTS = {
    "rows twice": ([Shard(0), Shard(0)], (2, 2)),
    "columns and rows": ([Shard(1), Shard(0)], (2, 2)),
    "rows, replicated": ([Shard(0), Replicate()], (2, 2)),
    "more ranks than fit evenly": ([Shard(0)], (4,)),
}
KINDS = ("ddp", "fsdp", "hsdp", "fsdp_tp")
WORLD = 4


def _read(held: Held) -> torch.Tensor:
    """A shard's bytes, straight from the address and strides that were reported."""
    buffer = (ctypes.c_uint8 * held.span_bytes).from_address(held.address)
    return torch.as_strided(torch.frombuffer(buffer, dtype=torch.float32), held.extent, held.strides).clone()


def _report(module: torch.nn.Module) -> list[tuple[Any, ...]]:
    return [
        (held.tensor.name, held.aliases, held.tensor.shape, held.lo, held.extent, _read(held).numpy())
        for held in weights_of(module).held
    ]


def _rank(rank: int, port: int, queue: Any) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    reports = {kind: _report(_wrap(kind, full_model(), WORLD)) for kind in KINDS}
    reports |= {case: _report(_placed(*placed)) for case, placed in PLACEMENTS.items()}
    queue.put((rank, reports))
    dist.barrier()
    dist.destroy_process_group()


def all_reports() -> dict[int, dict[str, list[tuple[Any, ...]]]]:
    """What every rank says about every case."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    queue = context.Queue()
    ranks = [context.Process(target=_rank, args=(rank, port, queue), daemon=True) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    reports = dict(queue.get(timeout=120) for _ in ranks)
    for process in ranks:
        process.join(60)
    return reports
