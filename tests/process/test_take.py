"""Engines that stand still until the next version is there: `Receiver.take`."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from weft.config import TransferSettings
from weft.errors import TransferTimeout
from weft.runtime.controller.controller import Controller
from weft.runtime.receive.receiver import Receiver
from weft.runtime.send.sender import Sender
from weft.runtime.weights import Weights

NUM_VERSIONS = 20


def array() -> dict[str, np.ndarray]:
    return {"a": np.zeros((64, 32), dtype=np.float32)}


@pytest.mark.parametrize("mode", ["in_place", "shadow"])
def test_every_version_is_taken_once_and_whole(mode):
    source, live = array(), array()
    seen = []
    with Controller(num_trainers=1, num_engine_ranks=1, settings=TransferSettings(mode=mode)) as controller:

        def publish() -> None:
            with Sender(controller.address, rank=0, weights=Weights.from_arrays(source)) as sender:
                for version in range(1, NUM_VERSIONS + 1):
                    source["a"][...] = version
                    publication = sender.publish(version=version)
                    publication.wait_released(20.0)
                publication.wait_committed(20.0)

        trainer = threading.Thread(target=publish)
        trainer.start()
        with Receiver(controller.address, rank=0, weights=Weights.from_arrays(live)) as receiver:
            while len(seen) < NUM_VERSIONS:
                version = receiver.take(20.0)
                assert (live["a"] == version).all()
                seen.append(version)
                assert receiver.last_pause_s > 0
            trainer.join(20.0)
            assert (live["a"] == NUM_VERSIONS).all()
    assert seen == list(range(1, NUM_VERSIONS + 1))


def test_an_engine_that_waited_in_vain_takes_later_versions():
    source, live = array(), array()
    settings = TransferSettings(mode="in_place")
    with (
        Controller(num_trainers=1, num_engine_ranks=1, settings=settings) as controller,
        Receiver(controller.address, rank=0, weights=Weights.from_arrays(live)) as receiver,
        Sender(controller.address, rank=0, weights=Weights.from_arrays(source)) as sender,
    ):
        taken = []
        engine = threading.Thread(target=lambda: taken.append(receiver.take(20.0)))
        engine.start()
        source["a"][...] = 1.0
        sender.publish(version=1).wait_committed(20.0)
        engine.join(20.0)
        with pytest.raises(TransferTimeout, match="received no version"):
            receiver.take(0.05)
        assert not receiver.is_poisoned
        engine = threading.Thread(target=lambda: taken.append(receiver.take(20.0)))
        engine.start()
        source["a"][...] = 2.0
        sender.publish(version=2).wait_committed(20.0)
        engine.join(20.0)
        assert taken == [1, 2]
        assert (live["a"] == 2.0).all()


class CalledOff:
    """An update in place that was called off before anything was written; or one that was not."""

    def __init__(self, version: int, *, is_called_off: bool) -> None:
        self.version, self._is_called_off = version, is_called_off

    def commit(self, timeout_s: float) -> bool:
        return not self._is_called_off


def test_an_update_that_is_called_off_is_not_taken(monkeypatch):
    """The receiver has just been made, and has not heard that versions come in place."""
    with (
        Controller(num_trainers=1, num_engine_ranks=1) as controller,
        Receiver(controller.address, rank=0, weights=Weights.from_arrays(array())) as receiver,
    ):
        updates = iter([CalledOff(1, is_called_off=True), CalledOff(2, is_called_off=False)])
        monkeypatch.setattr(receiver, "wait", lambda timeout_s: next(updates))
        assert receiver.take(20.0) == 2
