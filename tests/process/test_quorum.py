"""With a quorum nobody waits for an engine that is away: neither a trainer that was restarted nor an engine that is
back. Members get their old parts of the plan, and the engine that was away takes part again when it returns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.process.runtime_members import Fleet
from tests.support.raw_member import SOON_S, RawMember, fleet, follow_plan, part, written
from tests.support.waiting import wait_until
from weft.config import TransferSettings
from weft.core.version import CommitPolicy
from weft.runtime.control.held import HeldTable
from weft.runtime.control.messages import (
    Alive,
    Committed,
    Decide,
    Go,
    Leave,
    Open,
    Ready,
    ReceivePlan,
    Refused,
    SendPlan,
    Stopped,
    Verify,
    Want,
    Welcome,
)
from weft.runtime.controller.controller import Controller
from weft.runtime.receive.receiver import Receiver
from weft.runtime.send.sender import Sender
from weft.runtime.weights import Weights
from weft.transport.registry import is_installed, place_here

BOUND_S = 30.0
COMMITTED = ["committed", "committed"]
SETTINGS = TransferSettings(silence_s=30.0, beat_s=0.2, version_s=30.0)
WINDOWS = {"mode": "in_place", "window_bytes": 1 << 20, "min_write_bytes": 1 << 20}


@contextmanager
def running(**options: Any) -> Iterator[Fleet]:
    made = Fleet(**({"quorum": 1, "silence_s": 3.0} | options))
    try:
        made.wait_planned(BOUND_S)
        yield made
    finally:
        made.close()


def check_all_serve(fleet: Fleet, version: int) -> None:
    """A version commits without engines that are late, so they may serve it a little later."""
    served = [version] * len(fleet.engines)
    wait_until(lambda: [held[0] for held in fleet.holdings()] == served, BOUND_S, f"all serve version {version}")
    fleet.check(version)


@pytest.mark.parametrize(
    "options",
    [
        {"transport": "shm"},
        {"transport": "cma"} | WINDOWS,
        {"transport": "shm", "mode": "patch", "delta": "on", "density": 0.01},
        {"transport": "shm", "precision": "fp8"},
        pytest.param(
            {"transport": "nixl"} | WINDOWS,
            marks=pytest.mark.skipif(not is_installed("nixl"), reason="NIXL is not installed"),
        ),
    ],
    ids=lambda options: " ".join(str(options[key]) for key in ("transport", "mode", "precision") if key in options),
)
def test_a_trainer_that_was_restarted_does_not_wait_for_an_engine_that_is_dead(options):
    with running(**options) as fleet:
        assert fleet.publish(1) == COMMITTED
        planned = fleet.statistics()
        fleet.lose("engine 1")
        assert fleet.publish(2) == COMMITTED
        fleet.lose("trainer 1")
        fleet.replace("trainer 1")
        for version in (3, 4):
            assert fleet.publish(version) == COMMITTED
            fleet.check(version, ranks=(0,))
        fleet.replace("engine 1")
        fleet.wait_planned(BOUND_S)
        assert fleet.publish(5) == COMMITTED
        check_all_serve(fleet, 5)
        now = fleet.statistics()
        assert (now.num_plans, now.plan_digest) == (1, planned.plan_digest), "nothing was planned again"


@pytest.mark.parametrize("options", [{"transport": "shm"}, {"transport": "cma"} | WINDOWS], ids=["shm", "cma in place"])
def test_an_engine_that_stood_still_gets_a_whole_version_when_it_goes_on(options):
    """Its memory was offered to a trainer that has been replaced meanwhile, in rounds it had no part in."""
    with running(**options) as fleet:
        assert fleet.publish(1) == COMMITTED
        fleet.lose("engine 1", stalls=True)
        fleet.lose("trainer 1")
        fleet.replace("trainer 1")
        assert fleet.publish(2) == COMMITTED
        fleet.engines[1].resume()
        fleet.wait_planned(BOUND_S)
        assert fleet.publish(3) == COMMITTED
        check_all_serve(fleet, 3)


def test_an_engine_takes_part_again_while_another_is_dead():
    with running(num_engines=3, quorum=2) as fleet:
        assert fleet.publish(1) == COMMITTED
        fleet.lose("engine 1")
        assert fleet.publish(2) == COMMITTED
        fleet.lose("engine 2")
        assert all("engine 2" in answer for answer in fleet.publish(3)), "a quorum is two"
        fleet.replace("engine 2")
        assert fleet.publish(4) == COMMITTED
        fleet.check(4, ranks=(0, 2))
        fleet.replace("engine 1")
        fleet.wait_planned(BOUND_S)
        assert fleet.publish(5) == COMMITTED
        check_all_serve(fleet, 5)


def test_a_controller_that_was_restarted_needs_all_members_once_and_says_so():
    with running(patience_s=4.0) as fleet:
        assert fleet.publish(1) == COMMITTED
        fleet.lose("engine 1")
        fleet.lose("trainer 1")
        fleet.restart_controller()
        fleet.replace("trainer 1")
        fleet.wait_joined("trainer 0", "engine 0")
        for answer in fleet.publish(2):
            assert "waiting for engine 1 to join: the first plan needs all members" in answer
        fleet.replace("engine 1")
        fleet.wait_planned(BOUND_S)
        assert fleet.publish(3) == COMMITTED
        check_all_serve(fleet, 3)


# Members made by hand


def controller_of(num_engine_ranks: int, *, quorum: int = 1, ranks_per_engine: int = 1) -> Controller:
    return Controller(
        num_trainers=2,
        num_engine_ranks=num_engine_ranks,
        ranks_per_engine=ranks_per_engine,
        commit_policy=CommitPolicy.QUORUM,
        quorum=quorum,
        settings=SETTINGS,
    )


@contextmanager
def planned(num_engine_ranks: int, **facts: int) -> Iterator[tuple[Controller, list[RawMember]]]:
    """Two trainers, each with a half of the weights, and engine ranks that have their parts of the plan."""
    names = ["trainer 0", "trainer 1", *(f"engine {rank}" for rank in range(num_engine_ranks))]
    with controller_of(num_engine_ranks, **facts) as controller, fleet(controller, *names, num_parts=2) as members:
        assert controller.wait_planned(SOON_S)
        yield controller, members


def leave(controller: Controller, *members: RawMember) -> None:
    for member in members:
        member.send(Leave())
        wait_until(lambda name=member.name: name in controller.statistics().lost, SOON_S, f"{member.name} is lost")


def come_back(member: RawMember, **changes: Any) -> None:
    held = {"held": HeldTable.of([part(member.rank, 2)]).packed()} if member.side == "trainer" else {}
    member.join(**(held | changes))
    member.hear(Welcome)


half_written = partial(written, num_bytes=1000)


def test_those_that_are_there_get_their_old_parts_without_links_to_engines_that_are_away():
    with planned(2) as (controller, (first, second, stays, dies)):
        digest = controller.statistics().plan_digest
        leave(controller, dies, second)
        come_back(second)
        first.send(Want(version=1))  # while the others open: it waits for them, not for the engine
        for member in (first, second, stays):
            member.open()
        for trainer in (first, second):
            plan = trainer.hear(SendPlan)
            assert (plan.plan_digest, [target.engine for target in plan.targets]) == (digest, [0])
        assert stays.hear(ReceivePlan).plan_digest == digest
        assert not controller._rounds.planned.is_set(), "not all members have their part"
        for trainer in (first, second):
            assert trainer.hear(Go, Decide).engines == [0]
            trainer.send(half_written(1, 0))
        stays.hear(Verify)
        come_back(dies)
        assert controller.statistics().num_plans == 1


def test_a_round_that_loses_an_engine_before_it_has_opened_goes_on_without_it():
    with planned(2) as (controller, (first, second, stays, dies)):
        leave(controller, second)
        come_back(second)
        for member in (first, second, stays):
            member.open()
        dies.hear(Open)
        leave(controller, dies)
        follow_plan(first, second, stays)
        first.send(Want(version=1))
        assert first.hear(Go).engines == [0]


def test_one_rank_of_an_engine_neither_takes_part_nor_disturbs():
    with planned(4, ranks_per_engine=2) as (controller, (first, second, *engines)):
        leave(controller, second, engines[2], engines[3])
        come_back(second)
        first.open()
        come_back(engines[2])
        for member in (second, *engines[:2]):
            member.open()
        for trainer in (first, second):
            assert {target.engine for target in trainer.hear(SendPlan).targets} == {0, 1}
        told = engines[2].hear(Alive, Open)
        while told == Alive(controller=controller._name):
            told = engines[2].hear(Alive, Open)
        assert isinstance(told, Alive), "only whole engines open"
        assert told.status == "waiting for engine 3 to join"
        leave(controller, engines[2])
        first.send(Want(version=1))
        assert first.hear(Go).engines == [0, 1]


def test_a_trainer_that_has_changed_needs_another_plan_and_so_all_members():
    with planned(2) as (controller, (first, second, _, dies)):
        leave(controller, dies, second)
        come_back(second, place=place_here("cuda:0"))
        first.send(Want(version=1))
        assert "engine 1 left; trainer 1 has changed" in first.hear(Decide).reason


def test_an_engine_that_comes_back_where_no_transport_reaches_it_costs_only_itself():
    with planned(2) as (controller, (first, second, stays, returns)):
        leave(controller, returns)
        come_back(returns, place=msgspec.structs.replace(place_here(), host="another", installed=()))
        assert "not installed on the engine side" in returns.hear(Refused).reason
        follow_plan(first, second, stays)
        first.send(Want(version=1))
        assert first.hear(Go).engines == [0]


def test_a_version_waits_for_the_last_commit_although_an_engine_is_away():
    """A trainer may publish as soon as the last version is written."""
    with planned(2) as (controller, (first, second, stays, dies)):
        leave(controller, dies)
        first.send(Want(version=1))
        for trainer in (first, second):
            trainer.hear(Go)
            trainer.send(half_written(1, 0))
        stays.hear(Verify)
        stays.send(Ready(version=1))
        stays.hear(Decide)
        first.send(Want(version=2))
        wait_until(lambda: controller._versions._wants == {0: 2}, SOON_S, "version 2 is wanted")
        stays.send(Committed(version=1))
        assert first.hear(Decide) == Decide(version=1, commit=True)
        assert first.hear(Go, Decide).version == 2


def test_an_engine_that_was_away_hears_later_that_writes_to_it_may_still_be_in_flight():
    with planned(2) as (controller, (first, second, stays, dies)):
        first.send(Want(version=1))
        for trainer in (first, second):
            trainer.hear(Go)
        first.send(half_written(1, 0, 1))
        leave(controller, dies)
        second.send(Stopped(version=1, reason="a write does not end", has_written=True, abandoned=[0, 1]))
        leave(controller, second)
        come_back(second)
        first.open()
        second.open()
        asked = stays.hear(Open)
        assert asked.abandoned
        stays.answer(asked)
        for trainer in (first, second):
            trainer.hear(SendPlan)
        come_back(dies)
        assert dies.hear(Open).abandoned
        assert not stays.hear(Open).abandoned


def test_a_trainer_remembers_writes_in_flight_until_their_engine_has_closed_its_memory():
    """Also a controller that was restarted hears of them."""
    trained, served = np.ones(500, np.float32), [np.zeros(500, np.float32) for _ in range(2)]
    with (
        Controller(
            num_trainers=1, num_engine_ranks=2, commit_policy=CommitPolicy.QUORUM, quorum=1, settings=SETTINGS
        ) as controller,
        Sender(controller.address, rank=0, weights=Weights.from_arrays({"w": trained})) as sender,
    ):

        def engine(rank: int) -> Receiver:
            return Receiver(controller.address, rank=rank, weights=Weights.from_arrays({"w": served[rank]}))

        with engine(0), engine(1):
            wait_until(lambda: sender._program is not None, SOON_S, "the trainer has its part of the plan")
            sender._abandoned.update([0, 1])
        with engine(0):
            wait_until(lambda: sender._abandoned == {1}, SOON_S, "engine 0 has closed its memory")
            assert sender._join_message().abandoned == [1]
            with engine(1):
                wait_until(lambda: not sender._abandoned, SOON_S, "engine 1 has, too")
