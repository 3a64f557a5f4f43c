"""What came of storms: a table, JSON, and for a seed that failed the sequence of events that led to it."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.process.storm.fleet import Event
from tests.process.storm.settings import StormSettings
from tests.process.storm.storm import Storm
from tests.process.storm.verdicts import KINDS, Finding

AFTER_S = 0.5
MAX_LINES = 200
MAX_TOLD = 4
"""Findings of one seed whose story is told; the others follow from them, as a rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one seed came to."""

    settings: StormSettings
    seed: int
    seconds: float
    num_published: int
    num_committed: int
    num_commits: int
    """On all engines."""
    num_checks: int
    """Comparisons of everything an engine serves with its version."""
    faults: Counter[str]
    findings: list[Finding]
    growth_bytes: int
    growth_fds: int
    growth_threads: int

    @classmethod
    def of(cls, storm: Storm, seed: int, seconds: float) -> Outcome:
        verdicts = storm.verdicts
        return cls(
            settings=storm.settings,
            seed=seed,
            seconds=seconds,
            num_published=len(verdicts.ended),
            num_committed=len(verdicts.committed),
            num_commits=verdicts.counts["commits"],
            num_checks=verdicts.counts["checks"],
            faults=storm.faults,
            findings=list(verdicts.findings),
            growth_bytes=verdicts.growth.num_bytes,
            growth_fds=verdicts.growth.num_fds,
            growth_threads=verdicts.growth.num_threads,
        )


def story(journal: list[Event], findings: list[Finding]) -> str:
    """What was found, and for the first ones everything from the beginning of the fault until a little after it."""
    lines = [f"{finding.kind} at {finding.time_s:.3f} s: {finding.what}" for finding in findings]
    told = 0.0
    for finding in findings[:MAX_TOLD]:
        begins = [event.time_s for event in journal if event.what == "begins" and event.time_s <= finding.time_s]
        first, last = max([told, *begins[-1:]]), finding.time_s + AFTER_S
        lines += [str(event) for event in journal if first <= event.time_s <= last][-MAX_LINES:]
        told = max(told, last)
    return "\n".join(lines)


def table(outcomes: list[Outcome]) -> str:
    """One line for each transport and mode."""
    heads = ("transport", "mode", "seconds", "versions", "committed", "aborted", "commits", "checks", "faults")
    rows = [(*heads, *KINDS, "growth")]
    for pair in dict.fromkeys((o.settings.transport, o.settings.mode) for o in outcomes):
        mine = [o for o in outcomes if (o.settings.transport, o.settings.mode) == pair]
        found = Counter(finding.kind for o in mine for finding in o.findings)
        growth = (
            f"{max(o.growth_bytes for o in mine) / 2**20:.1f} MiB {max(o.growth_fds for o in mine)} fds "
            f"{max(o.growth_threads for o in mine)} threads"
        )
        numbers = [
            round(sum(o.seconds for o in mine)),
            sum(o.num_published for o in mine),
            sum(o.num_committed for o in mine),
            sum(o.num_published - o.num_committed for o in mine),
            sum(o.num_commits for o in mine),
            sum(o.num_checks for o in mine),
            sum(sum(o.faults.values()) for o in mine),
            *(found[kind] for kind in KINDS),
        ]
        rows.append((*pair, *map(str, numbers), growth))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    faults: Counter[str] = sum((o.faults for o in outcomes), Counter())
    lines.append("faults: " + ", ".join(f"{count} {name}" for name, count in faults.most_common()))
    return "\n".join(lines)


def write_json(path: Path, outcomes: list[Outcome]) -> None:
    """Everything, for other programs."""
    path.write_text(json.dumps([_plain(outcome) for outcome in outcomes], indent=1) + "\n")


def _plain(outcome: Outcome) -> dict[str, Any]:
    names = [name for name in Outcome.__slots__ if name not in ("settings", "findings", "faults")]
    return {
        "transport": outcome.settings.transport,
        "mode": outcome.settings.mode,
        **{name: getattr(outcome, name) for name in names},
        "faults": dict(outcome.faults),
        "findings": [{"kind": f.kind, "time_s": f.time_s, "what": f.what} for f in outcome.findings],
    }
