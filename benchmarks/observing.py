"""What watching costs: versions with events, metrics and the dashboard on and off; writes results/observing.json.

`python benchmarks/observing.py`; about three minutes on two cores, which must have nothing else to do. Metrics and the
dashboard's state are asked for four times a second.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import machine
from recording import RESULTS
from weft.bench import payload
from weft.bench.worker import start_fleet
from weft.config import DigestPolicy, ReceiverMode, TransferSettings
from weft.observe.metrics import serve_metrics
from weft.runtime.controller.controller import Controller
from weft.web.dashboard import serve_dashboard

NUM_ROUNDS = 9
LOOK_S = 0.25
HOWS = ("off", "events", "dashboard")
"""Events and metrics, then the dashboard as well."""
CASES = {"Qwen2.5-0.5B, TP2, in place over shm": ("qwen2.5-0.5b", 2, 6), "a few bytes": (payload.SMALLEST, 1, 40)}
"""Model, ranks per engine, and versions per round."""


@contextlib.contextmanager
def watched(controller: Controller, events: Path, *, has_dashboard: bool) -> Iterator[None]:
    """Metrics, and perhaps the dashboard, are served and looked at."""
    with contextlib.ExitStack() as stack:
        addresses = [stack.enter_context(serve_metrics("127.0.0.1:0", lambda: asdict(controller.statistics())))]
        if has_dashboard:
            addresses.append(f"{stack.enter_context(serve_dashboard('127.0.0.1:0', events))}api/state")
        over = threading.Event()

        def look() -> None:
            while not over.wait(LOOK_S):
                for address in addresses:
                    with urllib.request.urlopen(address, timeout=10.0) as answer:
                        answer.read()

        looker = threading.Thread(target=look)
        looker.start()
        try:
            yield
        finally:
            over.set()
            looker.join()


def one_round(fleet: Any, num_parts: int, num_versions: int, how: str, file: Path) -> list[float]:
    """Seconds of versions under one controller; the first is not counted."""
    events = None if how == "off" else file
    settings = TransferSettings(mode=ReceiverMode.IN_PLACE, digest=DigestPolicy.ON, transport="shm")
    with (
        Controller(
            num_trainers=2, num_engine_ranks=2, ranks_per_engine=num_parts, settings=settings, events=events
        ) as controller,
        watched(controller, file, has_dashboard=how == "dashboard") if events is not None else contextlib.nullcontext(),
    ):
        for side in ("engine", "trainer"):
            fleet.call(side, "open", address=controller.address)
        seconds = []
        for version in range(1, num_versions + 2):
            receiving = fleet.ask("engine", "receive")
            publishing = fleet.ask("trainer", "publish", version=version, start=fleet.soon())
            spans = fleet.answers(receiving, publishing)[1]
            seconds.append(max(span[1] for span in spans) - min(span[0] for span in spans))
        for side in ("trainer", "engine"):
            fleet.call(side, "shut")
    return seconds[1:]


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Off and on in turn; ratios are of medians."""
    model, num_parts, num_versions = CASES[name]
    found: dict[str, list[float]] = {how: [] for how in HOWS}
    with start_fleet(num_trainers=2, num_engine_ranks=2, num_parts=num_parts, model=model) as fleet:
        for number in range(NUM_ROUNDS):
            for how in HOWS if number % 2 else reversed(HOWS):
                file = folder / f"{model}-{number}-{how}.jsonl"
                found[how] += one_round(fleet, num_parts, num_versions, how, file)
    off, on, dashboard = (statistics.median(found[how]) for how in HOWS)
    return {
        "case": name,
        "off_ms": off * 1e3,
        "on_ms": on * 1e3,
        "ratio": on / off,
        "dashboard_ms": dashboard * 1e3,
        "dashboard_ratio": dashboard / off,
        "num_versions": len(found["off"]),
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(name, Path(folder)) for name in CASES]
    for row in rows:
        print(f"{row['case']}: {row['off_ms']:.2f} ms, {row['ratio']:.3f}×, dashboard {row['dashboard_ratio']:.3f}×")
    RESULTS.mkdir(exist_ok=True)
    found = {"machine": machine.describe(), "rows": rows}
    (RESULTS / "observing.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
