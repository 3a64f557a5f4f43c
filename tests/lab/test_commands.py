"""The `weft lab` commands as their users meet them: real processes, their streams and exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.lab.programs import program
from tests.support.waiting import wait_until
from weft import cli
from weft.lab import Lab, alike, records
from weft.lab.commands import call, namespaces

pytestmark = pytest.mark.lab
NAME = f"run{os.getpid()}"
WAIT_S = 60.0


def weft_lab(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "weft", "lab", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)


def good(*arguments: str) -> str:
    """What a command that succeeds prints."""
    done = weft_lab(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(alike(hosts=2, nic="80mbit", nics=2), NAME) as made:
        yield made


def rates(host: int) -> list[str]:
    """What the kernel says about the NICs of a host."""
    cards = json.loads(call("tc", "-n", f"weft-{NAME}-h{host}", "-j", "qdisc", "show"))
    return [card["options"]["rate"] for card in cards if card["kind"] == "tbf"]


def ports(host: int) -> set[str]:
    """Whether the switches' ports to a host are up."""
    found = json.loads(call("ip", "-n", f"weft-{NAME}-sw", "-j", "link", "show"))
    return {
        "UP" if "UP" in link["flags"] else "DOWN" for link in found if link["ifname"] in (f"h{host}n0", f"h{host}n1")
    }


def test_run_tells_every_host_its_rank_and_its_addresses():
    says = "echo $RANK of $WORLD_SIZE at $WEFT_LAB_ADDRESS, $MASTER_ADDR, $UCX_NET_DEVICES, $WEFT_NIC_GBPS, $WEFT_LAB"
    options = ["--hosts", "3", "--nic", "80mbit", "--nics", "2", "--name", NAME]
    done = weft_lab("run", *options, "--", "sh", "-c", says)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"host {n} | {n} of 3 at 10.77.0.{n + 1}, 10.77.0.1, eth0,eth1, 0.16, {NAME}" for n in range(3)
    ]
    assert f"lab {NAME}: 3 hosts, 10.77.0.1 to 10.77.0.3" in done.stderr
    assert not any(NAME in namespace for namespace in namespaces())


def test_run_names_the_host_on_which_the_command_failed():
    done = weft_lab("run", "--name", NAME, "--", "sh", "-c", "test $RANK = 1 && exit 3; exec sleep 600")
    assert done.returncode == 2
    assert "the command on host 1 exited with 3" in done.stderr
    assert not any(NAME in namespace for namespace in namespaces())


def test_cut_slow_and_heal_change_a_host_of_a_running_lab(lab):
    healthy = rates(1)
    assert len(healthy) == 2
    good("slow", "1", "8mbit", "--name", NAME)
    assert rates(1) == [rate / 10 for rate in healthy]
    assert rates(0) == healthy
    good("cut", "1", "--name", NAME)
    assert (ports(0), ports(1)) == ({"UP"}, {"DOWN"})
    good("heal", "1", "--name", NAME)
    assert (rates(1), ports(1)) == (healthy, {"UP"})


@pytest.mark.parametrize("command", [["cut", "2"], ["slow", "2", "8mbit"], ["heal", "2"]], ids=" ".join)
def test_a_host_the_lab_does_not_have_is_refused(lab, command):
    done = weft_lab(*command, "--name", NAME)
    assert done.returncode == 2
    assert "no host 2" in done.stderr
    assert "expected 0 to 1" in done.stderr


def test_traffic_counts_every_nic(lab):
    with program(lab, 1, "receive", "100000") as receiver:
        assert receiver.stdout.readline() == "listening\n"
        with program(lab, 0, "send", lab.address(1), "100000") as sender:
            assert sender.wait(WAIT_S) == 0
        assert receiver.communicate(timeout=WAIT_S)[0].startswith("0 ")
    nics = json.loads(good("traffic", "--name", NAME, "--json"))["nics"]
    assert [(each["host"], each["nic"]) for each in nics] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert min(nics[0]["sent_bytes"], nics[2]["received_bytes"]) > 100000 > nics[1]["sent_bytes"]
    lines = [line for line in good("traffic", "--name", NAME).splitlines() if "│" in line]
    assert len(lines) == 4


def watched(as_json: bool) -> Iterator[str]:
    """Lines of `weft lab traffic --watch`, which is ended afterwards."""
    command = [sys.executable, "-m", "weft", "lab", "traffic", "--watch", "--name", NAME, *["--json"] * as_json]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as watching:
        try:
            assert watching.stdout is not None
            yield from watching.stdout
        finally:
            watching.kill()


def test_watched_traffic_is_printed_every_second(lab):
    lines = watched(as_json=True)
    looks: list[Any] = [json.loads(next(lines))["nics"] for _ in range(2)]
    lines.close()
    assert [len(look) for look in looks] == [4, 4]
    assert all(now["sent_bytes"] >= before["sent_bytes"] for before, now in zip(*looks, strict=True))
    lines = watched(as_json=False)
    assert next(line for line in lines if "Mbit/s │" in line)
    lines.close()


def test_list_shows_the_labs_that_run(lab):
    shown = {each["name"]: each for each in json.loads(good("list", "--json"))["labs"]}
    assert shown[NAME] == {"name": NAME, "num_hosts": 2, "pid": os.getpid()}
    assert f"{NAME}: 2 hosts, process {os.getpid()}" in good("list").splitlines()


def test_clean_removes_what_a_killed_command_leaves():
    command = [sys.executable, "-m", "weft", "lab", "run", "--name", NAME, "--", "sleep", "600"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as launcher:
        assert launcher.stderr is not None
        assert NAME in launcher.stderr.readline()
        launcher.kill()
        launcher.wait(WAIT_S)
    assert any(NAME in namespace for namespace in namespaces())
    done = weft_lab("clean")
    assert done.returncode == 0
    assert done.stderr.startswith("removed: ")
    assert NAME in done.stderr
    wait_until(lambda: not any(NAME in namespace for namespace in namespaces()), WAIT_S, "its namespaces are gone")
    assert not list(records.FOLDER.glob(f"{NAME}.*"))


@pytest.mark.parametrize(
    "command",
    [["run", "--", "true"], ["cut", "0"], ["slow", "0", "8mbit"], ["heal", "0"], ["traffic"], ["clean"]],
    ids=lambda command: command[0],
)
def test_without_root_every_command_is_refused_with_a_hint(lab, command, monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    named = [] if command[0] in ("run", "clean") else ["--name", NAME]
    monkeypatch.setattr(sys, "argv", ["weft", "lab", *command, *named])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "error: labs need root" in said
    assert "hint: sudo weft lab" in said
