"""Reports of what other commands wrote: events files, and results of `--json`; one alone, or two beside each other.

write_page(report_of(Path("events.jsonl")), Path("report.html"))
write_page(comparison(Path("old.json"), Path("new.json")), Path("report.html"))
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.errors import ConfigError
from weft.events import Event
from weft.observe.events_file import read_lines
from weft.web.page_file import Chart, Page, Table, shown
from weft.web.story import Story, details

MAX_TIMELINE_MEMBERS = 45
MAX_PREDICTED_MEMBERS = 10
MEASURES = ("seconds", "gb_per_s", "measured_ms", "predicted_ms", "published", "predicted", "paced_s", "predicted_s")
"""Fields of results that are drawn, in this order."""
COUNTS = {"num_senders": "sender", "num_receivers": "receiver", "num_nics": "NIC"}
"""Fields of results that say, as texts do, what a row is about."""
Facts = Mapping[str, Any]


def report_of(path: Path) -> Page:
    """One file."""
    result = _result(path)
    return result_page(path.stem, result) if result is not None else events_page(path)


def comparison(first: Path, second: Path) -> Page:
    """Two files of the same kind."""
    results = _result(first), _result(second)
    if results[0] is not None and results[1] is not None:
        return _compared_results((first, results[0]), (second, results[1]))
    if results[0] is not None or results[1] is not None:
        raise ConfigError(f"`{first}` and `{second}` are not of the same kind", hint="give two results or two events")
    return _compared_events(first, second)


def _result(path: Path) -> Any:
    """The one JSON value of a file; None if it is an events file, of one value per line."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"`{path}` cannot be read: {error}") from error
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        return None
    return None if isinstance(found, dict) and "at" in found else found


# Results of `--json`


def result_page(title: str, result: Any, *, extra: Sequence[Chart] = ()) -> Page:
    """What a command printed with `--json`: facts as cards, rows as a chart and a table."""
    facts = result if isinstance(result, dict) else {"rows": result}
    machine = facts.get("machine")
    lead = ", ".join(f"{name} {value}" for name, value in machine.items()) if isinstance(machine, dict) else ""
    cards = {name: _text(value) for name, value in facts.items() if isinstance(value, str | int | float)}
    parts: list[Chart | Table] = [*extra]
    for name, rows in _tables(facts).items():
        parts += _charts(name, rows)
        parts.append(_table(name, rows))
    return Page(title=title, lead=lead, cards=cards, parts=parts)


def _tables(facts: Facts, *, inside: str = "") -> dict[str, list[Facts]]:
    """Lists of rows, by name, also those `inside` parts of a result. A dictionary of numbers is one too."""
    found: dict[str, list[Facts]] = {}
    for name, value in facts.items():
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            found[f"{inside}{name}"] = value
        elif isinstance(value, dict) and value and all(isinstance(one, int | float) for one in value.values()):
            found[f"{inside}{name}"] = [{name: key, "value": one} for key, one in value.items()]
        elif isinstance(value, dict):
            found |= _tables(value, inside=f"{inside}{name}: ")
    return found


def _charts(name: str, rows: Sequence[Facts]) -> list[Chart]:
    """Bars of what rows measure."""
    named = [measure for measure in (*MEASURES, "value") if any(_is_number(row.get(measure)) for row in rows)]
    groups = [named] if {"measured_ms", "published"} & set(named) else [[measure] for measure in named]
    return [
        Chart(
            title=f"{name}: {', '.join(_words(measure) for measure in group)}",
            is_wide=len(rows) > 12,
            spec={
                "kind": "bars",
                "unit": _unit(group[0]),
                "rows": [_label(row) for row in rows],
                "series": [
                    {"name": _words(measure), "values": [_number(row.get(measure)) for row in rows]}
                    for measure in group
                ],
            },
        )
        for group in groups
    ]


def _table(name: str, rows: Sequence[Facts]) -> Table:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [
        [_text(row.get(key)) if isinstance(row.get(key), list | dict) else row.get(key) for key in columns]
        for row in rows
    ]
    return Table(title=name, columns=[_words(column) for column in columns], rows=cells)


def _label(row: Facts) -> str:
    """What a row is about: its texts, and how many send and receive."""
    texts = [value for value in row.values() if isinstance(value, str) and len(value) < 60]
    counts = [f"{row[key]} {word}{'s' * (row[key] != 1)}" for key, word in COUNTS.items() if _is_number(row.get(key))]
    return " · ".join(texts + counts) or "–"


def _by_label(rows: Sequence[Facts]) -> dict[tuple[str, int], Facts]:
    """Rows by what they are about; of several about the same, the first, the second and so on."""
    seen: Counter[str] = Counter()
    found = {}
    for row in rows:
        label = _label(row)
        seen[label] += 1
        found[label, seen[label]] = row
    return found


def _words(name: str) -> str:
    return name.replace("_", " ")


def _unit(measure: str) -> str:
    return {"seconds": "s", "gb_per_s": "GB/s", "paced_s": "s", "predicted_s": "s"}.get(measure) or (
        "ms" if measure.endswith("_ms") else ""
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: Any) -> float | None:
    return value if _is_number(value) else None


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(one)}" for key, one in value.items())
    if isinstance(value, list):
        return ", ".join(_text(one) for one in value[:8]) + (" …" if len(value) > 8 else "")
    return shown(value) if _is_number(value) else str(value)


def _compared_results(first: tuple[Path, Any], second: tuple[Path, Any]) -> Page:
    """Rows that both results have, by what they are about."""
    names = _two_names(first[0], second[0])
    tables = [_tables(result if isinstance(result, dict) else {"rows": result}) for _, result in (first, second)]
    parts: list[Chart | Table] = []
    for name in [name for name in tables[0] if name in tables[1]]:
        old_rows, new_rows = (_by_label(found[name]) for found in tables)
        pairs = [(row, new_rows[about]) for about, row in old_rows.items() if about in new_rows]
        for measure in (*MEASURES, "value"):
            both = [(old, new) for old, new in pairs if _is_number(old.get(measure)) and _is_number(new.get(measure))]
            if both:
                parts += _beside(name, measure, both, names)
    if not parts:
        raise ConfigError(f"`{first[0]}` and `{second[0]}` have no rows in common")
    return Page(title=f"{names[0]} and {names[1]}", parts=parts)


def _beside(
    name: str, measure: str, both: Sequence[tuple[Facts, Facts]], names: tuple[str, str]
) -> list[Chart | Table]:
    """One measure of two results."""
    rows = [_label(old) for old, _ in both]
    values = [[float(pair[side][measure]) for pair in both] for side in (0, 1)]
    series = [{"name": names[side], "values": values[side]} for side in (0, 1)]
    spec = {"kind": "bars", "unit": _unit(measure), "rows": rows, "series": series}
    cells = [
        [row, old, new, new / old if old else None] for row, old, new in zip(rows, values[0], values[1], strict=True)
    ]
    title = f"{name}: {_words(measure)}"
    return [Chart(title=title, spec=spec), Table(title=title, columns=["", *names, "ratio"], rows=cells, is_wide=False)]


# Events


def events_page(path: Path) -> Page:
    """One run: its versions, where their time went, and the last version in detail."""
    story = _story(path)
    state = story.state()
    last = story.version(state["versions"][-1]["version"])
    assert last is not None
    return Page(
        title=f"weft: {path.name}",
        lead=f"{state['num_committed']} versions committed, {state['num_aborted']} aborted. {last['sentence']}.",
        cards=_cards(state),
        parts=[
            Chart(title="Update and pause times", spec=history_spec({"": state["versions"]}, predicted=state["plan"])),
            Chart(title="Routing: bytes by link", spec=_matrix_spec(story.links() or last["links"])),
            Chart(
                title=f"Version {last['version']}",
                note="framed: members of the chain of waits that ended last",
                spec=timeline_spec(last),
                is_wide=True,
            ),
            Table(
                title=f"Version {last['version']}: where its time went",
                columns=("what", "ms", "share"),
                rows=[(one["what"], one["seconds"] * 1e3, one["seconds"] / last["seconds"]) for one in last["chain"]],
                is_wide=False,
            ),
            Table(title="Links, both ends", columns=_LINK_COLUMNS, rows=_link_cells(last["links"]), is_wide=False),
            Table(
                title="Versions",
                columns=("version", "outcome", "ms", "pause ms", "bytes", "why"),
                rows=[
                    (
                        one["version"],
                        one["outcome"],
                        one["seconds"] * 1e3,
                        one["pause_s"] * 1e3,
                        one["bytes"],
                        one["sentence"],
                    )
                    for one in reversed(state["versions"])
                ],
            ),
            Table(title="Failures", columns=("what",), rows=[(one["what"],) for one in reversed(state["failures"])]),
        ],
    )


_LINK_COLUMNS = ("trainer", "engine", "transport", "planned", "sent", "sent s", "arrived", "arrived s")


def _link_cells(links: Sequence[Facts]) -> list[list[Any]]:
    keys = ("trainer", "engine", "transport", "planned", "sent", "sent_s", "arrived", "arrived_s")
    return [[link.get(key) for key in keys] for link in links]


def _story(path: Path) -> Story:
    story = Story()
    for line in read_lines(path):
        story.take(line)
    if not story.state()["versions"]:
        raise ConfigError(f"`{path}` has no version", hint="versions are written when they have ended")
    return story


def _cards(state: Facts) -> dict[str, str]:
    good = [one for one in state["versions"] if one["outcome"] == "committed"]
    if not good:
        return {"versions": "none committed"}
    seconds = sorted(one["seconds"] for one in good)
    predicted = state["plan"].get("predicted_s")
    return {
        "update, median": f"{statistics.median(seconds) * 1e3:.1f} ms",
        "update, 95th percentile": f"{seconds[int(0.95 * (len(seconds) - 1))] * 1e3:.1f} ms",
        "predicted by its NICs": f"{predicted * 1e3:.1f} ms" if predicted else "–",
        "pause, median": f"{statistics.median(one['pause_s'] for one in good) * 1e3:.2f} ms",
        "moved by the last": f"{good[-1]['bytes'] / 1e6:.2f} MB",
        "members": str(len(state["members"])),
    }


def history_spec(runs: Mapping[str, Sequence[Facts]], *, predicted: Facts | None = None) -> dict[str, Any]:
    """Times of committed versions; of several runs, by name."""
    series: list[dict[str, Any]] = []
    for name, versions in runs.items():
        good = [one for one in versions if one["outcome"] == "committed"]
        for what, key in (("update", "seconds"), ("pause", "pause_s")):
            points = [(one["version"], one[key] * 1e3) for one in good]
            series.append({"name": f"{name} {what}".strip(), "points": points})
    seconds = (predicted or {}).get("predicted_s")
    if seconds and series[0]["points"]:
        ends = series[0]["points"][0][0], series[0]["points"][-1][0]
        series.append({"name": "predicted", "is_dashed": True, "points": [(end, seconds * 1e3) for end in ends]})
    return {"kind": "lines", "x_name": "version", "y_name": "ms", "series": series}


def timeline_spec(version: Facts, *, mark: str = "") -> dict[str, Any]:
    """What members did, in milliseconds; of many members, those that were busy for longest. `mark`: before names."""
    critical = {cause["member"] for cause in version["chain"]}
    spans = [
        span
        for span in version["spans"]
        if span["lane"] != "chain" and span["member"] != "controller" and not span["peer"]
    ]
    busy: dict[str, float] = {}
    for span in spans:
        busy[span["member"]] = busy.get(span["member"], 0.0) + (0.0 if _waits(span) else span["duration_s"])
    longest = sorted(busy, key=lambda name: (name not in critical, -busy[name]))[:MAX_TIMELINE_MEMBERS]
    bars = [
        {
            "row": f"{mark}{span['member']}",
            "name": span["name"],
            "start": span["start_s"] * 1e3,
            "end": (span["start_s"] + span["duration_s"]) * 1e3,
            "is_critical": span["member"] in critical and not _waits(span),
            "is_waiting": _waits(span),
        }
        for span in spans
        if span["member"] in set(longest)
    ]
    return {"kind": "timeline", "unit": "ms", "bars": bars}


def _waits(span: Facts) -> bool:
    return str(span["name"]).startswith("wait")


def _matrix_spec(links: Sequence[Facts]) -> dict[str, Any]:
    trainers, engines = (sorted({link[side] for link in links}) for side in ("trainer", "engine"))
    row, column = ({rank: at for at, rank in enumerate(ranks)} for ranks in (trainers, engines))
    return {
        "kind": "matrix",
        "unit": "MB",
        "x_name": "engine rank",
        "y_name": "trainer",
        "columns": [str(rank) for rank in engines],
        "rows": [str(rank) for rank in trainers],
        "cells": [
            [
                column[link["engine"]],
                row[link["trainer"]],
                (link["planned"] or link.get("sent", 0)) / 1e6,
                link["transport"],
            ]
            for link in links
        ],
    }


def timelines_beside(predicted: Sequence[Event], measured: Facts | None = None) -> Chart:
    """What the simulator predicts, and what a version of an events file took, over one scale of time."""
    busy: dict[str, float] = {}
    merged: dict[tuple[str, str], list[float]] = {}
    for event in predicted:
        busy[event.member] = busy.get(event.member, 0.0) + event.duration_s
        ends = merged.setdefault((event.member, event.name), [event.start_s, event.start_s + event.duration_s, 0.0])
        ends[0] = min(ends[0], event.start_s)
        ends[1] = max(ends[1], event.start_s + event.duration_s)
        ends[2] += event.duration_s
    longest = set(sorted(busy, key=lambda name: -busy[name])[:MAX_PREDICTED_MEMBERS])
    bars = [
        {
            "row": f"predicted: {member} {name}",
            "name": name,
            "start": start * 1e3,
            "end": end * 1e3,
            "note": f"busy for {spent * 1e3:.1f} ms",
        }
        for (member, name), (start, end, spent) in merged.items()
        if member in longest
    ]
    if measured is not None:
        bars += timeline_spec(details(measured), mark="measured: ")["bars"]
    title = "Predicted" if measured is None else f"Predicted, and version {measured['version']} as measured"
    note = "from the first to the last of each stage, on the busiest members"
    return Chart(title=title, note=note, spec={"kind": "timeline", "unit": "ms", "bars": bars}, is_wide=True)


def _compared_events(first: Path, second: Path) -> Page:
    """Two runs: times of their versions, and where the time of the median version went."""
    names = _two_names(first, second)
    stories = [_story(path) for path in (first, second)]
    states = [story.state() for story in stories]
    cards = [_cards(state) for state in states]
    rows = [[name, *(found.get(name, "–") for found in cards)] for name in dict.fromkeys([*cards[0], *cards[1]])]
    parts: list[Chart | Table] = [
        Chart(
            title="Update and pause times",
            spec=history_spec({name: state["versions"] for name, state in zip(names, states, strict=True)}),
            is_wide=True,
        ),
        Table(title="Beside each other", columns=("", *names), rows=rows),
    ]
    for name, story, state in zip(names, stories, states, strict=True):
        version = _median_version(state)
        found = story.version(version)
        if found is not None:
            note = found["sentence"]
            parts.append(
                Chart(
                    title=f"{name}: version {version}, the median", note=note, spec=timeline_spec(found), is_wide=True
                )
            )
    return Page(title=f"{names[0]} and {names[1]}", parts=parts)


def _median_version(state: Facts) -> int:
    by_time = sorted(state["versions"], key=lambda one: one["seconds"])
    return int(by_time[len(by_time) // 2]["version"])


def _two_names(first: Path, second: Path) -> tuple[str, str]:
    """Short names that differ."""
    return (first.name, second.name) if first.name != second.name else (str(first), str(second))
