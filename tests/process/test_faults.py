"""What goes wrong at random moments: the version is aborted or committed, never mixed; survivors serve; nothing hangs.

Each fault is repeated at moments drawn from a seed, while versions of 8 MiB are under way.
"""

from __future__ import annotations

import random
import time

import pytest

from tests.process.runtime_members import LARGE, Fleet
from tests.support.leftovers import shared_files
from tests.support.waiting import wait_until
from weft.transport.registry import is_installed

BOUND_S = 15.0
"""No fault may keep anybody waiting longer than this."""
MOMENTS_S = [0.0, 0.004, 0.012, 0.03]


@pytest.fixture
def fleet(request):
    made = Fleet(shapes=LARGE, **getattr(request, "param", {}))
    yield made
    made.close()


def moment(seed: int) -> None:
    """Wait for a random moment inside the life of a version."""
    time.sleep(random.Random(seed).choice(MOMENTS_S) + random.Random(seed).random() * 0.004)


def recover(fleet: Fleet, version: int) -> None:
    """After a restart the next version commits."""
    fleet.wait_planned(BOUND_S)
    assert fleet.publish(version) == ["committed", "committed"]
    fleet.check(version)


@pytest.mark.parametrize("seed", range(4))
def test_a_killed_trainer(fleet, seed):
    assert fleet.publish(1) == ["committed", "committed"]
    for trainer in fleet.trainers:
        trainer.ask(2)
    moment(seed)
    fleet.trainers[1].kill()
    started = time.monotonic()
    answer = fleet.trainers[0].answer(BOUND_S)
    assert time.monotonic() - started < BOUND_S
    assert answer == "committed" or "trainer 1" in answer
    fleet.check(2 if answer == "committed" else 1)
    fleet.trainers[1].close()
    fleet.trainers[1] = fleet.new_trainer(1)
    assert fleet.trainers[1].answer() == "there"
    recover(fleet, 3)


@pytest.mark.parametrize("seed", range(4))
def test_a_killed_engine_rank(fleet, seed):
    assert fleet.publish(1) == ["committed", "committed"]
    for trainer in fleet.trainers:
        trainer.ask(2)
    moment(seed)
    fleet.engines[1].kill()
    started = time.monotonic()
    answers = [trainer.answer(BOUND_S) for trainer in fleet.trainers]
    assert time.monotonic() - started < BOUND_S
    committed = answers[0] == "committed"
    assert committed or all("engine 1" in answer for answer in answers)
    fleet.check(2 if committed else 1, ranks=(0,))
    fleet.engines[1].close()
    fleet.engines[1] = fleet.new_engine(1)
    assert fleet.engines[1].answer() == "there"
    recover(fleet, 3)


@pytest.mark.parametrize("seed", range(4))
def test_a_killed_controller_is_replaced_and_learns_what_was_decided(fleet, seed):
    assert fleet.publish(1) == ["committed", "committed"]
    for trainer in fleet.trainers:
        trainer.ask(2)
    moment(seed)
    fleet.controller.kill()
    started = time.monotonic()
    answers = [trainer.answer(BOUND_S) for trainer in fleet.trainers]
    assert time.monotonic() - started < BOUND_S
    assert all(answer == "committed" or "controller" in answer for answer in answers), answers
    fleet.restart_controller()
    fleet.wait_planned(BOUND_S)
    visible = agreed_version(fleet)
    assert visible in (1, 2)
    fleet.check(visible)
    assert fleet.statistics().committed == visible
    recover(fleet, 3)


def agreed_version(fleet: Fleet) -> int | None:
    """What all engines serve; one that was told to commit just before may take a moment."""
    deadline = time.monotonic() + BOUND_S
    while len(versions := {held[0] for held in fleet.holdings()}) > 1:
        assert time.monotonic() < deadline, f"engines serve different versions: {versions}"
    return versions.pop()


@pytest.mark.parametrize("victim", ["trainer", "engine"])
def test_a_stalled_member_and_its_late_writes(fleet, victim):
    """A stopped process is given up within seconds; when it goes on, it changes nothing any more."""
    assert fleet.publish(1) == ["committed", "committed"]
    members = fleet.trainers if victim == "trainer" else fleet.engines
    for trainer in fleet.trainers:
        trainer.ask(2)
    time.sleep(0.003)
    stalled = members[1]
    stalled.stall()
    started = time.monotonic()
    answer = fleet.trainers[0].answer(BOUND_S)
    assert time.monotonic() - started < BOUND_S
    assert answer == "committed" or f"{victim} 1" in answer
    if victim == "engine":
        fleet.trainers[1].answer(BOUND_S)
    members[1] = fleet.new_trainer(1) if victim == "trainer" else fleet.new_engine(1)
    assert members[1].answer() == "there"
    recover(fleet, 3)
    stalled.resume()
    time.sleep(0.5)
    fleet.check(3)
    recover(fleet, 4)
    stalled.kill()
    stalled.close()


WINDOWS = {
    "quorum": 1,
    "mode": "in_place",
    "transport": "cma",
    "min_write_bytes": 1 << 20,
    "window_bytes": 1 << 20,
    "version_s": 60.0,
}
"""A version is written to an engine only as fast as that engine makes room."""


@pytest.mark.parametrize("fleet", [WINDOWS], indirect=True)
@pytest.mark.parametrize("how", ["freeze inside", "fail inside"])
def test_with_a_quorum_nobody_waits_for_room_in_the_window_of_an_engine_that_is_lost(fleet, how):
    """Trainers give up after 20 s; a version may take 60."""
    assert fleet.publish(1) == ["committed", "committed"]
    fleet.engines[1].ask(how)
    assert fleet.publish(2) == ["committed", "committed"]
    fleet.check(2, ranks=(0,))
    if how == "freeze inside":
        fleet.wait_lost("engine 1")
        fleet.engines[1].kill()
        fleet.engines[1].close()
        fleet.engines[1] = fleet.new_engine(1)
        assert fleet.engines[1].answer() == "there"
        fleet.wait_planned(BOUND_S)
    assert fleet.publish(3) == ["committed", "committed"]
    wait_until(lambda: fleet.holdings()[1][0] == 3, BOUND_S, "engine 1 serves version 3")
    fleet.check(3)


@pytest.mark.skipif(not is_installed("nixl"), reason="NIXL is not installed")
@pytest.mark.parametrize(
    "fleet", [WINDOWS | {"transport": "nixl", "mode": mode} for mode in ("shadow", "in_place")], indirect=True
)
def test_over_nixl_an_engine_that_stands_still_costs_one_version_at_most(fleet):
    """What is in flight to it never ends by itself; the next version goes on while it still stands still."""
    assert fleet.publish(1) == ["committed", "committed"]
    if fleet.mode == "in_place":
        fleet.engines[1].ask("freeze inside")
    else:
        fleet.engines[1].stall()
    for answer in fleet.publish(2):
        assert answer == "committed" or "aborted" in answer or "could not write" in answer
    assert fleet.publish(3) == ["committed", "committed"]
    fleet.check(3, ranks=(0,))
    fleet.engines[1].resume()
    fleet.wait_planned(BOUND_S)
    assert fleet.publish(4) == ["committed", "committed"]
    wait_until(lambda: fleet.holdings()[1][0] == 4, BOUND_S, "engine 1 serves version 4")
    fleet.check(4)


@pytest.mark.parametrize("fleet", [{"quorum": 1}], indirect=True)
def test_with_a_quorum_the_others_go_on_and_the_lost_engine_comes_back(fleet):
    assert fleet.publish(1) == ["committed", "committed"]
    fleet.engines[1].kill()
    started = time.monotonic()
    assert fleet.publish(2) == ["committed", "committed"]
    assert fleet.publish(3) == ["committed", "committed"]
    assert time.monotonic() - started < BOUND_S
    fleet.check(3, ranks=(0,))
    fleet.engines[1].close()
    fleet.engines[1] = fleet.new_engine(1)
    assert fleet.engines[1].answer() == "there"
    recover(fleet, 4)


def test_nothing_is_left_in_shared_memory_when_everybody_is_killed():
    before = shared_files()
    made = Fleet(shapes=LARGE)
    assert made.publish(1) == ["committed", "committed"]
    for member in (*made.trainers, *made.engines, made.controller):
        member.kill()
    wait_until(lambda: shared_files() <= before, 60.0, "no shared memory is left")
    made.close()
