"""`weft bench scaling`: every method moves a version between the hosts of a lab, and says what it cost."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from weft.transport.registry import is_installed

pytestmark = [pytest.mark.lab, pytest.mark.skipif(not is_installed("nixl"), reason="NIXL is not installed")]
WAIT_S = 300.0
EACH = "rank 0 sends to each in turn (Gloo)"
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
    options += ["--no-slow-host", "--plot", str(tmp_path / "plot.svg"), "--report", str(tmp_path / "page.html")]
    command = [sys.executable, "-m", "weft", "bench", "scaling", *options, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    rows = {row["method"]: row for row in report["rows"]}
    assert all(set(row) >= FIELDS for row in report["rows"])
    assert {name for name, row in rows.items() if row["verified"] is not True} == {"plain sockets"}
    assert len(rows) == 10
    sockets = rows["plain sockets"]
    assert sockets["fraction_of_nics"] * sockets["num_nics"] > 1, "they use more than one NIC"
    assert rows["weft"]["predicted_s"] > rows["weft"]["bound_s"] > 0
    assert rows[EACH]["predicted_s"] > 2 * rows["weft"]["predicted_s"], "two receivers, from one of four NICs"
    assert rows[EACH]["sent_bytes"] > 2 * report["num_bytes"]
    for row in rows.values():
        raw = row["nic_gb_per_s"] * 1e9 * row["num_nics"] * row["num_senders"]
        assert row["fraction_of_nics"] == pytest.approx(row["planned_bytes"] / row["seconds"] / raw)
    assert rows["weft"]["sent_bytes"] > report["num_bytes"], "every byte crosses the NICs"
    assert rows["weft, 1% changed, NICs at 1%"]["sent_bytes"] < report["num_bytes"] / 10
    assert rows["gather to rank 0, broadcast (Gloo)"]["sent_bytes"] > report["num_bytes"]
    assert rows["weft, FP8 engines"]["planned_bytes"] < 0.7 * 2 * report["num_bytes"], "two engines; embeddings in BF16"
    assert 1.9 < rows["weft, BF16 replicas"]["planned_bytes"] / report["num_bytes"] < 2
    for name in ("weft", "weft, BF16 replicas", "weft, expert-parallel ranks of a MoE", "weft, FP8 engines"):
        assert rows[name]["planned_bytes"] < rows[name]["sent_bytes"] < 1.2 * rows[name]["planned_bytes"]
    assert "plain sockets" in (tmp_path / "plot.svg").read_text()
    assert '"kind": "lines"' in (tmp_path / "page.html").read_text()
