"""FP8 from FSDP2 shards, by exchanging magnitudes and by gathering full tensors; writes results/fp8.json.

Measured on this machine, and predicted for two published runs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from recording import RESULTS, record

PREDICTED = ("chen-qwen3-235b", "chen-kimi-k2")


def simulated(preset: str) -> dict[str, Any]:
    """What the simulator says of a published run, with and without a gather."""
    command = [sys.executable, "-m", "weft", "simulate", preset, "--beside-gather", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=600)
    found = json.loads(done.stdout)
    return {"preset": preset, "predicted_s": found["predicted_s"], "beside_gather": found["beside_gather"]}


def main() -> None:
    report = record("fp8", "fp8", "--trainers", "4", "--repeat", "9", timeout_s=900)
    report["simulated"] = [simulated(preset) for preset in PREDICTED]
    (RESULTS / "fp8.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    for row in report["rows"]:
        print(f"{row['method']}: {row['seconds'] * 1e3:.0f} ms, {row['exchanged_bytes']} bytes between trainers")


if __name__ == "__main__":
    main()
