"""A report: one HTML file that needs no other, with cards, charts and tables over the width of the window.

    page = Page(title="weft bench transfer", lead="two cores", cards={"copy": "12 GB/s"}, parts=[Chart(…), Table(…)])
    write_page(page, Path("report.html"))

Charts are specs that `page/charts.js` draws; readers can save each as PNG or SVG.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from weft import __version__
from weft.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A drawing: `spec` as `page/charts.js` describes it."""

    title: str
    spec: Mapping[str, Any]
    note: str = ""
    is_wide: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of cells; numbers are aligned to the right."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    is_wide: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A report."""

    title: str
    lead: str = ""
    cards: Mapping[str, str] = field(default_factory=dict)
    parts: Sequence[Chart | Table] = ()


def page_text(name: str) -> str:
    """A file that pages are made of."""
    return resources.files("weft.web").joinpath("page", name).read_text()


def write_page(page: Page, path: Path) -> Path:
    """Write a report; returns its path."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render(page))
    except OSError as error:
        raise ConfigError(f"the report `{path}` cannot be written: {error.strerror}") from error
    return path


def render(page: Page) -> str:
    """The file as text."""
    parts = [_part(number, part) for number, part in enumerate(page.parts)]
    specs = {f"chart-{number}": part.spec for number, part in enumerate(page.parts) if isinstance(part, Chart)}
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{escape(page.title)}</title>',
            '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">',
            f"<style>{page_text('page.css')}</style></head><body>",
            f'<header><h1>{escape(page.title)}</h1><span class="soft">{escape(page.lead)}</span>',
            '<span class="end"><button id="theme">light / dark</button></span></header>',
            f'<main><div class="cards">{_cards(page.cards)}</div><div class="views">{"".join(parts)}</div></main>',
            f'<footer class="soft">weft {escape(__version__)}, {time.strftime("%Y-%m-%d %H:%M")}</footer>',
            f"<script>{page_text('echarts.min.js')}</script>",
            f"<script>{page_text('charts.js')}</script>",
            f"<script>{_START % _embedded(specs)}</script></body></html>",
        ]
    )


_START = """
const specs = %s;
for (const [id, spec] of Object.entries(specs)) {
  const element = document.getElementById(id);
  weftCharts.draw(element, spec);
  weftCharts.addButtons(element.parentElement.querySelector(".bar"), element, id);
}
document.getElementById("theme").onclick = weftCharts.toggleTheme;
weftCharts.useTheme();
"""


def _embedded(specs: Mapping[str, Any]) -> str:
    """JSON that cannot end the script it is in."""
    return json.dumps(specs).replace("</", "<\\/")


def _cards(cards: Mapping[str, str]) -> str:
    return "".join(f'<div class="card"><b>{escape(text)}</b>{escape(name)}</div>' for name, text in cards.items())


def _part(number: int, part: Chart | Table) -> str:
    width = "wide" if part.is_wide else "half"
    head = f'<div class="bar"><h2>{escape(part.title)}</h2>'
    if isinstance(part, Table):
        return f'<section class="view {width}">{head}</div><div class="scroll">{_table(part)}</div></section>'
    note = f'<span class="soft">{escape(part.note)}</span>'
    return f'<section class="view {width}">{head}{note}</div><div class="chart" id="chart-{number}"></div></section>'


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    rows = ("".join(_cell(value) for value in row) for row in table.rows)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def _cell(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return f"<td>{'' if value is None else 'yes' if value else 'no'}</td>"
    if isinstance(value, int | float):
        return f'<td class="number">{shown(value)}</td>'
    return f'<td class="text">{escape(str(value))}</td>'


def shown(value: float) -> str:
    """A number as short text."""
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
