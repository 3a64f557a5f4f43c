"""What an engine rank receives and where it belongs: compiled from its part of the plan, for all versions.

In mode `shadow` versions land in stream order beside the live weights, and a commit scatters them; in other modes they
land where they belong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from weft.codec.delta import ImageRows
from weft.codec.image import PATCH_ALIGN, ImageLayout
from weft.core.geometry.alignment import ALIGN, aligned
from weft.core.geometry.boxes import row_major_strides
from weft.core.geometry.planes import Planes, joined, planes_of
from weft.errors import LayoutError
from weft.runtime.compile.link_boxes import LinkBoxes
from weft.runtime.compile.link_stream import LinkStream
from weft.runtime.compile.member_plans import digest_places
from weft.runtime.control.messages import TrainerSource
from weft.runtime.memory import own_memory
from weft.runtime.weights import Weights
from weft.transport.base import Memory

SCRATCH_BYTES = 64
"""Where gaps between the units of a patch go."""
Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivingChunk:
    """What is done when a Chunk has arrived."""

    num_bytes: int
    """Bytes that arrive."""
    planes: Planes
    """What is digested, and drained where required."""
    is_drained: bool = False
    """Whether it lies in a window and is copied from there to where it belongs."""


@dataclass(frozen=True, kw_only=True)
class ArrivingLink:
    """What one trainer sends in a version: Chunks, in the order in which they are written."""

    trainer: int
    transport: str
    chunks: tuple[ArrivingChunk, ...]
    is_ordered: bool
    """Whether bytes are counted in this order; otherwise nothing is known before all have arrived."""
    num_slots: int = 0
    """Chunks that fit in its window at once; 0: no window."""

    @cached_property
    def total(self) -> int:
        """All bytes."""
        return sum(chunk.num_bytes for chunk in self.chunks)

    @cached_property
    def has_window(self) -> bool:
        """Whether some Chunks land in a window."""
        return any(chunk.is_drained for chunk in self.chunks)

    @cached_property
    def num_awaited(self) -> int:
        """Chunks that must be drained before the trainer can write all of them."""
        return sum(self.frees_room(number) for number in range(len(self.chunks)))

    def frees_room(self, chunk: int) -> bool:
        """Whether a later Chunk takes the place of this one in the window, and so waits until it is drained."""
        return self.chunks[chunk].is_drained and chunk + self.num_slots < len(self.chunks)

    @cached_property
    def planes(self) -> Planes:
        """What all Chunks consist of, to be digested at once."""
        return joined([chunk.planes for chunk in self.chunks])


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchPlace:
    """The patch of one Chunk, and where its changes belong."""

    layout: ImageLayout
    rows: tuple[ImageRows, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchedLink:
    """What one trainer sends as patches, one after the other."""

    trainer: int
    transport: str
    address: int
    num_bytes: int
    """Room for them."""
    chunks: tuple[PatchPlace, ...]

    def has_room(self, sizes: Sequence[int]) -> bool:
        """Whether patches of these sizes fit into the memory for them."""
        return not sizes or self.slots(sizes)[-1] + sizes[-1] <= self.address + self.num_bytes

    def slots(self, sizes: Sequence[int]) -> list[int]:
        """Where the patches of a version are, from the size of each."""
        taken = aligned(np.array(sizes, dtype=np.int64), PATCH_ALIGN)
        return (self.address + np.cumsum(taken) - taken).tolist()


class Landing:
    """An engine rank's part of a plan."""

    def __init__(
        self,
        sources: Sequence[TrainerSource],
        weights: Weights,
        *,
        landing: Memory | None = None,
        window: Memory | None = None,
        patches: Memory | None = None,
    ) -> None:
        """`landing`: where streams land; None: in the live weights, or in a window. `patches`: where patches land."""
        self._keep = landing, window, patches
        self._scratch = own_memory(weights.device, SCRATCH_BYTES)
        self._bounce, live, bounces = _straight_addresses(weights)
        self._live = live
        self._place = digest_places(weights.table)
        self.arriving: list[ArrivingLink] = []
        """What is followed, of versions that are sent whole."""
        self.patched: list[PatchedLink] = []
        self.unreachable = ""
        """Why credits cannot be returned to a trainer that waits for them."""
        tables: list[Planes] = []
        streams: dict[tuple[object, ...], LinkStream] = {}
        for source in sources:
            key = source.boxes, source.carriage
            stream = streams.get(key) or streams.setdefault(key, LinkStream(LinkBoxes.decode(source.boxes), key[1]))
            at = None if landing is None else landing.address + source.stream
            found = self._landed(stream, at)
            drained = self._drained(stream, 0 if window is None else window.address + source.stream)
            self.arriving.append(_arriving(source, stream, found, drained))
            tables += found
            if patches is not None:
                self.patched.append(self._patched(source, stream, at, patches.address + source.patches))
        self.steps: tuple[Planes, ...] = ()
        """The steps that make a staged version visible, in order; none if it is already in place."""
        if landing is not None:
            scatter = joined(tables)
            scatter = scatter.take(np.argsort(scatter.dst))  # parts of one tensor, from several trainers, go together
            self.steps = (scatter, *([joined(bounces)] if bounces else []))

    def _landed(self, stream: LinkStream, at: int | None) -> list[Planes]:
        tensors = stream.boxes.tensors
        live = self._live[tensors]
        return stream.landed(live if at is None else at, live, self._place[tensors])

    def _drained(self, stream: LinkStream, window: int) -> list[Planes]:
        """Packed Chunks that lie in a window."""
        if not stream.carriage.num_slots:
            return []
        tensors = stream.boxes.tensors
        return stream.drained(window, self._live[tensors], self._place[tensors])

    def _patched(self, source: TrainerSource, stream: LinkStream, at: int | None, address: int) -> PatchedLink:
        layouts = stream.images()
        if at is None:
            rows = stream.image_rows(self._live[stream.boxes.tensors], self._scratch.address)
        else:
            begins = (at + stream.chunks.begin[stream.num_straight :]).tolist()
            rows = [layout.contiguous(begin) for layout, begin in zip(layouts, begins, strict=True)]
        return PatchedLink(
            trainer=source.trainer,
            transport=source.transport,
            address=address,
            num_bytes=source.patch_bytes,
            chunks=tuple(PatchPlace(layout=layout, rows=mine) for layout, mine in zip(layouts, rows, strict=True)),
        )


def _arriving(
    source: TrainerSource, stream: LinkStream, landed: Sequence[Planes], drained: Sequence[Planes]
) -> ArrivingLink:
    """What lands directly is digested in place; what lands in a window, when it is drained."""
    sizes = stream.chunk_wire_bytes.tolist()
    straight = landed[: stream.num_straight] if drained else landed
    chunks = [ArrivingChunk(num_bytes=size, planes=planes) for size, planes in zip(sizes, straight, strict=False)]
    chunks += [
        ArrivingChunk(num_bytes=size, planes=planes, is_drained=True)
        for size, planes in zip(sizes[stream.num_straight :], drained, strict=False)
    ]
    return ArrivingLink(
        trainer=source.trainer,
        transport=source.transport,
        chunks=tuple(chunks),
        is_ordered=stream.num_packed == 0 or bool(drained),
        num_slots=stream.carriage.num_slots,
    )


def check_contiguous(weights: Weights) -> None:
    """Raise LayoutError unless all weights can be written in place."""
    strided = [weights.table[number] for number in np.flatnonzero(~weights.table.is_contiguous).tolist()]
    if strided:
        problems = tuple(f"{held.name}: extent {list(held.extent)}, strides {list(held.strides)}" for held in strided)
        raise LayoutError(
            "weights that are not contiguous cannot be written in place", problems=problems, hint="use mode shadow"
        )


def _straight_addresses(weights: Weights) -> tuple[Memory | None, Int64s, list[Planes]]:
    """Addresses at which every shard is row-major: its own, or separate memory, with the copies from there."""
    live, held = weights.addresses.copy(), weights.table
    strided = np.flatnonzero(~held.is_contiguous)
    if not len(strided):
        return None, live, []
    sizes = np.maximum(aligned(held.num_bytes[strided]), ALIGN)
    memory = own_memory(weights.device, int(sizes.sum()))
    begins = memory.address + np.cumsum(sizes) - sizes
    extent = held.extent[strided]
    planes = planes_of(extent, row_major_strides(extent), held.strides[strided])
    copies = Planes.of(planes, src=begins, dst=live[strided], width=held.itemsize[strided])
    live[strided] = begins
    return memory, live, [copies]
