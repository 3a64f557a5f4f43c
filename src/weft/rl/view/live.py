"""The live view of a run: reward, versions on each engine, bytes, transfer and pause times.

On a terminal a view that is redrawn; elsewhere a line every few seconds.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from weft.rl.run.launch import Watch
from weft.rl.run.record import Record, quantiles
from weft.rl.settings import LoopSettings

LINE_S = 5.0
CURVE_HEIGHT, CURVE_WIDTH = 8, 64
_DOTS = ((0x40, 0x04, 0x02, 0x01), (0x80, 0x20, 0x10, 0x08))
"""Bits of a Braille cell: left and right column, from the bottom."""


@contextlib.contextmanager
def live_view(settings: LoopSettings, console: Console) -> Iterator[Watch]:
    """Yields a function to call often with the record."""
    if not console.is_terminal:
        yield _lines(settings, console)
        return
    with Live(console=console, refresh_per_second=8, transient=False) as live:
        yield lambda record: live.update(view(settings, record))


def _lines(settings: LoopSettings, console: Console) -> Watch:
    """A line every few seconds, for logs."""
    said = time.monotonic()

    def say(record: Record) -> None:
        nonlocal said
        if not record.iterations or time.monotonic() - said < LINE_S:
            return
        said = time.monotonic()
        last = record.iterations[-1]
        transfers = quantiles([version.transfer_ms for version in record.committed])
        console.print(
            f"{last.at_s:5.0f} s  iteration {last.number + 1}/{settings.iterations}  reward {last.reward:.3f}  "
            f"version {record.committed[-1].number if record.committed else '–'} in {transfers['p50']:.1f} ms  "
            f"{last.staleness:.1f} versions old  {record.example}",
            soft_wrap=True,
        )

    return say


def view(settings: LoopSettings, record: Record) -> RenderableType:
    """The whole picture."""
    done, total = len(record.iterations), settings.iterations
    title = (
        f"{settings.method.value} · {settings.task} · {settings.model} · {settings.num_trainers} × "
        f"{settings.trainer.value} → {settings.num_engines} × TP{settings.ranks_per_engine} "
        f"{settings.stored_dtype.value}"
    )
    rewards = [iteration.reward for iteration in record.iterations]
    head = Text(f"iteration {done}/{total}", style="bold")
    head.append(f"   {record.since(time.time()) if not record.ended_s else record.ended_s:.0f} s")
    if rewards:
        head.append(f"   reward {rewards[0]:.3f} → {rewards[-1]:.3f}", style="green")
        head.append(f"   {record.example}", style="not bold")
    body = Group(head, Text(curve(rewards), style="green"), _transfers(record), _engines(settings, record))
    return Panel(body, title=title, border_style="cyan", width=min(CURVE_WIDTH + 26, 100))


def _transfers(record: Record) -> Text:
    """One line about versions."""
    if not record.committed:
        return Text("waiting for the first version …" if not record.versions else record.versions[-1].reason)
    last = record.committed[-1]
    times = quantiles([version.transfer_ms for version in record.committed[1:] or record.committed])
    pauses = quantiles([commit.pause_ms for commit in record.commits])
    checked = "verified" if record.all_verified else "not verified"
    return Text(
        f"version {last.number} {checked} · {last.num_bytes / 1e6:.2f} MB · transfer {times['p50']:.1f} ms "
        f"(p95 {times['p95']:.1f}) · pause {pauses['p50']:.2f} ms"
    )


def _engines(settings: LoopSettings, record: Record) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("engine", "version", "samples", "last pause"):
        table.add_column(name, justify="left" if name == "engine" else "right")
    newest = {commit.engine_rank // settings.ranks_per_engine: commit for commit in record.commits}
    for engine in range(settings.num_engines):
        lost = record.lost.get(f"engine {engine}")
        commit = newest.get(engine)
        table.add_row(
            str(engine),
            f"lost: {lost}" if lost else ("–" if commit is None else str(commit.version)),
            str(record.samples_of.get(engine, 0)),
            "–" if commit is None else f"{commit.pause_ms:.2f} ms",
            style="red" if lost else None,
        )
    return table


def curve(values: Sequence[float], *, width: int = CURVE_WIDTH, height: int = CURVE_HEIGHT) -> str:
    """A line of dots, from 0 to 1 or beyond, with its scale on the left."""
    top = max([1.0, *values])
    columns, rows = 2 * width, 4 * height
    cells = [[0] * width for _ in range(height)]
    for column in range(columns) if values else ():
        share = values[column * len(values) // columns : max((column + 1) * len(values) // columns, 0)]
        if not share:
            share = values[min(column * len(values) // columns, len(values) - 1) :][:1]
        level = min(int(sum(share) / len(share) / top * rows), rows - 1)
        cells[height - 1 - level // 4][column // 2] |= _DOTS[column % 2][level % 4]
    lines = ["".join(chr(0x2800 + cell) for cell in row) for row in cells]
    labels = [f"{top:4.1f} ┤", *["     │"] * (height - 2), " 0.0 ┤"]
    return "\n".join(label + line for label, line in zip(labels, lines, strict=True))
