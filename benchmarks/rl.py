"""The loop on this machine: what is learned, with and without fresh weights, by weft and by collectives.

Writes results/rl.json, docs/learning.svg (curves) and docs/demo.svg (the live view at the end of the demo).
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

import machine
from recording import RESULTS
from weft.observe.charts import Curve, line_chart
from weft.rl.run.record import Record
from weft.rl.settings import LoopSettings
from weft.rl.view.live import view

DOCS = Path(__file__).parent.parent / "docs"
SEEDS = (0, 1, 2)
METHODS = ("weft", "broadcast", "gather")
FSDP = ("--trainers", "2", "--trainer", "fsdp2", "--engines", "2", "--rollouts", "64", "--iterations", "100")
TURNS = ("--sync", "--engines", "2", "--rollouts", "64", "--iterations", "60")


def run(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """One `weft …` command; its summaries, each with the reward of every iteration."""
    command = [sys.executable, "-m", "weft", *arguments, "--out", str(folder), "--json"]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True, timeout=900
    )
    found = json.loads(done.stdout)
    summaries = found.get("runs", [found])
    for summary in summaries:
        record = load(Path(summary.pop("report")).parent)
        summary["rewards"] = [round(iteration.reward, 4) for iteration in record.iterations]
    print(" ".join(arguments), [f"{s['method']}: {s['reward_first']:.3f} → {s['reward_last']:.3f}" for s in summaries])
    return summaries


def load(folder: Path) -> Record:
    return msgspec.json.decode((folder / "record.json").read_bytes(), type=Record)


def draw_demo(folder: Path) -> None:
    """The live view as it ends, as a picture that needs no font from elsewhere."""
    settings = msgspec.json.decode((folder / "settings.json").read_bytes(), type=LoopSettings)
    console = Console(record=True, width=94, file=io.StringIO(), force_terminal=True)
    console.print(view(settings, load(folder)))
    picture = re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title="weft demo"), flags=re.DOTALL)
    (DOCS / "demo.svg").write_text(picture.replace("Fira Code", "DejaVu Sans Mono, Menlo, Consolas") + "\n")


def draw_learning(demos: list[dict[str, Any]], frozen: dict[str, Any]) -> None:
    curves = [Curve(name=f"seed {seed}", points=_points(demo)) for seed, demo in zip(SEEDS, demos, strict=True)]
    curves.append(Curve(name="engines frozen", points=_points(frozen)))
    (DOCS / "learning.svg").write_text(line_chart(curves, x_name="iterations", y_name="reward", least_top=1.0) + "\n")


def _points(summary: dict[str, Any]) -> list[tuple[float, float]]:
    return [(float(number), reward) for number, reward in enumerate(summary["rewards"])]


def main() -> None:
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where)
        demos = [run(folder / f"seed{seed}", "demo", "--seed", str(seed))[0] for seed in SEEDS]
        (frozen,) = run(folder / "frozen", "demo", "--freeze-engines")
        named = [word for method in METHODS for word in ("--method", method)]
        methods = run(folder / "methods", "rl", *FSDP, *named)
        in_turn = run(folder / "turns", "rl", *TURNS, "--method", "weft", "--method", "broadcast")
        draw_demo(folder / "seed0")
        draw_learning(demos, frozen)
    report = {
        "machine": machine.describe(),
        "demo": demos,
        "frozen": frozen,
        "methods": methods,
        "in_turn": in_turn,
        "same_policy": in_turn[0]["rewards"] == in_turn[1]["rewards"],
    }
    (RESULTS / "rl.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    print("weft and broadcast, in turn, train the same policy:", report["same_policy"])


if __name__ == "__main__":
    main()
