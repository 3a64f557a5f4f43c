"""Memory for frameworks that hand out new tensors one by one every time: refilled for each version.

staged = StagedTensors()
staged.fill(framework.named_tensors())       # the first time it is made, and `weights` is known
Sender(address, rank=0, weights=staged.weights())
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from weft.errors import LayoutError
from weft.integrations.torch import weights_of_tensors
from weft.runtime.weights import Weights


@dataclass(slots=True)
class StagedTensors:
    """Copies of named tensors in host memory, at the same addresses every time."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def fill(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy all tensors. Raises LayoutError if they are not those of the first time."""
        is_first = not self.tensors
        missing = set(self.tensors)
        for name, tensor in named:
            if is_first:
                self.tensors[name] = tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
                continue
            self._check(name, tensor)
            self.tensors[name].copy_(tensor)
            missing.discard(name)
        if missing:
            raise LayoutError("tensors of earlier versions are missing", problems=tuple(sorted(missing)))

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        known = self.tensors.get(name)
        if known is None:
            raise LayoutError(f"`{name}` is not a tensor of earlier versions", hint="pass the same tensors every time")
        if known.shape != tensor.shape or known.dtype != tensor.dtype:
            raise LayoutError(
                f"`{name}` is {tensor.dtype} {list(tensor.shape)}, expected {known.dtype} {list(known.shape)} as before"
            )

    def weights(self) -> Weights:
        """For a Sender or a Receiver."""
        return weights_of_tensors(self.tensors)
