"""Events as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing: one process per member, one row per lane."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft.errors import ConfigError
from weft.events import Event
from weft.observe.perfetto import perfetto_trace


def write_trace(events: Sequence[Event], path: Path) -> int:
    """Write a trace file, `.pftrace` in Perfetto's own format, others as JSON; returns the number of spans in it."""
    try:
        if path.suffix == ".pftrace":
            path.write_bytes(perfetto_trace(events))
        else:
            path.write_text(json.dumps({"traceEvents": trace_events(events), "displayTimeUnit": "ms"}))
    except OSError as error:
        raise ConfigError(f"`{path}` cannot be written: {error.strerror}") from error
    return len(events)


def trace_events(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Events in the trace-event format, microseconds."""
    members = {member: i + 1 for i, member in enumerate(dict.fromkeys(event.member for event in events))}
    lanes = {key: i + 1 for i, key in enumerate(dict.fromkeys((event.member, event.lane) for event in events))}
    names: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": member}}
        for member, pid in members.items()
    ]
    names += [
        {"ph": "M", "name": "thread_name", "pid": members[member], "tid": tid, "args": {"name": lane}}
        for (member, lane), tid in lanes.items()
    ]
    spans = [
        {
            "ph": "X",
            "name": f"{event.name} → {event.peer}" if event.peer and event.name == "write" else event.name,
            "cat": event.name,
            "pid": members[event.member],
            "tid": lanes[event.member, event.lane],
            "ts": round(event.start_s * 1e6, 3),
            "dur": round(event.duration_s * 1e6, 3),
            "args": {"bytes": event.num_bytes, "peer": event.peer},
        }
        for event in events
    ]
    return names + spans
