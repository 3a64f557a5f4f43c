"""Planning at size: seconds, memory and distance from the bound, and how the cost grows with the number of routes.

    python benchmarks/planning.py          # writes benchmarks/results/planning.json and validation.json

Every case is planned by the `weft` command in a process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import machine
from weft.core.models.configs import CONFIGS

RESULTS = Path(__file__).parent / "results"
KIMI = ("--trainer", "pp2.ep8.fsdp16", "--engine", "ep32", "--replicas", "4", "--dtype", "fp8-block128")
PREDICTED = ("chen-qwen3-235b", "chen-kimi-k2", "miles-qwen3-235b", "miles-kimi-k2", "nemo-deepseek-v3")
LAYERS = (15, 31, 61)
NAMED = (
    ("chen-qwen3-235b",),
    ("chen-qwen3-235b", "--policy", "greedy"),
    ("chen-qwen3-235b", "--policy", "greedy", "--gather", "mesh"),
    ("chen-qwen3-235b", "--policy", "round_robin", "--gather", "mesh"),
    ("chen-qwen3-235b", "--policy", "rank0"),
    ("chen-kimi-k2",),
    ("miles-qwen3-235b",),
    ("miles-kimi-k2",),
    ("nemo-deepseek-v3",),
    ("llama-3.1-405b", "--trainer", "fsdp64.tp8", "--engine", "tp8", "--replicas", "16"),
)


def weft(*arguments: str) -> Any:
    command = [sys.executable, "-m", "weft", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    return json.loads(done.stdout)


def scaling() -> list[dict[str, Any]]:
    """Kimi-K2 cut to fewer layers: the same routes per layer, so only the size changes."""
    rows = []
    for num_layers in LAYERS:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "config.json"
            path.write_text(json.dumps({**CONFIGS["kimi-k2"], "num_hidden_layers": num_layers}))
            plan = weft("plan", str(path), *KIMI)
        rows.append({**plan, "model": f"kimi-k2, {num_layers} layers"})
        show(rows[-1])
    return rows


def show(plan: dict[str, Any]) -> None:
    print(
        f"{plan['model']:24s} {plan['policy']:12s} {plan['num_routes']:>11,} routes  {plan['plan_s']:6.1f} s  "
        f"{plan['peak_rss_bytes'] / 2**30:5.2f} GiB  {plan['makespan_over_bound']:.4f} × bound",
        file=sys.stderr,
    )


def main() -> None:
    grown = scaling()
    slope = np.polyfit(np.log([row["num_routes"] for row in grown]), np.log([row["plan_s"] for row in grown]), deg=1)[0]
    named = []
    for case in NAMED:
        named.append({"case": " ".join(case), **weft("plan", *case)})
        show(named[-1])
    predictions = [{"case": name, **weft("simulate", name)} for name in PREDICTED]
    result = {
        "machine": machine.describe(),
        "scaling": grown,
        "growth_exponent": float(slope),
        "cases": named,
        "predictions": predictions,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "planning.json").write_text(json.dumps(result, indent=1) + "\n")
    (RESULTS / "validation.json").write_text(
        json.dumps({"machine": machine.describe(), "rows": weft("validate")}, indent=1, ensure_ascii=False) + "\n"
    )
    print(json.dumps({"growth_exponent": result["growth_exponent"], "cases": len(named), "sizes": len(grown)}))


if __name__ == "__main__":
    main()
