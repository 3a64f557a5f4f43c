"""`weft bench transfer` and `weft controller` as their users meet them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys

import numpy as np

from tests.support.leftovers import shared_files
from tests.support.waiting import wait_until
from weft import Receiver, Sender, Weights
from weft.core.topology import load_topology

SOON_S = 60.0
ROW_KEYS = {
    "method",
    "transport",
    "bytes",
    "seconds",
    "gb_per_s",
    "fraction_of_limit",
    "predicted_s",
    "verified",
}


def test_every_method_moves_every_byte():
    """The whole benchmark on a model of a few kilobytes: one JSON object, everything verified, nothing left behind."""
    before = shared_files()
    command = [sys.executable, "-m", "weft", "bench", "transfer", "--model", "smallest", "--repeat", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["limit_gb_per_s"] > 0
    assert report["control_ms"] > 0
    assert all(set(row) >= ROW_KEYS for row in report["rows"])
    moved = [row for row in report["rows"] if row["verified"] is not None]
    assert all(row["verified"] for row in moved)
    assert {row["transport"] for row in moved} == {"shm", "cma", "nixl", "gloo", "file"}
    assert {row["case"] for row in moved} == {"FSDP2 → TP2", "FSDP2 → 2 replicas"}
    assert {row["mode"] for row in moved if row["wire_bytes"] is not None} == {"in_place", "shadow", "patch"}
    wait_until(lambda: shared_files() <= before, SOON_S, "no shared memory is left")


def test_costs_of_links_become_a_topology(tmp_path):
    saved = tmp_path / "here.toml"
    command = [sys.executable, "-m", "weft", "bench", "links", "--repeat", "1", "--json", "--save", str(saved)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert {row["transport"] for row in report["rows"]} >= {"cma", "nixl"}
    assert all(row["op_us"] >= 0 and row["gb_per_s"] > 0 for row in report["rows"])
    host = load_topology(str(saved)).host
    costs = {(row["transport"], row["memory"]): round(row["op_us"], 3) for row in report["rows"]}
    assert {(name, memory): cost for name, of in host.op_us.items() for memory, cost in of.items()} == costs
    assert host.cpu_gb_per_s == round(report["cpu_gb_per_s"], 2)
    assert {memory for _, memory in costs} == {"cpu"} | ({"cuda"} if report["device_gb_per_s"] else set())


def test_every_codec_gives_what_its_reference_gives():
    command = [sys.executable, "-m", "weft", "bench", "codec", "--megabytes", "2", "--repeat", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["copy_gb_per_s"] > 0
    wanted = {"kernel", "device", "bytes", "seconds", "gb_per_s", "fraction_of_limit", "exact"}
    assert all(set(row) >= wanted for row in report["rows"])
    assert [row["kernel"] for row in report["rows"] if row["exact"] is False] == []
    assert sum(row["exact"] is True for row in report["rows"]) >= 10


def test_fp8_is_exact_with_and_without_a_gather():
    command = [sys.executable, "-m", "weft", "bench", "fp8", "--model", "smallest", "--repeat", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    weft, gather = json.loads(done.stdout)["rows"]
    assert weft["exact"]
    assert gather["exact"]
    assert weft["wire_bytes"] == gather["wire_bytes"] > 0
    assert weft["exchanged_bytes"] > 0
    assert gather["exchanged_bytes"] > 0


def test_stages_over_a_slow_link_stay_below_the_watermark():
    command = [sys.executable, "-m", "weft", "bench", "pipeline", "--model", "smallest", "--repeat", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [set(row["stages_s"]) for row in rows] == [
        {"amax", "convert", "write"},
        {"amax", "convert", "delta", "write"},
    ]
    assert all(row["exact"] and 0 < row["peak_staging_bytes"] <= row["watermark_bytes"] for row in rows)


def test_the_controller_command_serves_members_and_says_what_happened():
    command = [
        sys.executable, "-m", "weft", "controller", "--trainers", "1", "--engine-ranks", "1",
        "--bind", "tcp://127.0.0.1:*", "--ignore", "visual.*", "--json",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        address = re.search(r"tcp://127.0.0.1:\d+", process.stderr.readline())
        assert address is not None
        source, target = {"w": np.arange(9, dtype=np.float32)}, {"w": np.zeros(9, dtype=np.float32)}
        source["visual.patch"] = np.zeros((4, 3, 2, 2), dtype=np.float32)
        with (
            Sender(address[0], rank=0, weights=Weights.from_arrays(source)) as sender,
            Receiver(address[0], rank=0, weights=Weights.from_arrays(target)) as receiver,
        ):
            publication = sender.publish(version=1)
            receiver.wait(SOON_S).commit()
            publication.wait_committed(SOON_S)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=SOON_S)
    assert process.returncode == 0, stderr
    found = json.loads(stdout)
    assert (found["committed"], found["num_committed"], found["num_aborted"]) == (1, 1, 0)
    assert np.array_equal(source["w"], target["w"])
    assert "1 links: shm (one host, CPU memory)" in stderr
    assert "version 1 is served everywhere" in stderr
