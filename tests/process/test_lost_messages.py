"""What was said while a connection was cut is said again, and members that never say what is due hold nobody up."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.support.raw_member import SOON_S, RawMember, fleet, written
from tests.support.waiting import wait_until
from weft.config import TransferSettings
from weft.core.version import MAX_FIRST
from weft.errors import PeerLost, VersionError
from weft.runtime.control.messages import (
    Alive,
    At,
    Beat,
    Boundary,
    Committed,
    Decide,
    Expect,
    Failed,
    Go,
    Leave,
    Open,
    ReceivePlan,
    Refused,
    SendPlan,
    Stopped,
    Want,
    Welcome,
)
from weft.runtime.controller.controller import Controller
from weft.runtime.receive.receiver import Receiver
from weft.runtime.send.sender import Sender
from weft.runtime.weights import Weights
from weft.transport.local import Faults, LocalNetwork, LocalTransport
from weft.transport.registry import place_here

SETTINGS = TransferSettings(silence_s=30.0, beat_s=0.2, version_s=30.0, digest="off")


def test_a_decision_an_engine_rank_did_not_hear_is_repeated_when_it_joins_again():
    """Otherwise the other rank of its engine would wait for it at a step that is never agreed on."""
    with (
        Controller(num_trainers=1, num_engine_ranks=2, ranks_per_engine=2, settings=SETTINGS) as controller,
        fleet(controller, "trainer 0", "engine 0", "engine 1") as (trainer, first, second),
    ):
        trainer.send(Want(version=1))
        trainer.hear(Go)
        trainer.send(written(1, 0, 1))
        assert first.hear(Decide).commit
        second.hear(Expect)
        second.join(ready=1)  # its connection was cut before the decision
        second.hear(Welcome)
        assert second.hear(Decide) == Decide(version=1, commit=True)
        first.send(At(version=1, step=3))
        second.send(At(version=1, step=5))
        assert first.hear(Boundary) == second.hear(Boundary)
        for engine in (first, second):
            engine.send(Committed(version=1))
        assert trainer.hear(Decide).commit
        for engine in (first, second):
            engine.hear(Open)


def test_an_engine_rank_that_has_committed_is_not_told_again():
    with (
        Controller(num_trainers=1, num_engine_ranks=1, settings=SETTINGS) as controller,
        fleet(controller, "trainer 0", "engine 0") as (trainer, engine),
    ):
        trainer.send(Want(version=1))
        trainer.hear(Go)
        trainer.send(written(1, 0))
        assert engine.hear(Decide).commit
        engine.send(Committed(version=1))
        assert trainer.hear(Decide).commit
        engine.join(last=1, holds=1)
        heard = engine.hear(Decide, Open)
        assert isinstance(heard, Open)


def test_a_trainer_that_never_stops_writing_is_named_and_the_others_go_on():
    settings = dataclasses.replace(SETTINGS, version_s=1.0)
    with (
        Controller(num_trainers=2, num_engine_ranks=1, settings=settings) as controller,
        fleet(controller, "trainer 0", "trainer 1", "engine 0") as (good, stuck, _),
    ):
        good.send(Want(version=1))
        good.hear(Go)
        stuck.hear(Go)
        good.send(written(1, 0))
        assert not good.hear(Decide).commit
        good.send(Want(version=2))
        reason = "did not stop writing version 1 in 1.0 s"

        def is_named() -> bool:
            beat(good, stuck)
            return controller.statistics().lost.get("trainer 1") == reason

        wait_until(is_named, SOON_S, "the trainer is lost")
        assert good.hear(Decide) == Decide(version=2, commit=False, reason=f"trainer 1 {reason}")


def test_a_late_report_of_a_trainer_that_joined_again_does_not_cost_its_membership():
    """It was cut off while it wrote, which aborted the version; the other trainer is still writing."""
    with (
        Controller(num_trainers=2, num_engine_ranks=1, settings=SETTINGS) as controller,
        fleet(controller, "trainer 0", "trainer 1", "engine 0") as (first, second, engine),
    ):
        first.send(Want(version=1))
        first.hear(Go)
        second.hear(Go)
        first.join(last=1)
        first.hear(Welcome)
        first.send(written(1, 0))
        second.send(Stopped(version=1, reason="it was aborted", has_written=True))
        for member in (first, second, engine):
            member.open()
        assert first.hear(SendPlan, Refused) is not None
        assert set(controller.statistics().members) == {"trainer 0", "trainer 1", "engine 0"}


def test_an_engine_that_opens_twice_does_not_make_trainers_follow_the_plan_twice():
    with (
        Controller(num_trainers=1, num_engine_ranks=2, settings=SETTINGS) as controller,
        ExitStack() as stack,
    ):
        trainer, bad, good = (
            stack.enter_context(RawMember(controller.address, side, rank).join())
            for side, rank in (("trainer", 0), ("engine", 0), ("engine", 1))
        )
        trainer.open()
        good.open()
        opened = bad.open()
        trainer.hear(SendPlan)
        bad.hear(ReceivePlan)
        assert controller.wait_planned(SOON_S)
        bad.send(opened)
        assert "has opened its memory twice" in bad.hear(Refused).reason
        trainer.send(Want(version=1))
        assert isinstance(trainer.hear(SendPlan, Decide), Decide)


def test_an_engine_on_an_impossible_device_is_refused_and_no_other():
    place = msgspec.structs.replace(place_here(), device="tpu")
    with (
        Controller(num_trainers=1, num_engine_ranks=1, settings=SETTINGS) as controller,
        RawMember(controller.address, "trainer").join() as trainer,
        RawMember(controller.address, "engine").join(place=place) as engine,
    ):
        assert "device tpu" in engine.hear(Refused).reason
        trainer.hear(Alive)
        assert controller.statistics().members == ("trainer 0",)


def test_an_engine_without_the_transport_of_the_others_is_refused_and_no_other():
    """One replacement of an engine that lacks a package does not end the trainers."""
    settings = dataclasses.replace(SETTINGS, transport="nixl")
    place = msgspec.structs.replace(place_here(), installed=("shm", "cma", "nixl"))
    bare = msgspec.structs.replace(place, installed=("shm", "cma"))
    with (
        Controller(num_trainers=1, num_engine_ranks=2, settings=settings) as controller,
        RawMember(controller.address, "trainer").join(place=place) as trainer,
        RawMember(controller.address, "engine").join(place=place) as good,
        RawMember(controller.address, "engine", 1).join(place=bare) as bad,
    ):
        refused = bad.hear(Refused)
        assert refused.reason == "nixl is not installed on the engine side"
        for member in (trainer, good):
            member.hear(Alive)
        assert set(controller.statistics().members) == {"trainer 0", "engine 0"}


@pytest.mark.parametrize("how", ["falls silent", "leaves"])
def test_first_versions_far_apart_do_not_end_the_controller(how):
    settings = dataclasses.replace(SETTINGS, silence_s=3.0)
    with (
        Controller(num_trainers=2, num_engine_ranks=2, settings=settings) as controller,
        RawMember(controller.address, "trainer").join() as first,
        RawMember(controller.address, "trainer", 1).join() as second,
        RawMember(controller.address, "engine").join() as engine,
    ):
        for member in (first, second, engine):
            member.hear(Welcome)
        first.send(Want(version=5))
        second.send(Want(version=MAX_FIRST))
        wait_until(lambda: len(controller._versions._wants) == 2, SOON_S, "both want to write")
        if how == "leaves":
            engine.send(Leave())

        def is_lost() -> bool:
            beat(first, second)
            return "engine 0" in controller.statistics().lost

        wait_until(is_lost, SOON_S, "the engine is lost")
        reason = f"engine 0 {controller.statistics().lost['engine 0']}"
        assert first.hear(Decide) == Decide(version=5, commit=False, reason=reason)
        assert not second.hear(Decide).commit
        second.hear(Alive)


def beat(*members: RawMember) -> None:
    """Without reading what was answered."""
    for member in members:
        member.send(Beat())


@contextmanager
def slow_writer() -> Iterator[tuple[Sender, threading.Event, list[Any]]]:
    """A sender that is writing version 1 to an engine which stands still until an event; and what it says."""
    network, goes_on = LocalNetwork(), threading.Event()
    trained, served = np.ones(500, np.float32), np.zeros(500, np.float32)
    ends = [LocalTransport(name, network, writer=0) for name in ("trainer 0", "engine 0")]
    with (
        Controller(num_trainers=1, num_engine_ranks=1, settings=SETTINGS) as controller,
        Sender(controller.address, rank=0, weights=Weights.from_arrays({"w": trained}), transport=ends[0]) as sender,
        Receiver(controller.address, rank=0, weights=Weights.from_arrays({"w": served}), transport=ends[1]),
    ):
        assert controller.wait_planned(SOON_S)
        said: list[Any] = []
        post = sender._control.post
        sender._control.post = lambda message: (said.append(message), post(message))  # type: ignore[method-assign]
        network.faults["engine 0"] = Faults(stalled=goes_on)
        try:
            publication = sender.publish(version=1)
            wait_until(lambda: any(job.tickets for job in publication._jobs), SOON_S, "it writes")
            yield sender, goes_on, said
        finally:
            goes_on.set()


def test_a_version_that_was_stopped_is_not_reported_as_lost_engines():
    """Cancelled writes look as if engines could not be reached; these are healthy."""
    with slow_writer() as (sender, goes_on, said):
        publication = sender._publications[1]
        sender._controller_lost(PeerLost("the controller has not answered for 5.0 s"))
        goes_on.set()
        with pytest.raises(PeerLost, match="has not answered"):
            publication.wait_committed(SOON_S)
        assert [type(message) for message in said] == [Want, Failed, Stopped]


def test_a_trainer_that_cannot_reopen_what_it_cut_off_says_that_it_has_stopped(monkeypatch):
    """Until it does, no other version can be written."""
    with slow_writer() as (sender, goes_on, said):
        publication = sender._publications[1]

        def no_memory() -> None:
            raise MemoryError("no pinned memory is left")

        with monkeypatch.context() as broken:
            broken.setattr(sender._transports, "close_cut", lambda: {"local": frozenset({"engine 0"})})
            broken.setattr(sender, "_reopen", no_memory)
            publication._settle(VersionError("version 1 was aborted: the trainer's host is slow"))
            goes_on.set()
            with pytest.raises(VersionError, match="aborted"):
                publication.wait_committed(SOON_S)
        assert said[-1] == Stopped(
            version=1, reason="version 1 was aborted: the trainer's host is slow", has_written=True, abandoned=[0]
        )
        assert sender._cut == {"local"}
