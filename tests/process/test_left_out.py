"""Engines that are lost, or fail, while others go on: versions without them, and none that they have no part in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.support.raw_member import SOON_S, RawMember, fleet, follow_plan, written
from tests.support.waiting import wait_until
from weft.config import TransferSettings
from weft.core.version import CommitPolicy
from weft.runtime.control.messages import (
    Alive,
    Beat,
    Committed,
    Decide,
    Expect,
    Failed,
    Go,
    Leave,
    LeftOut,
    Open,
    Opened,
    Paused,
    Ready,
    ReceivePlan,
    Reconnect,
    Refused,
    Reopened,
    SendPlan,
    Verify,
    Want,
    Welcome,
)
from weft.runtime.controller.controller import Controller
from weft.runtime.receive.receiver import Receiver
from weft.runtime.send.sender import Sender
from weft.runtime.weights import Weights
from weft.transport.base import Endpoint

half_written = partial(written, num_bytes=1000)
SETTINGS = TransferSettings(silence_s=30.0, beat_s=0.2, version_s=30.0)
PATCHES = TransferSettings(silence_s=30.0, beat_s=0.2, version_s=30.0, pause_s=30.0, mode="patch", delta="on")


def controller_of(num_engine_ranks: int, *, quorum: int = 1, ranks_per_engine: int = 1, **more: object) -> Controller:
    facts = {"num_trainers": 2, "commit_policy": CommitPolicy.QUORUM, "settings": SETTINGS} | more
    return Controller(num_engine_ranks=num_engine_ranks, ranks_per_engine=ranks_per_engine, quorum=quorum, **facts)


@contextmanager
def writing(num_engine_ranks: int, **facts: Any) -> Iterator[tuple[Controller, RawMember, RawMember, list[RawMember]]]:
    """A controller, two trainers that may write version 1, each its half, and engine ranks that expect it."""
    names = ["trainer 0", "trainer 1", *(f"engine {rank}" for rank in range(num_engine_ranks))]
    with (
        controller_of(num_engine_ranks, **facts) as controller,
        fleet(controller, *names, num_parts=2) as (first, second, *engines),
    ):
        first.send(Want(version=1))
        first.hear(Go)
        second.hear(Go)
        yield controller, first, second, engines


def test_trainers_that_write_hear_of_an_engine_that_left():
    with writing(2) as (_, first, second, (stays, leaves)):
        first.send(half_written(1, 0, 1))
        leaves.send(Leave())
        assert second.hear(LeftOut) == LeftOut(version=1, engines=[1])
        second.send(half_written(1, 0))
        stays.hear(Verify)
        stays.send(Ready(version=1))
        assert stays.hear(Decide).commit


def test_an_engine_that_failed_a_version_takes_part_in_the_next():
    """Which a trainer has been waiting to write: it is opened in the moment the first one is given up."""
    with writing(1) as (controller, first, second, (engine,)):
        for trainer in (first, second):
            trainer.send(half_written(1, 0))
        engine.hear(Verify)
        first.send(Want(version=2))
        wait_until(lambda: controller._versions._wants == {0: 2}, SOON_S, "version 2 is wanted")
        engine.send(Failed(version=1, reason="its digest differs"))
        for trainer in (first, second):
            assert not trainer.hear(Decide).commit
            assert trainer.hear(Go).engines == [0]
            trainer.send(half_written(2, 0))
        assert engine.hear(Verify).version == 2
        engine.send(Ready(version=2))
        assert engine.hear(Decide) == Decide(version=2, commit=True)


def test_no_second_round_waits_for_an_engine_that_left_in_the_first():
    with writing(2, settings=PATCHES) as (_, first, second, (stays, leaves)):
        first.send(half_written(1, whole=[0, 1]))
        leaves.send(Leave())
        second.hear(LeftOut)
        second.send(half_written(1, whole=[0]))
        assert not stays.hear(Expect).whole
        assert stays.hear(Expect).whole
        stays.send(Paused(version=1))
        for trainer in (first, second):
            again = trainer.hear(Go)
            assert (again.whole, again.engines) == (True, [0])


def test_there_is_no_second_round_for_nobody():
    with writing(2, settings=PATCHES) as (_, first, second, (stays, leaves)):
        first.send(half_written(1, whole=[1]))
        leaves.send(Leave())
        second.hear(LeftOut)
        second.send(half_written(1))
        assert stays.hear(Verify).version == 1


def test_a_rank_that_nothing_was_written_to_is_not_torn():
    """It stood still for a second round; then another rank of its engine failed."""
    with writing(4, ranks_per_engine=2, settings=PATCHES) as (_, first, second, engines):
        for trainer in (first, second):
            trainer.send(half_written(1, whole=[0, 1, 2, 3]))
        for engine in engines:
            assert not engine.hear(Expect).whole
            assert engine.hear(Expect).whole
        engines[2].send(Paused(version=1))
        engines[3].send(Failed(version=1, reason="its memory cannot be reached"))
        for engine in engines[:2]:
            engine.send(Paused(version=1))
        for trainer in (first, second):
            assert trainer.hear(Go).engines == [0, 1]
            trainer.send(written(1, 0, 1, num_bytes=1024))  # packed Chunks end at multiples of 64
        for engine in engines[:2]:
            engine.hear(Verify)
            engine.send(Ready(version=1))
        for engine in engines[:2]:
            assert engine.hear(Decide).commit
        told = engines[2].hear(Decide)
        assert (told.commit, told.torn) == (False, False)


def test_one_rank_of_an_engine_that_was_dropped_does_not_commit_alone():
    """It had verified the version, and joins again after the decision."""
    with writing(4, ranks_per_engine=2) as (controller, first, second, engines):
        for trainer in (first, second):
            trainer.send(half_written(1, 0, 1, 2, 3))
        for engine in engines:
            engine.hear(Verify)
        engines[3].send(Leave())
        wait_until(lambda: "engine 3" in controller.statistics().lost, SOON_S, "engine 3 is lost")
        for engine in engines[:2]:
            engine.send(Ready(version=1))
        for engine in engines[:2]:
            assert engine.hear(Decide).commit
            engine.send(Committed(version=1))
        assert not engines[2].hear(Decide).commit
        with RawMember(controller.address, "engine", 3).join(ready=1, seen=1) as returned:
            returned.hear(Welcome)
            assert isinstance(returned.hear(Decide, Open), Open)


def test_nor_when_the_controller_was_restarted_meanwhile():
    joins = {0: {"last": 1, "holds": 1}, 1: {"ready": 1, "seen": 1}, 2: {"seen": 1}, 3: {"ready": 1, "seen": 1}}
    with controller_of(4, ranks_per_engine=2) as controller, ExitStack() as stack:
        engines = [
            stack.enter_context(RawMember(controller.address, "engine", rank).join(**facts))
            for rank, facts in joins.items()
        ]
        trainers = [stack.enter_context(RawMember(controller.address, "trainer", rank).join()) for rank in (0, 1)]
        assert engines[1].hear(Decide, Open) == Decide(version=1, commit=True)
        engines[1].send(Committed(version=1))
        assert isinstance(engines[3].hear(Decide, Open), Open)
        del trainers


def test_a_loss_that_is_reported_late_does_not_cost_an_engine_its_new_membership():
    with writing(2) as (_, first, second, (stays, returns)):
        returns.join()
        returns.hear(Welcome)
        first.send(half_written(1, 0, lost=[1]))
        second.send(half_written(1, 0))
        stays.hear(Verify)
        stays.send(Ready(version=1))
        stays.hear(Decide)
        stays.send(Committed(version=1))
        follow_plan(first, second, stays, returns)


def test_an_engine_that_leaves_while_memory_is_opened_is_left_out():
    """It joins again while a version is written; what it had opened before does not count."""
    names = ["trainer 0", "trainer 1", "engine 0", "engine 1"]
    with controller_of(2) as controller, ExitStack() as stack:
        members = [stack.enter_context(RawMember(controller.address, *_named(name))).join() for name in names]
        first, second, stays, leaves = members
        for member in (first, second, stays):
            member.open()
        opening = leaves.hear(Open)
        first.send(Want(version=1))
        leaves.send(Leave())
        for member in (first, second, stays):
            member.open()
        for trainer in (first, second):
            assert [target.engine for target in trainer.hear(SendPlan).targets] in ([0], [])
        stays.hear(ReceivePlan)
        assert first.hear(Decide, Go) == second.hear(Go)
        assert not controller.wait_planned(0.0), "engine 1 has no plan"
        leaves.join()
        leaves.hear(Welcome)
        leaves.send(Opened(round=opening.round, offers={}))
        leaves.send(Beat())
        leaves.hear(Alive)
        assert controller._membership.live_engines() == [0]
        assert "engine 1" in controller.statistics().members


def _named(name: str) -> tuple[str, int]:
    side, rank = name.split()
    return side, int(rank)


def endpoint_of(member: str, transport: str = "cma") -> Endpoint:
    return Endpoint(transport=transport, member=member, data=b"\x80garbage")


def test_engines_that_return_credits_hear_where_a_trainer_can_be_reached_now():
    with (
        controller_of(1, settings=PATCHES) as controller,
        fleet(controller, "trainer 0", "trainer 1", "engine 0", num_parts=2) as (trainer, _, engine),
    ):
        trainer.send(Reopened(endpoints=[endpoint_of("trainer 0")]))
        assert engine.hear(Reconnect).endpoint == endpoint_of("trainer 0")


@pytest.mark.parametrize(
    "endpoints",
    [[endpoint_of("trainer 1")], [endpoint_of("trainer 0", "carrier pigeon")], [endpoint_of("trainer 0")] * 2],
    ids=["of another", "of no transport", "twice"],
)
def test_a_trainer_can_reopen_only_what_is_its_own(endpoints):
    with (
        controller_of(1, settings=PATCHES) as controller,
        fleet(controller, "trainer 0", "trainer 1", "engine 0", num_parts=2) as (trainer, other, _),
    ):
        trainer.send(Reopened(endpoints=endpoints))
        assert "has reopened" in trainer.hear(Refused).reason
        other.hear(Alive)
        assert set(controller.statistics().members) == {"trainer 1", "engine 0"}


@pytest.mark.parametrize("transport", ["shm", "nixl"])
def test_an_endpoint_that_reaches_nobody_does_not_end_an_engine(transport):
    trained, served = np.ones(500, np.float32), np.zeros(500, np.float32)
    with (
        Controller(num_trainers=1, num_engine_ranks=1, settings=SETTINGS) as controller,
        Sender(controller.address, rank=0, weights=Weights.from_arrays({"w": trained})) as sender,
        Receiver(controller.address, rank=0, weights=Weights.from_arrays({"w": served})) as receiver,
    ):
        assert controller.wait_planned(SOON_S)
        receiver._reconnect(endpoint_of("trainer 0", transport))
        publication = sender.publish(version=1)
        receiver.wait(SOON_S).commit()
        publication.wait_committed(SOON_S)
        assert np.array_equal(served, trained)
