"""The report of a run: one self-contained HTML page.

path = write_report(record, settings, Path("runs/a/report.html"))
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from weft.rl.run.record import Record
from weft.rl.settings import LoopSettings
from weft.web.page_file import Chart, Page, Table, write_page

SHOWN_VERSIONS = 4
"""In the timeline."""


def write_report(record: Record, settings: LoopSettings, path: Path) -> Path:
    """Write the page; returns its path."""
    return write_page(page(record, settings), path)


def page(record: Record, settings: LoopSettings) -> Page:
    """The page as data."""
    trainers, engines = count(settings.num_trainers, "trainer"), count(settings.num_engines, "engine")
    values = msgspec.to_builtins(settings)
    return Page(
        title=f"weft: {settings.task}, {trainers} → {engines}",
        lead=_sentence(settings),
        cards=_cards(record),
        parts=[
            *_charts(record),
            Table(title="Settings", columns=("setting", "value"), rows=[(k, str(v)) for k, v in values.items()]),
        ],
    )


def _sentence(settings: LoopSettings) -> str:
    apart = count(settings.max_staleness, "version")
    how = "in turn (sync)" if settings.sync else f"at the same time, at most {apart} apart"
    frozen = " Engines were frozen at version 0." if settings.freeze_engines else ""
    return (
        f"{count(settings.num_trainers, 'trainer rank')} ({settings.trainer.value}, {settings.dtype.value}) and "
        f"{count(settings.num_engines, 'engine')} of {count(settings.ranks_per_engine, 'rank')} "
        f"({settings.stored_dtype.value}), training and generating {how}; weights by {settings.method.value}.{frozen}"
    )


def count(number: int, what: str) -> str:
    """A number and its noun."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def _cards(record: Record) -> dict[str, str]:
    found = record.summary()
    return {
        "reward": f"{found['reward_first']:.3f} → {found['reward_last']:.3f}",
        "seconds": f"{found['seconds']:.0f}",
        "versions": f"{found['num_versions']}, {'all verified' if found['all_verified'] else 'not all verified'}",
        "transfer, median": f"{found['transfer_ms']['p50']:.1f} ms",
        "engine pause, median": f"{found['pause_ms']['p50']:.2f} ms",
        "staleness, mean and most": f"{found['staleness']:.2f}, {found['max_staleness']}",
        "samples a second": f"{found['samples_per_s']:.0f}",
        "bytes a version": f"{found['bytes_per_version'] / 1e6:.2f} MB",
    }


def _charts(record: Record) -> list[Chart]:
    iterations = record.iterations
    rewards = {"reward": [(i.number, i.reward) for i in iterations]}
    stale = {
        "mean": [(i.number, i.staleness) for i in iterations],
        "most": [(i.number, float(i.max_staleness)) for i in iterations],
    }
    times = {"transfer": [(v.number, v.transfer_ms) for v in record.committed[1:]], "pause": _pauses(record)}
    return [
        Chart(title="Reward", spec=_lines(rewards, "iteration", "mean of samples")),
        Chart(title="Staleness of samples", spec=_lines(stale, "iteration", "versions")),
        Chart(title="Transfer and pause", spec=_lines(times, "version", "ms"), is_wide=True),
        Chart(
            title=f"The last {SHOWN_VERSIONS} versions",
            note="published to released (read), to committed everywhere; commits",
            spec={"kind": "timeline", "unit": "ms", "bars": _bars(record)},
            is_wide=True,
        ),
    ]


def _lines(curves: dict[str, Any], x_name: str, y_name: str) -> dict[str, Any]:
    series = [{"name": name, "points": points} for name, points in curves.items()]
    return {"kind": "lines", "x_name": x_name, "y_name": y_name, "series": series}


def _pauses(record: Record) -> list[tuple[float, float]]:
    """The longest pause of each version."""
    longest: dict[int, float] = {}
    for commit in record.commits:
        longest[commit.version] = max(longest.get(commit.version, 0.0), commit.pause_ms)
    return [(float(version), pause) for version, pause in sorted(longest.items()) if version]


def _bars(record: Record) -> list[dict[str, Any]]:
    """The timeline of the last versions, in milliseconds since the first of them was published."""
    shown = record.committed[-SHOWN_VERSIONS:]
    numbers = {version.number for version in shown}
    first = min((version.published_s for version in shown), default=0.0)
    bars: list[dict[str, Any]] = []

    def add(row: str, name: str, start_s: float, end_s: float, note: str) -> None:
        start, end = (start_s - first) * 1e3, (end_s - first) * 1e3
        bars.append({"row": row, "name": name, "start": max(start, 0.0), "end": end, "note": note})

    for version in shown:
        note = f"version {version.number}: {version.transfer_ms:.1f} ms"
        add("reading", "send", version.published_s, version.released_s, note)
        add("deciding", "verify", version.released_s, version.committed_s, note)
    for commit in record.commits:
        if commit.version in numbers:
            note = f"version {commit.version}: {commit.pause_ms:.2f} ms"
            add(f"engine {commit.engine_rank}", "commit", commit.at_s - commit.pause_ms / 1e3, commit.at_s, note)
    for iteration in record.iterations:
        if iteration.number + 1 in numbers:
            train_s = iteration.metrics.get("train_s", 0.0)
            add("training", "train", iteration.at_s - train_s, iteration.at_s, f"iteration {iteration.number}")
    return bars
