"""Nothing of a lab stays behind, however the process it belongs to ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from tests.support.waiting import wait_until
from weft.lab import Lab, alike, network, records
from weft.lab.commands import call, namespaces
from weft.transport.registry import is_installed

pytestmark = pytest.mark.lab
NAME = f"end{os.getpid()}"
WAIT_S = 60.0
FORKS = "while :; do sleep 600 & sleep 0.05; done"
COMMANDS = {
    "run": ["lab", "run", "--name", NAME, "--", "sh", "-c", FORKS],
    "bench": ["bench", "scaling", "--model", "smallest", "--senders", "1", "--receivers", "1", "--repeat", "1000"],
}
needs_nixl = pytest.mark.skipif(not is_installed("nixl"), reason="NIXL is not installed")


def mine(parent: int) -> str | None:
    """The name of the lab of a process, once it is there."""
    return next((record.name for record in records.all_labs() if record.owner.pid == parent), None)


def inside(name: str) -> list[int]:
    """Processes on the hosts of a lab."""
    found = []
    for namespace in namespaces():
        if namespace.startswith(f"weft-{name}-"):
            found += [int(process) for process in call("ip", "netns", "pids", namespace).split()]
    return found


def is_running(process: int) -> bool:
    """Whether it is there, and not only waits to be reaped."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("command", ["run", pytest.param("bench", marks=needs_nixl)])
def test_a_command_that_is_told_to_end_leaves_nothing(command, number):
    arguments = [sys.executable, "-m", "weft", *COMMANDS[command]]
    with subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as launcher:
        try:
            wait_until(lambda: mine(launcher.pid) is not None, WAIT_S, "there is a lab")
            name = mine(launcher.pid)
            assert name is not None
            wait_until(lambda: len(inside(name)) >= 3, WAIT_S, "processes run on its hosts")
            processes = inside(name)
            launcher.send_signal(number)
            assert launcher.wait(WAIT_S) == 128 + number
        finally:
            launcher.kill()
    assert [namespace for namespace in namespaces() if name in namespace] == []
    assert list(records.FOLDER.glob(f"{name}.*")) == []
    wait_until(lambda: not any(map(is_running, processes)), WAIT_S, "no process is left")


def test_processes_that_end_or_start_while_a_lab_is_removed_do_not_matter(monkeypatch):
    ended = subprocess.Popen(["true"])
    ended.wait(WAIT_S)
    listings = [f"{ended.pid}\n"]

    def late(*arguments: str) -> str:
        """The first list of processes has one that has just ended, and not the one that has just begun."""
        return listings.pop() if "pids" in arguments and listings else call(*arguments)

    with Lab(alike(hosts=1, nic="1gbit")) as lab, contextlib.ExitStack() as stack:
        begun = stack.enter_context(lab.start(0, ["sleep", "600"]))
        stack.callback(begun.kill)
        wait_until(lambda: inside(lab.name) == [begun.pid], WAIT_S, "the process is on its host")
        monkeypatch.setattr(network, "call", late)
        records.remove_lab(lab.name)
        assert not listings
        assert begun.wait(WAIT_S) == -signal.SIGKILL
        assert not any(lab.name in namespace for namespace in namespaces())
    assert not os.path.exists(records.FOLDER / f"{lab.name}.json")


def test_two_labs_that_begin_may_remove_the_same_leftovers(monkeypatch):
    with Lab(alike(hosts=1, nic="1gbit")) as lab:
        listings = [namespaces()]
        records.remove_lab(lab.name)
        monkeypatch.setattr(network, "namespaces", lambda: listings.pop() if listings else namespaces())
        records.remove_lab(lab.name)
    assert not listings
