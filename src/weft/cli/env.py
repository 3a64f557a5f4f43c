"""`weft env`: the network variables that collectives and transfer engines need, for a shell to evaluate."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from weft.cli.case_options import Json
from weft.cli.network_env import network_variables
from weft.cli.output import print_json, print_text


def env_command(
    nic: Annotated[str | None, typer.Option(help="Network interface. Default: the first that is up.")] = None,
    as_json: Json = False,
) -> None:
    """Print the NCCL, Gloo, UCX and UCCL variables for a network interface: eval "$(weft env --nic ens1f0)"."""
    variables = network_variables(nic)
    if as_json:
        print_json(variables)
    else:
        print_text("\n".join(f"export {name}={shlex.quote(value)}" for name, value in variables.items()))
