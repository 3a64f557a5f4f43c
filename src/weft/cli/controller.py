"""`weft controller`: the process whose address every member of a run knows."""

from __future__ import annotations

import contextlib
import logging
import signal
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from weft.cli.case_options import (
    ConfigFile,
    Delta,
    Ignore,
    Json,
    Mode,
    PolicyName,
    TopologyName,
    TransportName,
    typed_settings,
)
from weft.cli.output import err, print_json
from weft.config import DigestPolicy, TransferSettings, load_settings
from weft.core.version import CommitPolicy
from weft.observe.metrics import serve_metrics
from weft.runtime.control.security import security_in
from weft.runtime.controller.controller import Controller
from weft.web.dashboard import serve_dashboard


def controller_command(
    trainers: Annotated[int, typer.Option(help="Trainer ranks that will join.")],
    engine_ranks: Annotated[int, typer.Option(help="Engine ranks that will join, over all engines.")],
    ranks_per_engine: Annotated[int, typer.Option(help="Ranks of one engine; they commit at the same step.")] = 1,
    bind: Annotated[str, typer.Option(help="Address to listen on.")] = "tcp://127.0.0.1:7070",
    quorum: Annotated[int, typer.Option(help="Engines that must be ready before a version commits; 0: all.")] = 0,
    mode: Mode = "",
    delta: Delta = None,
    anchor_every: Annotated[
        int | None, typer.Option(help="With --delta: one version in this many is sent whole; 20 by default.")
    ] = None,
    compression: Annotated[
        str, typer.Option(help="With --delta: compression, none (default) or zstd (for slow links).")
    ] = "",
    staging: Annotated[
        str, typer.Option(help="none (default), or cpu: trainers send from a copy in host memory while they train.")
    ] = "",
    allow_nonfinite: Annotated[
        bool | None, typer.Option(help="Quantise NaN and infinities instead of refusing them.")
    ] = None,
    transport: TransportName = "",
    allow_fallback: Annotated[
        bool | None, typer.Option(help="Use a slower transport where the intended one fails.")
    ] = None,
    digest: Annotated[bool | None, typer.Option(help="Verify every version by digests (default).")] = None,
    silence_s: Annotated[
        float | None, typer.Option(help="Seconds of silence after which a member is lost; 5 by default.")
    ] = None,
    version_s: Annotated[
        float | None, typer.Option(help="Seconds after which an unfinished version is aborted; 60 by default.")
    ] = None,
    config: ConfigFile = None,
    policy: PolicyName = "",
    topology: TopologyName = "",
    ignore: Ignore = None,
    plan: Annotated[
        Path | None,
        typer.Option(help="Follow a plan saved by `weft plan --save`; refuse members that do not match it."),
    ] = None,
    any_place: Annotated[
        bool, typer.Option(help="With --plan: members may be on other hosts and GPUs than the plan says.")
    ] = False,
    rebalance: Annotated[
        bool, typer.Option(help="Plan again when a host carries less than it reports, so that others send for it.")
    ] = False,
    events: Annotated[
        Path | None, typer.Option(help="Append every member, plan and version to a file, for `weft why` and others.")
    ] = None,
    dashboard: Annotated[str, typer.Option(help="Serve the dashboard on HOST:PORT, as in 127.0.0.1:7080.")] = "",
    metrics: Annotated[str, typer.Option(help="Serve Prometheus metrics on HOST:PORT, as in 127.0.0.1:9464.")] = "",
    keys: Annotated[Path | None, typer.Option(help="Folder with controller.key and members' .pub files.")] = None,
    as_json: Json = False,
) -> None:
    """Wait for members, make the plan, decide versions. Ctrl-C stops it and prints a summary."""
    typed = {
        "anchor_every": anchor_every,
        "compression": compression or None,
        "staging": staging or None,
        "allow_nonfinite": allow_nonfinite,
        "allow_fallback": allow_fallback,
        "digest": None if digest is None else DigestPolicy.ON if digest else DigestPolicy.OFF,
        "silence_s": silence_s,
        "version_s": version_s,
    }
    given = typed_settings(mode=mode, delta=delta, transport=transport)
    given |= {name: value for name, value in typed.items() if value is not None}
    settings = load_settings(TransferSettings, config, given=given)
    _log_to_stderr()
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with (
        _events(events, dashboard) as recorded,
        Controller(
            bind,
            num_trainers=trainers,
            num_engine_ranks=engine_ranks,
            ranks_per_engine=ranks_per_engine,
            commit_policy=CommitPolicy.QUORUM if quorum else CommitPolicy.ALL,
            quorum=quorum,
            settings=settings,
            policy=policy or None,
            topology=topology or None,
            ignore=ignore or (),
            plan=plan,
            any_place=any_place,
            rebalance=rebalance,
            events=recorded,
            security=security_in(keys),
        ) as controller,
    ):
        err.print(f"listening on {controller.address}, waiting for {trainers} trainers and {engine_ranks} engine ranks")
        if plan is not None:
            err.print(f"following the plan `{plan}`")
        with _metrics(metrics, controller), _dashboard(dashboard, recorded):
            stop.wait()
        found = asdict(controller.statistics())
    if as_json:
        print_json(found)
        return
    err.print(
        f"{found['num_committed']} versions committed, {found['num_aborted']} aborted; last: {found['committed']}"
    )


@contextlib.contextmanager
def _events(path: Path | None, dashboard: str) -> Iterator[Path | None]:
    """Where events go: a dashboard needs a file, if only for a while."""
    if path is not None or not dashboard:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="weft-events-") as folder:
        yield Path(folder) / "events.jsonl"


@contextlib.contextmanager
def _dashboard(bind: str, events: Path | None) -> Iterator[None]:
    """The dashboard, if it is asked for."""
    if not bind or events is None:
        yield
        return
    with serve_dashboard(bind, events) as address:
        err.print(f"dashboard at {address}", soft_wrap=True)
        yield


@contextlib.contextmanager
def _metrics(bind: str, controller: Controller) -> Iterator[None]:
    """Metrics, if they are asked for."""
    if not bind:
        yield
        return
    with serve_metrics(bind, lambda: asdict(controller.statistics())) as address:
        err.print(f"metrics at {address}")
        yield


class _ToStderr(logging.Handler):
    """Prints the controller's log records, one line each."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record."""
        err.print(escape(record.getMessage()), style="yellow" if record.levelno >= logging.WARNING else None)


def _log_to_stderr() -> None:
    log = logging.getLogger("weft.runtime")
    log.setLevel(logging.INFO)
    log.addHandler(_ToStderr())
