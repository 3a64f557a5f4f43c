"""What many small tensors cost: joining, planning, opening, compiling, and every version, by tensor.

A real controller, with every trainer and engine rank in a process of its own. Every tensor is an array with memory of
its own; trainers hold it cut by rows, each engine has all of it. What the engines serve at the end is compared with
what was published.

    python benchmarks/many_tensors.py                        # all cases; benchmarks/results/many_tensors.json
    python benchmarks/many_tensors.py --tensors 20000 --fp8 --trainers 4 --engines 2 --json

`join`: members describe their weights and the controller admits them. `plan`: until the plan is made. `open`: until it
is shipped. `compile`: until the first version is committed, less what a later version takes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

import machine
from weft.runtime.controller.controller import Controller, ControllerStatistics
from weft.runtime.receive.receiver import Receiver
from weft.runtime.send.sender import Sender
from weft.runtime.weights import Part, Weights

ROWS, COLUMNS = 8, 16
NUM_VERSIONS = 11
WAIT_S = 600.0
COUNTS, SHAPES = (20_000, 100_000), ((1, 1), (4, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class ManyTensorsCase:
    """What is measured."""

    tensors: int
    precision: str
    trainers: int
    engines: int


def names(case: ManyTensorsCase) -> list[str]:
    """Like the experts of a large model."""
    return [f"model.layers.{i // 512}.mlp.experts.{i % 512}.gate_proj.weight" for i in range(case.tensors)]


def contents(number: int, version: int) -> float:
    """What all elements of a tensor are in a version; exact in BF16, and the largest of its block."""
    return float(number % 64 + version + 1)


def fill(arrays: dict[str, Any], version: int) -> None:
    """Make the tensors those of a version."""
    for number, array in enumerate(arrays.values()):
        array[...] = contents(number, version)


def trainer(pipe: Connection, case: ManyTensorsCase, rank: int) -> None:
    """Hold a part of every tensor, publish when told to."""
    share = ROWS // case.trainers
    arrays = {name: np.zeros((share, COLUMNS), dtype=ml_dtypes.bfloat16) for name in names(case)}
    fill(arrays, 0)
    part = Part(shape=(ROWS, COLUMNS), lo=(rank * share, 0))
    pipe.send("ready")
    weights = Weights.from_arrays(arrays, parts=dict.fromkeys(arrays, part))
    with Sender(pipe.recv(), rank=rank, weights=weights, timeout_s=WAIT_S) as sender:
        while (version := pipe.recv()) is not None:
            if version > 0:
                fill(arrays, version)
            pipe.send("ready")
            pipe.recv()
            sender.publish(version=version).wait_committed(WAIT_S)
            pipe.send(time.monotonic())


def engine(pipe: Connection, case: ManyTensorsCase, rank: int) -> None:
    """Hold all tensors, commit what arrives, and say at the end whether it is right."""
    is_fp8 = case.precision == "fp8"
    dtype = ml_dtypes.float8_e4m3fn if is_fp8 else ml_dtypes.bfloat16
    arrays: dict[str, Any] = {name: np.zeros((ROWS, COLUMNS), dtype=dtype) for name in names(case)}
    scales = {f"{name}_scale_inv": np.zeros((1, 1), dtype=np.float32) for name in arrays if is_fp8}
    pipe.send("ready")
    weights = Weights.from_arrays(arrays | scales)
    version = -1
    with Receiver(pipe.recv(), rank=rank, weights=weights) as receiver:
        while not pipe.poll(0.0005):
            if (update := receiver.poll()) is not None:
                version = update.version
                update.commit()
    found = np.stack(list(arrays.values())).astype(np.float32)
    if is_fp8:
        found = found * np.stack(list(scales.values()))
    expected = np.array([contents(number, version) for number in range(case.tensors)])[:, None, None]
    pipe.send(bool(np.allclose(found, expected, rtol=1e-6)))


class Members:
    """The processes of a case."""

    def __init__(self, case: ManyTensorsCase) -> None:
        context = multiprocessing.get_context("spawn")
        self._processes = []
        self.pipes: dict[str, list[Connection]] = {"trainer": [], "engine": []}
        roles = {"trainer": (trainer, case.trainers), "engine": (engine, case.engines)}
        for side, (role, count) in roles.items():
            for rank in range(count):
                ours, theirs = context.Pipe()
                process = context.Process(target=role, args=(theirs, case, rank), daemon=True)
                process.start()
                self._processes.append(process)
                self.pipes[side].append(ours)
        self.answers("trainer", "engine")

    def tell(self, what: Any, *sides: str) -> None:
        """Something to all of these sides."""
        for side in sides:
            for pipe in self.pipes[side]:
                pipe.send(what)

    def answers(self, *sides: str) -> list[Any]:
        """What all of these sides say."""
        return [self._answer(pipe) for side in sides for pipe in self.pipes[side]]

    @staticmethod
    def _answer(pipe: Connection) -> Any:
        if not pipe.poll(WAIT_S):
            raise SystemExit("a member did not answer")
        return pipe.recv()

    def close(self) -> None:
        """End them."""
        for process in self._processes:
            process.kill()
            process.join()


def wait_for(controller: Controller, is_there: Any) -> float:
    """When a snapshot of the controller shows something."""
    while not is_there(controller.statistics()):
        time.sleep(0.002)
    return time.monotonic()


def publish(members: Members, version: int) -> float:
    """Seconds until all engines serve a version."""
    members.tell(version, "trainer")
    members.answers("trainer")
    began = time.monotonic()
    members.tell("publish", "trainer")
    return max(members.answers("trainer")) - began


def measure(case: ManyTensorsCase) -> dict[str, Any]:
    """One case."""
    num_members = case.trainers + case.engines

    def all_joined(now: ControllerStatistics) -> bool:
        return len(now.members) == num_members

    members = Members(case)
    try:
        with Controller(num_trainers=case.trainers, num_engine_ranks=case.engines) as controller:
            began = time.monotonic()
            members.tell(controller.address, "trainer", "engine")
            joined = wait_for(controller, all_joined)
            planned = wait_for(controller, lambda now: bool(now.plan_digest))
            controller.wait_planned(WAIT_S)
            shipped = time.monotonic()
            publish(members, 0)
            first = time.monotonic()
            seconds = [publish(members, version) for version in range(1, NUM_VERSIONS + 1)]
            members.tell("stop", "engine")
            if not all(members.answers("engine")):
                raise SystemExit("engines do not serve what was published")
    finally:
        members.close()
    later = statistics.median(seconds)
    spent = {
        "join_s": joined - began,
        "plan_s": planned - joined,
        "open_s": shipped - planned,
        "compile_s": max(first - shipped - later, 0.0),
        "first_commit_s": first - began,
        "version_s": later,
    }
    rounded = {name: round(value, 4) for name, value in spent.items()}
    per_tensor = {
        name.replace("_s", "_us_per_tensor"): round(value / case.tensors * 1e6, 3) for name, value in spent.items()
    }
    return asdict(case) | rounded | per_tensor


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, help="measure one case only, and do not keep it")
    parser.add_argument("--fp8", action="store_true", help="engines take FP8 with block scales")
    parser.add_argument("--trainers", type=int, default=1, choices=[1, 2, 4, 8])
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "many_tensors.json")
    options = parser.parse_args()
    if options.tensors is not None:
        precision = "fp8" if options.fp8 else "bf16"
        one = ManyTensorsCase(
            tensors=options.tensors, precision=precision, trainers=options.trainers, engines=options.engines
        )
        cases = [one]
    else:
        cases = [
            ManyTensorsCase(tensors=count, precision=precision, trainers=trainers, engines=engines)
            for count in COUNTS
            for trainers, engines in SHAPES
            for precision in ("bf16", "fp8")
        ]
    rows = []
    for case in cases:
        rows.append(measure(case))
        print(json.dumps(rows[-1]) if options.json else rows[-1], file=sys.stdout if options.json else sys.stderr)
    if options.tensors is None:
        options.out.write_text(json.dumps({"machine": machine.describe(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
