"""One trainer's part of a plan, prepared once for all versions: links, Chunks, and the memory they pass through."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.codec.conversion import Converter, Spans, all_spans, converter_for
from weft.codec.grids import HeldGrids
from weft.codec.patching import patcher_for
from weft.config import DeltaPolicy, DigestPolicy, StagingPolicy, TransferSettings
from weft.core.geometry.planes import Planes, joined
from weft.core.streams.send_order import turn_of
from weft.devices import CPU
from weft.errors import ProtocolError, TransportError
from weft.runtime.compile.grids import held_grids
from weft.runtime.compile.link_boxes import LinkBoxes
from weft.runtime.compile.link_stream import LinkStream
from weft.runtime.control.columns import expand
from weft.runtime.control.messages import EngineTarget, SendPlan
from weft.runtime.memory import own_memory
from weft.runtime.send.job import Chunk, Link, Parcel, StagedPatch
from weft.runtime.send.magnitudes import CutBlocks
from weft.runtime.send.mirror import Mirror
from weft.runtime.send.outgoing import Outgoing
from weft.runtime.send.pipeline import Room
from weft.runtime.transports import OpenTransports
from weft.runtime.weights import Weights
from weft.transport.base import Batch, Handle, Memory, Ranges, Transport
from weft.transport.mapped import DirectBatch, MappedTransport

Int64s = NDArray[np.int64]


class SendProgram:
    """What is sent for every version. Chunks that are not kept, and patches, pass through a ring of `staging_bytes`."""

    def __init__(
        self,
        plan: SendPlan,
        transports: OpenTransports,
        settings: TransferSettings,
        weights: Weights,
        *,
        mirror: Mirror | None = None,
        without: Collection[int] = (),
    ) -> None:
        """`weights`: what is sent from, on whatever device. `without`: engine ranks that are not connected to."""
        self.transports, self.settings, self.mirror = transports, settings, mirror
        device = weights.device
        on_host = settings.staging is StagingPolicy.CPU or transports.device != device
        self._patcher = patcher_for(CPU if on_host else device)
        self._allocate = partial(own_memory, device, on_host=on_host)
        self._registered: list[tuple[Transport[Any], Handle]] = []
        self._ranges = Ranges()
        for address, num_bytes in weights.ranges:
            if num_bytes:
                self._ranges.add(address, num_bytes)
        self._read: dict[str, set[tuple[int, int]]] = {}
        """Ranges of weights registered with each transport."""
        self._source = weights.addresses
        grids = held_grids(plan.grids, weights)
        self.converter = converter_for(device, grids, allow_nonfinite=settings.allow_nonfinite)
        self.cut_blocks = _cut_blocks(plan, self.converter, len(grids))
        self._read_beside: dict[int, list[Spans]] = {}
        """Engine rank → the offloaded weights that are read by what is written straight beside each of its Chunks."""
        self._outgoing: list[Outgoing] = []
        self._programs = _compile(plan.targets, is_digested=settings.digest is DigestPolicy.ON)
        self.links = [
            Link(program.target.engine, program.target.offer.endpoint.transport, obstacle="writes to it were cut off")
            if program.target.engine in without
            else self._connect(program)
            for program in self._programs
        ]
        self.chunks = self._make_chunks()
        self.converter.expect([fill for outgoing in self._outgoing for fill in outgoing.fills])
        self.groups = [group for group in grids.groups if self.converter.looks_before(group)]
        """Groups of matrices whose magnitudes are found before Chunks are filled."""
        self.room = Room([self._staged_bytes(chunk) for chunk in self.chunks], settings.staging_bytes_on(device))
        self.memory = self._allocate(self.room.num_bytes) if self.room.num_bytes else None
        self._prepare_chunks()
        self.pieces: list[Planes] = []
        """Pieces of offloaded weights, in the order in which they are copied to the device."""
        self.group_pieces, self.chunk_pieces = [0] * len(self.groups), [0] * len(self.chunks)
        """How many of the first pieces each group, and each Chunk, reads."""
        self.beside_pieces = [0] * len(self.chunks)
        """How many are read by what is written straight from the weights beside each Chunk."""
        if mirror is not None:
            self._order_pieces(mirror, grids)

    def _order_pieces(self, mirror: Mirror, grids: HeldGrids) -> None:
        """Weights are copied in the order in which they are read: for a group's magnitudes, then for its Chunks."""
        readers = [((group, 0, number), grids.source_spans(group)) for number, group in enumerate(self.groups)]
        for number, chunk in enumerate(self.chunks):
            group = chunk.outgoing.groups[chunk.number]
            readers.append(((group, 1, number), chunk.outgoing.source_spans(chunk.number)))
            readers.append(((group, 2, number), self._spans_beside(chunk)))
        readers.sort(key=lambda reader: reader[0])
        self.pieces, needs = mirror.pieces([spans for _, spans in readers])
        found = self.group_pieces, self.chunk_pieces, self.beside_pieces
        for ((_, kind, number), _), count in zip(readers, needs, strict=True):
            found[kind][number] = count

    def _spans_beside(self, chunk: Chunk) -> Spans:
        """The weights that are read by what is written beside a Chunk."""
        known = [self._read_beside.get(link.engine, []) for link in chunk.links]
        return all_spans([parts[chunk.number] for parts in known if chunk.number < len(parts)])

    def _connect(self, program: _LinkProgram) -> Link:
        target = program.target
        endpoint = target.offer.endpoint
        link = Link(target.engine, endpoint.transport)
        try:
            link.peer = self.transports[endpoint.transport].connect(endpoint, target.offer.descriptors)
            tables = program.stream.straight(self._source, program.to, program.position)
            self._register_read(endpoint.transport, tables)
            stream = program.stream
            link.needs = stream.credits_needed
            num_parts = 1 if link.has_window else stream.num_packed
            beside = _beside(tables, num_parts)
            link.direct = [self._parcel(link, part) for part in beside]
            if self.mirror is not None:
                self._read_beside[target.engine] = [_read_by(part) for part in beside]
        except TransportError as error:
            link.obstacle = str(error)
        return link

    def _register_read(self, transport: str, tables: Sequence[Planes]) -> None:
        """Register the memory of weights that are sent without packing, where it is not yet registered."""
        if not tables:
            return
        address, num_bytes = joined(tables).src_spans
        starts, ends = self._ranges.columns()
        used = np.unique(self._ranges.find(address, num_bytes, whose="this trainer"))
        ranges = zip(starts[used].tolist(), (ends - starts)[used].tolist(), strict=True)
        known = self._read.setdefault(transport, set())
        fresh = [each for each in ranges if each not in known]
        known.update(fresh)
        known_to = self.transports[transport]
        self._registered += [(known_to, handle) for handle in known_to.register_sources(fresh)]

    def _parcel(self, link: Link, tables: Sequence[Planes]) -> Parcel:
        """Something a link writes: planes, or rows if the transport uses descriptors."""
        transport = self.transports[link.transport]
        if isinstance(transport, MappedTransport):
            return transport.prepare_direct(link.peer, tables)
        dst, src, length, position = joined(tables).runs
        return transport.prepare(link.peer, src, dst, length, position)

    def _make_chunks(self) -> list[Chunk]:
        """Chunks in the order in which they are sent. Links that carry the same bytes share them."""
        alike: dict[tuple[object, ...], list[int]] = {}
        for number, program in enumerate(self._programs):
            if program.stream.num_packed:
                alike.setdefault((program.target.boxes, program.target.carriage), []).append(number)
        chunks, due = [], []
        for numbers in alike.values():
            stream = self._programs[numbers[0]].stream
            outgoing = Outgoing(stream, self._source, self.settings, self.converter, self._patcher, self._allocate)
            self._outgoing.append(outgoing)
            links = tuple(self.links[number] for number in numbers)
            if len(links) == 1 and not links[0].obstacle:
                self._go_straight(outgoing, links[0], self._programs[numbers[0]])
            chunks += [Chunk(outgoing, number, links) for number in range(len(outgoing.layouts))]
            due += stream.packed_due(turn_of(numbers[0], len(self._programs))).tolist()
        group = [chunk.outgoing.groups[chunk.number] for chunk in chunks]
        return [chunks[number] for number in np.lexsort((due, group)).tolist()]

    def _go_straight(self, outgoing: Outgoing, link: Link, program: _LinkProgram) -> None:
        """Convert into the engine's memory, if it is mapped and nothing reads the converted bytes again."""
        transport = self.transports[link.transport]
        carriage = program.target.carriage
        wanted = carriage.is_mapped and not outgoing.is_kept and program.position is None and not carriage.num_slots
        if not wanted or not isinstance(transport, MappedTransport):
            return
        try:
            to = transport.mapped(link.peer, np.atleast_1d(np.asarray(program.to, dtype=np.int64)))
        except TransportError as error:
            link.obstacle = str(error)
            return
        fills = program.stream.straight_fills(self._source, int(to[0]) if isinstance(program.to, int) else to)
        if fills is not None:
            outgoing.go_straight(fills)

    def _staged_bytes(self, chunk: Chunk) -> int:
        """Bytes a Chunk needs in the ring."""
        layout = chunk.outgoing.layouts[chunk.number]
        if chunk.outgoing.is_straight:
            return 0
        if self.settings.delta is DeltaPolicy.ON:
            return layout.max_patch_bytes
        return 0 if chunk.outgoing.is_kept else layout.num_bytes

    def _prepare_chunks(self) -> None:
        """Register the memory Chunks are sent from, and make what they write."""
        images = [image for outgoing in self._outgoing for image in outgoing.images]
        sources = images + ([self.memory] if self.memory is not None else [])
        for name in {link.transport for chunk in self.chunks for link in chunk.links if not link.obstacle}:
            for memory in sources:
                self._register(name, memory)
        programs = {program.target.engine: program for program in self._programs}
        for number, chunk in enumerate(self.chunks):
            for link in chunk.links:
                if link.obstacle:
                    continue
                program = programs[link.engine]
                link.patches = program.target.patches
                try:
                    for image, place in enumerate(self._places(number)):
                        while len(link.chunks) <= image:
                            link.chunks.append({})
                        link.chunks[image][chunk.number] = self._packed(link, program, chunk.number, place)
                except TransportError as error:
                    link.obstacle = str(error)

    def _packed(self, link: Link, program: _LinkProgram, chunk: int, place: int) -> Parcel:
        """What a packed Chunk writes: one piece, if it lands in stream order through a transport's own write."""
        if not place:
            payload = program.stream.chunks.payload[program.stream.num_straight + chunk]
            return DirectBatch(peer=link.peer, chunks=(), num_there=int(payload))
        table = program.parcels[chunk].moved(src=place)
        carriage, stream = program.target.carriage, program.stream
        number = stream.num_straight + chunk
        if not stream.is_written_whole[number]:
            return self._parcel(link, [table])
        begin = stream.slot(chunk) if carriage.num_slots else int(stream.chunks.begin[number])
        size = int(stream.chunks.num_bytes[number])
        src, dst, length = (np.array([n], dtype=np.uint64) for n in (place, program.target.stream + begin, size))
        digested = table if program.position is not None else None
        return self.transports[link.transport].prepare(link.peer, src, dst, length, digested=digested)

    def _register(self, transport: str, memory: Memory) -> None:
        known_to = self.transports[transport]
        self._registered.append((known_to, known_to.register_source(memory.address, memory.num_bytes)))

    def place(self, number: int) -> int:
        """Where a Chunk is filled."""
        return self._places(number)[self.chunks[number].outgoing.now]

    def _places(self, number: int) -> list[int]:
        """Where a Chunk is filled, alternating from version to version."""
        chunk = self.chunks[number]
        if chunk.outgoing.is_straight:
            return [0]
        if chunk.outgoing.is_kept:
            return [chunk.outgoing.address(chunk.number, image) for image in range(len(chunk.outgoing.images))]
        return [self.staged(number)]

    def staged(self, number: int) -> int:
        """A Chunk's place in the ring."""
        assert self.memory is not None
        return self.memory.address + self.room.at[number]

    def patch_batch(self, link: Link, patches: Sequence[StagedPatch]) -> Batch:
        """What patches write to their places in the memory for patches."""
        columns = np.array(patches, dtype=np.uint64).reshape(-1, 3)
        position, src, length = (np.ascontiguousarray(column) for column in columns.T)
        wanted = position if self.settings.digest is DigestPolicy.ON else None
        return self.transports[link.transport].prepare(
            link.peer, src, position + np.uint64(link.patches), length, wanted
        )

    def patch_room(self, engines: Collection[int]) -> int:
        """Room for patches that all of these engine ranks have."""
        return min((p.target.patch_bytes for p in self._programs if p.target.engine in engines), default=0)

    def committed(self, version: int) -> None:
        """Engines hold a version now."""
        for outgoing in self._outgoing:
            outgoing.committed(version)

    def close(self) -> None:
        """Give back what was registered."""
        for transport, handle in self._registered:  # the transport may have been torn down meanwhile
            transport.deregister(handle)
        self._registered = []


def _cut_blocks(plan: SendPlan, converter: Converter, num_grids: int) -> list[CutBlocks]:
    """The blocks of each group that other trainers have parts of. Raises ProtocolError."""
    roles = expand(plan.roles, ["role"])["role"] if plan.roles else np.zeros(num_grids, dtype=np.int64)
    if roles.shape != (num_grids,):
        raise ProtocolError(f"plan has roles for {len(roles)} quantised matrices, expected {num_grids}")
    return [CutBlocks(keys, roles[of]) for keys, of in zip(converter.keys, converter.cut_grids, strict=True)]


class _LinkProgram:
    """One link's stream, and where it goes."""

    def __init__(self, target: EngineTarget, stream: LinkStream, *, is_digested: bool) -> None:
        self.target, self.stream = target, stream
        places = expand(target.places, ["position", "address"] if target.is_live else ["position"])
        self.to: Int64s | int = places["address"] if target.is_live else target.stream
        self.position = places["position"] if is_digested else None

    @cached_property
    def parcels(self) -> list[Planes]:
        """What each packed Chunk writes; sources are relative to its beginning."""
        return self.stream.parcels(self.to, self.position)


def _compile(targets: Sequence[EngineTarget], *, is_digested: bool) -> list[_LinkProgram]:
    """Streams of all links; identical ones, such as those of replicas, are compiled once."""
    streams: dict[tuple[object, ...], LinkStream] = {}
    programs = []
    for target in targets:
        key = (target.boxes, target.carriage)
        if key not in streams:
            streams[key] = LinkStream(LinkBoxes.decode(target.boxes), target.carriage)
        programs.append(_LinkProgram(target, streams[key], is_digested=is_digested))
    return programs


def _read_by(tables: Sequence[Planes]) -> Spans:
    """The weights some tables read."""
    address, num_bytes = joined(tables).src_spans
    return address.astype(np.int64), num_bytes.astype(np.int64)


def _beside(tables: Sequence[Planes], num_packed: int) -> list[list[Planes]]:
    """What goes straight from the weights, divided among the link's packed Chunks; in one piece if there are none."""
    if not tables:
        return []
    num_parts = min(max(num_packed, 1), len(tables))
    borders = [len(tables) * part // num_parts for part in range(num_parts + 1)]
    return [list(tables[a:b]) for a, b in itertools.pairwise(borders)]
