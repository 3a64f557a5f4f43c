"""weft between hosts of a lab, over NIXL and TCP: bytes cross the NICs; a host that is cut off costs one version."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab.programs import program
from weft.lab import Lab, alike
from weft.runtime.control.keys import make_keys
from weft.transport.registry import is_installed

pytestmark = [pytest.mark.lab, pytest.mark.skipif(not is_installed("nixl"), reason="NIXL is not installed")]
NUM_ELEMENTS = 1_000_000
NUM_BYTES = 4 * NUM_ELEMENTS
CONTROLLER, TRAINER, ENGINE = range(3)
WAIT_S = 60.0


class Fleet:
    """A controller, a trainer and an engine, each on a host of its own."""

    def __init__(self, lab: Lab, keys: Path, stack: contextlib.ExitStack) -> None:
        self.lab = lab
        make_keys(keys, ["controller", "trainer", "engine"])
        at = lab.address(CONTROLLER)
        self._controller = stack.enter_context(program(lab, CONTROLLER, "control", str(keys)))
        assert self._controller.stdout.readline() == "listening\n"
        self._trainer = stack.enter_context(program(lab, TRAINER, "train", str(keys), at, str(NUM_ELEMENTS)))
        self._engine = stack.enter_context(program(lab, ENGINE, "serve", str(keys), at, str(NUM_ELEMENTS)))

    def publish(self, version: int) -> None:
        self._trainer.stdin.write(f"{version}\n")
        self._trainer.stdin.flush()

    @property
    def answer(self) -> str:
        """What became of the version that was published. UCX complains on the standard output, too."""
        while (line := str(self._trainer.stdout.readline()).strip()).startswith("["):
            pass
        return line

    @property
    def served(self) -> str:
        """The version the engine has committed, and whether it is right."""
        return str(self._engine.stdout.readline()).strip()

    def links(self) -> str:
        """The transports in use; ends the controller."""
        return str(self._controller.communicate(timeout=WAIT_S)[0]).strip()

    def received(self) -> int:
        """Bytes that have reached the engine's host."""
        return next(each.received_bytes for each in self.lab.traffic() if each.host == ENGINE)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Any]:
    with Lab(alike(hosts=3, nic="24mbit")) as lab, contextlib.ExitStack() as stack:
        yield Fleet(lab, tmp_path, stack)


def test_versions_cross_the_nics(fleet):
    for version in (1, 2, 3):
        before = fleet.received()
        fleet.publish(version)
        assert fleet.answer == "committed"
        assert fleet.served == f"{version} True"
        assert NUM_BYTES < fleet.received() - before < 1.2 * NUM_BYTES
    assert fleet.links() == "['nixl (different hosts)']"


@pytest.mark.parametrize(
    ("victim", "named"), [(ENGINE, "engine 0"), (TRAINER, "controller"), (CONTROLLER, "controller")], ids=str
)
def test_a_host_that_is_cut_off_during_a_version_costs_that_version(fleet, victim, named):
    fleet.publish(1)
    assert fleet.answer == "committed"
    assert fleet.served == "1 True"
    before = fleet.received()
    fleet.publish(2)
    deadline = time.monotonic() + WAIT_S
    while fleet.received() - before < NUM_BYTES / 8:
        assert time.monotonic() < deadline, "no byte of version 2 has arrived"
    fleet.lab.cut(victim)
    assert named in fleet.answer
    fleet.lab.heal(victim)
    version, answer = 2, ""
    while answer != "committed":  # until it is back
        assert time.monotonic() < deadline, answer
        version += 1
        fleet.publish(version)
        answer = fleet.answer
    assert fleet.served == f"{version} True"
