"""`weft validate`: planner and simulator against published results."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from weft.cli.case_options import Json
from weft.cli.output import number, out, print_json, progress
from weft.cli.report import ReportFile, save_report
from weft.errors import ConfigError
from weft.sim.validation import ValidationRow, passed_ids, test_ids, validate


def validate_command(
    only: Annotated[str, typer.Option(help="Run only these tests, such as T1,T2; exit code 1 if one fails.")] = "",
    report_file: ReportFile = None,
    as_json: Json = False,
) -> None:
    """Compare planner and simulator with other systems' published results."""
    wanted = [part.strip().upper() for part in only.split(",") if part.strip()]
    unknown = [test for test in wanted if test not in test_ids()]
    if unknown:
        raise ConfigError(f"unknown test `{unknown[0]}`", hint=f"tests: {', '.join(test_ids())}")
    with progress() as on_progress:
        rows = validate(on_progress, only=wanted or None)
    passed = passed_ids(rows)
    save_report(report_file, "published results, predicted", [row.to_json() for row in rows])
    if as_json:
        print_json([row.to_json() for row in rows])
    else:
        _show_rows(rows, passed)
    if wanted and not all(passed.values()):
        raise typer.Exit(1)


def _show_rows(rows: list[ValidationRow], passed: dict[str, bool]) -> None:
    table = Table(title="published results, predicted", title_justify="left")
    for column in ("test", "quantity", "published", "predicted", "error", "rule", "split", "result"):
        table.add_column(
            column,
            overflow="fold",
            justify="right" if column in ("published", "predicted", "error") else "left",
        )
    for row in rows:
        result = "[green]pass[/]" if row.passed else "[bold red]NOT PASSED[/]"
        cells = (
            row.id,
            row.quantity,
            number(row.published),
            number(row.predicted),
            f"{row.error:+.1%}",
            row.rule,
            row.split,
        )
        table.add_row(*(escape(cell) for cell in cells), result)
    out.print(table)
    for row in rows:
        if not row.passed:
            out.print(f"[bold]{row.id}[/] not passed: {escape(row.quantity)}. {escape(row.note)}")
    whole = [row_id for row_id, good in passed.items() if good]
    out.print(
        f"{sum(row.passed for row in rows)} of {len(rows)} rows pass; all rows of {', '.join(whole)}. Constants "
        "are fitted on the rows marked fit (micro-benchmarks and stage costs); the others are held out."
    )
