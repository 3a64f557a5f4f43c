"""One trainer's part of a plan, made ready once for all versions: links, chunks, and the memory they pass through."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial

import numpy as np

from weft.codec.conversion import HeldGrid, converter_for
from weft.codec.patching import patcher_for
from weft.config import DeltaPolicy, DigestPolicy, StagingPolicy, TransferSettings
from weft.devices import CPU
from weft.errors import TransportError
from weft.runtime.compile.grids import held_grid
from weft.runtime.control.messages import SendPlan, Target, unpack
from weft.runtime.memory import own_memory
from weft.runtime.send.job import Chunk, Link
from weft.runtime.send.mirror import Mirror
from weft.runtime.send.outgoing import Outgoing
from weft.runtime.send.pipeline import Room
from weft.runtime.transports import OpenTransports
from weft.transport.base import Batch, Column, Handle, Memory


class Sending:
    """What is sent, again and again. Chunks that are not kept pass through a ring of `staging_bytes`; so do patches."""

    def __init__(
        self,
        plan: SendPlan,
        transports: OpenTransports,
        settings: TransferSettings,
        *,
        device: str,
        mirror: Mirror | None = None,
    ) -> None:
        """`device`: where the weights lie, or their mirror."""
        self.transports, self.settings, self.mirror = transports, settings, mirror
        on_host = settings.staging is StagingPolicy.CPU
        self._patcher = patcher_for(CPU if on_host else device)
        self._allocate = partial(own_memory, device, on_host=on_host)
        self._registered: list[tuple[str, Handle]] = []
        grids = [held_grid(message) for message in plan.grids]
        self.converter = converter_for(device, grids, allow_nonfinite=settings.allow_nonfinite)
        self.groups = sorted({grid.group for grid in grids})
        self.group_ends = {group: _group_end(grids, group) for group in self.groups}
        """Behind the last byte of the weights a group looks at."""
        self.told: set[int] = set()
        """Groups whose blocks the controller knows."""
        self._outgoing: list[Outgoing] = []
        self.links = [self._connect(target) for target in plan.targets]
        self.chunks = self._make_chunks(plan, grids)
        self.room = Room([self._staged_bytes(chunk) for chunk in self.chunks], settings.staging_bytes_on(device))
        self.memory = self._allocate(self.room.num_bytes) if self.room.num_bytes else None
        self._prepare_chunks(plan)

    def _connect(self, target: Target) -> Link:
        endpoint = target.offer.endpoint
        transport = self.transports[endpoint.transport]
        link = Link(target.engine, endpoint.transport)
        try:
            link.peer = transport.connect(endpoint, target.offer.descriptors)
            src = unpack(target.src)
            link.direct = [self._batch(link, target, rows, src) for rows in _direct_rows(target)]
        except TransportError as error:
            link.obstacle = str(error)
        return link

    def _batch(self, link: Link, target: Target, rows: slice, src: Column) -> Batch:
        """Some rows of a link; `src` is where all of its rows are read."""
        dst, length = unpack(target.dst)[rows], unpack(target.length)[rows]
        position = unpack(target.position)[rows] if self.settings.digest is DigestPolicy.ON else None
        return self.transports[link.transport].prepare(link.peer, src[rows], dst, length, position)

    def _make_chunks(self, plan: SendPlan, grids: Sequence[HeldGrid]) -> list[Chunk]:
        """Chunks in the order in which they are sent. Links that carry the same bytes share them."""
        alike: dict[tuple[bytes, ...], list[int]] = {}
        for number, target in enumerate(plan.targets):
            if target.chunk_ends:
                key = (target.src, target.length, target.width, target.chunk_ends, target.boxes)
                alike.setdefault(key, []).append(number)
        chunks = []
        for numbers in alike.values():
            first = plan.targets[numbers[0]]
            outgoing = Outgoing(first, self.settings, self.converter, self._patcher, grids, self._allocate)
            self._outgoing.append(outgoing)
            links = tuple(self.links[number] for number in numbers)
            chunks += [Chunk(outgoing, number, links) for number in range(len(outgoing.layouts))]
        return sorted(chunks, key=lambda chunk: (chunk.outgoing.groups[chunk.number], chunk.number))

    def _staged_bytes(self, chunk: Chunk) -> int:
        """Bytes a chunk needs in the ring."""
        layout = chunk.outgoing.layouts[chunk.number]
        if self.settings.delta is DeltaPolicy.ON:
            return layout.max_patch_bytes
        return 0 if chunk.outgoing.is_kept else -(-layout.num_bytes // 64) * 64

    def _prepare_chunks(self, plan: SendPlan) -> None:
        """Register the memory chunks are sent from, and make their batches."""
        targets = {target.engine: target for target in plan.targets}
        images = [image for outgoing in self._outgoing for image in outgoing.images]
        is_delta = self.settings.delta is DeltaPolicy.ON
        sources = ([] if is_delta else images) + ([self.memory] if self.memory is not None else [])
        for name in {link.transport for chunk in self.chunks for link in chunk.links if not link.obstacle}:
            for memory in sources:
                self._register(name, memory)
        for number, chunk in enumerate(self.chunks):
            for link in chunk.links:
                if link.obstacle:
                    continue
                target = targets[link.engine]
                if is_delta:
                    link.slots[chunk.number] = target.slot + chunk.outgoing.patch_begins[chunk.number]
                    continue
                rows = chunk.outgoing.rows[chunk.number]
                src = np.zeros(rows.stop, dtype=np.uint64)
                src[rows] = chunk.outgoing.layouts[chunk.number].addresses(self.place(number))
                try:
                    link.chunks[chunk.number] = self._batch(link, target, rows, src)
                except TransportError as error:
                    link.obstacle = str(error)

    def _register(self, transport: str, memory: Memory) -> None:
        handle = self.transports[transport].register_source(memory.address, memory.num_bytes)
        self._registered.append((transport, handle))

    def place(self, number: int) -> int:
        """Where a chunk is filled."""
        chunk = self.chunks[number]
        if chunk.outgoing.is_kept:
            return chunk.outgoing.address(chunk.number)
        return self.staged(number)

    def staged(self, number: int) -> int:
        """Where a chunk has its place in the ring."""
        assert self.memory is not None
        return self.memory.address + self.room.at[number]

    def patch_batch(self, link: Link, number: int, src: int, num_bytes: int) -> Batch:
        """What the patch of a link's chunk writes."""
        slot = link.slots[number]
        position = np.array([slot - link.slots[0]], dtype=np.uint64)
        where, to, length = (np.array([n], dtype=np.uint64) for n in (src, slot, num_bytes))
        wanted = position if self.settings.digest is DigestPolicy.ON else None
        return self.transports[link.transport].prepare(link.peer, where, to, length, wanted)

    def committed(self, version: int) -> None:
        """Engines hold a version now."""
        for outgoing in self._outgoing:
            outgoing.committed(version)

    def close(self) -> None:
        """Give back what was registered."""
        for name, handle in self._registered:
            self.transports[name].deregister(handle)
        self._registered = []


def _group_end(grids: Sequence[HeldGrid], group: int) -> int:
    boxes = [box for grid in grids if grid.group == group for box in grid.boxes]
    return max((box.address + box.rows * box.stride for box in boxes), default=0)


def _direct_rows(target: Target) -> list[slice]:
    """The rows that go straight from the weights, divided among the chunks of the link; in one piece without any."""
    if not target.num_direct:
        return []
    num_parts = max(len(unpack(target.chunk_ends)), 1)
    ends = np.cumsum(unpack(target.length)[: target.num_direct])
    wanted = ends[-1] * np.arange(1, num_parts + 1) // num_parts
    borders = np.unique([0, *np.searchsorted(ends, wanted) + 1]).tolist()
    return [slice(a, min(b, target.num_direct)) for a, b in itertools.pairwise(borders)]
