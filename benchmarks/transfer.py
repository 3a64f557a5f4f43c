"""Transfers between processes of this machine, beside its limits and the usual ways; writes results/transfer.json."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import machine

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    command = [sys.executable, "-m", "weft", "bench", "transfer", "--repeat", "9", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=1800)
    report = {"machine": machine.describe(), **json.loads(done.stdout)}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "transfer.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps({"limit_gb_per_s": report["limit_gb_per_s"], "rows": len(report["rows"])}))


if __name__ == "__main__":
    main()
