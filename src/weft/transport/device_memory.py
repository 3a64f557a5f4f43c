"""Memory of a GPU that versions land in, outside PyTorch's caching allocator.

So it is of no consequence to it what a framework does with PyTorch's memory: an engine that sleeps discards it, and
another process that has opened it for writing would keep whatever else lies in the same segment.
"""

from __future__ import annotations

import weakref

from weft.errors import TransportError
from weft.transport.base import Memory
from weft.transport.cuda_driver import CudaDriver


class _Allocation:
    """Freed with this object."""

    def __init__(self, driver: CudaDriver, num_bytes: int) -> None:
        self.address = driver.allocate(num_bytes)
        self._free = weakref.finalize(self, driver.free, self.address)
        self._free.atexit = False  # at exit the device reclaims everything anyway


def device_memory(index: int, num_bytes: int) -> Memory:
    """Zeroed memory of a GPU. Raises MemoryError."""
    driver = CudaDriver(index)
    try:
        made = _Allocation(driver, num_bytes)
    except TransportError:
        made = _second_try(driver, index, num_bytes)
    driver.clear(made.address, num_bytes)
    return Memory(address=made.address, num_bytes=num_bytes, keep=made)


def _second_try(driver: CudaDriver, index: int, num_bytes: int) -> _Allocation:
    """Without the memory that PyTorch has, but does not use."""
    import torch  # noqa: PLC0415 - only where there is a GPU

    torch.cuda.empty_cache()
    try:
        return _Allocation(driver, num_bytes)
    except TransportError as error:
        needed = f"{num_bytes / 1e9:.3f} GB of memory are needed on cuda:{index}"
        raise MemoryError(f"{needed}, {driver.free_bytes() / 1e9:.3f} GB are free") from error
