"""Patches, FP8 and digests on one core of this machine; writes results/codec.json."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import machine

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    command = [sys.executable, "-m", "weft", "bench", "codec", "--megabytes", "512", "--repeat", "15", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=900)
    report = {"machine": machine.describe(), **json.loads(done.stdout)}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "codec.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps({"copy_gb_per_s": report["copy_gb_per_s"], "rows": len(report["rows"])}))


if __name__ == "__main__":
    main()
