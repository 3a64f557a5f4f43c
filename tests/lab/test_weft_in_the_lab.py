"""weft between hosts of a lab, over NIXL and TCP: bytes cross the NICs; a host that is cut off costs one version."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.lab.programs import program
from weft.lab import Lab, alike
from weft.observe.events_file import find_version
from weft.observe.why import explain
from weft.runtime.control.keys import make_keys
from weft.transport.registry import is_installed

pytestmark = [pytest.mark.lab, pytest.mark.skipif(not is_installed("nixl"), reason="NIXL is not installed")]
NUM_ELEMENTS = 1_000_000
NUM_BYTES = 4 * NUM_ELEMENTS
CONTROLLER, TRAINER, ENGINE = range(3)
WAIT_S = 60.0


class Fleet:
    """A controller on host 0, and trainers and engines on others; trainers all hold the same."""

    def __init__(
        self,
        lab: Lab,
        keys: Path,
        stack: contextlib.ExitStack,
        *,
        trainers: Sequence[int] = (TRAINER,),
        engines: Sequence[int] = (ENGINE,),
        rebalance: bool = False,
    ) -> None:
        self.lab = lab
        make_keys(keys, ["controller", "trainer", "engine"])
        numbers = str(len(trainers)), str(len(engines)), "rebalance" if rebalance else ""
        self._controller = stack.enter_context(program(lab, CONTROLLER, "control", str(keys), *numbers))
        assert self._controller.stdout.readline() == "listening\n"
        what = str(keys), lab.address(CONTROLLER), str(NUM_ELEMENTS)
        self._trainers, self._engines = (
            [stack.enter_context(program(lab, host, name, *what, str(rank))) for rank, host in enumerate(hosts)]
            for name, hosts in (("train", trainers), ("serve", engines))
        )

    def publish(self, version: int) -> None:
        for trainer in self._trainers:
            trainer.stdin.write(f"{version}\n")
            trainer.stdin.flush()

    @property
    def answer(self) -> str:
        """What became of the version that was published; the same for all trainers."""
        answers = {_line(trainer) for trainer in self._trainers}
        assert len(answers) == 1, answers
        return answers.pop()

    @property
    def served(self) -> str:
        """The version the engines have committed, and whether it is right."""
        found = {_line(engine) for engine in self._engines}
        assert len(found) == 1, found
        return found.pop()

    def end(self) -> str:
        """The transports in use, slow hosts, and how many plans were made; ends the controller."""
        return str(self._controller.communicate(timeout=WAIT_S)[0]).strip()

    def received(self, host: int = ENGINE) -> int:
        """Bytes that have reached a host."""
        return sum(each.received_bytes for each in self.lab.traffic() if each.host == host)

    def sent(self, host: int) -> int:
        """Bytes that have left a host."""
        return sum(each.sent_bytes for each in self.lab.traffic() if each.host == host)


def _line(process: Any) -> str:
    """UCX complains on the standard output, too."""
    while (line := str(process.stdout.readline()).strip()).startswith("["):
        pass
    return line


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
    assert fleet.end() == "['nixl (different hosts)'] {} 1"


@pytest.mark.parametrize(
    ("victim", "named"), [(ENGINE, "engine 0"), (TRAINER, "controller"), (CONTROLLER, "controller")], ids=str
)
def test_a_host_that_is_cut_off_during_a_version_costs_that_version(fleet, victim, named):
    fleet.publish(1)
    assert fleet.answer == "committed"
    assert fleet.served == "1 True"
    before = fleet.received()
    fleet.lab.slow(ENGINE, "1mbit")  # half a minute: a busy machine may be seconds late with the cut
    fleet.publish(2)
    deadline = time.monotonic() + WAIT_S
    while fleet.received() - before < NUM_BYTES / 32:
        assert time.monotonic() < deadline, "no byte of version 2 has arrived"
    fleet.lab.cut(victim)
    assert named in fleet.answer
    for host in {victim, ENGINE}:
        fleet.lab.heal(host)
    version, answer = 2, ""
    while answer != "committed":  # until it is back
        assert time.monotonic() < deadline, answer
        version += 1
        fleet.publish(version)
        answer = fleet.answer
    assert fleet.served == f"{version} True"


def test_two_engines_on_one_host_share_its_nic(tmp_path):
    with Lab(alike(hosts=3, nic="100mbit")) as lab, contextlib.ExitStack() as stack:
        fleet = Fleet(lab, tmp_path, stack, engines=(ENGINE, ENGINE))
        for version in (1, 2):
            before = fleet.received()
            fleet.publish(version)
            assert fleet.answer == "committed"
            assert fleet.served == f"{version} True"
            assert 2 * NUM_BYTES < fleet.received() - before < 2.4 * NUM_BYTES


def test_two_nics_share_the_bytes(tmp_path):
    with Lab(alike(hosts=3, nic="100mbit", nics=2)) as lab, contextlib.ExitStack() as stack:
        fleet = Fleet(lab, tmp_path, stack)
        for version in (1, 2):
            before = {each.nic: each.received_bytes for each in lab.traffic() if each.host == ENGINE}
            fleet.publish(version)
            assert fleet.answer == "committed"
            assert fleet.served == f"{version} True"
        carried = [each.received_bytes - before[each.nic] for each in lab.traffic() if each.host == ENGINE]
        assert max(carried) < 1.05 * min(carried)
        assert sum(carried) < 1.2 * NUM_BYTES


def test_a_slow_host_is_found_and_others_send_for_it(tmp_path):
    slow, others = 4, (2, 3)
    with Lab(alike(hosts=5, nic="100mbit")) as lab, contextlib.ExitStack() as stack:
        fleet = Fleet(lab, tmp_path, stack, trainers=(*others, slow), engines=(1,), rebalance=True)
        sent = {}
        for version in range(1, 9):
            if version == 2:
                lab.slow(slow, "5mbit")
            before = fleet.sent(slow)
            fleet.publish(version)
            assert fleet.answer == "committed"
            assert fleet.served == f"{version} True"
            sent[version] = fleet.sent(slow) - before
            if version == 2:
                why = explain(find_version(tmp_path / "events.jsonl", 2))
                slowest = max(why.causes, key=lambda cause: cause.seconds).what
                assert re.fullmatch(r"trainer 2 wrote to engine 0 \([\d.]+ MB/s, other links [\d.]+\)", slowest)
        assert sent[2] > NUM_BYTES / 4, "an even share before it was found to be slow"
        assert sent[8] < NUM_BYTES / 8
        links, _, rest = fleet.end().partition("] ")
        assert links == "['nixl (different hosts)'"
        assert "trainer 2" in rest
        assert rest.endswith(" 2"), "planned once more, and no more than that"
