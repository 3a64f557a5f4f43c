"""The few calls of the CUDA driver that PyTorch does not offer."""

from __future__ import annotations

import ctypes

from weft.errors import TransportError, TransportUnavailable

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_byte * HANDLE_BYTES),)


class CudaDriver:
    """CUDA driver calls; every call makes the device's context current."""

    def __init__(self, index: int) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise TransportUnavailable("this host has no CUDA driver", hint="use shm for CPU memory") from error
        self._context = ctypes.c_void_p()
        device = ctypes.c_int()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), index)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(text))
            raise TransportError(f"{name} failed: {(text.value or b'').decode() or code}")

    def export(self, address: int) -> tuple[bytes, int]:
        """The handle of the allocation that contains an address, and where the allocation begins."""
        self._call("cuCtxSetCurrent", self._context)
        base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _IpcHandle()
        pointer = ctypes.c_uint64(address)
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), pointer)
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        return bytes(handle), base.value

    def open(self, handle: bytes) -> int:
        """Map another process's allocation; returns where it begins here."""
        self._call("cuCtxSetCurrent", self._context)
        pointer = ctypes.c_uint64()
        self._call(
            "cuIpcOpenMemHandle_v2", ctypes.byref(pointer), _IpcHandle.from_buffer_copy(handle), _LAZY_PEER_ACCESS
        )
        return pointer.value

    def close(self, pointer: int) -> None:
        """Unmap it."""
        self._call("cuCtxSetCurrent", self._context)
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(pointer))

    def allocate(self, num_bytes: int) -> int:
        """Device memory, outside PyTorch's caching allocator."""
        self._call("cuCtxSetCurrent", self._context)
        pointer = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(num_bytes))
        return pointer.value

    def clear(self, pointer: int, num_bytes: int) -> None:
        """Fill it with zeros, and wait until it is."""
        self._call("cuCtxSetCurrent", self._context)
        self._call("cuMemsetD8_v2", ctypes.c_uint64(pointer), ctypes.c_ubyte(0), ctypes.c_size_t(num_bytes))
        self._call("cuCtxSynchronize")

    def free_bytes(self) -> int:
        """Memory of the device that nobody has."""
        self._call("cuCtxSetCurrent", self._context)
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def free(self, pointer: int) -> None:
        """Free it."""
        self._call("cuCtxSetCurrent", self._context)
        self._call("cuMemFree_v2", ctypes.c_uint64(pointer))
