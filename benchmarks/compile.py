"""What members get of a plan and what it costs them: boxes, shipped bytes, processor time, and writes.

Every link of a case is compiled as its trainer and its engine rank would, without any memory behind it: addresses are
numbers. The writes their tables would post are counted and compared with the plan's.

    python benchmarks/compile.py                 # all cases, a few minutes; benchmarks/results/compile.json
    python benchmarks/compile.py --case qwen3-8b
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

import numpy as np

sys.path.insert(0, str(FilePath(__file__).parent))

import machine
from weft.core.case import Case, plan_case
from weft.core.geometry.planes import num_runs
from weft.core.plans.plan import Plan
from weft.runtime.compile.link_boxes import LinkBoxes, PlanBoxes
from weft.runtime.compile.link_stream import LinkStream
from weft.runtime.control.columns import squeeze

CASES = {
    "qwen3-8b": Case(model="qwen3-8b", trainer="fsdp8", engine="tp8"),
    "qwen3-30b-a3b": Case(model="qwen3-30b-a3b", trainer="fsdp16", engine="tp8"),
    "qwen3-30b-a3b ep": Case(model="qwen3-30b-a3b", trainer="fsdp16", engine="ep8"),
    "nemo-deepseek-v3": Case(model="deepseek-v3", trainer="pp16.ep16", engine="tp32"),
}


@dataclass(slots=True)
class Spent:
    """What one member was shipped and spent."""

    num_boxes: int = 0
    shipped_bytes: int = 0
    compile_s: float = 0.0
    num_writes: int = 0


class Compiled:
    """All members of a plan, each compiled alone."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.links = plan.links
        self._boxes = PlanBoxes(plan, plan.row_boxes)
        self._grid = np.full(len(plan.trainer.tensors), -1)
        self._shard, self._tensor = np.arange(len(plan.trainer.lo)), np.arange(len(plan.recipe.engine.lo))
        self.trainers = [Spent() for _ in range(plan.topology.num_trainers)]
        self.engines = [Spent() for _ in range(plan.topology.num_engines)]

    def link(self, trainer: int, engine: int) -> None:
        """Ship and compile one link."""
        boxes = self._boxes.link(trainer, engine, shard=self._shard, tensor=self._tensor, grid=self._grid)
        encoded = boxes.encode()
        places = squeeze({"position": 256 * boxes.tensors, "address": 4096 * boxes.tensors})
        source = 4096 * self._shard
        live, place = 4096 * boxes.tensors, 256 * boxes.tensors
        for member, is_trainer in ((self.trainers[trainer], True), (self.engines[engine], False)):
            began = time.process_time()
            stream = LinkStream(LinkBoxes.decode(encoded), self.links.carriage(trainer, engine))
            if is_trainer:
                member.num_writes += sum(int(table.rows.sum()) for table in stream.straight(source, 1 << 40, place))
                member.num_writes += len(stream.parcels(1 << 40, place))
                stream.fills(source)
            else:
                stream.landed(1 << 40, live, place)
            member.compile_s += time.process_time() - began
            member.num_boxes += len(boxes)
            member.shipped_bytes += len(encoded) + (len(places) if is_trainer else 0)


def measure(name: str, case: Case) -> dict[str, Any]:
    """One case: the busiest member of each side, and all writes."""
    plan = plan_case(case)
    compiled = Compiled(plan)
    links = list(zip(*(side.tolist() for side in np.nonzero(plan.pair_bytes)), strict=True))
    for number, (trainer, engine) in enumerate(links):
        compiled.link(trainer, engine)
        if number % 500 == 499:
            print(f"{name}: {number + 1} of {len(links)} links", file=sys.stderr)
    counted = sum(member.num_writes for member in compiled.trainers)
    if counted != plan.num_writes:
        raise SystemExit(f"{name}: {counted} writes were compiled, {plan.num_writes} are planned")
    rows = plan.row_boxes
    found: dict[str, Any] = {
        "case": name,
        "trainer": case.trainer,
        "engine": case.engine,
        "num_links": len(links),
        "num_writes": counted,
        "num_runs": int((num_runs(rows.extent, rows.src_strides, rows.dst_strides) * plan.fan_out).sum()),
    }
    for side, members in (("trainer", compiled.trainers), ("engine", compiled.engines)):
        found |= {
            f"{side}_boxes": max(member.num_boxes for member in members),
            f"{side}_shipped_bytes": max(member.shipped_bytes for member in members),
            f"{side}_compile_s": round(max(member.compile_s for member in members), 4),
        }
    return found


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=[*CASES, "all"], default="all")
    parser.add_argument("--out", type=FilePath, default=FilePath(__file__).parent / "results" / "compile.json")
    options = parser.parse_args()
    names = list(CASES) if options.case == "all" else [options.case]
    rows = [measure(name, CASES[name]) for name in names]
    for row in rows:
        print(row)
    if options.case == "all":
        options.out.write_text(json.dumps({"machine": machine.describe(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
