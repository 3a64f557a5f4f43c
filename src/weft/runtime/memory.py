"""A member's own memory: on its device, or on the host where its device can reach it."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from weft.core.geometry.planes import rows_as_planes
from weft.devices import CPU
from weft.transport.base import Memory, ordinary_memory
from weft.transport.cuda_driver import CudaDriver
from weft.transport.device_memory import device_memory
from weft.transport.pages import Pages

if TYPE_CHECKING:
    from weft.gpu import GpuWork


def trim_heap() -> None:
    """Give freed memory back to the system: glibc keeps gigabytes of small arrays for later."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def own_memory(device: str, num_bytes: int, *, on_host: bool = False) -> Memory:
    """Zeroed memory. `on_host`: pinned host memory, where the device is a GPU."""
    if device == CPU:
        return ordinary_memory(num_bytes)
    if not on_host:
        return device_memory(int(device.partition(":")[2]), num_bytes)
    from weft.gpu import pinned_memory  # noqa: PLC0415 - torch only where there is a GPU

    made = pinned_memory(num_bytes)
    return Memory(address=made.data_ptr(), num_bytes=num_bytes, keep=made)


def pinned(memory: Memory) -> Memory:
    """Host memory that GPUs read and write directly, too, until it is freed or given up."""
    from weft.gpu import Pin  # noqa: PLC0415 - torch only where there is a GPU

    pin = Pin(memory.address, memory.num_bytes, keep=memory)

    def give_up() -> bool:
        pin.end()
        is_freed = memory.give_up()
        if not is_freed:
            pin.begin()
        return is_freed

    return replace(memory, keep=pin, give_up=give_up)


def brought(device: str, address: int, num_bytes: int) -> Memory:
    """A copy on a GPU of bytes in host memory."""
    work = _bringing(device)
    made = work.allocate(num_bytes)
    dst, src, length = (np.array([value], dtype=np.uint64) for value in (made.data_ptr(), address, num_bytes))
    work.copy_from_host(rows_as_planes(dst=dst, src=src, length=length))
    return Memory(address=made.data_ptr(), num_bytes=num_bytes, keep=made)


@cache
def _bringing(device: str) -> GpuWork:
    """One stream for all copies: memory that was used on one is not used on another."""
    from weft.gpu import GpuWork  # noqa: PLC0415 - torch and Triton only where there is a GPU

    return GpuWork(int(device.partition(":")[2]))


class Placeholder:
    """Memory held for later. `num_bytes` as requested."""

    def __init__(self, num_bytes: int, free: Callable[[], None]) -> None:
        self.num_bytes = num_bytes
        self._free = weakref.finalize(self, free)
        self._free.atexit = False  # at exit the device reclaims everything anyway

    def free(self) -> None:
        """Return it to the device."""
        self._free()


def placeholder(device: str, num_bytes: int) -> Placeholder:
    """Hold memory of a device, pages included; on GPUs outside PyTorch's caching allocator."""
    if device == CPU:
        pages = Pages(num_bytes)
        pages.populate()
        return Placeholder(num_bytes, pages.close)
    driver = CudaDriver(int(device.partition(":")[2]))
    address = driver.allocate(num_bytes)
    return Placeholder(num_bytes, lambda: driver.free(address))
