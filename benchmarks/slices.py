"""Single ranks of published runs on one GPU; writes results/slice_h200.json, from which docs/planning.md is made.

Run it on a machine with one NVIDIA H200: `python benchmarks/slices.py`.
"""

from __future__ import annotations

import json

from machine import describe
from recording import RESULTS, run_bench

NAMES = ("chen-qwen3-235b", "chen-kimi-k2", "nemo-deepseek-v3")

if __name__ == "__main__":
    runs = [run_bench("slice", name, "--side", side, timeout_s=600) for name in NAMES for side in ("trainer", "engine")]
    found = {"machine": {**describe(), "gpu": "NVIDIA H200"}, "runs": runs}
    (RESULTS / "slice_h200.json").write_text(json.dumps(found, indent=1) + "\n")
