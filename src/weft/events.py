"""What happened, when, on which member: one schema for the runtime and the simulator.

An `Event` is a span (`duration_s > 0`) or an instant. `Recorder` collects them; metrics, traces and
reports are functions of the collected events (`weft.observe`).

    recorder = Recorder()
    recorder.span("write", member="trainer 3", lane="nic", start_s=0.10, end_s=0.25, num_bytes=1 << 30)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One span or instant on one member. Times are seconds since the start of the update."""

    name: str
    member: str
    """Such as `trainer 3`, `engine 7`, `controller`."""
    lane: str
    """The resource it ran on: `h2d`, `stream`, `nic`, `main`."""
    start_s: float
    duration_s: float = 0.0
    num_bytes: int = 0
    peer: str = ""


@dataclass(slots=True)
class Recorder:
    """Collects events in the order they are reported; one per update."""

    events: list[Event] = field(default_factory=list)

    def span(
        self,
        name: str,
        *,
        member: str,
        lane: str,
        start_s: float,
        end_s: float,
        num_bytes: int = 0,
        peer: str = "",
    ) -> None:
        """Record something that took from `start_s` to `end_s`."""
        self.events.append(
            Event(
                name=name,
                member=member,
                lane=lane,
                start_s=start_s,
                duration_s=end_s - start_s,
                num_bytes=num_bytes,
                peer=peer,
            )
        )


def busy_seconds(events: Iterable[Event]) -> dict[str, float]:
    """Total seconds of the spans of each name."""
    busy: dict[str, float] = {}
    for event in events:
        busy[event.name] = busy.get(event.name, 0.0) + event.duration_s
    return busy
