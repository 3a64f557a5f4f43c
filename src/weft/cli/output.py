"""Streams and tables: data on stdout, everything else on stderr; one JSON object with `--json`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

out = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
MAX_TABLE_ROWS = 1000
"""Longer listings are plain tab-separated lines: a table must measure all rows first."""

err = Console(stderr=True, highlight=False)


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Shows the current stage on stderr, on a terminal only."""
    with err.status("starting") as status:
        yield lambda stage: status.update(f"{stage} …")


def print_text(text: str) -> None:
    """Text on stdout. A closed pipe, as `head` leaves it, ends the command without an error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit from None


def print_json(value: Any) -> None:
    """One line of JSON on stdout."""
    print_text(json.dumps(value, ensure_ascii=False))


def show_facts(title: str, facts: dict[str, str]) -> None:
    """A title and named facts, on stdout."""
    table = Table(title=title or None, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(escape(name), escape(value))
    out.print(table)


def show_table(title: str, keys: tuple[str, ...], rows: list[tuple[Any, ...]], *, as_json: bool) -> None:
    """Rows on stdout: a table, or a JSON list of objects."""
    if as_json:
        print_json([dict(zip(keys, row, strict=True)) for row in rows])
        return
    if len(rows) > MAX_TABLE_ROWS:
        print_text("\n".join("\t".join(str(cell) for cell in row) for row in rows))
        return
    table = Table(title=title, title_justify="left")
    for key in keys:
        table.add_column(key.replace("_", " "), overflow="fold")
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    out.print(table)


def gb(num_bytes: float) -> str:
    """Bytes as text."""
    return f"{num_bytes / 1e9:.3f} GB"


def number(value: float | str) -> str:
    """A number as short text; text stays as it is."""
    return f"{value:.4g}" if isinstance(value, float) else value
