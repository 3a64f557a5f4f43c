"""Patches of images in GPU memory: the same bytes as weft.codec.image produces.

A chunk's image has a section for each size of elements, at most three. Every call queues a launch for each of them and
waits for the device once, at its end.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import torch

from weft.codec import delta, patch_kernels
from weft.codec.delta import HEADER_BYTES, NO_BASE, ImageRows
from weft.codec.image import ImageLayout, Section, padded
from weft.codec.patch_kernels import DeviceRows
from weft.errors import CodecError
from weft.gpu import GpuWork


class GpuPatcher:
    """Patches on one GPU, on a stream of their own."""

    def __init__(self, work: GpuWork) -> None:
        self._work = work
        self._rows: dict[int, DeviceRows] = {}
        self._sections: dict[ImageLayout, torch.Tensor] = {}
        self._dense: dict[Section, torch.Tensor] = {}
        """Tables of anchors."""

    def encode(
        self, layout: ImageLayout, now: int, old: int | None, out: int, capacity: int, *, base: int, version: int
    ) -> int:
        """Patches of all sections, one after the other."""
        most = sum(padded(delta.max_bytes(part.num_elements, part.width)) for part in layout.sections)
        if most > capacity:
            raise CodecError(f"patches of {most} bytes may not fit into {capacity}")
        room = self._work.view(out, capacity)
        with self._work.queue():
            if old is None:
                return self._anchors(layout, now, room, version)
            state = torch.zeros(2, dtype=torch.int64, device=self._work.device)
            for part in layout.sections:
                new, before = (self._work.view(image + part.begin, part.num_bytes) for image in (now, old))
                patch_kernels.encode(new, before, width=part.width, base=base, version=version, out=room, state=state)
            return int(state[0].item())  # waits for the stream

    def _anchors(self, layout: ImageLayout, now: int, room: torch.Tensor, version: int) -> int:
        """All blocks dense: headers, tables, and the bytes verbatim."""
        done = 0
        with self._work.stream():
            for part in layout.sections:
                begin = delta.first_record(part.num_elements)
                size = begin + -(-part.num_bytes // 4) * 4
                out = room[done : done + size]
                header = delta.header_bytes(part.width, part.num_elements, size, NO_BASE, version)
                out[:HEADER_BYTES] = self._work.upload(header)
                out[HEADER_BYTES:begin] = self._dense_table(part)
                out[begin : begin + part.num_bytes] = self._work.view(now + part.begin, part.num_bytes)
                out[begin + part.num_bytes :] = 0
                done += padded(size)
        return done

    def _dense_table(self, part: Section) -> torch.Tensor:
        if part not in self._dense:
            self._dense[part] = self._work.upload(delta.dense_table(part.num_elements, part.width))
        return self._dense[part]

    def check(self, layout: ImageLayout, patches: int, num_bytes: int, *, base: int | None, version: int) -> None:
        """Raise CodecError unless these are valid patches of all sections."""
        data = self._work.view(patches, num_bytes)
        count = len(layout.sections)
        with self._work.queue():
            opened = patch_kernels.open_patches(data, self._section_table(layout))
            flags = torch.zeros(2 * count, dtype=torch.int64, device=self._work.device)
            for number, part in enumerate(layout.sections):
                patch_kernels.check(
                    data,
                    opened[6 * number :],
                    flags[2 * number :],
                    width=part.width,
                    num_elements=part.num_elements,
                )
            found = torch.cat([opened, flags]).cpu().numpy()  # waits for the stream
        _check_places(layout, found[: 6 * count + 1], num_bytes)
        for header, (is_bad, is_sparse) in zip(
            _headers(found, count), found[6 * count + 1 :].reshape(-1, 2), strict=True
        ):
            header.check_versions(base=base, version=version)
            if is_bad:
                raise CodecError("patch is damaged: a record lies outside it, or its counts do not add up")
            if header.base == NO_BASE and is_sparse:
                raise CodecError("patch is damaged: it needs a base but names none")

    def apply(self, layout: ImageLayout, patches: int, num_bytes: int, rows: Sequence[ImageRows]) -> None:
        """Apply checked patches to rows of device memory."""
        data = self._work.view(patches, num_bytes)
        with self._work.queue():
            opened = patch_kernels.open_patches(data, self._section_table(layout))
            for number, (part, where) in enumerate(zip(layout.sections, rows, strict=True)):
                patch_kernels.apply(
                    data,
                    opened[6 * number :],
                    width=part.width,
                    num_elements=part.num_elements,
                    rows=self._device_rows(part, where),
                )
            _check_places(layout, opened.cpu().numpy(), num_bytes)  # waits for the stream

    def _section_table(self, layout: ImageLayout) -> torch.Tensor:
        if layout not in self._sections:
            words = [patch_kernels.section_words(part.width, part.num_elements) for part in layout.sections]
            self._sections[layout] = self._work.upload(np.array(words, dtype=np.int64).reshape(-1, 3))
        return self._sections[layout]

    def _device_rows(self, part: Section, rows: ImageRows) -> DeviceRows:
        """Tables of a section, kept as long as its rows are."""
        key = id(rows.address)
        if key not in self._rows:
            self._rows[key] = DeviceRows.of(rows, part.width, part.num_elements, self._work.device)
            weakref.finalize(rows.address, self._rows.pop, key, None)
        return self._rows[key]


def _headers(found: np.ndarray, count: int) -> list[delta.PatchHeader]:
    """Headers of patches whose positions were checked."""
    words = [np.ascontiguousarray(row[1:]) for row in found[: 6 * count].reshape(-1, 6)]
    return [delta.read_header(int(row.ctypes.data), HEADER_BYTES) for row in words]


def _check_places(layout: ImageLayout, opened: np.ndarray, num_bytes: int) -> None:
    """Raise CodecError unless there is a patch of every section, and nothing after them."""
    for part, begin in zip(layout.sections, opened[:-1:6].tolist(), strict=True):
        if begin < 0:
            raise CodecError(
                f"no valid patch of {part.num_elements} elements of {part.width} bytes in {num_bytes} bytes"
            )
    if int(opened[-1]) != num_bytes:
        raise CodecError(f"patches have {num_bytes} bytes, of which only {int(opened[-1])} are used")
