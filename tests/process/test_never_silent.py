"""Whatever takes long, planning or compiling, both sides go on hearing each other, and know what they wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.support.raw_member import WEIGHTS, RawMember
from tests.support.waiting import wait_until
from weft.config import TransferSettings
from weft.errors import TransferTimeout
from weft.runtime.control.held import HeldTable
from weft.runtime.control.messages import Alive, Beat, Leave, Open, Welcome
from weft.runtime.controller.controller import Controller
from weft.runtime.controller.planning import Planning
from weft.runtime.receive.receiver import Receiver
from weft.runtime.send.sender import Sender
from weft.runtime.weights import Weights

SILENCE_S = 3.0
SETTINGS = TransferSettings(beat_s=0.1, silence_s=SILENCE_S)
SOON_S = 20.0


def eventually(happened: Callable[[], bool]) -> None:
    wait_until(happened, SOON_S, "what the test waits for")


def weights() -> Weights:
    return Weights.from_arrays({"w": np.zeros(500, np.float32)})


class HeldUp:
    """Something of a class's methods that waits until it may go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: type, method: str) -> None:
        self.may_go_on, self.num_calls = threading.Event(), 0
        real = getattr(kind, method)

        def held_up(*arguments, **named):
            self.num_calls += 1
            assert self.may_go_on.wait(SOON_S)
            return real(*arguments, **named)

        monkeypatch.setattr(kind, method, held_up)


@pytest.fixture
def planning(monkeypatch):
    held_up = HeldUp(monkeypatch, Planning, "plan")
    yield held_up
    held_up.may_go_on.set()


def test_while_it_plans_a_controller_answers_and_says_so(planning):
    with (
        Controller(num_trainers=1, num_engine_ranks=1, settings=SETTINGS) as controller,
        RawMember(controller.address, "trainer").join() as trainer,
        RawMember(controller.address, "engine").join() as engine,
    ):
        eventually(lambda: planning.num_calls == 1)
        for member in (trainer, engine):
            member.hear(Welcome)
            member.send(Beat())
            eventually(lambda member=member: member.hear(Alive).status.startswith("planning: 2 shards, "))
        planning.may_go_on.set()
        trainer.hear(Open)
        engine.hear(Open)


def test_members_that_come_and_go_while_it_plans_are_noticed_and_planned_for(planning):
    with (
        Controller(num_trainers=1, num_engine_ranks=1, settings=SETTINGS) as controller,
        RawMember(controller.address, "trainer").join() as trainer,
    ):
        with RawMember(controller.address, "engine").join() as engine:
            eventually(lambda: planning.num_calls == 1)
            engine.send(Leave(reason="enough"))
            eventually(lambda: controller.statistics().lost == {"engine 0": "left: enough"})
        with RawMember(controller.address, "engine").join() as another:
            planning.may_go_on.set()
            opening = trainer.hear(Open)
            assert another.hear(Open).round == opening.round
            assert controller.statistics().num_plans == 1


def test_errors_of_those_who_wait_say_what_for(planning):
    patient = TransferSettings(beat_s=SETTINGS.beat_s, silence_s=SOON_S)  # a raw member does not beat
    with (
        Controller(num_trainers=1, num_engine_ranks=2, settings=patient) as controller,
        Sender(controller.address, rank=0, weights=weights(), timeout_s=2 * SILENCE_S) as sender,
        Receiver(controller.address, rank=0, weights=weights()) as receiver,
    ):
        with pytest.raises(TransferTimeout, match="the controller says: waiting for engine 1 to join"):
            receiver.wait(SILENCE_S)
        with (
            RawMember(controller.address, "engine", 1).join(),
            pytest.raises(TransferTimeout, match=r"the controller says: planning: 3 shards, \d s so far"),
        ):
            sender.publish(version=0).wait_committed(SOON_S)


def test_errors_of_those_who_wait_for_a_publication_say_so_too():
    """Also before the publication itself has waited too long for its turn."""
    with (
        Controller(num_trainers=1, num_engine_ranks=1, settings=SETTINGS) as controller,
        Sender(controller.address, rank=0, weights=weights(), timeout_s=SOON_S) as sender,
    ):
        publication = sender.publish(version=0)
        eventually(lambda: "engine 0" in (sender._control.obstacle() or ""))
        for wait in (publication.wait_released, publication.wait_committed):
            with pytest.raises(TransferTimeout, match="the controller says: waiting for engine 0 to join"):
                wait(0.1)


@pytest.mark.parametrize(("kind", "method"), [(Sender, "_follow"), (Receiver, "_follow_plan")])
def test_a_member_that_compiles_is_not_lost(monkeypatch, kind, method):
    compiling = HeldUp(monkeypatch, kind, method)
    with (
        Controller(num_trainers=1, num_engine_ranks=1, settings=SETTINGS) as controller,
        Sender(controller.address, rank=0, weights=weights(), timeout_s=SOON_S) as sender,
        Receiver(controller.address, rank=0, weights=weights()) as receiver,
    ):
        publication = sender.publish(version=0)
        eventually(lambda: compiling.num_calls == 1)
        with pytest.raises(TransferTimeout):
            receiver.wait(3 * SILENCE_S)
        member = sender if kind is Sender else receiver
        assert "has been compiling its part of the plan for" in member._control.obstacle()
        assert controller.statistics().lost == {}
        compiling.may_go_on.set()
        receiver.take(SOON_S)
        publication.wait_committed(SOON_S)
        assert compiling.num_calls == 1


def test_a_member_that_returns_unchanged_is_not_planned_for():
    with (
        Controller(num_trainers=1, num_engine_ranks=1, settings=SETTINGS) as controller,
        Sender(controller.address, rank=0, weights=weights(), timeout_s=SOON_S) as sender,
    ):
        for version in range(3):
            with Receiver(controller.address, rank=0, weights=weights()) as receiver:
                eventually(lambda: receiver._following.landing is not None)
                publication = sender.publish(version=version)
                receiver.take(SOON_S)
                publication.wait_committed(SOON_S)
        assert controller.statistics().num_plans == 1


def test_a_member_that_returns_with_other_weights_is_planned_for():
    with (
        Controller(num_trainers=1, num_engine_ranks=1, settings=SETTINGS) as controller,
        RawMember(controller.address, "trainer").join() as trainer,
    ):
        for num_plans, dtype in enumerate(("fp32", "bf16"), 1):
            held = HeldTable.of([replace(WEIGHTS, dtype=dtype)]).packed()
            with RawMember(controller.address, "engine").join(held=held) as engine:
                engine.hear(Open)
                trainer.hear(Open)
                assert controller.statistics().num_plans == num_plans
