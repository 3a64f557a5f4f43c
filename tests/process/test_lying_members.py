"""Members that say what is not true: each is refused by name, and the others go on as if it had never joined."""

from __future__ import annotations

import time

import numpy as np
import pytest

from tests.support.raw_member import SOON_S, RawMember
from tests.support.waiting import wait_until
from weft.config import TransferSettings
from weft.errors import WeftError
from weft.runtime.control.held import HeldShard, HeldTable
from weft.runtime.control.messages import (
    Alive,
    At,
    Committed,
    Decide,
    Failed,
    Go,
    Leave,
    Loss,
    Offered,
    Paused,
    Ready,
    Refused,
    Stopped,
    Want,
    Welcome,
    Written,
)
from weft.runtime.control.write_reports import WriteReport, WriteReports
from weft.runtime.controller.controller import Controller
from weft.runtime.receive.receiver import Receiver
from weft.runtime.send.sender import Sender
from weft.runtime.weights import Weights

SETTINGS = TransferSettings(silence_s=5.0, beat_s=0.2, version_s=30.0)


@pytest.fixture
def controller():
    with Controller(num_trainers=2, num_engine_ranks=1, settings=SETTINGS) as made:
        yield made


class Honest:
    """Trainer 0 and engine 0, as they should be; trainer 1 is somebody else's part."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self.trainer, self.engine = np.arange(500, dtype=np.float32), np.zeros(500, dtype=np.float32)
        self.receiver = Receiver(controller.address, rank=0, weights=Weights.from_arrays({"w": self.engine}))
        self.sender = Sender(
            controller.address, rank=0, weights=Weights.from_arrays({"w": self.trainer}), timeout_s=SOON_S
        )

    def commit_with_a_good_second_trainer(self, version: int) -> None:
        """Nobody was evicted, and versions may have small numbers."""
        address = self.controller.address
        with Sender(address, rank=1, weights=Weights.from_arrays({"w": self.trainer}), timeout_s=SOON_S) as second:
            assert self.controller.wait_planned(SOON_S)
            publications = [sender.publish(version=version) for sender in (self.sender, second)]
            self.receiver.wait(SOON_S).commit()
            for publication in publications:
                publication.wait_committed(SOON_S)
        assert np.array_equal(self.engine, self.trainer)

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


@pytest.fixture
def honest(controller):
    made = Honest(controller)
    yield made
    made.close()


def joined(controller: Controller, **changes: object) -> RawMember:
    liar = RawMember(controller.address, "trainer", 1).join(**changes)
    liar.hear(Welcome)
    return liar


LIES = {
    "ready as a trainer": Ready(version=1),
    "committed as a trainer": Committed(version=1),
    "paused as a trainer": Paused(version=1),
    "a step as a trainer": At(version=1, step=3),
    "an impossible version": Want(version=2**63),
    "a version of the far future": Want(version=2**62),
    "a negative version": Want(version=-1),
    "bytes nobody asked for": Written(version=5, reports=WriteReports(), losses=[]),
    "an end of nothing": Stopped(version=5, reason="", has_written=False),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_a_trainer_that_lies_is_refused_and_nobody_else(controller, honest, lie):
    with joined(controller) as liar:
        liar.send(lie)
        assert liar.hear(Refused).reason
        wait_until(
            lambda: "was refused" in controller.statistics().lost.get("trainer 1", ""), SOON_S, "the liar is lost"
        )
    honest.commit_with_a_good_second_trainer(1)


def test_a_trainer_cannot_say_that_an_engine_holds_a_version(controller, honest):
    """A version without a byte was committed that way."""
    with joined(controller) as liar:
        publication = honest.sender.publish(version=1)
        liar.open()
        liar.send(Want(version=1))
        liar.send(Ready(version=1))
        liar.hear(Refused)
        with pytest.raises(WeftError, match="trainer 1"):
            publication.wait_committed(SOON_S)
    assert honest.receiver.version is None
    honest.commit_with_a_good_second_trainer(2)


@pytest.mark.parametrize(
    "written",
    [
        Written(version=1, reports=WriteReports.of([WriteReport(3, 2000, 0)]), losses=[]),
        Written(version=1, reports=WriteReports.of([WriteReport(0, 1, 0)]), losses=[]),
        Written(version=1, reports=WriteReports.of([WriteReport(0, 2000, 0)] * 2), losses=[]),
        Written(version=1, reports=WriteReports(peers=b"12345678", num_bytes=b"1"), losses=[]),
        Written(version=1, reports=WriteReports(), losses=[Loss(engine=7, reason="")]),
    ],
)
def test_what_a_trainer_says_it_wrote_is_compared_with_the_plan(controller, honest, written):
    with joined(controller) as liar:
        publication = honest.sender.publish(version=1)
        liar.open()
        liar.send(Want(version=1))
        liar.hear(Go)
        liar.send(written)
        liar.hear(Refused)
        with pytest.raises(WeftError, match="trainer 1"):
            publication.wait_committed(SOON_S)
    honest.commit_with_a_good_second_trainer(2)


@pytest.mark.parametrize(
    "story",
    [{"pending": 4}, {"ready": 4}, {"last": -3}, {"age_s": -1.0}, {"incarnation": 2**62}],
    ids=["pending", "ready", "negative", "young", "future"],
)
def test_a_story_that_cannot_be_true_is_refused_at_once(controller, honest, story):
    with RawMember(controller.address, "trainer", 1).join(**story) as liar:
        assert "trainer 1" in liar.hear(Refused).reason
    honest.commit_with_a_good_second_trainer(1)


def test_a_trainer_that_knows_of_versions_nobody_else_does_is_refused(controller, honest):
    with joined(controller, last=2**62) as liar:
        assert "version 4611686018427387904" in liar.hear(Refused).reason
    honest.commit_with_a_good_second_trainer(1)


@pytest.mark.parametrize(
    "held",
    [
        [HeldShard(name="w", dtype="fp32", shape=(500,), lo=(0,), extent=(501,), strides=(1,))],
        [HeldShard(name="w", dtype="nonsense", shape=(500,), lo=(0,), extent=(500,), strides=(1,))],
        [HeldShard(name="t", dtype="fp32", shape=(4096, 4096), lo=(0, 0), extent=(4096, 4096), strides=(1, 4096))],
    ],
    ids=["outside", "dtype", "transposed"],
)
def test_weights_that_cannot_be_are_refused_when_their_owner_joins(controller, honest, held):
    with RawMember(controller.address, "trainer", 1).join(held=HeldTable.of(held).packed()) as bad:
        assert held[0].name in bad.hear(Refused).reason
    honest.commit_with_a_good_second_trainer(1)


def test_one_trainer_with_another_model_is_refused_and_the_others_stay():
    with Controller(num_trainers=3, num_engine_ranks=1, settings=SETTINGS) as controller:
        good = {"w": np.arange(500, dtype=np.float32)}
        engine = {"w": np.zeros(500, dtype=np.float32)}
        with (
            Receiver(controller.address, rank=0, weights=Weights.from_arrays(engine)) as receiver,
            Sender(controller.address, rank=0, weights=Weights.from_arrays(good), timeout_s=SOON_S) as first,
            Sender(controller.address, rank=2, weights=Weights.from_arrays(good), timeout_s=SOON_S) as third,
        ):
            wrong = {"w": np.zeros(400, dtype=np.float32)}
            with (
                Sender(controller.address, rank=1, weights=Weights.from_arrays(wrong), timeout_s=SOON_S) as bad,
                pytest.raises(WeftError, match=r"w: fp32 \[400\] on trainer 1"),
            ):
                bad.publish(version=1).wait_committed(SOON_S)
            with Sender(controller.address, rank=1, weights=Weights.from_arrays(good), timeout_s=SOON_S) as second:
                assert controller.wait_planned(SOON_S)
                publications = [sender.publish(version=2) for sender in (first, second, third)]
                receiver.wait(SOON_S).commit()
                for publication in publications:
                    publication.wait_committed(SOON_S)
            assert np.array_equal(engine["w"], good["w"])


@pytest.mark.parametrize(
    "opened", [{"landing": 0}, {"landing": 2**63}, {"offers": {}}], ids=["too few", "impossible", "nothing"]
)
def test_an_engine_that_opens_what_cannot_be_is_refused_by_name(opened):
    with (
        Controller(num_trainers=1, num_engine_ranks=2, settings=SETTINGS) as controller,
        Sender(controller.address, rank=0, weights=Weights.from_arrays({"w": np.ones(500, np.float32)})) as sender,
        Receiver(controller.address, rank=0, weights=Weights.from_arrays({"w": np.zeros(500, np.float32)})) as receiver,
        RawMember(controller.address, "engine", 1).join() as bad,
    ):
        bad.open(**opened)
        assert "engine 1" in bad.hear(Refused).reason
        others = {"trainer 0", "engine 0"}
        wait_until(lambda: set(controller.statistics().members) == others, SOON_S, "engine 1 alone is lost")
        with pytest.raises(WeftError, match="engine 1 was refused"):
            sender.publish(version=1).wait_committed(SOON_S)
        assert receiver.poll() is None


def test_an_endpoint_that_is_garbage_costs_its_engine_the_membership():
    """The trainer that cannot read it names it, and lives."""
    with (
        Controller(num_trainers=1, num_engine_ranks=2, settings=SETTINGS) as controller,
        Sender(controller.address, rank=0, weights=Weights.from_arrays({"w": np.ones(500, np.float32)})) as sender,
        Receiver(controller.address, rank=0, weights=Weights.from_arrays({"w": np.zeros(500, np.float32)})) as receiver,
    ):
        with RawMember(controller.address, "engine", 1).join() as bad:
            bad.open()
            with pytest.raises(WeftError, match="engine 1 cannot be reached"):
                sender.publish(version=1).wait_committed(SOON_S)
        engine = np.zeros(500, np.float32)
        with Receiver(controller.address, rank=1, weights=Weights.from_arrays({"w": engine})) as good:
            assert controller.wait_planned(SOON_S)
            publication = sender.publish(version=2)
            for each in (receiver, good):
                each.wait(SOON_S).commit()
            publication.wait_committed(SOON_S)
            assert engine.all()


def test_a_trainer_that_cannot_be_given_credits_does_not_cost_its_engine_the_membership():
    """Packed Chunks pass a window in place; the engine needs the trainer's endpoint for it."""
    settings = TransferSettings(
        mode="in_place", transport="cma", min_write_bytes=1 << 20, silence_s=5.0, beat_s=0.2, version_s=30.0
    )
    engine = {name: np.zeros(500, np.float32) for name in "vw"}
    with (
        Controller(num_trainers=2, num_engine_ranks=1, settings=settings) as controller,
        Receiver(controller.address, rank=0, weights=Weights.from_arrays(engine)) as receiver,
        Sender(controller.address, rank=0, weights=Weights.from_arrays({"v": np.ones(500, np.float32)})) as sender,
    ):
        with joined(controller) as bad:
            bad.open()
            wait_until(lambda: receiver.poll() or controller.wait_planned(0.1), SOON_S, "there is a plan")
            publication = sender.publish(version=1)
            bad.send(Want(version=1))
            assert not bad.hear(Decide).commit
            bad.send(Stopped(version=1, reason="", has_written=False))
            with pytest.raises(WeftError, match="credits cannot be returned to trainer 1"):
                publication.wait_committed(SOON_S)
            bad.send(Leave())
            wait_until(lambda: "trainer 1" not in controller.statistics().members, SOON_S, "it has left")
        with Sender(controller.address, rank=1, weights=Weights.from_arrays({"w": np.ones(500, np.float32)})) as good:
            wait_until(lambda: receiver.poll() or controller.wait_planned(0.1), SOON_S, "there is a plan without it")
            publications = [each.publish(version=2) for each in (sender, good)]
            receiver.wait(SOON_S).commit()
            for each in publications:
                each.wait_committed(SOON_S)
        assert engine["v"].all()
        assert engine["w"].all()


def test_an_engine_that_says_it_serves_what_was_never_decided_is_refused():
    with (
        Controller(num_trainers=1, num_engine_ranks=1, settings=SETTINGS) as controller,
        RawMember(controller.address, "engine").join() as liar,
    ):
        liar.hear(Welcome)
        for lie in (Committed(version=9), Failed(version=-1, reason="")):
            liar.send(lie)
        assert "serves version 9, which was not published" in liar.hear(Refused).reason


def test_an_older_process_does_not_replace_a_newer_one(controller):
    with RawMember(controller.address, "trainer", 1).join(age_s=5.0) as new:
        new.hear(Welcome)
        with RawMember(controller.address, "trainer", 1).join(age_s=60.0) as old:
            assert "a newer process has joined as trainer 1" in old.hear(Refused).reason
        assert controller.statistics().members == ("trainer 1",)
        with RawMember(controller.address, "trainer", 1).join(age_s=1.0) as newest:
            newest.hear(Welcome)
            assert "another process has joined" in new.hear(Refused).reason


def test_engines_tell_a_restarted_controller_of_newer_trainers(controller):
    known = Offered(rank=1, incarnation=time.time_ns())
    with RawMember(controller.address, "engine").join(offered=[known]) as engine:
        engine.hear(Welcome)
        with RawMember(controller.address, "trainer", 1).join(age_s=60.0) as old:
            assert "a newer process" in old.hear(Refused).reason


def test_an_engine_may_commit_what_it_joined_with_before_the_others_are_back(controller):
    """A controller that was restarted does not know yet what was decided."""
    with RawMember(controller.address, "engine").join(last=6, pending=7) as engine:
        engine.hear(Welcome)
        engine.send(At(version=7, step=3))
        engine.send(Committed(version=7))
        for _ in range(3):  # at least one of them answers a beat that came after all that
            engine.hear(Alive)
        assert controller.statistics().members == ("engine 0",)
