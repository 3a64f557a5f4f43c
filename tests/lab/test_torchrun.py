"""`weft rl` under torchrun on four hosts: trainers on two, engines on two, weights by NIXL over TCP."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from weft.lab import Lab, alike
from weft.runtime.control.keys import make_keys
from weft.transport.registry import is_installed

pytestmark = [pytest.mark.lab, pytest.mark.skipif(not is_installed("nixl"), reason="NIXL is not installed")]
NUM_HOSTS = 4
WAIT_S = 240.0
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


def start(lab: Lab, host: int, out: Path, keys: Path) -> subprocess.Popen[str]:
    torchrun = ["--nnodes", str(NUM_HOSTS), "--nproc-per-node", "1", "--node-rank", str(host)]
    torchrun += ["--master-addr", lab.address(0), "--master-port", "29501"]
    loop = ["--trainers", "2", "--trainer", "fsdp2", "--engines", "2", "--iterations", "5", "--rollouts", "16"]
    loop += ["--transport", "nixl", "--keys", str(keys), "--out", str(out), "--timeout-s", "150", "--json"]
    command = [sys.executable, "-m", "torch.distributed.run", *torchrun, "-m", "weft", "rl", *loop]
    return lab.start(host, command, env={"OMP_NUM_THREADS": "1"}, **PIPES)


def test_a_run_trains_through_nixl_over_tcp(tmp_path):
    make_keys(tmp_path / "keys", ["controller", "trainer", "engine"])
    with Lab(alike(hosts=NUM_HOSTS, nic="400mbit")) as lab:
        processes = [start(lab, host, tmp_path / str(host), tmp_path / "keys") for host in range(NUM_HOSTS)]
        try:
            said = [process.communicate(timeout=WAIT_S) for process in processes]
        finally:
            for process in processes:
                process.kill()
        received = {each.host: each.received_bytes for each in lab.traffic()}
    assert [process.returncode for process in processes] == [0] * NUM_HOSTS, said
    assert [text for text, _ in said[1:]] == [""] * (NUM_HOSTS - 1), "the first rank speaks for all"
    found = json.loads(said[0][0].splitlines()[-1])
    assert (found["iterations"], found["num_versions"], found["all_verified"]) == (5, 6, True)
    assert set(found["links"]) == {"nixl (asked for)"}
    assert Path(found["report"]).is_file()
    assert min(received.values()) > 0


def test_without_keys_nobody_listens_on_a_network(tmp_path):
    with Lab(alike(hosts=1, nic="400mbit")) as lab:
        rank = {"WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none", "NO_COLOR": "1"}
        process = lab.start(0, [sys.executable, "-m", "weft", "rl", "--out", str(tmp_path)], env=rank, **PIPES)
        try:
            _, said = process.communicate(timeout=60.0)
        finally:
            process.kill()
    assert process.returncode == 2
    assert "without keys" in said
