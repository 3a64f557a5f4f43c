"""Random layouts against a brute-force copier: every possible transfer plans, every plan is exact.

The suite tries some hundred cases. Any number, from any seed:

    python -m tests.property.test_random_layouts --cases 10000 --seed 0
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tests.support.executor import execute, same_bits
from tests.support.random_layouts import RandomCase, copied, random_case, spoiled, whole_arrays
from weft.config import ReceiverMode, Settings
from weft.core.layout import Layout
from weft.core.planner import make_plan
from weft.core.plans import plan_file
from weft.core.plans.bound import balance
from weft.core.plans.memory_cost import memory_cost
from weft.core.plans.plan import Plan
from weft.core.recipe import Recipe
from weft.core.topology import load_topology, with_placement
from weft.errors import WeftError
from weft.sim.simulator import Options, simulate

CLUSTERS = ("h100-ib400", "h200-efa3200", "gb200-nvl72", "ethernet-10g")
SPOILED_SHARE = 0.25
EVERY_FILE = 10
"""One plan in so many is saved, loaded, and simulated in every mode."""


@dataclass(slots=True)
class Tally:
    """What became of the cases."""

    num_cases: int = 0
    num_plans: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """Refusals of cases with a mistake, by mistake."""
    failures: list[str] = field(default_factory=list)
    num_raw: int = 0
    """Failures that were exceptions no user should see."""


def try_cases(num_cases: int, seed: int) -> Tally:
    """Plan and check random cases; failures are collected, with what it takes to repeat them."""
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(num_cases):
            tally.num_cases += 1
            try:
                _try_one(np.random.default_rng([seed, number]), tally, number, Path(folder) / "plan")
            except AssertionError as error:
                tally.failures.append(f"case {number} of seed {seed}: {error}")
            except Exception:
                tally.num_raw += 1
                tally.failures.append(f"case {number} of seed {seed}: {traceback.format_exc()}")
    return tally


def _try_one(rng: np.random.Generator, tally: Tally, number: int, path: Path) -> None:
    case = random_case(rng)
    if rng.random() < SPOILED_SHARE:
        case = spoiled(rng, case)
    try:
        plan = _plan(case, rng)
    except WeftError as error:
        assert case.mistake, f"a possible transfer was refused: {error}"
        tally.refused[case.mistake] += 1
        return
    assert not case.mistake, f"planned with {case.mistake}"
    _check_bits(case, plan, rng)
    _check_numbers(plan)
    if number % EVERY_FILE == 0:
        _check_file(plan, path)
    tally.num_plans += 1


def _plan(case: RandomCase, rng: np.random.Generator) -> Plan:
    trainer = Layout.from_shards(case.tensors, case.shards, num_ranks=case.num_trainers)
    recipe = Recipe.from_pieces(case.local, case.pieces, num_replicas=case.num_replicas, scaling=case.scaling)
    cluster = with_placement(load_topology(str(rng.choice(CLUSTERS))), str(rng.choice(["separate", "packed"])))
    return make_plan(
        trainer=trainer,
        recipe=recipe,
        topology=cluster.place(num_trainers=trainer.num_ranks, num_engines=recipe.engine.num_ranks),
        policy=case.policy,
        settings=Settings(min_write_bytes=case.min_write_bytes),
        ignore=case.ignore,
    )


def _check_bits(case: RandomCase, plan: Plan, rng: np.random.Generator) -> None:
    whole = whole_arrays(rng, case.tensors)
    done = execute(plan, whole)
    for rank, expected in copied(case, whole).items():
        assert set(done.tensors[rank]) == set(expected)
        for name, wanted in expected.items():
            assert same_bits(done.tensors[rank][name], wanted.value), f"{name} on engine rank {rank} is wrong"
            assert (done.writes[rank][name] == wanted.written).all(), f"{name} on engine rank {rank}: not once each"


def _check_numbers(plan: Plan) -> None:
    """Everything that is printed about a plan can be computed, and adds up."""
    measured = balance(plan)
    assert measured.makespan_s >= 0
    assert memory_cost(plan).shadow_bytes >= 0
    assert plan.total_bytes == int(plan.tx_bytes.sum()) == int(plan.rx_bytes.sum())
    assert simulate(plan).predicted_s >= 0
    assert plan.num_writes >= (plan.total_bytes > 0)
    assert plan.amax_bytes >= 0


def _check_file(plan: Plan, path: Path) -> None:
    digest = plan_file.save(plan, path)
    loaded = plan_file.load(path)
    assert digest == plan_file.digest(plan) == plan_file.digest(loaded)
    assert plan_file.compare(plan, loaded).num_same == plan.num_routes
    for mode, density in ((ReceiverMode.IN_PLACE, None), (ReceiverMode.PATCH, 0.01)):
        assert simulate(loaded, options=Options(mode=mode, delta_density=density)).predicted_s >= 0


def test_every_possible_transfer_plans_exactly_and_every_mistake_is_refused():
    tally = try_cases(400, seed=1)
    assert not tally.failures, "\n".join(tally.failures[:5])
    assert tally.num_plans + tally.refused.total() == tally.num_cases
    assert len(tally.refused) > 10  # the mistakes were really tried


def main() -> int:
    parser = argparse.ArgumentParser(description="Plan random layouts and compare with a brute-force copier.")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    started = time.perf_counter()
    tally = try_cases(asked.cases, asked.seed)
    for failure in tally.failures[:20]:
        print(failure)
    for mistake, count in sorted(tally.refused.items()):
        print(f"refused {count:5d} with {mistake}")
    print(
        f"{tally.num_cases} cases (seed {asked.seed}): {tally.num_plans} exact plans, "
        f"{tally.refused.total()} mistakes refused by name, {tally.num_raw} raw exceptions, "
        f"{len(tally.failures)} failures, {time.perf_counter() - started:.0f} s"
    )
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
