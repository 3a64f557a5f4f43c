"""`weft why`: where the time of a version went."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from weft.cli.case_options import Json
from weft.cli.output import out, print_json, show_table
from weft.errors import ConfigError
from weft.observe.why import explain


def why_command(
    events: Annotated[Path, typer.Argument(help="The file that `weft controller --events FILE` writes.")],
    version: Annotated[int | None, typer.Argument(help="The version. Default: the last one that ended.")] = None,
    as_json: Json = False,
) -> None:
    """Say why a version took as long as it did: the chain of waits that ended last."""
    explanation = explain(_record(events, version))
    if as_json:
        print_json(asdict(explanation))
        return
    out.print(escape(explanation.sentence))
    rows = [
        (f"{cause.seconds * 1e3:.1f}", f"{cause.seconds / explanation.seconds:.0%}", cause.what)
        for cause in explanation.causes
    ]
    show_table(f"version {explanation.version}, {explanation.outcome}", ("ms", "share", "what"), rows, as_json=False)


def _record(path: Path, version: int | None) -> dict[str, Any]:
    """The line of a version. The last line may be incomplete while a controller writes."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"`{path}` cannot be read: {error}") from error
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise ConfigError(f"`{path}` line {number} is not an event: {error}") from error
    known = [record for record in records if isinstance(record, dict) and "moments" in record]
    found = [record for record in known if version is None or record["version"] == version]
    if not found:
        what = "no version" if version is None else f"no version {version}"
        ended = ", ".join(str(record["version"]) for record in known[-5:])
        raise ConfigError(f"`{path}` has {what}", hint=f"the last that ended: {ended or 'none'}")
    return found[-1]
