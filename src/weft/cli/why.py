"""`weft why`: where the time of a version went."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from weft.cli.case_options import Json
from weft.cli.output import out, print_json, show_table
from weft.observe.events_file import find_version
from weft.observe.why import explain


def why_command(
    events: Annotated[Path, typer.Argument(help="The file that `weft controller --events FILE` writes.")],
    version: Annotated[int | None, typer.Argument(help="The version. Default: the last one that ended.")] = None,
    as_json: Json = False,
) -> None:
    """Say why a version took as long as it did: the chain of waits that ended last."""
    explanation = explain(find_version(events, version))
    if as_json:
        print_json(asdict(explanation))
        return
    out.print(escape(explanation.sentence))
    rows = [
        (f"{cause.seconds * 1e3:.1f}", f"{cause.seconds / explanation.seconds:.0%}", cause.what)
        for cause in explanation.causes
    ]
    show_table(f"version {explanation.version}, {explanation.outcome}", ("ms", "share", "what"), rows, as_json=False)
