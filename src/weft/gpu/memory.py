"""Memory at an address: device memory, and pinned host memory that GPUs read and write directly."""

from __future__ import annotations

import weakref

import torch

_pinned: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
"""Pinned host memory, by its address."""


class _DeviceBytes:
    """Device memory in a form other libraries accept."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def device_view(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Device memory as bytes."""
    return torch.as_tensor(_DeviceBytes(address, num_bytes), device=device)


def pinned_memory(num_bytes: int) -> torch.Tensor:
    """Host memory that GPUs read and write directly."""
    made = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
    _pinned[made.data_ptr()] = made
    return made


def pinned_view(address: int, num_bytes: int) -> torch.Tensor | None:
    """A part of pinned memory; None for other memory."""
    for start, memory in list(_pinned.items()):
        if start <= address and address + num_bytes <= start + len(memory):
            return memory[address - start : address - start + num_bytes]
    return None
