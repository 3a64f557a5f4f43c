"""`weft trace`: versions of a run for Perfetto, or for whatever collects OpenTelemetry spans."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.case_options import Json
from weft.cli.output import err, print_json
from weft.errors import ConfigError
from weft.observe.events_file import find_version, read_versions
from weft.observe.otel import span_exporter
from weft.observe.trace import write_trace
from weft.observe.version_trace import run_spans, version_spans


def trace_command(
    events: Annotated[Path, typer.Argument(help="The file that `weft controller --events FILE` writes.")],
    version: Annotated[int | None, typer.Argument(help="One version. Default: all that ended.")] = None,
    out: Annotated[Path, typer.Option(help="The trace to write: .json, or .pftrace for Perfetto's own format.")] = Path(
        "trace.json"
    ),
    otel: Annotated[
        bool, typer.Option("--otel", help="Export OpenTelemetry spans instead, to OTEL_EXPORTER_OTLP_ENDPOINT.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write what every member did as a trace for ui.perfetto.dev."""
    records = read_versions(events) if version is None else [find_version(events, version)]
    if not records:
        raise ConfigError(f"`{events}` has no version", hint="versions are written when they have ended")
    if otel:
        with span_exporter() as export:
            num_spans = sum(export(record) for record in records)
        where, done = "OpenTelemetry", f"exported {num_spans} spans of {len(records)} versions"
    else:
        spans = run_spans(records) if version is None else version_spans(records[0])
        num_spans = write_trace(spans, out)
        where = str(out)
        done = f"wrote {num_spans} spans of {len(records)} versions to {out}: open it at ui.perfetto.dev"
    if as_json:
        print_json({"trace": where, "num_versions": len(records), "num_spans": num_spans})
    else:
        err.print(done)
