"""An engine rank whose weights lose their memory: nobody writes there meanwhile, and torn weights are not served."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import weft
from tests.support.waiting import wait_until
from weft.integrations.engine_rank import EngineRank
from weft.runtime.receive.reservation import Reservation
from weft.runtime.weights import Weights

SOON_S = 20.0


class Engine:
    """One rank, as an adapter drives it."""

    def __init__(self) -> None:
        self.controller = weft.Controller(num_trainers=1, num_engine_ranks=1)
        self.trained, self.served = np.zeros(1000, dtype=np.float32), np.zeros(1000, dtype=np.float32)
        weights = Weights.from_arrays({"w": self.trained})
        self.sender = weft.Sender(self.controller.address, rank=0, weights=weights)
        self.rank = EngineRank(0, lambda: None)
        self.join()

    def join(self) -> None:
        weights = Weights.from_arrays({"w": self.served})
        self.rank.join(weft.Receiver(self.controller.address, rank=0, weights=weights))
        wait_until(lambda: len(self.controller.statistics().members) == 2, SOON_S, "both have joined")
        assert self.controller.wait_planned(SOON_S)

    def publish(self, version: int) -> weft.Publication:
        self.trained[...] = version
        return self.sender.publish(version=version)

    def serve(self, version: int) -> dict:
        status = self.rank.serve(version, SOON_S, is_asked=True)
        assert not status["error"]
        return status

    def close(self) -> None:
        self.rank.leave()
        self.sender.close()
        self.controller.close()


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    made.close()


def test_versions_are_refused_by_name_until_the_engine_is_awake(engine):
    engine.publish(1)
    assert engine.serve(1)["version"] == 1
    engine.rank.fall_asleep(discards=False)
    wait_until(
        lambda: engine.controller.statistics().lost.get("engine 0") == "left: the engine is asleep",
        SOON_S,
        "it has left",
    )
    with pytest.raises(weft.WeftError, match="engine 0 left: the engine is asleep"):
        engine.publish(2).wait_committed(SOON_S)
    assert not engine.rank.tend()["error"]
    assert engine.rank.serve(2, 0.1, is_asked=True)["error"] == "engine 0 is asleep"
    engine.join()
    engine.rank.wake_up()
    assert not engine.rank.status()["is_poisoned"], "its weights were kept"
    publication = engine.publish(3)
    assert engine.serve(3)["version"] == 3
    publication.wait_committed(SOON_S)
    assert engine.served[0] == 3.0


def test_weights_that_were_discarded_are_torn_until_the_next_version(engine):
    engine.publish(1)
    engine.serve(1)
    engine.rank.fall_asleep(discards=True)
    engine.join()
    engine.rank.wake_up()
    status = engine.rank.status()
    assert (status["version"], status["is_poisoned"]) == (None, True)
    engine.publish(2)
    assert not engine.serve(2)["is_poisoned"]


def test_weights_that_were_loaded_anew_are_whole(engine):
    engine.rank.fall_asleep(discards=True)
    engine.rank.wake_up()
    engine.rank.renew()
    assert not engine.rank.status()["is_poisoned"]


def test_an_engine_that_cannot_fall_asleep_is_what_it_was(engine):
    engine.publish(1)
    engine.serve(1)
    engine.rank.fall_asleep(discards=True)
    engine.rank.stay_awake()
    engine.join()
    assert not engine.rank.status()["is_poisoned"]
    engine.publish(2)
    assert engine.serve(2)["version"] == 2


def test_a_sleeping_engine_reserves_nothing(engine):
    engine.rank.reservation = reservation = Reservation("cpu", 1_000_000)
    engine.rank.fall_asleep(discards=False)
    assert reservation.num_bytes == 0
    assert engine.rank.reservation is None
