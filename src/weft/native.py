"""Memory work in bulk: copies, the digest, writes into another process, arrival counters.

A small C module does it at memory speed without a Python loop per piece. It is built at install; if that failed, the
same functions run on ctypes and NumPy, more slowly, and warn once.

All columns are `uint64` NumPy arrays of addresses, byte positions and byte lengths.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.core.geometry.planes import Column, Planes


def compiled(module: str) -> Any:
    """A module written in C; None where there was no compiler at install."""
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


_native = compiled("weft._native")
is_native: bool = _native is not None
_MASK = (1 << 64) - 1
_said = False


def mix(x: Column) -> Column:
    """SplitMix64."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


_COLUMNS, _ROWS, _ONE = np.uint64(8), np.uint64(256), np.uint64(1)
_KEYS = mix(~np.arange(3 * 8, dtype=np.uint64)).reshape(8, 3)
ALPHA, BETA, GAMMA = _KEYS[:, 0] | _ONE, _KEYS[:, 1] & ~_ONE, _KEYS[:, 2] | _ONE
"""Weights of the digest's eight columns."""


def synchronize() -> None:
    """Nothing is queued for CPU memory."""


def queued() -> Callable[[], None]:
    """The same."""
    return synchronize


def copy(dst: Column, src: Column, length: Column, *, num_threads: int = 1) -> int:
    """Copy `length[i]` bytes from `src[i]` to `dst[i]`, for all i; returns the bytes copied."""
    if _native is not None:
        return int(_native.copy(dst, src, length, num_threads))
    _say_slower()
    for to, start, size in zip(dst.tolist(), src.tolist(), length.tolist(), strict=True):
        ctypes.memmove(to, start, size)
    return int(length.sum())


def digest(address: Column, position: Column, length: Column, *, num_threads: int = 1) -> int:
    """Digest of bytes in memory; `position[i]` is the position of run i in the digest's space.

    The digest is a weighted sum modulo 2^64, so the digests of the parts add up to the digest of the whole, however it
    was cut.
    """
    if _native is not None:
        return int(_native.digest(address, position, length, num_threads))
    _say_slower()
    total = 0
    for start, where, size in zip(address.tolist(), position.tolist(), length.tolist(), strict=True):
        total += digest_bytes(np.frombuffer(ctypes.string_at(start, size), dtype=np.uint8), where)
    return total & _MASK


def copy_digest(dst: Column, src: Column, position: Column, length: Column, *, num_threads: int = 1) -> int:
    """Copy and digest in one pass, as fast as copying alone; returns the digest of what was copied."""
    group = np.zeros_like(length)
    return copy_digests(dst, src, position, group, length, num_groups=1, num_threads=num_threads)[0]


def copy_digests(
    dst: Column,
    src: Column,
    position: Column,
    group: Column,
    length: Column,
    *,
    num_groups: int,
    num_threads: int = 1,
) -> list[int]:
    """Copy and digest rows of several groups in the order given; returns the digest of each group.

    Rows whose group is `num_groups` or more are copied without being digested.
    """
    sums = np.zeros(num_groups, dtype=np.uint64)
    if _native is not None:
        _native.copy_digest(dst, src, position, group, length, sums, num_threads)
        return [int(total) for total in sums]
    copy(dst, src, length)
    return [digest(src[group == g], position[group == g], length[group == g]) for g in range(num_groups)]


def copy_planes(planes: Planes, *, num_threads: int = 1) -> int:
    """Copy planes; returns the bytes copied."""
    if _native is not None:
        return int(_native.walk_planes(_table(planes), np.zeros(0, dtype=np.uint64), True, num_threads))
    dst, src, length, _ = planes.runs
    return copy(dst, src, length)


def digest_planes(planes: Planes, *, num_threads: int = 1) -> int:
    """Digest of what planes read."""
    if _native is not None:
        sums = np.zeros(1, dtype=np.uint64)
        _native.walk_planes((*_table(planes), *_positions(planes)), sums, False, num_threads)
        return int(sums[0])
    _, src, length, position = planes.runs
    assert position is not None
    return digest(src, position, length)


def digest_each(tables: Sequence[Planes]) -> list[int]:
    """Digests of what several tables of planes read."""
    return [digest_planes(planes) for planes in tables]


def copy_digest_planes(planes: Planes, *, num_groups: int = 1, num_threads: int = 1) -> list[int]:
    """Copy and digest in one pass; returns the digest of each group. Planes of later groups are only copied."""
    sums = np.zeros(num_groups, dtype=np.uint64)
    if _native is not None:
        _native.walk_planes((*_table(planes), *_positions(planes)), sums, True, num_threads)
        return [int(total) for total in sums]
    dst, src, length, position = planes.runs
    assert position is not None
    group = np.repeat(_positions(planes)[2], planes.rows.astype(np.int64))
    return copy_digests(dst, src, position, group, length, num_groups=num_groups)


def _table(planes: Planes) -> tuple[Column, ...]:
    """Planes as the C module takes them."""
    bundle = np.arange(len(planes), dtype=np.uint64) if planes.bundle is None else planes.bundle
    return planes.dst, planes.src, planes.rows, planes.length, planes.dst_stride, planes.src_stride, bundle


def _positions(planes: Planes) -> tuple[Column, Column, Column]:
    """Their positions in the digest's space, and the digest each belongs to."""
    assert planes.position is not None
    assert planes.position_stride is not None
    group = np.zeros(len(planes), dtype=np.uint64) if planes.group is None else planes.group
    return planes.position, planes.position_stride, group


def digest_bytes(data: NDArray[np.uint8], position: int) -> int:
    """The digest in NumPy: the reference for the C and GPU code, where its formula is documented."""
    head = position % 8
    padded = np.zeros(-(-(head + len(data)) // 8) * 8, dtype=np.uint8)
    padded[head : head + len(data)] = data
    words = padded.view("<u8")
    number = np.uint64(position // 8) + np.arange(len(words), dtype=np.uint64)
    column, row, block = number % _COLUMNS, number // _COLUMNS % _ROWS, number // (_COLUMNS * _ROWS)
    within = (ALPHA[column] + BETA[column] * (_ROWS - row)) * words + GAMMA[column] * (words >> np.uint64(32))
    return int((within * (mix(block) | np.uint64(1))).sum(dtype=np.uint64))


def write_process(pid: int, dst: Column, src: Column, length: Column) -> int:
    """Write into ordinary memory of another process of this host; raises OSError, never a silent short write."""
    if _native is not None:
        return int(_native.write_process(pid, dst, src, length))
    _say_slower()
    libc = ctypes.CDLL(None, use_errno=True)
    for to, start, size in zip(dst.tolist(), src.tolist(), length.tolist(), strict=True):
        done = 0
        while done < size:
            local, remote = _iovec(start + done, size - done), _iovec(to + done, size - done)
            written = libc.process_vm_writev(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
            if written <= 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            done += written
    return int(length.sum())


def write_process_digest(pid: int, dst: Column, src: Column, position: Column, length: Column) -> int:
    """Write into another process, and digest what was written while it is in the cache; returns the digest."""
    if _native is not None:
        return int(_native.write_process(pid, dst, src, length, position))
    write_process(pid, dst, src, length)
    return digest(src, position, length)


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


def _iovec(address: int, size: int) -> _IoVec:
    return _IoVec(address, min(size, 1 << 30))


def read_process(pid: int, address: int, size: int) -> bytes:
    """Read memory of another process of this host (used to recognise it, not to move weights)."""
    libc = ctypes.CDLL(None, use_errno=True)
    into = ctypes.create_string_buffer(size)
    local, remote = _iovec(ctypes.addressof(into), size), _iovec(address, size)
    got = libc.process_vm_readv(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
    if got != size:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return into.raw


def publish(cell: int, tag: int, num_bytes: int) -> None:
    """Count bytes as arrived in a shared arrival cell, after they were copied."""
    if _native is not None:
        _native.publish(cell, tag, num_bytes)
        return
    view = _cells(cell, 1)
    if int(view[0, 0]) != tag:
        view[0, 1] = 0
        view[0, 0] = tag
    view[0, 1] += np.uint64(num_bytes)


def arrived(cells: int, num_cells: int, tag: int) -> int:
    """Bytes counted under a tag, over all cells."""
    if _native is not None:
        return int(_native.arrived(cells, num_cells, tag))
    view = _cells(cells, num_cells)
    return int(view[view[:, 0] == np.uint64(tag), 1].sum())


def _cells(address: int, count: int) -> NDArray[Any]:
    buffer = (ctypes.c_uint64 * (2 * count)).from_address(address)
    return np.ctypeslib.as_array(buffer).reshape(count, 2)


def _say_slower() -> None:
    global _said  # noqa: PLW0603 - said once per process
    if not _said:
        _said = True
        logging.getLogger(__name__).warning(
            "weft's C module was not built at install: copies and digests are several times slower; "
            "install a C compiler and reinstall weft"
        )
