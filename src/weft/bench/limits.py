"""The machine's limits, measured in the same run: plain copies, kernel writes into another process, bare NIXL."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from weft import native
from weft.runtime.send.sender import Sender
from weft.transport.base import Batch
from weft.transport.nixl import NixlTransport

Span = tuple[float, float]


def copy(num_bytes: int, wait: Callable[[], None]) -> Span:
    """One large copy inside this process, between pages that are already mapped."""
    src, dst = _buffers(num_bytes)
    wait()
    began = time.monotonic()
    np.copyto(dst, src)
    return began, time.monotonic()


def copy_and_digest(num_bytes: int, wait: Callable[[], None]) -> Span:
    """The same copy, then one digest of what it wrote: the least that moving and checking bytes takes."""
    src, dst = _buffers(num_bytes)
    columns = [np.array([n], dtype=np.uint64) for n in (dst.ctypes.data, 0, num_bytes)]
    wait()
    began = time.monotonic()
    np.copyto(dst, src)
    native.digest(*columns)
    return began, time.monotonic()


_kept: dict[int, tuple[np.ndarray, np.ndarray]] = {}


def _buffers(num_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    if num_bytes not in _kept:
        _kept.clear()
        _kept[num_bytes] = np.ones(num_bytes, dtype=np.uint8), np.ones(num_bytes, dtype=np.uint8)
    return _kept[num_bytes]


def digest_rate(num_bytes: int) -> float:
    """Bytes per second one process digests from memory."""
    src, _ = _buffers(num_bytes)
    columns = [np.array([n], dtype=np.uint64) for n in (src.ctypes.data, 0, num_bytes)]
    began = time.monotonic()
    native.digest(*columns)
    return num_bytes / (time.monotonic() - began)


def kernel_write(num_bytes: int, pid: int, address: int, wait: Callable[[], None]) -> Span:
    """process_vm_writev of one large piece."""
    src, _ = _buffers(num_bytes)
    columns = [np.array([n], dtype=np.uint64) for n in (address, src.ctypes.data, num_bytes)]
    wait()
    began = time.monotonic()
    native.write_process(pid, *columns)
    return began, time.monotonic()


def bare_nixl(sender: Sender, wait: Callable[[], None]) -> Span:
    """Post what the sender would write with bare NIXL calls, without weft around them."""
    batches = sender._batches()
    transport = batches[0][0]
    assert isinstance(transport, NixlTransport)
    wait()
    began = time.monotonic()
    transport.write_bare([batch for _, batch in batches if isinstance(batch, Batch)])
    return began, time.monotonic()
