"""`weft trace`: versions of a run for Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.case_options import Json
from weft.cli.output import err, print_json
from weft.errors import ConfigError
from weft.observe.events_file import find_version, read_versions
from weft.observe.trace import write_trace
from weft.observe.version_trace import run_spans, version_spans


def trace_command(
    events: Annotated[Path, typer.Argument(help="The file that `weft controller --events FILE` writes.")],
    version: Annotated[int | None, typer.Argument(help="One version. Default: all that ended.")] = None,
    out: Annotated[Path, typer.Option(help="The trace to write.")] = Path("trace.json"),
    as_json: Json = False,
) -> None:
    """Write what every member did as a trace for ui.perfetto.dev."""
    if version is not None:
        records = [find_version(events, version)]
        spans = version_spans(records[0])
    else:
        records = read_versions(events)
        spans = run_spans(records)
    if not spans:
        raise ConfigError(f"`{events}` has no version", hint="versions are written when they have ended")
    num_spans = write_trace(spans, out)
    if as_json:
        print_json({"trace": str(out), "num_versions": len(records), "num_spans": num_spans})
    else:
        err.print(f"wrote {num_spans} spans of {len(records)} versions to {out}: open it at ui.perfetto.dev")
