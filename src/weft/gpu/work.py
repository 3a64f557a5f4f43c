"""Bulk work on one GPU's memory: copies and the digest of planes, on a stream of its own.

Tables are built once for each Planes object and stay on the device as long as it lives: running a version builds and
uploads nothing.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from weft import native
from weft.core.geometry.planes import Column, Planes, rows_as_planes
from weft.gpu.memory import device_view, host_view, is_pinned, pinned_view
from weft.gpu.tiles import walk_table
from weft.gpu.walking import copy_with_few, walk

LARGE_BYTES = 256 << 20
"""Single rows from this size on are left to the driver's own copy, which is as fast as the memory; with smaller ones
the pauses between its calls outweigh that."""
LARGE_BUS_BYTES, MAX_BUS_ROWS = 1 << 20, 32
"""The same for rows from or to host memory, if there are not too many: calls take longer than short copies."""
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class _Walk:
    """One launch over planes, and the copies left to the driver."""

    planes: torch.Tensor
    tiles: torch.Tensor
    large: tuple[tuple[int, int, int], ...]
    """Destination, source, bytes."""
    crosses_bus: bool
    """Whether one side is host memory: the bus is slow, and must not hold up everything else on the device."""


class GpuWork:
    """Work on one GPU's memory. Calls return when the work is done."""

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self.device)
        self._prepare()

    def _prepare(self) -> None:
        keys = np.concatenate([native.ALPHA, native.BETA, native.GAMMA]).view(np.int64)
        self._keys = self.upload(keys)
        self._walks: weakref.WeakKeyDictionary[Planes, dict[tuple[bool, bool], _Walk]] = weakref.WeakKeyDictionary()
        self._rows: dict[tuple[int, ...], Planes] = {}
        """Planes made of columns, for as long as the columns live."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Zeroed device memory, as bytes, for work on this object's stream. Raises MemoryError."""
        try:
            with self.stream():  # zeros on another stream might come after what is written there
                return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError as error:
            free = torch.cuda.mem_get_info(self.device)[0]
            needed = f"{num_bytes / 1e9:.3f} GB of memory are needed on {self.device}"
            raise MemoryError(f"{needed}, {free / 1e9:.3f} GB are free") from error

    def upload(self, table: NDArray[np.generic]) -> torch.Tensor:
        """A table in device memory."""
        return torch.from_numpy(np.ascontiguousarray(table).copy()).to(self.device)

    @contextlib.contextmanager
    def queue(self) -> Iterator[None]:
        """Work inside goes to this object's stream."""
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """Work inside goes to this object's stream, and is done at the end."""
        with self.queue():
            yield
            self._stream.synchronize()

    def beside(self) -> Self:
        """The same device, with a stream of its own."""
        return type(self)(self.device.index or 0)

    def host_copy(self, values: torch.Tensor) -> torch.Tensor:
        """Room for a copy in host memory."""
        return torch.empty(values.shape, dtype=values.dtype, pin_memory=self.device.type == "cuda")

    def between(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Planes:
        """Copies between the device and a `host_copy`, for `queue_copy`: destination and source of each.

        A kernel moves them, which reads and writes pinned memory itself: no call of the driver for each, and no wait
        for the device's copy engines.
        """
        used = [(dst, src) for dst, src in pairs if src.numel()]
        dst, src = (np.array([pair[end].data_ptr() for pair in used], dtype=np.uint64) for end in (0, 1))
        length = np.array([source.numel() * source.element_size() for _, source in used], dtype=np.uint64)
        return rows_as_planes(dst=dst, src=src, length=length)

    def fetch(self, values: torch.Tensor) -> torch.Tensor:
        """A copy in host memory, queued on the current stream: complete when a later `marker` is reached."""
        return self.host_copy(values).copy_(values, non_blocking=True)

    def marker(self) -> torch.cuda.Event:
        """Reached when what was queued on this object's stream is done."""
        done = torch.cuda.Event()
        done.record(self._stream)
        return done

    def queued(self) -> Callable[[], None]:
        """What waits for the work that the calling thread has queued so far: on its current stream, and the default."""
        streams = {torch.cuda.current_stream(self.device), torch.cuda.default_stream(self.device)}
        events = [stream.record_event() for stream in streams]

        def wait() -> None:
            for event in events:
                event.synchronize()

        return wait

    def synchronize(self) -> None:
        """Wait for everything queued on the device, on any stream of this process."""
        torch.cuda.synchronize(self.device)

    def copy(self, dst: Column, src: Column, length: Column, *, num_threads: int = 1) -> int:
        """Copy rows between device addresses."""
        return self.copy_planes(self._planes(dst, src, length), num_threads=num_threads)

    def digest(self, address: Column, position: Column, length: Column, *, num_threads: int = 1) -> int:
        """Digest of rows in device memory."""
        return self.digest_planes(self._planes(address, address, length, position), num_threads=num_threads)

    def copy_digest(self, dst: Column, src: Column, position: Column, length: Column, *, num_threads: int = 1) -> int:
        """Copy and digest; the digest is of the source."""
        return self.copy_digest_planes(self._planes(dst, src, length, position), num_threads=num_threads)[0]

    def copy_planes(self, planes: Planes, *, num_threads: int = 1) -> int:
        """Copy planes between device addresses."""
        del num_threads
        with self.stream():
            self.queue_copy(planes)
        return planes.num_bytes

    def digest_planes(self, planes: Planes, *, num_threads: int = 1) -> int:
        """Digest of what planes read."""
        del num_threads
        return self._digested(planes, is_copied=False)

    def digest_each(self, tables: Sequence[Planes]) -> list[int]:
        """Digests of what several tables of planes read: a launch for each, and one wait for all."""
        walks = [self._walk(planes, is_copied=False, is_digested=True) for planes in tables]
        borders = np.cumsum([2, *(len(work.tiles) + len(work.tiles) % 2 for work in walks)])  # pointers stay aligned
        with self.stream():
            sums = torch.zeros(int(borders[-1]), dtype=torch.int64, device=self.device)
            for work, begin in zip(walks, borders.tolist(), strict=False):
                if len(work.tiles):
                    walk(work.planes, work.tiles, self._keys, sums[begin:], is_copied=False)
            found = self.fetch(sums.cumsum(0)[self.upload(borders - 1)])
        return [int(digest) & _MASK for digest in np.diff(found.numpy())]

    def copy_digest_planes(self, planes: Planes, *, num_groups: int = 1, num_threads: int = 1) -> list[int]:
        """Copy and digest planes of one group, in one pass."""
        del num_threads
        assert num_groups == 1
        return [self._digested(planes, is_copied=True)]

    def start_copy(self, planes: Planes, *, is_digested: bool) -> Callable[[], int]:
        """Start copying planes; the returned function waits for it and gives the digest, or 0 if not digested."""
        found = None
        with self.queue():
            if is_digested:
                found = self._queue_digest(planes, is_copied=True)
            else:
                self.queue_copy(planes)
            done = self.marker()

        def wait() -> int:
            done.synchronize()
            return 0 if found is None else int(found.item()) & _MASK

        return wait

    def queue_copy(self, planes: Planes) -> None:
        """Copy planes on the current stream, without waiting."""
        work = self._walk(planes, is_copied=True, is_digested=False)
        for dst, src, size in work.large:
            self.view(dst, size).copy_(self.view(src, size), non_blocking=True)
        if work.crosses_bus and len(work.tiles):
            copy_with_few(work.planes, work.tiles)
        elif len(work.tiles):
            walk(work.planes, work.tiles, self._keys, None, is_copied=True)

    def _digested(self, planes: Planes, *, is_copied: bool) -> int:
        with self.stream():
            found = self._queue_digest(planes, is_copied=is_copied)
        return int(found.item()) & _MASK

    def _queue_digest(self, planes: Planes, *, is_copied: bool) -> torch.Tensor:
        """Digest planes, and copy them, on the current stream; the sum is in host memory when that is done."""
        work = self._walk(planes, is_copied=is_copied, is_digested=True)
        if not len(work.tiles):
            return torch.zeros(1, dtype=torch.int64)
        sums = torch.empty(len(work.tiles), dtype=torch.int64, device=self.device)
        walk(work.planes, work.tiles, self._keys, sums, is_copied=is_copied)
        return self.fetch(sums.sum())

    def _walk(self, planes: Planes, *, is_copied: bool, is_digested: bool) -> _Walk:
        """The launch for planes, made at their first use."""
        walks = self._walks.setdefault(planes, {})
        if (is_copied, is_digested) not in walks:
            is_large = np.zeros(len(planes), dtype=bool) if is_digested else self._is_large(planes)
            table = walk_table(planes.take(~is_large), is_copied=is_copied, is_digested=is_digested)
            columns = (column[is_large].tolist() for column in (planes.dst, planes.src, planes.length))
            large = tuple(zip(*columns, strict=True))
            crosses_bus = any(len(column) and is_pinned(int(column[0]), 1) for column in (planes.src, planes.dst))
            tables = self.upload(table.planes), self.upload(table.tiles)
            walks[is_copied, is_digested] = _Walk(*tables, large, crosses_bus)
        return walks[is_copied, is_digested]

    def _is_large(self, planes: Planes) -> NDArray[np.bool_]:
        """Planes that are copied by driver calls of their own."""
        is_single = planes.rows == 1
        if not (_is_on_host(planes.src) or _is_on_host(planes.dst)):
            return is_single & (planes.length >= LARGE_BYTES)
        large = is_single & (planes.length >= LARGE_BUS_BYTES)
        return large & bool(large.sum() <= MAX_BUS_ROWS)

    def _planes(self, dst: Column, src: Column, length: Column, position: Column | None = None) -> Planes:
        """Rows as planes; the same columns give the same planes."""
        columns = [dst, src, length] if position is None else [dst, src, length, position]
        key = tuple(id(column) for column in columns)
        if key not in self._rows:
            self._rows[key] = rows_as_planes(dst=dst, src=src, length=length, position=position)
            for column in columns:  # the address of a column that is gone may be reused for another one
                weakref.finalize(column, self._rows.pop, key, None)
        return self._rows[key]

    def copy_from_host(self, rows: Planes) -> int:
        """Copy host memory, pinned or not, to the device; planes of one row each."""
        with self.stream():
            for dst, src, size in zip(rows.dst.tolist(), rows.src.tolist(), rows.length.tolist(), strict=True):
                self.view(dst, size).copy_(host_view(src, size), non_blocking=True)
        return rows.num_bytes

    def view(self, address: int, num_bytes: int) -> torch.Tensor:
        """Device memory, or pinned host memory, as bytes."""
        pinned = pinned_view(address, num_bytes)
        return pinned if pinned is not None else device_view(address, num_bytes, self.device)


def _is_on_host(addresses: Column) -> bool:
    """Whether memory is pinned host memory: all of one side is, or none."""
    return bool(len(addresses)) and pinned_view(int(addresses[0]), 1) is not None
