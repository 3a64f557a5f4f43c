"""Memory of a member's own: on its device, or on the host where its device reaches it."""

from __future__ import annotations

from weft.devices import CPU
from weft.transport.base import Memory, ordinary_memory


def own_memory(device: str, num_bytes: int, *, on_host: bool = False) -> Memory:
    """Zeroed memory. `on_host`: pinned host memory, where the device is a GPU."""
    if device == CPU:
        return ordinary_memory(num_bytes)
    from weft.gpu import GpuWork, pinned_memory  # noqa: PLC0415 - torch and Triton only where there is a GPU

    made = pinned_memory(num_bytes) if on_host else GpuWork(int(device.partition(":")[2])).allocate(num_bytes)
    return Memory(address=made.data_ptr(), num_bytes=num_bytes, keep=made)
