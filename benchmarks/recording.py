"""Runs a `weft bench` command and keeps what it found, with the machine it ran on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import machine

RESULTS = Path(__file__).parent / "results"


def run_bench(*arguments: str, timeout_s: int) -> dict[str, Any]:
    """What `weft bench … --json` finds."""
    command = [sys.executable, "-m", "weft", "bench", *arguments, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=timeout_s)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def record(name: str, *arguments: str, timeout_s: int) -> dict[str, Any]:
    """Run `weft bench … --json` and write results/NAME.json."""
    report = {"machine": machine.describe(), **run_bench(*arguments, timeout_s=timeout_s)}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    return report
