"""AdamW with FP32 masters behind BF16 weights: steps too small for BF16 add up instead of being lost.

Works on each rank's own memory, so shards of FSDP2 (DTensors) need nothing special. FP32 weights are their own masters.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

BETAS = (0.9, 0.95)
EPS = 1e-8


class MasterAdamW:
    """Holds masters and moments; `step` updates masters and rounds them into the weights."""

    def __init__(self, parameters: Iterable[Tensor], *, lr: float, weight_decay: float) -> None:
        self.parameters = list(parameters)
        self.lr, self._weight_decay, self._steps = lr, weight_decay, 0
        self._local = [_local(parameter.detach()) for parameter in self.parameters]
        self._masters = [p if p.dtype == torch.float32 else p.float() for p in self._local]
        self._first = [torch.zeros_like(master) for master in self._masters]
        self._second = [torch.zeros_like(master) for master in self._masters]

    @torch.no_grad()
    def step(self) -> None:
        """One step along the gradients, which are dropped."""
        self._steps += 1
        grads = [_grad(parameter, master) for parameter, master in zip(self.parameters, self._masters, strict=True)]
        torch._foreach_lerp_(self._first, grads, 1 - BETAS[0])
        torch._foreach_mul_(self._second, BETAS[1])
        torch._foreach_addcmul_(self._second, grads, grads, 1 - BETAS[1])
        torch._foreach_mul_(self._masters, 1 - self.lr * self._weight_decay)
        scale = torch._foreach_div(self._second, 1 - BETAS[1] ** self._steps)
        torch._foreach_sqrt_(scale)
        torch._foreach_add_(scale, EPS)
        torch._foreach_addcdiv_(self._masters, self._first, scale, -self.lr / (1 - BETAS[0] ** self._steps))
        for local, master in zip(self._local, self._masters, strict=True):
            if local is not master:
                local.copy_(master)
        for parameter in self.parameters:
            parameter.grad = None

    def state(self) -> dict[str, Any]:
        """Everything a resumed run needs, of this rank."""
        return {"steps": self._steps, "masters": self._masters, "first": self._first, "second": self._second}

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """Continue from a saved state; weights follow their masters."""
        self._steps = int(state["steps"])
        for mine, saved in (
            (self._masters, state["masters"]),
            (self._first, state["first"]),
            (self._second, state["second"]),
        ):
            for tensor, value in zip(mine, saved, strict=True):
                tensor.copy_(value)
        for local, master in zip(self._local, self._masters, strict=True):
            local.copy_(master)


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _grad(parameter: Tensor, master: Tensor) -> Tensor:
    return torch.zeros_like(master) if parameter.grad is None else _local(parameter.grad).to(master.dtype)
