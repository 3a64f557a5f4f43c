"""One trainer's wish opens a version for all: those that publish it later, never, or another one instead."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.waiting import wait_until
from weft import Controller, Receiver, Sender, TransferSettings, Weights
from weft.errors import ProtocolError, VersionError
from weft.observe.why import explain

NUM_TRAINERS = 3
WAIT_S = 30.0


class Fleet:
    """Trainers that hold the same weights, and an engine, in threads of this process."""

    def __init__(self, stack: contextlib.ExitStack, events: Path, **settings: object) -> None:
        self.events = events
        self.controller = stack.enter_context(
            Controller(
                num_trainers=NUM_TRAINERS,
                num_engine_ranks=1,
                settings=TransferSettings(version_s=WAIT_S, **settings),
                events=events,
            )
        )
        address = self.controller.address
        self.trained, self.served = np.arange(500, dtype=np.float32), np.zeros(500, dtype=np.float32)
        self.engine = stack.enter_context(Receiver(address, rank=0, weights=Weights.from_arrays({"w": self.served})))
        self.trainers = [
            stack.enter_context(Sender(address, rank=rank, weights=Weights.from_arrays({"w": self.trained})))
            for rank in range(NUM_TRAINERS)
        ]
        wait_until(self._is_planned, WAIT_S, "all have a plan")

    def _is_planned(self) -> bool:
        """In place, the engine's thread opens its memory when it polls."""
        assert self.engine.poll() is None
        return self.controller.wait_planned(0.0)

    def commit(self, version: int, *, order: tuple[int, ...] = (0, 1, 2)) -> None:
        """All trainers publish, in this order."""
        self.trained += 1
        publications = [self.trainers[rank].publish(version=version) for rank in order]
        self.engine.take(WAIT_S)
        for publication in publications:
            publication.wait_committed(WAIT_S)
        assert np.array_equal(self.served, self.trained)

    def told_to_write(self, rank: int, version: int) -> None:
        """Wait until a trainer has been told to write a version it has not published."""
        wait_until(lambda: self.trainers[rank]._early.version == version, WAIT_S, f"trainer {rank} is told")

    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.events.read_text().splitlines() if "moments" in line]


@pytest.fixture
def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fleet]:
    """In mode `shadow` trainers are told to write at once; in place when the engine stands still."""
    with contextlib.ExitStack() as stack:
        yield Fleet(stack, tmp_path / "events.jsonl", mode=getattr(request, "param", "shadow"))


both_modes = pytest.mark.parametrize("fleet", ["shadow", "in_place"], indirect=True)


def test_a_version_that_some_publish_later_is_written_by_all(fleet):
    fleet.commit(1)
    fleet.commit(2, order=(2, 1, 0))
    first = fleet.trainers[0].publish(version=3)
    fleet.told_to_write(2, 3)
    others = [fleet.trainers[rank].publish(version=3) for rank in (2, 1)]
    fleet.engine.take(WAIT_S)
    for publication in (first, *others):
        publication.wait_committed(WAIT_S)
    assert np.array_equal(fleet.served, fleet.trained)


def test_trainers_that_are_late_are_named(fleet):
    fleet.commit(1)
    fleet.trainers[0].publish(version=2)
    fleet.trainers[1].publish(version=2)
    fleet.told_to_write(2, 2)
    time.sleep(0.3)  # what makes it late; nothing waits for it
    last = fleet.trainers[2].publish(version=2)
    fleet.engine.take(WAIT_S)
    last.wait_committed(WAIT_S)
    wait_until(lambda: len(fleet.lines()) == 2, WAIT_S, "the version is recorded")
    assert "trainer 2 had not published yet" in explain(fleet.lines()[-1]).sentence


@both_modes
def test_the_first_rank_asks_at_once(fleet):
    """Higher ranks leave it to lower ones for a while; how many ask all the same depends on the machine."""
    for version in range(1, 6):
        fleet.commit(version)
    wait_until(lambda: len(fleet.lines()) == 5, WAIT_S, "the versions are recorded")
    for line in fleet.lines():
        assert "trainer 0" in [member for _, kind, member in line["moments"] if kind == "Want"]


@both_modes
def test_a_higher_rank_asks_if_lower_ones_do_not(fleet):
    """The version opens without trainer 0; it is committed when that has published it as well."""
    fleet.trainers[2].publish(version=1)
    wait_until(lambda: fleet.controller._versions._transfer is not None, WAIT_S, "the version is open")
    for rank in (1, 0):
        publication = fleet.trainers[rank].publish(version=1)
    fleet.engine.take(WAIT_S)
    publication.wait_committed(WAIT_S)


def test_a_trainer_that_publishes_a_later_version_ends_the_one_it_passes_over(fleet):
    fleet.commit(1)
    passed = [fleet.trainers[rank].publish(version=2) for rank in (0, 1)]
    fleet.told_to_write(2, 2)
    ahead = fleet.trainers[2].publish(version=3)
    for publication in passed:
        with pytest.raises(VersionError, match="trainer 2 published version 3 instead"):
            publication.wait_committed(WAIT_S)
    others = [fleet.trainers[rank].publish(version=3) for rank in (0, 1)]
    fleet.engine.take(WAIT_S)
    for publication in (ahead, *others):
        publication.wait_committed(WAIT_S)
    assert np.array_equal(fleet.served, fleet.trained)


def test_a_lower_version_is_refused_while_another_is_open(fleet):
    """A trainer that is behind hears of it at once, and then takes part."""
    others = [fleet.trainers[rank].publish(version=5) for rank in (0, 1)]
    fleet.told_to_write(2, 5)
    behind = fleet.trainers[2].publish(version=4)
    with pytest.raises(VersionError, match="version numbers must increase"):
        behind.wait_committed(WAIT_S)
    others.append(fleet.trainers[2].publish(version=5))
    fleet.engine.take(WAIT_S)
    for publication in others:
        publication.wait_committed(WAIT_S)


def test_an_abort_is_answered_by_trainers_that_had_not_published(fleet):
    """Otherwise the controller would wait for a writer that never begins."""
    fleet.commit(1)
    may_fail, write = threading.Event(), fleet.trainers[0]._write

    def fail(*_: object) -> None:
        may_fail.wait(WAIT_S)
        raise VersionError("planted")

    fleet.trainers[0]._write = fail
    publications = [fleet.trainers[rank].publish(version=2) for rank in (0, 1)]
    fleet.told_to_write(2, 2)
    may_fail.set()
    for publication in publications:
        with pytest.raises(VersionError, match="planted"):
            publication.wait_committed(WAIT_S)
    fleet.trainers[0]._write = write
    wait_until(lambda: fleet.trainers[2]._early.version is None, WAIT_S, "trainer 2 has heard of the abort")
    late = fleet.trainers[2].publish(version=2)
    with pytest.raises(VersionError, match="planted"):
        late.wait_committed(WAIT_S)
    fleet.commit(3)


def test_a_trainer_that_closes_before_it_publishes_ends_the_version(tmp_path):
    with contextlib.ExitStack() as stack:
        fleet = Fleet(stack, tmp_path / "events.jsonl", mode="shadow")
        fleet.commit(1)
        publications = [fleet.trainers[rank].publish(version=2) for rank in (0, 1)]
        fleet.told_to_write(2, 2)
        fleet.trainers[2].close()
        for publication in publications:
            with pytest.raises(VersionError, match="trainer 2 was closed before it published it"):
                publication.wait_committed(WAIT_S)


def test_closing_does_not_wait_for_versions_that_are_not_decided(tmp_path):
    """The second version has had no turn: it is dropped at once, though the first is not committed yet."""
    with contextlib.ExitStack() as stack:
        fleet = Fleet(stack, tmp_path / "events.jsonl", mode="shadow")
        for trainer in fleet.trainers:
            trainer.publish(version=1)
        for trainer in fleet.trainers:
            trainer._publications[1].wait_released(WAIT_S)
        second = fleet.trainers[2].publish(version=2)
        closing = threading.Thread(target=fleet.trainers[2].close)
        closing.start()
        closing.join(WAIT_S)
        assert not closing.is_alive()
        with pytest.raises(ProtocolError, match="was closed"):
            second.wait_committed(WAIT_S)
