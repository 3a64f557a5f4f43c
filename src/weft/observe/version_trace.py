"""Versions of an events file as spans: what every member did, and the chain of waits that ended last.

    version_spans(record)               # of one version, from its begin
    run_spans(records)                  # of all, from the begin of the first

Spans of the lane `chain` follow each other without gaps: together they are the version's time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weft.events import Event, Recorder
from weft.observe.why import explain

_PHASES = {
    "trainer": (
        ("Want", "Go", "wait for its turn"),
        ("Go", "Written", "send"),
        ("Written", "Decide", "wait for the decision"),
    ),
    "engine": (
        ("Expect", "Paused", "pause"),
        ("Expect", "Verify", "receive"),
        ("Verify", "Ready", "verify"),
        ("Ready", "Decide", "wait for the decision"),
        ("Decide", "Committed", "commit"),
    ),
}
"""What each side does between two messages."""


def run_spans(records: Sequence[Mapping[str, Any]]) -> list[Event]:
    """All versions of a run, one after the other as they happened."""
    begins = [float(record["at"]) - float(record["seconds"]) for record in records]
    first = min(begins, default=0.0)
    spans = (version_spans(record, at_s=begin - first) for record, begin in zip(records, begins, strict=True))
    return [span for version in spans for span in version]


def version_spans(record: Mapping[str, Any], *, at_s: float = 0.0) -> list[Event]:
    """One version that began at a time."""
    recorder, seconds = Recorder(), float(record["seconds"])
    name = f"version {record['version']} {record['outcome']}"
    recorder.span(name, member="controller", lane="versions", start_s=at_s, end_s=at_s + seconds)
    reached = at_s
    for cause in explain(record).causes:
        end = reached + cause.seconds
        recorder.span(cause.what, member="controller", lane="chain", start_s=reached, end_s=end)
        reached = end
    members = _by_member(record)
    for member, moments in members.items():
        for first, last, what in _PHASES[member.partition(" ")[0]]:
            if first in moments and moments.get(last, -1.0) >= moments[first]:
                span = at_s + moments[first], at_s + moments[last]
                recorder.span(what, member=member, lane=what, start_s=span[0], end_s=span[1])
    for trainer, engine, num_bytes, lasted_s in record["writes"]:
        reported = members.get(f"trainer {trainer}", {}).get("Written")
        if reported is not None:  # writes end, at the latest, when the trainer reports them
            recorder.span(
                "write",
                member=f"trainer {trainer}",
                lane=f"to engine {engine}",
                start_s=at_s + max(reported - lasted_s, 0.0),
                end_s=at_s + reported,
                num_bytes=num_bytes,
                peer=f"engine {engine}",
            )
    for trainer, engine, num_bytes, lasted_s in record.get("arrivals", []):
        committed = members.get(f"engine {engine}", {}).get("Ready") or members.get(f"engine {engine}", {}).get(
            "Committed"
        )
        if committed is not None:  # the last Chunk was verified, at the latest, when the engine said so
            recorder.span(
                "arrive",
                member=f"engine {engine}",
                lane=f"from trainer {trainer}",
                start_s=at_s + max(committed - lasted_s, 0.0),
                end_s=at_s + committed,
                num_bytes=num_bytes,
                peer=f"trainer {trainer}",
            )
    return recorder.events


def _by_member(record: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """When each member last said, or was told, each kind of message."""
    found: dict[str, dict[str, float]] = {}
    for moment, kind, member in record["moments"]:
        found.setdefault(member, {})[kind] = float(moment)
    return found
