"""Memory at an address: device memory, and pinned host memory that GPUs read and write directly."""

from __future__ import annotations

import ctypes
import weakref

import torch

_pinned: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
"""Pinned host memory, by its address."""
_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for all of the process's GPUs."""


class Pin:
    """Host memory of another allocator, which GPUs read and write directly until `end`."""

    def __init__(self, address: int, num_bytes: int, *, keep: object = None) -> None:
        """`keep`: what must outlive this object. Raises MemoryError where the driver cannot pin it."""
        self._address, self._num_bytes, self._keep = address, num_bytes, keep
        self.begin()

    def begin(self) -> None:
        """Pin it."""
        torch.cuda.init()
        code = torch.cuda.cudart().cudaHostRegister(self._address, self._num_bytes, _PORTABLE)
        if int(code):
            raise MemoryError(f"CUDA cannot pin {self._num_bytes / 1e9:.3f} GB of host memory: {code}")
        self._memory: torch.Tensor | None = host_view(self._address, self._num_bytes)
        _pinned[self._address] = self._memory
        self._end = weakref.finalize(self, _unpin, self._address)
        self._end.atexit = False  # at exit the driver reclaims everything anyway

    def end(self) -> None:
        """GPUs must not use it any more."""
        self._memory = None
        self._end()


def _unpin(address: int) -> None:
    _pinned.pop(address, None)
    torch.cuda.cudart().cudaHostUnregister(address)


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


def host_view(address: int, num_bytes: int) -> torch.Tensor:
    """Host memory as bytes."""
    return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)


def is_pinned(address: int, num_bytes: int) -> bool:
    """Whether GPUs can read host memory directly, no matter which library pinned it."""
    return bool(host_view(address, num_bytes).is_pinned())


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
