"""Two nodes: network namespaces joined by a virtual cable, torchrun on each, weights by NIXL over TCP."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from weft.runtime.control.keys import make_keys

pytestmark = pytest.mark.lab


def can_make_namespaces() -> bool:
    if os.getuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"weft-{secrets.token_hex(3)}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False, timeout=10)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False, timeout=10)
    return made.returncode == 0


if not can_make_namespaces():
    pytest.skip("needs root, iproute2 and network namespaces", allow_module_level=True)
if not any(importlib.util.find_spec(name) for name in ("nixl_cu13", "nixl_cu12", "nixl")):
    pytest.skip("needs NIXL", allow_module_level=True)


@contextlib.contextmanager
def two_nodes():
    """Names of two namespaces and their ends of the cable; gone afterwards."""
    mark = secrets.token_hex(2)
    nodes = [(f"weft-{mark}-{n}", f"w{mark}{n}", f"10.77.0.{n + 1}") for n in range(2)]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)

    try:
        for name, _, _ in nodes:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        (first, cable, _), (second, other, _) = nodes
        ip("link", "add", cable, "netns", first, "type", "veth", "peer", "name", other, "netns", second)
        for name, end, address in nodes:
            ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
        yield nodes
    finally:
        for name, _, _ in nodes:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=10)


def start(number: int, node: tuple[str, str, str], master: str, out: Path, keys: Path) -> subprocess.Popen[str]:
    """`weft rl` under torchrun on one node: trainers on the first, engines on the second."""
    name, end, _ = node
    torchrun = ["--nnodes", "2", "--nproc-per-node", "2", "--node-rank", str(number)]
    torchrun += ["--master-addr", master, "--master-port", "29501"]
    loop = ["--trainers", "2", "--trainer", "fsdp2", "--engines", "2", "--iterations", "5", "--rollouts", "16"]
    loop += ["--transport", "nixl", "--keys", str(keys), "--out", str(out), "--timeout-s", "90", "--json"]
    return subprocess.Popen(
        [
            "ip",
            "netns",
            "exec",
            name,
            sys.executable,
            "-m",
            "torch.distributed.run",
            *torchrun,
            "-m",
            "weft",
            "rl",
            *loop,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "GLOO_SOCKET_IFNAME": end, "UCX_NET_DEVICES": end, "UCX_TLS": "tcp", "OMP_NUM_THREADS": "1"},
    )


def test_a_run_under_torchrun_trains_through_nixl_over_tcp(tmp_path):
    make_keys(tmp_path / "keys", ["controller", "trainer", "engine"])
    with two_nodes() as nodes:
        master = nodes[0][2]
        processes = [
            start(number, node, master, tmp_path / str(number), tmp_path / "keys") for number, node in enumerate(nodes)
        ]
        try:
            said = [process.communicate(timeout=150.0) for process in processes]
        finally:
            for process in processes:
                process.kill()
    assert [process.returncode for process in processes] == [0, 0], said
    found = json.loads(said[0][0].splitlines()[-1])
    assert said[1][0] == ""  # the first rank speaks for all
    assert (found["iterations"], found["num_versions"], found["all_verified"]) == (5, 6, True)
    assert set(found["links"]) == {"nixl (asked for)"}
    assert Path(found["report"]).is_file()


def test_without_keys_nobody_listens_on_a_network(tmp_path):
    with two_nodes() as nodes:
        name, end, address = nodes[0]
        rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
        where = {"MASTER_ADDR": address, "MASTER_PORT": "29501", "GLOO_SOCKET_IFNAME": end}
        done = subprocess.run(
            ["ip", "netns", "exec", name, sys.executable, "-m", "weft", "rl", "--out", str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=60.0,
            check=False,
            env={**os.environ, **rank, **where, "NO_COLOR": "1"},
        )
    assert done.returncode == 2
    assert "without keys" in done.stderr
