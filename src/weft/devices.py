"""Where memory lies, and what does bulk work on it: the C module for `cpu`, Triton kernels for `cuda:N`.

work = device_work("cuda:0")
work.copy(dst, src, length)             # the same calls as weft.native, on columns of device addresses
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Protocol

from weft import native
from weft.core.geometry.planes import Column, Planes
from weft.errors import ConfigError

CPU = "cpu"
_DEVICE = re.compile(r"cpu|cuda:\d+")


class DeviceWork(Protocol):
    """Bulk work on one device's memory. Calls return when the work is done."""

    def synchronize(self) -> None:
        """Wait until all work queued on the device is done."""

    def queued(self) -> Callable[[], None]:
        """What waits for the work that the calling thread has queued on the device so far."""

    def copy(self, dst: Column, src: Column, length: Column, *, num_threads: int = 1) -> int:
        """Copy rows; returns the bytes copied."""

    def digest(self, address: Column, position: Column, length: Column, *, num_threads: int = 1) -> int:
        """Digest of rows; see weft.native."""

    def copy_digest(self, dst: Column, src: Column, position: Column, length: Column, *, num_threads: int = 1) -> int:
        """Copy and digest."""

    def copy_planes(self, planes: Planes, *, num_threads: int = 1) -> int:
        """Copy planes; returns the bytes copied."""

    def digest_planes(self, planes: Planes, *, num_threads: int = 1) -> int:
        """Digest of what planes read."""

    def digest_each(self, tables: Sequence[Planes]) -> list[int]:
        """Digests of what several tables of planes read."""

    def copy_digest_planes(self, planes: Planes, *, num_groups: int = 1, num_threads: int = 1) -> list[int]:
        """Copy and digest planes of several groups."""


def is_device(device: str) -> bool:
    """Whether this names a device that weights may lie on."""
    return _DEVICE.fullmatch(device) is not None


def memory_kind(device: str) -> str:
    """`cpu` or `cuda`."""
    if not is_device(device):
        raise ConfigError(f"unknown device `{device}`", hint="cpu, or cuda:0, cuda:1, …")
    return device.partition(":")[0]


def device_number(device: str, visible: str | None) -> int | None:
    """Which of the host's GPUs a device is; None: none, or unknown.

    `visible` is `CUDA_VISIBLE_DEVICES`: a process that sees only GPUs 2 and 3 calls them `cuda:0` and `cuda:1`.
    """
    if memory_kind(device) == CPU:
        return None
    number = int(device.partition(":")[2])
    if visible is None:
        return number
    names = [name.strip() for name in visible.split(",")]
    return int(names[number]) if number < len(names) and names[number].isdecimal() else None


def device_work(device: str) -> DeviceWork:
    """The implementation for a device's memory."""
    if memory_kind(device) == CPU:
        return native
    from weft.gpu import GpuWork  # noqa: PLC0415 - torch and Triton only where there is a GPU

    return GpuWork(int(device.partition(":")[2]))
