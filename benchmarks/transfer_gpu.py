"""Transfers between processes that share one GPU, beside the device's own copy; writes results/transfer_h200.json.

Run it on a machine with one NVIDIA H200: `python benchmarks/transfer_gpu.py [FILE]`. With a file it is written there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from machine import describe
from recording import run_bench

CASES = (
    ("--model", "qwen3-30b-a3b", "--mode", "in_place"),
    ("--model", "qwen3-30b-a3b", "--layers", "20", "--precision", "bf16", "--mode", "patch", "--no-baselines"),
    ("--model", "qwen3-8b", "--precision", "bf16", "--engine-ranks", "2", "--mode", "in_place"),
    ("--model", "qwen3-8b", "--precision", "bf16", "--engine-ranks", "8", "--mode", "in_place"),
    ("--model", "qwen2.5-0.5b"),
    ("--model", "qwen2.5-0.5b", "--mode", "in_place", "--host", "trainer"),
    ("--model", "qwen2.5-0.5b", "--mode", "in_place", "--host", "engine"),
)

if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "results/transfer_h200.json"
    runs = []
    for case in CASES:
        runs.append(run_bench("transfer", "--device", "cuda:0", "--repeat", "5", *case, timeout_s=1800))
        for row in runs[-1]["rows"]:
            where = f"{runs[-1]['model']}, {runs[-1]['engine']}, {row['precision']}, {row['method']}"
            print(f"{where}: {row['seconds'] * 1e3:.1f} ms, {row['fraction_of_limit']:.2f} of the limit", flush=True)
        found = {"machine": {**describe(), "gpu": runs[-1]["device"]}, "runs": runs}
        path.write_text(json.dumps(found, indent=1) + "\n")
