"""`weft top`: a fleet, live in the terminal."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from weft.cli.case_options import Json
from weft.cli.output import out, print_json
from weft.observe.scrape import Scrape, scrape

BARS = "▁▂▃▄▅▆▇█"
NUM_SHOWN = 40


def top_command(
    address: Annotated[str, typer.Argument(help="Where `weft controller --metrics HOST:PORT` serves its metrics.")] = (
        "http://127.0.0.1:9464/metrics"
    ),
    every_s: Annotated[float, typer.Option(min=0.1, help="Seconds between looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
    as_json: Json = False,
) -> None:
    """Show versions, members and losses of a running fleet. Ctrl-C ends it."""
    view = TopView()
    found = scrape(address)
    if as_json:
        print_json(asdict(found))
        return
    if once:
        out.print(view.show(found))
        return
    with Live(view.show(found), console=out, screen=out.is_terminal, refresh_per_second=10) as live:
        while True:
            time.sleep(every_s)
            live.update(view.show(scrape(address)))


class TopView:
    """What is shown, with the times of the versions that were seen."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=NUM_SHOWN)
        self._seen = 0.0

    def show(self, found: Scrape) -> RenderableType:
        """The fleet as it is now."""
        plain = found.plain
        if plain["weft_versions_committed_total"] > self._seen:
            self._seen = plain["weft_versions_committed_total"]
            self._times.append(plain["weft_version_seconds"])
        table = Table.grid(padding=(0, 2))
        for name, value in self._facts(found).items():
            table.add_row(Text(name, style="dim"), value)
        lost = found.labelled.get("weft_members_lost", {})
        lines = [Text(f"lost: {member}", style="red") for member in sorted(lost)]
        slow = found.labelled.get("weft_host_speed", {})
        lines += [Text(f"slow: {members} at {speed:.0%}", style="yellow") for members, speed in sorted(slow.items())]
        return Group(table, *lines)

    def _facts(self, found: Scrape) -> dict[str, str]:
        plain, members = found.plain, found.labelled.get("weft_members", {})
        seconds, num_bytes = plain["weft_version_seconds"], plain["weft_version_wire_bytes"]
        rate = f", {num_bytes / seconds / 1e9:.2f} GB/s" if seconds else ""
        return {
            "version": f"{plain['weft_version']:.0f}",
            "committed": f"{plain['weft_versions_committed_total']:.0f}",
            "aborted": f"{plain['weft_versions_aborted_total']:.0f}",
            "last update": f"{seconds * 1e3:.1f} ms, {num_bytes / 1e9:.3f} GB{rate}",
            "updates seen": sparkline(list(self._times)),
            "trainers": f"{members.get('trainer', 0):.0f}",
            "engine ranks": f"{members.get('engine', 0):.0f}",
            "links": ", ".join(f"{n:.0f} {name}" for name, n in found.labelled.get("weft_links", {}).items()) or "none",
        }


def sparkline(values: list[float]) -> str:
    """Values as bars, the largest as the highest."""
    highest = max(values, default=0.0)
    if not highest:
        return ""
    return "".join(BARS[min(int(value / highest * len(BARS)), len(BARS) - 1)] for value in values)
