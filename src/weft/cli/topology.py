"""`weft topology detect`: this host as a topology file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from weft.cli.case_options import Json
from weft.cli.machine_topology import detect
from weft.cli.output import err, print_json, print_text
from weft.core.topology import cluster_toml
from weft.errors import ConfigError

topology_app = typer.Typer(no_args_is_help=True, help="Describe the hosts of a cluster.")


@topology_app.callback()
def _group() -> None:
    """Describe the hosts of a cluster."""


@topology_app.command("detect")
def detect_command(
    like: Annotated[
        str, typer.Option(help="Preset or .toml file for what a host does not report. Default: by its GPUs.")
    ] = "",
    save: Annotated[Path | None, typer.Option(help="Write it to a .toml file instead of printing it.")] = None,
    as_json: Json = False,
) -> None:
    """Describe this host: its network cards with their rates, and its GPUs. For --topology of other commands."""
    if save is not None and save.suffix != ".toml":
        raise ConfigError(f"`{save}` is not a .toml file", hint="topologies are read from .toml files")
    cluster = detect(like or None)
    if save is not None:
        save.write_text(cluster_toml(cluster))
        err.print(f"written to {escape(str(save))}; use it with --topology {escape(str(save))}")
    if as_json:
        print_json(asdict(cluster))
    elif save is None:
        print_text(cluster_toml(cluster).rstrip())
