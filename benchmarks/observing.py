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
CASES = {"Qwen2.5-0.5B, TP2, in place over shm": ("qwen2.5-0.5b", 2, 6), "a few bytes": (payload.SMALLEST, 1, 40)}
"""Model, ranks per engine, and versions per round."""


@contextlib.contextmanager
def watched(controller: Controller, events: Path) -> Iterator[None]:
    """Metrics and dashboard are served, and looked at."""
    with (
        serve_metrics("127.0.0.1:0", lambda: asdict(controller.statistics())) as metrics,
        serve_dashboard("127.0.0.1:0", events) as dashboard,
    ):
        over = threading.Event()

        def look() -> None:
            while not over.wait(LOOK_S):
                for address in (metrics, f"{dashboard}api/state"):
                    with urllib.request.urlopen(address, timeout=10.0) as answer:
                        answer.read()

        looker = threading.Thread(target=look)
        looker.start()
        try:
            yield
        finally:
            over.set()
            looker.join()


def one_round(fleet: Any, num_parts: int, num_versions: int, events: Path | None) -> list[float]:
    """Seconds of versions under one controller; the first is not counted."""
    settings = TransferSettings(mode=ReceiverMode.IN_PLACE, digest=DigestPolicy.ON, transport="shm")
    with (
        Controller(
            num_trainers=2, num_engine_ranks=2, ranks_per_engine=num_parts, settings=settings, events=events
        ) as controller,
        watched(controller, events) if events is not None else contextlib.nullcontext(),
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
    """Off and on in turn; the ratio is of medians."""
    model, num_parts, num_versions = CASES[name]
    found: dict[bool, list[float]] = {False: [], True: []}
    with start_fleet(num_trainers=2, num_engine_ranks=2, num_parts=num_parts, model=model) as fleet:
        for number in range(NUM_ROUNDS):
            for is_on in (False, True) if number % 2 else (True, False):
                events = folder / f"{model}-{number}.jsonl" if is_on else None
                found[is_on] += one_round(fleet, num_parts, num_versions, events)
    off, on = (statistics.median(found[is_on]) for is_on in (False, True))
    return {"case": name, "off_ms": off * 1e3, "on_ms": on * 1e3, "ratio": on / off, "num_versions": len(found[True])}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(name, Path(folder)) for name in CASES]
    for row in rows:
        print(f"{row['case']}: {row['off_ms']:.2f} ms, watched {row['on_ms']:.2f} ms: {row['ratio']:.3f}")
    RESULTS.mkdir(exist_ok=True)
    found = {"machine": machine.describe(), "rows": rows}
    (RESULTS / "observing.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
