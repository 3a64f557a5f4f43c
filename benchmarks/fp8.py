"""FP8 from FSDP2 shards, by exchanging magnitudes and by gathering full tensors; writes results/fp8.json."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import machine

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    command = [sys.executable, "-m", "weft", "bench", "fp8", "--trainers", "4", "--repeat", "9", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=900)
    report = {"machine": machine.describe(), **json.loads(done.stdout)}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "fp8.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps({row["method"]: round(row["seconds"] * 1e3) for row in report["rows"]}))


if __name__ == "__main__":
    main()
