"""Events as a trace in Perfetto's own format, written with Perfetto's own builder (needs weft[trace])."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.errors import ConfigError
from weft.events import Event

SEQUENCE = 1
"""All packets are of one sequence: they were written by one writer."""
FIRST_TRACK = 1000


def perfetto_trace(events: Sequence[Event]) -> bytes:
    """A trace with a track for every member, and a track for every lane of it."""
    try:
        from perfetto.trace_builder.proto_builder import TraceProtoBuilder  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ConfigError("traces in Perfetto's own format need perfetto", hint="pip install 'weft[trace]'") from error
    builder = TraceProtoBuilder()
    members: dict[str, int] = {}
    lanes: dict[tuple[str, str], int] = {}
    for event in events:
        if event.member not in members:
            members[event.member] = _track(builder, FIRST_TRACK + len(members) + len(lanes), event.member)
        if (event.member, event.lane) not in lanes:
            number = FIRST_TRACK + len(members) + len(lanes)
            lanes[event.member, event.lane] = _track(builder, number, event.lane, parent=members[event.member])
    ends = [(event.start_s, 1, event) for event in events]
    ends += [(event.start_s + event.duration_s, 0, event) for event in events]
    for at_s, is_begin, event in sorted(ends, key=lambda end: (end[0], end[1])):
        _slice_end(builder, lanes[event.member, event.lane], at_s, event if is_begin else None)
    return bytes(builder.serialize())


def _track(builder: Any, number: int, name: str, *, parent: int | None = None) -> int:
    packet = builder.add_packet()
    packet.trusted_packet_sequence_id = SEQUENCE
    packet.track_descriptor.uuid = number
    packet.track_descriptor.name = name
    if parent is not None:
        packet.track_descriptor.parent_uuid = parent
    return number


def _slice_end(builder: Any, track: int, at_s: float, begun: Event | None) -> None:
    """One end of a slice: its begin has the name and what is known of it."""
    packet = builder.add_packet()
    packet.timestamp = round(at_s * 1e9)
    packet.trusted_packet_sequence_id = SEQUENCE
    packet.track_event.track_uuid = track
    packet.track_event.type = (
        packet.track_event.TYPE_SLICE_END if begun is None else packet.track_event.TYPE_SLICE_BEGIN
    )
    if begun is None:
        return
    packet.track_event.name = begun.name
    packet.track_event.categories.append("weft")
    if begun.num_bytes:
        note = packet.track_event.debug_annotations.add()
        note.name, note.int_value = "bytes", begun.num_bytes
    if begun.peer:
        note = packet.track_event.debug_annotations.add()
        note.name, note.string_value = "peer", begun.peer
