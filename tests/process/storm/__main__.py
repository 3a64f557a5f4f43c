"""`python -m tests.process.storm`: storms over transports and modes. Progress on stderr, the table on stdout.

Exits with 1 if anything was found that must never happen. A seed that failed is drawn again by its own command, which
is printed; moments are those of real processes, so it may take more than one try.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from pathlib import Path

from tests.process.storm import faults
from tests.process.storm.report import Outcome, story, table, write_json
from tests.process.storm.settings import MODES, TRANSPORTS, StormSettings
from tests.process.storm.storm import Storm

PROGRESS_S = 10.0


def main() -> int:
    """Every transport with every mode, each with enough seeds for all versions."""
    options = _options()
    outcomes: list[Outcome] = []
    for transport, mode in itertools.product(options.transport or TRANSPORTS, options.mode or MODES):
        if mode == "patch" and options.precision == "fp8":
            continue
        settings = StormSettings(
            transport=transport,
            mode=mode,
            rows=options.rows,
            num_engine_ranks=3 * options.ranks_per_engine if options.quorum else 2,
            ranks_per_engine=options.ranks_per_engine,
            quorum=options.quorum,
            precision=options.precision,
        )
        seeds, num_left = itertools.count(options.seed), options.versions
        while num_left > 0:
            outcomes.append(_storm(settings, next(seeds), min(options.per_seed, num_left)))
            num_left -= outcomes[-1].num_published
    print(table(outcomes))
    if options.json is not None:
        write_json(options.json, outcomes)
    return int(any(outcome.findings for outcome in outcomes))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.process.storm", description=__doc__)
    parser.add_argument("--transport", action="append", choices=TRANSPORTS, help="all of them, unless given")
    parser.add_argument("--mode", action="append", choices=MODES, help="all of them, unless given")
    parser.add_argument("--versions", type=int, default=500, help="at least, for each transport and mode")
    parser.add_argument("--per-seed", type=int, default=125, help="versions of one fleet")
    parser.add_argument("--seed", type=int, default=1, help="the first one")
    parser.add_argument("--rows", type=int, default=1024, help="of each tensor: 1024 make 16 MiB of weights")
    parser.add_argument("--ranks-per-engine", type=int, default=1, choices=(1, 2))
    parser.add_argument(
        "--quorum", type=int, default=0, help="engines a version needs, of three; 0: of one or two, all"
    )
    parser.add_argument("--precision", default="fp32", choices=("fp32", "fp8"), help="of engines")
    parser.add_argument("--json", type=Path, help="write everything there")
    return parser.parse_args()


def _storm(settings: StormSettings, seed: int, num_versions: int) -> Outcome:
    began = last_told = time.monotonic()
    title = f"{settings.transport} {settings.mode} seed {seed}"

    def tell() -> None:
        nonlocal last_told
        if time.monotonic() - last_told > PROGRESS_S:
            last_told = time.monotonic()
            found = len(storm.verdicts.findings)
            print(f"{title}: {storm.fleet.version} versions, {found} findings", file=sys.stderr, flush=True)

    with Storm(settings, seed) as storm:
        try:
            storm.run(faults.WITH_QUORUM if settings.quorum else faults.ALL, num_versions=num_versions, on_step=tell)
        except AssertionError as error:
            storm.verdicts.add("hung", storm.fleet.now, str(error))
    outcome = Outcome.of(storm, seed, time.monotonic() - began)
    if outcome.findings:
        print(story(storm.fleet.journal, outcome.findings), file=sys.stderr)
        again = f"--transport {settings.transport} --mode {settings.mode} --seed {seed} --versions {num_versions}"
        size = f"--rows {settings.rows} --ranks-per-engine {settings.ranks_per_engine} --quorum {settings.quorum}"
        print(f"{title} failed; again: python -m tests.process.storm {again} {size}", file=sys.stderr)
    return outcome


if __name__ == "__main__":
    sys.exit(main())
