"""What an events file tells, as a page shows it: the fleet, the plan, the versions.

    story = Story()
    for line in lines:
        story.take(line)
    story.state()                # everything but the details of versions
    story.version(7)             # one version: what every member did, both ends of every link

Lines are those of the controller's journal (`weft controller --events FILE`). Unknown lines are ignored, so that files
of newer controllers can be read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from weft.observe.version_trace import version_spans
from weft.observe.why import explain

MAX_VERSIONS = 200
"""Versions that are shown."""
MAX_DETAILS = 400_000
"""Moments and transfers of versions that are kept, in all; of older ones only the summary is."""
MAX_FAILURES = 100
Facts = Mapping[str, Any]


@dataclass(slots=True)
class _Member:
    """A member, as last heard of."""

    name: str
    state: str = "joined"
    reason: str = ""
    since: float = 0.0
    host: str = ""
    device: str = ""
    version: int | None = None
    """Engines: the version they serve. Trainers: the last they have written."""


class Story:
    """Takes lines in the order they were written."""

    def __init__(self) -> None:
        self.revision = 0
        """Rises with every line."""
        self._controller: dict[str, Any] = {}
        self._num_starts = 0
        self._members: dict[str, _Member] = {}
        self._plan: dict[str, Any] = {}
        self._begun: dict[int, float] = {}
        """Versions under way, and since when."""
        self._versions: deque[dict[str, Any]] = deque(maxlen=MAX_VERSIONS)
        self._records: deque[dict[str, Any]] = deque(maxlen=MAX_VERSIONS)
        self._failures: deque[dict[str, Any]] = deque(maxlen=MAX_FAILURES)
        self._counts = {"committed": 0, "aborted": 0}
        self._committed: int | None = None

    def take(self, line: Facts) -> None:
        """One line."""
        self.revision += 1
        if "controller" in line:
            self._start(line)
        elif "member" in line:
            self._change(line)
        elif "plan" in line:
            self._plan = dict(line)
        elif "begun" in line:
            self._begun[int(line["begun"])] = float(line["at"])
        elif "moments" in line:
            self._end(dict(line))

    def _start(self, line: Facts) -> None:
        """A controller started, or started again: members have to join it."""
        self._num_starts += 1
        self._controller = dict(line)
        self._begun.clear()
        self._plan = {}
        if self._num_starts > 1:
            self._fail(line, "the controller was restarted")
        for member in self._members.values():
            member.state, member.reason, member.since = "away", "has not joined again yet", float(line["at"])

    def _change(self, line: Facts) -> None:
        """A member joined or was lost."""
        name, state, since = str(line["member"]), str(line["state"]), float(line["at"])
        member = self._members.setdefault(name, _Member(name))
        member.state, member.reason, member.since = state, line.get("reason", ""), since
        member.host, member.device = line.get("host", member.host), line.get("device", member.device)
        if "served" in line:
            member.version = line["served"]
        if member.state == "lost":
            self._fail(line, f"{member.name} {member.reason}")

    def _end(self, line: dict[str, Any]) -> None:
        """A version ended."""
        self._begun.pop(line["version"], None)
        self._counts[line["outcome"]] += 1
        line["links_planned"] = self._plan.get("links", [])
        self._versions.append(summary(line))
        self._records.append(line)
        while len(self._records) > 1 and sum(map(_size, self._records)) > MAX_DETAILS:
            self._records.popleft()
        if line["outcome"] == "committed":
            self._committed = line["version"]
        else:
            self._fail(line, f"version {line['version']} was aborted: {line['reason']}")
        for _, kind, name in line["moments"]:
            if kind in {"Committed", "Written"} and name in self._members:
                self._members[name].version = line["version"]

    def _fail(self, line: Facts, what: str) -> None:
        self._failures.append({"at": line["at"], "what": what})

    def state(self) -> dict[str, Any]:
        """Everything a page shows at once."""
        plan = {name: value for name, value in self._plan.items() if name != "links"}
        return {
            "revision": self.revision,
            "controller": self._controller | {"num_starts": self._num_starts},
            "members": [self._member(member) for member in sorted(self._members.values(), key=_rank)],
            "plan": plan | {"num_links": len(self._plan.get("links", [])), "predicted_s": predicted_s(self._plan)},
            "under_way": [{"version": version, "since": since} for version, since in sorted(self._begun.items())],
            "committed": self._committed,
            "num_committed": self._counts["committed"],
            "num_aborted": self._counts["aborted"],
            "versions": list(self._versions),
            "failures": list(self._failures),
        }

    def _member(self, member: _Member) -> dict[str, Any]:
        stale = 0
        if member.name.startswith("engine") and self._committed is not None:
            stale = self._committed - (-1 if member.version is None else member.version)
        return asdict(member) | {"staleness": stale}

    def links(self) -> list[dict[str, Any]]:
        """The routing matrix of the plan in force."""
        return [_planned(link) for link in self._plan.get("links", [])]

    def version(self, number: int) -> dict[str, Any] | None:
        """Details of a version, as it ended last; None if it is not known any more."""
        found = next((version for version in reversed(self._records) if version["version"] == number), None)
        return None if found is None else details(found)


def details(record: Facts) -> dict[str, Any]:
    """One version: the chain of waits that ended last, what every member did, and both ends of every link."""
    explanation = explain(record)
    links = _link_rows(record)
    return summary(record) | {
        "chain": [asdict(cause) for cause in explanation.causes],
        "spans": [asdict(span) for span in version_spans(record)],
        "links": links,
        "busiest": _busiest(links, float(record["seconds"])),
    }


def predicted_s(plan: Facts) -> float | None:
    """How long a whole version takes at the rates of the network cards; None if no card carries it."""
    wired = {name: seconds for name, seconds in plan.get("wire_s", {}).items() if name != "links inside a domain"}
    return max(wired.values(), default=0.0) or None


def summary(record: Facts) -> dict[str, Any]:
    """One version in a line."""
    return {
        "version": record["version"],
        "at": record["at"],
        "outcome": record["outcome"],
        "reason": record["reason"],
        "seconds": record["seconds"],
        "bytes": sum(write[2] for write in record["writes"]),
        "pause_s": max(record.get("pauses", {}).values(), default=0.0),
        "sentence": explain(record).sentence,
    }


def _size(record: Facts) -> int:
    return len(record["moments"]) + len(record["writes"]) + len(record.get("arrivals", []))


def _planned(link: list[Any]) -> dict[str, Any]:
    trainer, engine, num_bytes, transport, limit = link
    return {"trainer": trainer, "engine": engine, "planned": num_bytes, "transport": transport, "limit": limit}


def _link_rows(record: Facts) -> list[dict[str, Any]]:
    """Planned, sent and arrived, of every link that was used or planned."""
    rows = {(link[0], link[1]): _planned(link) for link in record.get("links_planned", [])}
    for what, ends in (("sent", record["writes"]), ("arrived", record.get("arrivals", []))):
        for trainer, engine, num_bytes, seconds in ends:
            row = rows.setdefault((trainer, engine), _planned([trainer, engine, 0, "", 0.0]))
            row[what] = row.get(what, 0) + num_bytes  # patches, then the whole version
            row[f"{what}_s"] = row.get(f"{what}_s", 0.0) + seconds
    return [rows[link] for link in sorted(rows)]


def _busiest(links: list[dict[str, Any]], seconds: float) -> dict[str, Any] | None:
    """The member whose network card was busiest during a version, and for what part of it."""
    busy: dict[str, float] = {}
    for link in links:
        if link["limit"] and seconds:
            for member in (f"trainer {link['trainer']}", f"engine {link['engine']}"):
                busy[member] = busy.get(member, 0.0) + link.get("sent", 0) / link["limit"] / seconds
    if not busy:
        return None
    member = max(busy, key=lambda name: busy[name])
    return {"member": member, "busy": busy[member]}


def _rank(member: _Member) -> tuple[str, int]:
    side, _, rank = member.name.partition(" ")
    return side, int(rank) if rank.isdecimal() else 0
