"""`weft keys`: key pairs for the controller and its members."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.case_options import Json
from weft.cli.output import err, print_json, print_text
from weft.runtime.control.keys import make_keys


def keys_command(
    names: Annotated[
        list[str], typer.Argument(help="Names of the keys, such as controller, trainer, engine, engine3.")
    ],
    side: Annotated[
        str | None, typer.Option(help="trainer, engine or controller, for names that do not begin with one.")
    ] = None,
    ranks: Annotated[str, typer.Option(help="Ranks the keys may join as, such as 0-7,9. Default: all.")] = "",
    folder: Annotated[Path, typer.Option(help="Folder for the key files.")] = Path("keys"),
    as_json: Json = False,
) -> None:
    """Make a key pair for each name: NAME.key stays with its owner, NAME.pub goes to the peers that trust it."""
    made = [str(path) for path in make_keys(folder, names, side=side, ranks=ranks)]
    if as_json:
        print_json(made)
        return
    print_text("\n".join(made))
    err.print(
        "keep .key files secret; the controller needs the .pub file of every member, each member the controller's;"
        " removing a .pub file from the controller's folder revokes that key"
    )
