"""`weft lab`: a virtual cluster on this machine; commands on its hosts, faults in its network, counters of its NICs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from weft.cli.case_options import Json
from weft.cli.ending import clean_up_when_told_to_end
from weft.cli.output import err, out, print_json
from weft.errors import ConfigError
from weft.lab import Lab, LabSpec, alike, load_lab, records
from weft.lab.commands import check_possible
from weft.lab.lab import NicTraffic
from weft.lab.running import run_everywhere

lab_app = typer.Typer(no_args_is_help=True, help="A virtual cluster on this machine, with rate-limited NICs.")
Name = Annotated[str | None, typer.Option(help="Name of the lab. Default: the only one.")]
LOOK_S = 1.0
"""How often watched counters are read."""
Host = Annotated[int, typer.Argument(help="Number of the host.")]


@lab_app.command("run")
def run_command(
    command: Annotated[list[str], typer.Argument(help="Command to run on every host, after `--`.")],
    hosts: Annotated[int | None, typer.Option(min=1, help="Hosts. Default: 2.")] = None,
    nic: Annotated[str | None, typer.Option(help="Rate of every NIC. Default: 400mbit.")] = None,
    nics: Annotated[int | None, typer.Option(min=1, help="NICs per host. Default: 1.")] = None,
    file: Annotated[Path | None, typer.Option(help="TOML file that describes hosts that differ.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the lab. Default: a random one.")] = None,
) -> None:
    """Run a command on every host of a virtual cluster; RANK, WORLD_SIZE and MASTER_ADDR tell it where it is."""
    spec = _spec(hosts, nic, nics, file)
    clean_up_when_told_to_end()
    with Lab(spec, name) as lab:
        err.print(f"lab {lab.name}: {len(spec.hosts)} hosts, {lab.address(0)} to {lab.address(len(spec.hosts) - 1)}")
        run_everywhere(lab, command, say=lambda host, line: out.print(f"[dim]host {host} |[/] {escape(line)}"))


def _spec(hosts: int | None, nic: str | None, nics: int | None, file: Path | None) -> LabSpec:
    if file is None:
        return alike(hosts=hosts or 2, nic=nic or "400mbit", nics=nics or 1)
    if hosts is not None or nic is not None or nics is not None:
        raise ConfigError("--file cannot be combined with --hosts, --nic or --nics", hint="describe them in the file")
    return load_lab(file)


@lab_app.command("list")
def list_command(as_json: Json = False) -> None:
    """List the labs that are running."""
    labs = records.all_labs()
    if as_json:
        print_json(
            {"labs": [{"name": lab.name, "num_hosts": len(lab.spec.hosts), "pid": lab.owner.pid} for lab in labs]}
        )
        return
    for lab in labs:
        out.print(
            f"{lab.name}: {len(lab.spec.hosts)} hosts, process {lab.owner.pid}{' (ended)' if lab.is_left else ''}"
        )
    if not labs:
        err.print("no lab is running")


@lab_app.command("cut")
def cut_command(host: Host, name: Name = None) -> None:
    """Take a host off the network; nothing tells the others."""
    Lab.running(name).cut(host)


@lab_app.command("slow")
def slow_command(
    host: Host, rate: Annotated[str, typer.Argument(help="Its new rate: 40mbit.")], name: Name = None
) -> None:
    """Give all NICs of a host another rate."""
    Lab.running(name).slow(host, rate)


@lab_app.command("heal")
def heal_command(host: Host, name: Name = None) -> None:
    """Undo `cut` and `slow`."""
    Lab.running(name).heal(host)


@lab_app.command("traffic")
def traffic_command(
    name: Name = None,
    watch: Annotated[
        bool, typer.Option(help="Print the rates of every second until interrupted; with --json, the bytes so far.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show the bytes every NIC has sent and received, as the switches count them."""
    lab, last = Lab.running(name), None
    for at, found in _looks(lab, watch=watch):
        if as_json:
            print_json({"nics": [_as_json(each) for each in found]})
        elif not watch:
            _show(None, found, None, lab)
        elif last is not None:
            _show(last[1], found, at - last[0], lab)
        last = at, found


def _looks(lab: Lab, *, watch: bool) -> Iterator[tuple[float, list[NicTraffic]]]:
    """The counters now and, if they are watched, every second; each with its moment."""
    yield time.monotonic(), lab.traffic()
    while watch:
        time.sleep(LOOK_S)
        yield time.monotonic(), lab.traffic()


def _as_json(each: NicTraffic) -> dict[str, int]:
    return {
        "host": each.host,
        "nic": each.nic,
        "sent_bytes": each.sent_bytes,
        "received_bytes": each.received_bytes,
        "sent_packets": each.sent_packets,
        "received_packets": each.received_packets,
    }


def _show(before: list[NicTraffic] | None, found: list[NicTraffic], seconds: float | None, lab: Lab) -> None:
    """Bytes so far, or, with an earlier look, rates since then."""
    table = Table()
    for title in ("host", "NIC", "limit Mbit/s", *(("sent MB", "received MB") if before is None else ("out", "in"))):
        table.add_column(title, justify="right")
    for number, each in enumerate(found):
        limit = f"{lab.spec.hosts[each.host].rates[each.nic] / 1e6:.0f}"
        if before is None or seconds is None:
            cells = f"{each.sent_bytes / 1e6:.1f}", f"{each.received_bytes / 1e6:.1f}"
        else:
            out_bytes = each.sent_bytes - before[number].sent_bytes
            in_bytes = each.received_bytes - before[number].received_bytes
            cells = f"{8e-6 * out_bytes / seconds:.0f} Mbit/s", f"{8e-6 * in_bytes / seconds:.0f} Mbit/s"
        table.add_row(str(each.host), str(each.nic), limit, *cells)
    out.print(table)


@lab_app.command("clean")
def clean_command() -> None:
    """Remove labs whose process was killed; every new lab does that, too."""
    check_possible()
    removed = records.remove_leftovers()
    err.print(f"removed: {', '.join(removed)}" if removed else "nothing was left behind")
