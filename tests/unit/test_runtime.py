"""The life of a version inside one process: injected faults, and members that do not fit together."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from weft.config import TransferSettings
from weft.errors import LayoutError, ProtocolError, VersionError, WeftError
from weft.runtime.controller import Controller
from weft.runtime.receiver import Receiver
from weft.runtime.sender import Sender
from weft.runtime.weights import Part, Weights
from weft.transport.local import Faults, LocalNetwork, LocalTransport

SOON_S = 10.0


class Pair:
    """One trainer, one engine, a controller: all here."""

    def __init__(self, trainer: dict[str, np.ndarray], engine: dict[str, np.ndarray], **settings: Any) -> None:
        self.network = LocalNetwork()
        self.trainer, self.engine = trainer, engine
        self.controller = Controller(num_trainers=1, num_engine_ranks=1, settings=TransferSettings(**settings))
        self.receiver = Receiver(
            self.controller.address,
            rank=0,
            weights=Weights.from_arrays(engine),
            transport=LocalTransport("engine 0", self.network),
        )
        self.sender = Sender(
            self.controller.address,
            rank=0,
            weights=Weights.from_arrays(trainer),
            transport=LocalTransport("trainer 0", self.network),
            timeout_s=SOON_S,
        )

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
        self.controller.close()


@pytest.fixture
def pair():
    made = Pair({"w": np.arange(500, dtype=np.float32)}, {"w": np.zeros(500, dtype=np.float32)}, version_s=3.0)
    yield made
    made.close()


def commit(pair: Pair, version: int) -> None:
    publication = pair.sender.publish(version=version)
    pair.receiver.wait(SOON_S).commit()
    publication.wait_committed(SOON_S)


def test_nothing_is_visible_before_commit(pair):
    publication = pair.sender.publish(version=1)
    publication.wait_released(SOON_S)
    update = pair.receiver.wait(SOON_S)
    assert not pair.engine["w"].any()
    assert pair.receiver.version is None
    update.commit()
    assert np.array_equal(pair.engine["w"], pair.trainer["w"])
    assert pair.receiver.version == 1
    with pytest.raises(ProtocolError, match="not waiting"):
        update.commit()


def test_released_weights_may_change_without_changing_the_version(pair):
    pair.sender.publish(version=1).wait_released(SOON_S)
    before = pair.trainer["w"].copy()
    pair.trainer["w"][:] = -1
    pair.receiver.wait(SOON_S).commit()
    assert np.array_equal(pair.engine["w"], before)


def test_a_corrupted_write_is_never_served(pair):
    commit(pair, 1)
    good = pair.engine["w"].copy()
    pair.trainer["w"] += 1
    pair.network.faults["engine 0"] = Faults(corrupt=True)
    with pytest.raises(VersionError, match="digest"):
        pair.sender.publish(version=2).wait_committed(SOON_S)
    assert pair.receiver.poll() is None
    assert np.array_equal(pair.engine["w"], good)
    commit(pair, 3)
    assert np.array_equal(pair.engine["w"], pair.trainer["w"])


def test_a_late_write_of_an_aborted_version_reaches_no_live_weights(pair):
    commit(pair, 1)
    good = pair.engine["w"].copy()
    stalled = threading.Event()
    pair.network.faults["engine 0"] = Faults(stalled=stalled)
    pair.trainer["w"] += 1
    publication = pair.sender.publish(version=2)
    started = time.monotonic()
    with pytest.raises(VersionError, match=r"did not finish|not ready everywhere"):
        publication.wait_committed(SOON_S)
    assert time.monotonic() - started < SOON_S
    assert not publication.is_released
    stalled.set()
    publication._released.wait(SOON_S)
    assert np.array_equal(pair.engine["w"], good)
    pair.network.faults.clear()
    commit(pair, 3)
    assert np.array_equal(pair.engine["w"], pair.trainer["w"])
    assert not np.array_equal(good, pair.engine["w"])


def test_a_lost_engine_is_named(pair):
    commit(pair, 1)
    pair.network.faults["engine 0"] = Faults(lost=True)
    with pytest.raises(WeftError, match="engine 0"):
        pair.sender.publish(version=2).wait_committed(SOON_S)


def test_a_defect_while_sending_reaches_the_waiting_trainer(pair, monkeypatch):
    commit(pair, 1)
    monkeypatch.setattr(pair.sender, "_write_all", lambda publication, go: 1 // 0)
    with pytest.raises(WeftError, match="ZeroDivisionError"):
        pair.sender.publish(version=2).wait_committed(SOON_S)


def test_a_version_that_still_reads_the_weights_is_not_overtaken(pair):
    stalled = threading.Event()
    pair.network.faults["engine 0"] = Faults(stalled=stalled)
    first = pair.sender.publish(version=1)
    with pytest.raises(VersionError, match="still reads the weights"):
        pair.sender.publish(version=2)
    stalled.set()
    first.wait_released(SOON_S)


def test_the_next_version_waits_until_the_engine_has_committed_the_one_before(pair):
    pair.sender.publish(version=1).wait_released(SOON_S)
    first = pair.trainer["w"].copy()
    pair.trainer["w"] += 1
    second = pair.sender.publish(version=2)
    update = pair.receiver.wait(SOON_S)
    assert not second.is_released
    update.commit()
    assert np.array_equal(pair.engine["w"], first)
    pair.receiver.wait(SOON_S).commit()
    second.wait_committed(SOON_S)
    assert np.array_equal(pair.engine["w"], pair.trainer["w"])


def test_members_that_do_not_fit_are_told_every_problem():
    made = Pair(
        {"w": np.zeros(4, np.float32), "extra": np.zeros(2, np.float32)},
        {"w": np.zeros(4, np.float16), "missing": np.zeros(2, np.float32)},
    )
    with pytest.raises(ProtocolError) as caught:
        made.sender.publish(version=1).wait_committed(SOON_S)
    for problem in ("missing: missing", "unexpected: extra", "dtype: w is fp32, w is fp16"):
        assert problem in str(caught.value)
    made.close()


def test_strided_live_weights_are_filled_in_place():
    wide = np.zeros((6, 10), dtype=np.float32)
    made = Pair({"w": np.arange(24, dtype=np.float32).reshape(6, 4)}, {"w": wide[:, 3:7]})
    commit(made, 1)
    assert np.array_equal(wide[:, 3:7], made.trainer["w"])
    assert not wide[:, :3].any()
    assert not wide[:, 7:].any()
    made.close()


def test_a_wrong_rank_is_refused(pair):
    with (
        Receiver(
            pair.controller.address,
            rank=5,
            weights=Weights.from_arrays({"w": np.zeros(4, np.float32)}),
            transport=LocalTransport("engine 5", pair.network),
        ) as stranger,
        pytest.raises(ProtocolError, match="does not fit"),
    ):
        stranger.wait(SOON_S)


def test_weights_say_what_is_wrong_with_an_array():
    with pytest.raises(LayoutError, match="int64"):
        Weights.from_arrays({"w": np.zeros(3, dtype=np.int64)})
    with pytest.raises(LayoutError, match="strides"):
        Weights.from_arrays({"w": np.zeros(3, dtype=np.float32)[::-1]})
    held = Weights.from_arrays({"w": np.zeros((2, 3), np.float32)}, parts={"w": Part(shape=(8, 3), lo=(2, 0))}).held[0]
    assert (held.tensor.shape, held.lo, held.extent) == ((8, 3), (2, 0), (2, 3))
