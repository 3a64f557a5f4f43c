"""The `weft` command: parsing, streams, exit codes. Every command delegates.

Data goes to stdout (a table, or one JSON object with `--json`), everything else to stderr. Exit codes: 0 done,
1 a requested validation row failed, 2 wrong input (`error:` and `hint:` on stderr), 130 interrupted.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any, NoReturn

import typer
from rich.markup import escape

from weft import __version__
from weft.cli.bench import bench_app
from weft.cli.bench_slice import slice_command
from weft.cli.controller import controller_command
from weft.cli.dashboard import dashboard_command
from weft.cli.env import env_command
from weft.cli.keys import keys_command
from weft.cli.lab import lab_app
from weft.cli.lists import models_command, presets_command, topologies_command
from weft.cli.output import err, out
from weft.cli.plan import plan_command
from weft.cli.rehearse import rehearse_command
from weft.cli.report import report_command
from weft.cli.rl import demo_command, rl_command
from weft.cli.serve import serve_command
from weft.cli.simulate import simulate_command
from weft.cli.top import top_command
from weft.cli.topology import topology_app
from weft.cli.trace import trace_command
from weft.cli.validate import validate_command
from weft.cli.why import why_command
from weft.errors import WeftError

_UsageError: Any = typer.BadParameter.__bases__[0]
"""Raised by parsing. typer bundles its own copy of click, so the class is reached through one that typer exports."""

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Move fresh policy weights from the GPUs that train a model to the GPUs that serve it.",
)
app.command("demo")(demo_command)
app.command("rl")(rl_command)
app.command("plan")(plan_command)
app.command("simulate")(simulate_command)
app.command("rehearse")(rehearse_command)
app.command("validate")(validate_command)
app.command("controller")(controller_command)
app.command("serve")(serve_command)
app.command("why")(why_command)
app.command("trace")(trace_command)
app.command("top")(top_command)
app.command("dashboard")(dashboard_command)
app.command("report")(report_command)
app.command("keys")(keys_command)
app.command("env")(env_command)
bench_app.command("slice")(slice_command)
app.add_typer(bench_app, name="bench")
app.add_typer(lab_app, name="lab")
app.add_typer(topology_app, name="topology")
app.command("models")(models_command)
app.command("presets")(presets_command)
app.command("topologies")(topologies_command)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        out.print(__version__)
        raise typer.Exit


def main() -> None:
    """Run the command line. Wrong input never shows a traceback."""
    try:
        sys.exit(app(standalone_mode=False) or 0)
    except WeftError as error:
        _fail(str(error), error.hint)
    except _UsageError as error:
        error.show()
        sys.exit(2)
    except MemoryError:
        _fail("out of memory", "plan fewer ranks, replicas or shards")
    except (KeyboardInterrupt, typer.Abort):
        err.print("interrupted")
        sys.exit(130)


def _fail(message: str, hint: str | None) -> NoReturn:
    err.print(f"[bold red]error:[/] {escape(message)}")
    if hint:
        err.print(f"[bold]hint:[/] {escape(hint)}")
    sys.exit(2)
