"""Patches of images in GPU memory: the same bytes as weft.codec.image makes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

import torch

from weft.codec import delta, patch_kernels
from weft.codec.delta import DENSE, HEADER_BYTES, NO_BASE, ImageRows, PatchHeader
from weft.codec.image import ImageLayout, Section, padded
from weft.codec.patch_kernels import DeviceRows
from weft.errors import CodecError
from weft.gpu import GpuWork


class GpuPatcher:
    """Patches on one GPU, on a stream of their own."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._work = GpuWork(self._device.index or 0)
        self._rows: dict[int, DeviceRows] = {}

    def encode(
        self, layout: ImageLayout, now: int, old: int | None, out: int, capacity: int, *, base: int, version: int
    ) -> int:
        """Patches of all sections, one after the other."""
        done = 0
        with self._work.stream():
            for part in layout.sections:
                room = self._work.view(out + done, capacity - done)
                new = self._work.view(now + part.begin, part.num_bytes)
                if old is None:
                    size = self._anchor(part, new, room, version)
                else:
                    before = self._work.view(old + part.begin, part.num_bytes)
                    size = patch_kernels.encode(new, before, width=part.width, base=base, version=version, out=room)
                done += padded(size)
        return done

    def _anchor(self, part: Section, now: torch.Tensor, out: torch.Tensor, version: int) -> int:
        """All blocks whole: a table, and the bytes as they are."""
        begin = delta.first_record(part.num_elements)
        size = begin + -(-part.num_bytes // 4) * 4
        if size > len(out):
            raise CodecError(f"an anchor of {size} bytes does not fit into {len(out)}")
        table = delta.dense_table(part.num_elements, part.width)
        header = delta.header_bytes(part.width, part.num_elements, size, NO_BASE, version)
        out[:HEADER_BYTES] = torch.from_numpy(header).to(self._device)
        out[HEADER_BYTES:begin] = torch.from_numpy(table).to(self._device)
        out[begin : begin + part.num_bytes] = now
        out[begin + part.num_bytes : size] = 0
        return size

    def _patches(self, layout: ImageLayout, patches: int, num_bytes: int) -> Iterator[tuple[Section, torch.Tensor]]:
        """The patch of each section."""
        done = 0
        for part in layout.sections:
            if num_bytes - done < HEADER_BYTES:
                raise CodecError(f"{num_bytes} bytes of patches end before the last one")
            size = _header(self._work.view(patches + done, HEADER_BYTES)).num_bytes
            if not HEADER_BYTES <= size <= num_bytes - done:
                raise CodecError(f"a patch of {size} bytes, of which {num_bytes - done} are here")
            yield part, self._work.view(patches + done, size)
            done += padded(size)
        if done != num_bytes:
            raise CodecError(f"{num_bytes} bytes of patches, of which {done} are used")

    def check(self, layout: ImageLayout, patches: int, num_bytes: int, *, base: int | None, version: int) -> None:
        """Raise CodecError unless these are sound patches of all sections."""
        with self._work.stream():
            for part, patch in self._patches(layout, patches, num_bytes):
                header = _header(patch)
                header.check_versions(base=base, version=version)
                patch_kernels.check(patch, width=part.width, num_elements=part.num_elements)
                if header.base == NO_BASE and not _is_dense(patch, part.num_elements):
                    raise CodecError("a damaged patch: it needs a base and names none")

    def apply(self, layout: ImageLayout, patches: int, num_bytes: int, rows: Sequence[ImageRows]) -> None:
        """Apply checked patches to rows of device memory."""
        with self._work.stream():
            for (part, patch), where in zip(self._patches(layout, patches, num_bytes), rows, strict=True):
                tables = self._device_rows(part, where)
                patch_kernels.apply(patch, width=part.width, num_elements=part.num_elements, rows=tables)

    def _device_rows(self, part: Section, rows: ImageRows) -> DeviceRows:
        """Tables of a section, kept as long as its rows are."""
        key = id(rows.address)
        if key not in self._rows:
            self._rows[key] = DeviceRows.of(rows, part.width, part.num_elements, self._device)
            weakref.finalize(rows.address, self._rows.pop, key, None)
        return self._rows[key]


def _header(patch: torch.Tensor) -> PatchHeader:
    data = patch[:HEADER_BYTES].cpu().numpy()
    return delta.read_header(int(data.ctypes.data), HEADER_BYTES)


def _is_dense(patch: torch.Tensor, num_elements: int) -> bool:
    """Whether every block is whole."""
    table = patch[HEADER_BYTES : delta.first_record(num_elements)].view(torch.int64)
    return bool((((table >> 32) & 0xFFFF) == DENSE).all())
