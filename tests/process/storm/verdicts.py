"""What must never happen, found from what processes say. Poisoned or refusing is fine; torn and served is not.

torn        an engine serves a version, and some of its bytes are others
backwards   an engine serves an older version than before
lost        a version is committed everywhere, and an engine that nothing happened to does not serve it
hung        a publication, or the fleet, has not come to an end in its time
slow        a version was ended by `version_s` alone: its reason was there long before
evicted     the newest process of a rank was refused in favour of an older one
leaked      an engine holds more memory, descriptors or threads than before, and every lost writer has ended
crashed     a process raised something that is not an error of weft
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from tests.process.storm.fleet import Actor, Event, Footprint
from tests.process.storm.settings import StormSettings

KINDS = ("torn", "backwards", "lost", "hung", "slow", "evicted", "leaked", "crashed")
MORE_FDS = 20
"""What a process may hold more than before: connections come and go."""
MORE_THREADS = 3


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that must never happen, and did."""

    kind: str
    time_s: float
    what: str


class Verdicts:
    """Listens to a fleet."""

    def __init__(self, settings: StormSettings) -> None:
        self._settings = settings
        self.findings: list[Finding] = []
        self.counts: Counter[str] = Counter()
        self.committed: set[int] = set()
        self.ended: set[int] = set()
        self._seen: set[tuple[str, object]] = set()
        self._first: dict[int, Footprint] = {}
        """Process → what it held when it was first looked at."""
        self.growth: Footprint = Footprint(0, 0, 0)

    def listen(self, actor: Actor | None, event: Event) -> None:
        """Something was said."""
        match event.what:
            case "checked":
                self.counts["checks"] += 1
            case "torn":
                version, num_wrong, where, when = event.facts
                self._find("torn", event, f"{num_wrong} wrong elements of version {version} from {where}, {when}")
            case "backwards":
                self._find("backwards", event, f"version {event.facts[0]} after {event.facts[1]}")
            case "crashed":
                self._find("crashed", event, event.facts[0].strip().splitlines()[-1])
            case "committed":
                self.counts["commits"] += 1
            case "not_committed":
                self.look_for_lateness(event.facts[1], event.time_s)
            case "error":
                self._look_for_eviction(actor, event, event.facts[0])
            case "published":
                self._published(actor, event, *event.facts)

    def _find(self, kind: str, event: Event, what: str) -> None:
        self.add(kind, event.time_s, f"{event.who}: {what}")

    def add(self, kind: str, time_s: float, what: str) -> None:
        self.findings.append(Finding(kind, time_s, what))

    def _add_once(self, kind: str, key: object, time_s: float, what: str) -> None:
        if (kind, key) not in self._seen:
            self._seen.add((kind, key))
            self.add(kind, time_s, what)

    def _published(self, actor: Actor | None, event: Event, version: int, how: str, seconds: float) -> None:
        self.ended.add(version)
        if how == "committed":
            self.committed.add(version)
        if seconds > self._settings.end_s:
            self._find("hung", event, f"version {version} took {seconds:.1f} s: {how}")
        if actor is not None and actor.is_replaced:
            return  # it was stopped meanwhile: its clock says nothing
        self.look_for_lateness(how, event.time_s)
        self._look_for_eviction(actor, event, how)

    def _look_for_eviction(self, actor: Actor | None, event: Event, why: str) -> None:
        if actor is not None and not actor.is_replaced and "another process" in why:
            self._add_once("evicted", actor.pid, event.time_s, f"{event.who}: {why}")

    def look_for_lateness(self, why: str, time_s: float) -> None:
        """Whether a version was ended by its deadline; `version_s` is no round number, so that it is recognised."""
        named = re.search(r"version (\d+) ", why)
        if named and f"{self._settings.version_s:.1f} s" in why:
            self._add_once("slow", int(named[1]), time_s, why)

    def growth_of(self, actor: Actor, now: Footprint) -> str:
        """What a process holds more than when it was first looked at, if that is too much and was not found before."""
        first = self._first.setdefault(actor.pid, now)
        if ("leaked", actor.pid) in self._seen:
            return ""
        more = Footprint(
            now.num_bytes - first.num_bytes, now.num_fds - first.num_fds, now.num_threads - first.num_threads
        )
        if (
            more.num_bytes > self._settings.engine_bytes / 2
            or more.num_fds > MORE_FDS
            or more.num_threads > MORE_THREADS
        ):
            return f"{more.num_bytes / 2**20:+.0f} MiB, {more.num_fds:+d} descriptors, {more.num_threads:+d} threads"
        self.growth = Footprint(
            max(self.growth.num_bytes, more.num_bytes),
            max(self.growth.num_fds, more.num_fds),
            max(self.growth.num_threads, more.num_threads),
        )
        return ""

    def leaked(self, actor: Actor, what: str, time_s: float) -> None:
        """A process holds too much."""
        self._add_once("leaked", actor.pid, time_s, f"{actor.name}: {what}")
