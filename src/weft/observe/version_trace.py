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
        ("Go", "Published", "wait until it is published"),
        ("Published", "Written", "send"),
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
            if first in moments and moments.get(last, -1.0) > moments[first]:
                span = at_s + moments[first], at_s + moments[last]
                recorder.span(what, member=member, lane=what, start_s=span[0], end_s=span[1])
    for what, lane, ends in (("write", "to", record["writes"]), ("arrive", "from", record.get("arrivals", []))):
        for trainer, engine, num_bytes, lasted_s in ends:
            names = f"trainer {trainer}", f"engine {engine}"
            member, peer = names if what == "write" else names[::-1]
            ended = _reported(members.get(member, {}), what)
            if ended is not None:  # it ended, at the latest, when the member said so
                recorder.span(
                    what,
                    member=member,
                    lane=f"{lane} {peer}",
                    start_s=at_s + max(ended - lasted_s, 0.0),
                    end_s=at_s + ended,
                    num_bytes=num_bytes,
                    peer=peer,
                )
    return recorder.events


def _reported(moments: Mapping[str, float], what: str) -> float | None:
    """When a member said that its end of a link was done; without digests engines say so only when they serve it."""
    return moments.get("Written") if what == "write" else moments.get("Ready", moments.get("Committed"))


def _by_member(record: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """When each member last said, or was told, each kind of message, and when trainers published, or could write."""
    found: dict[str, dict[str, float]] = {}
    for moment, kind, member in record["moments"]:
        found.setdefault(member, {})[kind] = float(moment)
    for moments in found.values():
        if "Go" in moments:  # most trainers have published before they are told to write
            moments.setdefault("Published", moments["Go"])
    return found
