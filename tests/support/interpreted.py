"""A GPU's work on a machine without one: Triton's interpreter runs the kernels on CPU memory."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from weft.gpu import GpuWork


class InterpretedWork(GpuWork):
    """Kernels on CPU tensors; needs TRITON_INTERPRET=1 (tests/conftest.py)."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._prepare()

    def beside(self) -> InterpretedWork:
        return InterpretedWork()

    @contextlib.contextmanager
    def queue(self) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        yield

    def synchronize(self) -> None:
        pass

    def queued(self) -> Callable[[], None]:
        return self.synchronize

    def marker(self) -> Any:
        """What was queued is done."""
        return SimpleNamespace(synchronize=lambda: None)

    def view(self, address: int, num_bytes: int) -> torch.Tensor:
        return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)
