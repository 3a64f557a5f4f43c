"""`weft bench scaling`: every method moves a version between the hosts of a lab, and says what it cost."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from weft.transport.registry import is_installed

pytestmark = [pytest.mark.lab, pytest.mark.skipif(not is_installed("nixl"), reason="NIXL is not installed")]
WAIT_S = 300.0
FIELDS = {
    "method",
    "num_senders",
    "num_receivers",
    "nic_gb_per_s",
    "num_nics",
    "seconds",
    "gb_per_s",
    "fraction_of_nics",
    "predicted_s",
    "verified",
}


def test_all_methods_are_measured_and_verified(tmp_path):
    options = ["--senders", "2", "--receivers", "2", "--nic", "400mbit", "--nics", "2", "--repeat", "1"]
    options += ["--no-slow-host", "--plot", str(tmp_path / "plot.svg")]
    command = [sys.executable, "-m", "weft", "bench", "scaling", *options, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    rows = {row["method"]: row for row in report["rows"]}
    assert all(set(row) >= FIELDS for row in report["rows"])
    assert {name for name, row in rows.items() if row["verified"] is not True} == {"plain sockets"}
    assert len(rows) == 9
    assert rows["weft"]["predicted_s"] > 0
    assert rows["weft"]["sent_bytes"] > report["num_bytes"], "every byte crosses the NICs"
    assert rows["weft, 1% changed, NICs at 1%"]["sent_bytes"] < report["num_bytes"] / 10
    assert rows["gather to rank 0, broadcast (Gloo)"]["sent_bytes"] > report["num_bytes"]
    assert rows["weft, FP8 engines"]["planned_bytes"] < 0.7 * 2 * report["num_bytes"], "two engines; embeddings in BF16"
    assert 1.9 < rows["weft, BF16 replicas"]["planned_bytes"] / report["num_bytes"] < 2
    for name in ("weft", "weft, BF16 replicas", "weft, expert-parallel ranks of a MoE", "weft, FP8 engines"):
        assert rows[name]["planned_bytes"] < rows[name]["sent_bytes"] < 1.2 * rows[name]["planned_bytes"]
    assert "plain sockets" in (tmp_path / "plot.svg").read_text()
