"""How a version's rate grows with sending hosts, and what faults cost; writes results/scaling.json, docs/scaling.svg.

Needs root. `python benchmarks/scaling.py`; about 45 minutes on two cores, which must have nothing else to do.
"""

from __future__ import annotations

import json
from pathlib import Path

import machine
from cut_host import measure_cut_host
from recording import RESULTS, run_bench
from weft.bench.scaling.plot import scaling_svg

DOCS = Path(__file__).parent.parent / "docs"
NIC = "100mbit"
MODEL = ("--model", "medium", "--nic", NIC)
SWEEP = (*MODEL, "--receivers", "8", "--repeat", "3")
NICS = (*MODEL, "--senders", "2", "--receivers", "2", "--no-baselines", "--no-slow-host", "--repeat", "3")

if __name__ == "__main__":
    found = {"machine": machine.describe(), "sweep": run_bench("scaling", *SWEEP, timeout_s=6000)}
    found["nics"] = [run_bench("scaling", *NICS, "--nics", str(count), timeout_s=1200) for count in (1, 2)]
    found["cut_host"] = measure_cut_host()
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "scaling.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    for row in found["sweep"]["rows"]:
        print(
            f"{row['num_senders']} to {row['num_receivers']} hosts, {row['method']}: "
            f"{row['seconds']:.2f} s, {row['gb_per_s'] * 1e3:.1f} MB/s"
        )
    (DOCS / "scaling.svg").write_text(scaling_svg(found["sweep"]["rows"]) + "\n")
    print(found["cut_host"])
