"""A short storm, and the worst sequences storms have found, each at its exact moment.

`make storm` runs the long one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.process.storm import faults
from tests.process.storm.report import story
from tests.process.storm.settings import StormSettings
from tests.process.storm.storm import Storm

LONG_S = 20.1
"""A `version_s` that cannot be mistaken for anything that takes its time."""
SILENCE_S = 3.0
"""Opening NIXL takes a second of a busy machine, in which a member says nothing."""
TRAINERS = ["trainer 0", "trainer 1"]
StartStorm = Callable[..., Storm]


@pytest.fixture
def start() -> Iterator[StartStorm]:
    """Starts storms; they are ended, whatever happens."""
    storms: list[Storm] = []

    def begin(transport: str, mode: str, seed: int = 0, **settings: Any) -> Storm:
        chosen = StormSettings(
            transport=transport, mode=mode, silence_s=SILENCE_S, version_s=LONG_S, turn_s=LONG_S + 1.0, **settings
        )
        storms.append(Storm(chosen, seed))
        return storms[-1]

    yield begin
    for storm in storms:
        storm.close()


def check(storm: Storm) -> None:
    """Nothing happened that must never happen."""
    if storm.verdicts.findings:
        pytest.fail(story(storm.fleet.journal, storm.verdicts.findings), pytrace=False)


@pytest.mark.parametrize(
    ("transport", "mode", "when"),
    [
        ("shm", "shadow", "offered"),
        ("cma", "shadow", "offered"),
        ("nixl", "shadow", "offered"),
        ("shm", "patch", "offered"),
        ("shm", "in_place", "committed"),
        ("cma", "in_place", "committed"),
    ],
)
def test_a_writer_that_was_stopped_cannot_tear_a_version_of_its_successor(start, transport, mode, when):
    """Stopped at its first bytes, the controller restarted, replaced; it goes on when the next version is verified and
    not yet visible, or just served. Then its successor, not it, is the trainer."""
    storm = start(transport, mode)
    ghost = faults.stop_while_writing(storm, "trainer 0")
    storm.restart_controller()
    storm.replace("trainer 0")
    faults.go_on_when(storm, ghost, when)
    end = storm.fleet.now + storm.settings.silence_s / 2
    while storm.fleet.now < end:
        check(storm)
        storm.publish()
    assert storm.recover()
    check(storm)


@pytest.mark.parametrize("mode", ["shadow", "in_place"])
def test_a_version_that_trainers_gave_up_ends_when_they_say_so(start, mode):
    """They hear only then that they may write it: nobody waits for its bytes."""
    storm = start("shm", mode)
    given_up = faults.hear_late(storm, TRAINERS)
    assert all(how != "committed" for how, _ in given_up.outcomes().values())
    following = storm.publish()
    assert {how for how, _ in following.outcomes().values()} == {"committed"}
    assert max(seconds for _, seconds in following.outcomes().values()) < LONG_S / 2
    check(storm)


def test_an_engine_that_paused_for_a_version_nobody_wrote_serves_on(start):
    """In place: trainers gave the version up before they heard that the engines had paused for it."""
    storm = start("shm", "in_place")
    before = storm.fleet.states()
    given_up = faults.hear_late(storm, TRAINERS)
    engines = storm.fleet.engines
    assert all(engine.last("offered")[1] == given_up.version for engine in engines)
    goes_on = storm.fleet.happens(lambda: all(engine.num_said("not_committed") for engine in engines), LONG_S / 2)
    assert goes_on, "engines stand still for a version that was given up"
    assert storm.fleet.states() == before
    check(storm)


@pytest.mark.parametrize("mode", ["shadow", "in_place"])
def test_a_version_that_was_refused_to_one_trainer_is_refused_to_all(start, mode):
    """Also if what was missing is back before the second trainer asks."""
    storm = start("shm", mode)
    before = storm.fleet.states()["engine 0"]
    later = faults.refuse_one(storm, "engine 1")
    (how, seconds), *_ = later.outcomes().values()
    assert how != "committed"
    assert seconds < LONG_S / 2
    assert storm.fleet.states()["engine 0"] == before
    assert storm.recover()
    check(storm)


@pytest.mark.parametrize(("transport", "mode"), [("shm", "shadow"), ("cma", "shadow"), ("nixl", "in_place")])
def test_writers_that_are_lost_leave_nothing_behind_in_engines(start, transport, mode):
    """Neither memory nor descriptors nor threads, once their processes have ended."""
    storm = start(transport, mode)
    faults.lose_writer(storm, "trainer 0")
    assert storm.recover()
    check(storm)
    ghost = faults.stop_while_writing(storm, "trainer 1")
    storm.fleet.wait_lost("trainer 1")
    storm.replace("trainer 1")
    storm.fleet.kill(ghost)
    assert storm.recover()
    check(storm)


@pytest.mark.parametrize(("transport", "mode"), [("cma", "in_place"), ("nixl", "in_place"), ("shm", "patch")])
def test_an_engine_that_stops_draining_costs_one_version(start, transport, mode):
    """No credits come back: the version ends in its time, and the next is whole for the engine that was torn."""
    storm = start(transport, mode)
    faults.stop_draining(storm, "engine 0")
    assert storm.recover()
    check(storm)
    following = storm.publish()
    assert {how for how, _ in following.outcomes().values()} == {"committed"}
    check(storm)


@pytest.mark.parametrize("transport", ["shm", "cma", "nixl"])
def test_a_version_for_an_engine_that_stands_still_ends_in_its_time(start, transport):
    """The engine is given up and replaced while its old process still exists; then versions are served again."""
    storm = start(transport, "shadow")
    ended = faults.write_to_stopped(storm, "engine 0")
    assert all(how != "committed" for how, _ in ended.outcomes().values())
    check(storm)
    following = storm.publish()
    assert {how for how, _ in following.outcomes().values()} == {"committed"}
    check(storm)


@pytest.mark.parametrize(("transport", "mode", "seed"), [("shm", "patch", 1), ("cma", "in_place", 2)])
def test_with_a_quorum_nobody_waits_for_an_engine_that_is_away(start, transport, mode, seed):
    """Another member is replaced meanwhile; then the engine is back, and all serve the newest version."""
    storm = start(transport, mode, seed, num_engine_ranks=3, quorum=2)
    for _ in range(2):
        faults.engine_away(storm)
        assert storm.recover()
    check(storm)


@pytest.mark.parametrize(
    ("transport", "mode", "seed"), [("shm", "shadow", 1), ("cma", "in_place", 2), ("nixl", "patch", 3)]
)
def test_a_short_storm(start, transport, mode, seed):
    run_short(start(transport, mode, seed))


def test_a_short_storm_of_fp8_engines(start):
    """Trainers are cut inside blocks: they agree on scales, or nobody serves the version."""
    run_short(start("shm", "in_place", 4, precision="fp8"))


def run_short(storm: Storm) -> None:
    storm.run(faults.ALL, num_versions=24, on_step=lambda: None)
    check(storm)
    assert storm.verdicts.counts["checks"] >= len(storm.verdicts.committed)
