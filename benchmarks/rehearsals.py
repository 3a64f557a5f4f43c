"""Control planes of large runs, rehearsed on this machine, and how they grow; writes results/rehearsals.json.

`python benchmarks/rehearsals.py`; about ten minutes on two cores, which must have nothing else to do.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import machine
from recording import RESULTS

LIMIT_S = 900
PRESETS = ("chen-qwen3-235b", "chen-kimi-k2")
GROWTH = (1, 2, 4)
"""Times 48 members; the second preset has eight times as many."""


def rehearse(name: str, *options: str) -> dict[str, Any]:
    """What `weft rehearse … --json` finds."""
    command = [sys.executable, "-m", "weft", "rehearse", *options, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=LIMIT_S)
    row = {"name": name, **json.loads(done.stdout)}
    print(row, flush=True)
    return row


def growing(factor: int) -> tuple[str, ...]:
    """Kimi-K2 with 48 members, times a factor."""
    trainer = f"pp2.fsdp{2 * factor}.ep8/hsdp{2 * factor}x8"
    engine = ("--engine", "ep16", "--replicas", str(factor), "--dtype", "fp8-block128")
    return ("kimi-k2", "--trainer", trainer, *engine)


if __name__ == "__main__":
    rows = [rehearse(f"kimi-k2, {48 * factor} members", *growing(factor)) for factor in GROWTH]
    rows += [rehearse(preset, preset) for preset in PRESETS]
    found = {"machine": machine.describe(), "rows": rows}
    (RESULTS / "rehearsals.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
