"""What a version costs beyond the device's passes, for models of equal size and very different numbers of tensors.

Run it on a machine with one NVIDIA H200: `python benchmarks/many_tensors_gpu.py [FILE [OPTIONS]]`, with options of
`weft bench transfer`; writes results/many_tensors_h200.json, or the file. Comparing 70,000 tensors takes minutes.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from machine import describe
from recording import run_bench

MODELS = (
    {"num_hidden_layers": 4, "num_experts": 22, "hidden_size": 4096, "moe_intermediate_size": 3072},
    {"num_hidden_layers": 8, "num_experts": 120, "hidden_size": 2304, "moe_intermediate_size": 512},
    {"num_hidden_layers": 48, "num_experts": 128, "hidden_size": 1408, "moe_intermediate_size": 128},
    {"num_hidden_layers": 60, "num_experts": 384, "hidden_size": 384, "moe_intermediate_size": 128},
)
"""Mixtures of experts of about 7 GB: 300, 3,000, 19,000 and 70,000 tensors."""
CONFIG = {
    "model_type": "qwen3_moe",
    "intermediate_size": 1024,
    "num_experts_per_tok": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 1024,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
CASE = ("--device", "cuda:0", "--mode", "in_place", "--no-baselines", "--repeat", "5")


def measure(model: dict[str, int], options: list[str]) -> list[dict[str, object]]:
    """One row for every method."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(CONFIG | model))
        run = run_bench("transfer", *CASE, *options, "--model", str(path), timeout_s=900)
    rows = []
    for row in run["rows"]:
        kept = {key: row[key] for key in ("method", "precision", "trainer_bytes", "seconds", "limit_s", "verified")}
        rows.append({"num_tensors": run["num_tensors"], **kept, "beyond_s": row["seconds"] - row["limit_s"]})
        rows[-1]["num_versions"] = len(row["each_s"])
        print(rows[-1], flush=True)
    return rows


if __name__ == "__main__":
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "results/many_tensors_h200.json"
    found = {"machine": describe(), "rows": []}
    for each in MODELS:
        found["rows"] += measure(each, sys.argv[2:])
        out.write_text(json.dumps(found, indent=1) + "\n")
