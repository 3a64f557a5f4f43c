"""`weft dashboard`: a fleet in the browser."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from weft.cli.output import err
from weft.web.dashboard import serve_dashboard


def dashboard_command(
    events: Annotated[Path, typer.Argument(help="The file that `weft controller --events FILE` writes.")],
    bind: Annotated[str, typer.Option(help="HOST:PORT to serve it on; beyond loopback it needs a token.")] = (
        "127.0.0.1:7080"
    ),
) -> None:
    """Serve a page that shows a fleet live, or a run that has ended. Ctrl-C stops it."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with serve_dashboard(bind, events) as address:
        if not events.exists():
            missing = f"`{escape(str(events))}` does not exist yet: waiting for a controller to write it"
            err.print(missing, soft_wrap=True)
        err.print(f"dashboard at {address}", soft_wrap=True)
        stop.wait()
