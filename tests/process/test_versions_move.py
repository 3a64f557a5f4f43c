"""Versions from trainer processes to engine processes, through the controller: bytes, atomicity, failures."""

from __future__ import annotations

import time

import numpy as np
import pytest

from tests.process.runtime_members import Member, checkpoint, parts_of
from weft.config import TransferSettings
from weft.runtime.controller import Controller

SOON_S = 15.0


class Fleet:
    """A controller here, trainers (FSDP along rows) and engine ranks (cut along columns) as processes."""

    def __init__(self, *, num_trainers: int, num_engines: int, kind: str = "shm") -> None:
        settings = TransferSettings(silence_s=2.0, version_s=10.0, transport=kind, nixl_devices="lo")
        self.controller = Controller(num_trainers=num_trainers, num_engine_ranks=num_engines, settings=settings)
        self.trainers = [self.member("trainer", r, num_trainers) for r in range(num_trainers)]
        self.engines = [self.member("engine", r, num_engines) for r in range(num_engines)]

    def member(self, side: str, rank: int, num_ranks: int) -> Member:
        return Member(side, self.controller.address, rank, num_ranks)

    def publish(self, version: int) -> list[str]:
        assert self.controller.wait_planned(SOON_S)
        for trainer in self.trainers:
            trainer.ask(version)
        return [trainer.answer() for trainer in self.trainers]

    def holdings(self):
        for engine in self.engines:
            engine.ask("holdings")
        return [engine.answer() for engine in self.engines]

    def wait_for(self, version: int) -> None:
        deadline = time.monotonic() + SOON_S
        while any(held[0] != version for held in self.holdings()):
            assert time.monotonic() < deadline, "the version is not visible"

    def check(self, version: int) -> None:
        """Every engine rank holds exactly its part of one version."""
        whole = checkpoint(version)
        for rank, (visible, arrays) in enumerate(self.holdings()):
            boxes, _ = parts_of(rank, len(self.engines), dim=1)
            assert visible == version
            for name, array in arrays.items():
                assert np.array_equal(array, whole[name][boxes[name]]), f"{name} on engine {rank}"

    def close(self) -> None:
        for member in (*self.trainers, *self.engines):
            member.close()
        self.controller.close()


@pytest.fixture
def fleet(request):
    made = Fleet(**request.param)
    yield made
    made.close()


@pytest.mark.parametrize(
    "fleet",
    [
        {"num_trainers": 2, "num_engines": 2, "kind": "shm"},
        {"num_trainers": 3, "num_engines": 2, "kind": "cma"},
        {"num_trainers": 2, "num_engines": 1, "kind": "nixl"},
    ],
    indirect=True,
)
def test_several_versions_arrive_bit_for_bit(fleet):
    for version in (1, 2, 3, 7):
        assert fleet.publish(version) == ["committed"] * len(fleet.trainers)
        fleet.wait_for(version)
        fleet.check(version)
    assert fleet.controller.committed == 7


@pytest.mark.parametrize("fleet", [{"num_trainers": 2, "num_engines": 2}], indirect=True)
def test_versions_must_grow(fleet):
    assert fleet.publish(5) == ["committed", "committed"]
    fleet.wait_for(5)
    answers = fleet.publish(5)
    assert all("version 5 after version 5" in answer for answer in answers)


@pytest.mark.parametrize("fleet", [{"num_trainers": 2, "num_engines": 2}], indirect=True)
def test_a_stalled_trainer_aborts_the_version_within_seconds(fleet):
    assert fleet.publish(1) == ["committed", "committed"]
    fleet.wait_for(1)
    fleet.trainers[1].stall()
    started = time.monotonic()
    fleet.trainers[0].ask(2)
    answer = fleet.trainers[0].answer()
    assert "trainer 1" in answer
    assert "was not heard of" in answer
    assert time.monotonic() - started < SOON_S
    fleet.check(1)
    fleet.trainers[1].kill()


@pytest.mark.parametrize("fleet", [{"num_trainers": 2, "num_engines": 2}], indirect=True)
@pytest.mark.parametrize("victim", ["trainer", "engine"])
def test_a_killed_member_aborts_the_version_and_its_successor_commits_the_next(fleet, victim):
    assert fleet.publish(1) == ["committed", "committed"]
    fleet.wait_for(1)
    members = fleet.trainers if victim == "trainer" else fleet.engines
    members[1].kill()
    started = time.monotonic()
    survivor = fleet.trainers[0]
    survivor.ask(2)
    if victim == "engine":
        fleet.trainers[1].ask(2)
    answer = survivor.answer()
    assert time.monotonic() - started < SOON_S
    assert "committed" not in answer
    if victim == "engine":
        assert "committed" not in fleet.trainers[1].answer()
    remaining = [e for e in fleet.engines if e is not members[1]]
    for engine in remaining:
        engine.ask("holdings")
        assert engine.answer()[0] == 1
    members[1].close()
    members[1] = fleet.member(victim, 1, 2)
    assert fleet.controller.wait_planned(SOON_S)
    assert fleet.publish(3) == ["committed", "committed"]
    fleet.wait_for(3)
    fleet.check(3)
