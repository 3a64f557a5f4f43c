"""The report of a run: one self-contained HTML page.

path = write_report(record, settings, Path("runs/a/report.html"))
"""

from __future__ import annotations

import time
from html import escape
from pathlib import Path

import msgspec

from weft import __version__
from weft.errors import ConfigError
from weft.observe.charts import Bar, Curve, line_chart, timeline
from weft.rl.run.record import Record
from weft.rl.settings import LoopSettings

SHOWN_VERSIONS = 4
"""In the timeline."""
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1380px; margin: 2em auto; padding: 0 1em; color: #212529; }
h1 { font-size: 1.5em; } h2 { font-size: 1.1em; margin: 0 0 .3em; }
.cards { display: flex; flex-wrap: wrap; gap: .8em; margin: 1em 0; }
.card { background: #f1f3f5; border-radius: 6px; padding: .6em 1em; } .card b { display: block; font-size: 1.25em; }
.charts { display: flex; flex-wrap: wrap; gap: 1.5em; } figure { margin: 0; } figcaption { color: #868e96; }
.settings { columns: 4 14em; font-size: .85em; } .settings i { color: #868e96; font-style: normal; }
"""


def write_report(record: Record, settings: LoopSettings, path: Path) -> Path:
    """Write the page; returns its path."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page(record, settings))
    except OSError as error:
        raise ConfigError(f"the report `{path}` cannot be written: {error.strerror}") from error
    return path


def page(record: Record, settings: LoopSettings) -> str:
    """The page as text."""
    trainers, engines = count(settings.num_trainers, "trainer"), count(settings.num_engines, "engine")
    title = f"weft: {settings.task}, {trainers} → {engines}"
    return "\n".join(
        [
            f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title><style>{_STYLE}</style>",
            f"<h1>{escape(title)}</h1>",
            f"<p>{escape(_sentence(settings))}</p>",
            _cards(record),
            f"<div class=charts>{''.join(_figures(record, settings))}</div>",
            "<h2>Settings</h2>",
            f"<div class=settings>{_settings(settings)}</div>",
            f"<p><small>weft {escape(__version__)}, {time.strftime('%Y-%m-%d %H:%M')}</small></p></html>",
        ]
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


def _cards(record: Record) -> str:
    found = record.summary()
    facts = {
        "reward": f"{found['reward_first']:.3f} → {found['reward_last']:.3f}",
        "seconds": f"{found['seconds']:.0f}",
        "versions": f"{found['num_versions']}, {'all verified' if found['all_verified'] else 'not all verified'}",
        "transfer, median": f"{found['transfer_ms']['p50']:.1f} ms",
        "engine pause, median": f"{found['pause_ms']['p50']:.2f} ms",
        "staleness, mean and most": f"{found['staleness']:.2f}, {found['max_staleness']}",
        "samples a second": f"{found['samples_per_s']:.0f}",
        "bytes a version": f"{found['bytes_per_version'] / 1e6:.2f} MB",
    }
    cards = [f"<div class=card><b>{escape(value)}</b>{escape(name)}</div>" for name, value in facts.items()]
    return f"<div class=cards>{''.join(cards)}</div>"


def _figures(record: Record, settings: LoopSettings) -> list[str]:
    iterations = record.iterations
    rewards = Curve(name="reward", points=[(i.number, i.reward) for i in iterations])
    stale = [
        Curve(name="mean", points=[(i.number, i.staleness) for i in iterations]),
        Curve(name="most", points=[(i.number, float(i.max_staleness)) for i in iterations]),
    ]
    times = [
        Curve(name="transfer", points=[(v.number, v.transfer_ms) for v in record.committed[1:]]),
        Curve(name="pause", points=_pauses(record)),
    ]
    return [
        _figure("Reward", line_chart([rewards], x_name="iterations", y_name="mean of samples", least_top=1.0)),
        _figure("Staleness of samples", line_chart(stale, x_name="iterations", y_name="versions", least_top=1.5)),
        _figure("Transfer and pause", line_chart(times, x_name="version", y_name="ms")),
        _figure(
            f"The last {SHOWN_VERSIONS} versions: published to released (read), to committed everywhere; commits",
            timeline(_bars(record, settings), unit="ms"),
        ),
    ]


def _pauses(record: Record) -> list[tuple[float, float]]:
    """The longest pause of each version."""
    longest: dict[int, float] = {}
    for commit in record.commits:
        longest[commit.version] = max(longest.get(commit.version, 0.0), commit.pause_ms)
    return [(float(version), pause) for version, pause in sorted(longest.items()) if version]


def _bars(record: Record, settings: LoopSettings) -> list[Bar]:
    """The timeline of the last versions, in milliseconds."""
    shown = record.committed[-SHOWN_VERSIONS:]
    numbers = {version.number for version in shown}
    bars = []
    for version in shown:
        start, released, end = (1e3 * s for s in (version.published_s, version.released_s, version.committed_s))
        title = f"version {version.number}: {version.transfer_ms:.1f} ms"
        bars.append(Bar(row="reading", start=start, end=released, colour=0, title=title))
        bars.append(Bar(row="deciding", start=released, end=end, colour=2, title=title))
    for commit in record.commits:
        if commit.version in numbers:
            end = 1e3 * commit.at_s
            title = f"engine rank {commit.engine_rank} commits version {commit.version}: {commit.pause_ms:.2f} ms"
            row = f"engine {commit.engine_rank}"
            bars.append(Bar(row=row, start=end - commit.pause_ms, end=end, colour=1, title=title))
    for iteration in record.iterations:
        train_s = iteration.metrics.get("train_s", 0.0)
        if iteration.number + 1 in numbers:
            end = 1e3 * iteration.at_s
            title = f"iteration {iteration.number}: {train_s * 1e3:.0f} ms"
            bars.append(Bar(row="training", start=end - 1e3 * train_s, end=end, colour=3, title=title))
    return bars


def _figure(caption: str, drawing: str) -> str:
    return f"<figure><h2>{escape(caption)}</h2>{drawing}</figure>"


def _settings(settings: LoopSettings) -> str:
    values = msgspec.to_builtins(settings)
    return "".join(f"<div><i>{escape(name)}</i> {escape(str(value))}</div>" for name, value in values.items())
