"""`weft report`, and the option `--report FILE` of other commands: results as one page for a browser."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from weft.cli.case_options import Json
from weft.cli.output import err, print_json
from weft.errors import ConfigError
from weft.web.page_file import Chart, Page, write_page
from weft.web.reports import comparison, report_of, result_page

ReportFile = Annotated[
    Path | None, typer.Option("--report", help="Also write the results as a page, to an .html file.")
]


def report_command(
    first: Annotated[Path, typer.Argument(help="An events file, or what a command printed with --json.")],
    second: Annotated[Path | None, typer.Argument(help="Another of the same kind, to compare with.")] = None,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    as_json: Json = False,
) -> None:
    """Write a run, a benchmark, or two beside each other, as a page that needs no other file."""
    page = report_of(first) if second is None else comparison(first, second)
    _write(page, out, says=not as_json)
    if as_json:
        print_json({"report": str(out), "title": page.title, "num_parts": len(page.parts)})


def save_report(path: Path | None, title: str, result: Any, *, charts: Sequence[Chart] = ()) -> None:
    """Write a result, as it is printed with --json, to a page; nothing if none was asked for."""
    if path is not None:
        _write(result_page(title, result, extra=charts), path, says=True)


def _write(page: Page, path: Path, *, says: bool) -> None:
    if path.suffix not in {".html", ".htm"}:
        raise ConfigError(f"`{path}` is not an .html file", hint="reports are pages for a browser")
    write_page(page, path)
    if says:
        err.print(f"report: {escape(str(path))}", soft_wrap=True)
