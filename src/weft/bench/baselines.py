"""The usual ways, in the same processes and over the same tensors: broadcast from rank 0, gather and broadcast, a file.

Rank 0 of the trainers has, or gathers, every full tensor; every engine rank receives all of it and keeps its part.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file as save_safetensors
from torch.distributed.tensor import DTensor

from weft.runtime.weights import Part


@dataclass(frozen=True)
class Groups:
    """Process groups of the baselines."""

    trainers: Any
    receivers: Any
    """Trainer 0 and all engine ranks."""
    num_trainers: int

    @classmethod
    def make(cls, num_trainers: int, num_engine_ranks: int) -> Groups:
        """Every process calls this at the same point."""
        trainers = dist.new_group(list(range(num_trainers)))
        receivers = dist.new_group([0, *range(num_trainers, num_trainers + num_engine_ranks)])
        return cls(trainers, receivers, num_trainers)


def _gathered(parameter: torch.Tensor, groups: Groups) -> torch.Tensor | None:
    """A full tensor on trainer 0 (None elsewhere), gathered from its row shards."""
    if not isinstance(parameter, DTensor):
        return parameter.data if dist.get_rank() == 0 else None
    shard = parameter.to_local()
    local = shard.reshape(shard.shape[0], -1).view(torch.uint8)
    rows = parameter.shape[0]
    per_rank = -(-rows // groups.num_trainers)
    padded = torch.zeros((per_rank, local.shape[1]), dtype=torch.uint8)
    padded[: local.shape[0]] = local
    if dist.get_rank() != 0:
        dist.gather(padded, dst=0, group=groups.trainers)
        return None
    parts = [torch.empty_like(padded) for _ in range(groups.num_trainers)]
    dist.gather(padded, parts, dst=0, group=groups.trainers)
    return torch.cat(parts)[:rows].view(parameter.dtype).reshape(parameter.shape)


def full_tensors(module: torch.nn.Module, groups: Groups) -> dict[str, torch.Tensor]:
    """All full tensors, on trainer 0."""
    gathered = {name: _gathered(parameter, groups) for name, parameter in module.named_parameters()}
    return {name: tensor for name, tensor in gathered.items() if tensor is not None}


def send_broadcast(module: torch.nn.Module, full: Mapping[str, torch.Tensor] | None, groups: Groups) -> None:
    """Broadcast every tensor from trainer 0, which has it or gathers it."""
    for name, parameter in module.named_parameters():
        tensor = _gathered(parameter, groups) if full is None else full.get(name)
        if tensor is not None:
            dist.broadcast(tensor.contiguous().view(torch.uint8), src=0, group=groups.receivers)


def receive_broadcast(
    module: torch.nn.Module, parts: Mapping[str, tuple[Part, tuple[int, ...]]], groups: Groups
) -> None:
    """Receive every full tensor and keep this rank's part."""
    _receive(module, parts, lambda full: dist.broadcast(full, src=0, group=groups.receivers))


def send_to_each(full: Mapping[str, torch.Tensor], groups: Groups) -> None:
    """Send every tensor from trainer 0, which has it, to one engine rank after the other."""
    for tensor in full.values():
        for receiver in range(groups.num_trainers, dist.get_world_size()):
            dist.send(tensor.contiguous().view(torch.uint8), dst=receiver)


def receive_whole(module: torch.nn.Module, parts: Mapping[str, tuple[Part, tuple[int, ...]]]) -> None:
    """Receive every full tensor from trainer 0 and keep this rank's part."""
    _receive(module, parts, lambda full: dist.recv(full, src=0))


def _receive(
    module: torch.nn.Module,
    parts: Mapping[str, tuple[Part, tuple[int, ...]]],
    take: Callable[[torch.Tensor], object],
) -> None:
    for name, parameter in module.named_parameters():
        part, extent = parts[name]
        full = torch.empty(part.shape, dtype=parameter.dtype)
        take(full.view(torch.uint8))
        parameter.copy_(full[_box(part, extent)])


def save_file(module: torch.nn.Module, path: str, groups: Groups) -> None:
    """Gather everything on trainer 0 and write it into one file."""
    gathered = {name: _gathered(parameter, groups) for name, parameter in module.named_parameters()}
    if dist.get_rank() == 0:
        save_safetensors({name: tensor for name, tensor in gathered.items() if tensor is not None}, path)


def load_file(module: torch.nn.Module, parts: Mapping[str, tuple[Part, tuple[int, ...]]], path: str) -> None:
    """Read this rank's part of every tensor."""
    with safe_open(path, framework="pt") as file:
        for name, parameter in module.named_parameters():
            part, extent = parts[name]
            parameter.copy_(file.get_slice(name)[_box(part, extent)])


def remove_file(path: str) -> None:
    """Leave no file in shared memory."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _box(part: Part, extent: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(lo, lo + n) for lo, n in zip(part.lo, extent, strict=True))
