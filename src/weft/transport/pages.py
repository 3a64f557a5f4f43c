"""Memory in whole pages, which can be given up while another process may still write to its addresses.

A process that was stopped inside a kernel copy (`process_vm_writev`) later resumes and writes to the address it was
given. Memory that was freed in the meantime may by then belong to something else. So memory that was offered to others
is given up in another way: its pages are freed at once, and its addresses stay reserved and inaccessible, which makes
the late write fail. The reservation costs no memory; it ends with the object.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Final

import numpy as np

_PROT_NONE: Final = 0
_MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x02, 0x10, 0x20, 0x4000
_FAILED: Final = ctypes.c_void_p(-1).value
_HUGE_BYTES = 4 << 20
"""From this size on, the kernel is asked for huge pages, as NumPy does."""
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


_kept: list[object] = []


def keep_reserved(memory: object) -> None:
    """Hold memory that was given up until this process ends: a writer that is still alive may write there."""
    _kept.append(memory)


class Pages:
    """Zeroed anonymous memory of this process."""

    def __init__(self, num_bytes: int) -> None:
        self._map = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if num_bytes >= _HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.num_bytes = num_bytes
        self.address = address_of(self._map)

    def populate(self) -> None:
        """Back every address with a page of memory."""
        view = np.frombuffer(self._map, dtype=np.uint8)
        view[:: mmap.PAGESIZE] = 0

    def close(self) -> None:
        """Free the pages and the addresses; no other process may know them."""
        self._map.close()

    def give_up(self) -> bool:
        """Free the pages; later writes to these addresses fail."""
        reserve(self.address, self.num_bytes)
        return True


class Reserved:
    """Addresses without memory behind them; touching them kills the process."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = max(num_bytes, 1)
        self.address = _map(None, self.num_bytes, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE)

    def __del__(self) -> None:
        _libc.munmap(self.address, self.num_bytes)


def address_of(mapped: mmap.mmap) -> int:
    """Where a mapping begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapped))


def reserve(address: int, num_bytes: int) -> None:
    """Replace a mapping with inaccessible addresses without memory behind them."""
    _map(address, num_bytes, _MAP_PRIVATE | _MAP_FIXED | _MAP_ANONYMOUS | _MAP_NORESERVE)


def _map(address: int | None, num_bytes: int, flags: int) -> int:
    """Map inaccessible addresses; returns where."""
    found = _libc.mmap(address, num_bytes, _PROT_NONE, flags, -1, 0)
    if found == _FAILED:
        code = ctypes.get_errno()
        where = "" if address is None else f" at {address:#x}"
        raise OSError(code, f"{num_bytes} bytes{where} cannot be reserved")
    return int(found)
