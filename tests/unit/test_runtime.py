"""The life of a version inside one process: injected faults, and members that do not fit together."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import numpy as np
import pytest

from tests.support.arena import Arena
from weft.config import ReceiverMode, TransferSettings
from weft.errors import (
    AuthError,
    IntegrityError,
    LayoutError,
    ProtocolError,
    TransferTimeout,
    VersionError,
    WeftError,
)
from weft.runtime.control import held
from weft.runtime.control.keys import make_keys
from weft.runtime.control.security import Security
from weft.runtime.controller.controller import Controller
from weft.runtime.receive.rank_state import RankState
from weft.runtime.receive.receiver import Receiver
from weft.runtime.send.sender import Sender
from weft.runtime.weights import Part, Weights
from weft.transport.local import Faults, LocalNetwork, LocalTransport

SOON_S = 20.0


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


class GuardedState(RankState):
    """Fails where a change is made without the receiver's lock."""

    guard: threading.Condition

    def __setattr__(self, name: str, value: Any) -> None:
        assert self.guard._is_owned(), f"{name} changes without the lock"
        super().__setattr__(name, value)


@pytest.mark.parametrize("settings", [{"mode": mode, "delta": "on"} for mode in ReceiverMode] + [{"mode": "in_place"}])
def test_what_a_rank_knows_of_versions_changes_only_with_the_lock_held(settings):
    pair = Pair({"w": np.zeros(500, dtype=np.float32)}, {"w": np.zeros(500, dtype=np.float32)}, **settings)
    GuardedState.guard = pair.receiver._changed
    pair.receiver._state.__class__ = GuardedState
    for version in (1, 2):
        pair.trainer["w"][version] = version
        commit(pair, version)
    pair.close()
    assert np.array_equal(pair.engine["w"], pair.trainer["w"])


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
    with pytest.raises(TransferTimeout, match="failed and is still being written") as caught:
        publication.wait_committed(SOON_S / 2)
    assert re.search("engine 0|trainer 0 to write", str(caught.value)), "trainer and controller give up at once"
    assert not publication.is_released
    stalled.set()
    with pytest.raises(WeftError, match=r"did not finish|not ready everywhere"):
        publication.wait_committed(SOON_S)
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
    monkeypatch.setattr(pair.sender, "_report", lambda *_, **__: 1 // 0)
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
        {"w": np.zeros(5, np.float16), "missing": np.zeros(2, np.float32)},
    )
    with pytest.raises(ProtocolError) as caught:
        made.sender.publish(version=1).wait_committed(SOON_S)
    for problem in ("missing: missing", "unexpected: extra", "shape: w is [4], the engine expects [5]"):
        assert problem in str(caught.value)
    made.close()


def test_an_engine_waits_for_trainers_that_fit():
    made = Pair({"v": np.ones(5, np.float32)}, {"w": np.zeros(5, np.float32)}, beat_s=0.1, version_s=60.0)
    with pytest.raises(ProtocolError, match="missing: w"):
        made.sender.publish(version=1).wait_committed(SOON_S)
    made.sender.close()
    with pytest.raises(ProtocolError, match="missing: w"):
        made.receiver.wait(SOON_S)
    assert made.receiver.poll() is None  # said once
    made.sender = Sender(
        made.controller.address,
        rank=0,
        weights=Weights.from_arrays({"w": np.full(5, 7.0, np.float32)}),
        transport=LocalTransport("trainer 0", made.network),
        timeout_s=SOON_S,
    )
    assert made.controller.wait_planned(SOON_S)
    commit(made, 2)  # and nobody waits for the version the other trainer has spoken of
    assert np.array_equal(made.engine["w"], np.full(5, 7.0, np.float32))
    made.close()


def test_a_commit_that_stops_half_way_is_made_good_by_the_next(pair, monkeypatch):
    commit(pair, 1)
    pair.sender.publish(version=2).wait_released(SOON_S)
    update = pair.receiver.wait(SOON_S)
    with monkeypatch.context() as broken:
        broken.setattr(pair.receiver._mode, "_work", FailingWork(pair.receiver._mode._work))
        with pytest.raises(MemoryError):
            update.commit()
    assert pair.receiver.is_poisoned
    assert pair.receiver.pending is None
    pair.trainer["w"] += 1
    commit(pair, 3)
    assert pair.receiver.version == 3
    assert np.array_equal(pair.engine["w"], pair.trainer["w"])


class FailingWork:
    def __init__(self, work: Any) -> None:
        self.synchronize = work.synchronize

    def copy_planes(self, *_: Any) -> int:
        raise MemoryError


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
        pytest.raises(ProtocolError, match="is out of range"),
    ):
        stranger.wait(SOON_S)


def test_weights_say_what_is_wrong_with_an_array():
    with pytest.raises(LayoutError, match="int64"):
        Weights.from_arrays({"w": np.zeros(3, dtype=np.int64)})
    with pytest.raises(LayoutError, match="strides"):
        Weights.from_arrays({"w": np.zeros(3, dtype=np.float32)[::-1]})
    held = Weights.from_arrays({"w": np.zeros((2, 3), np.float32)}, parts={"w": Part(shape=(8, 3), lo=(2, 0))}).held[0]
    assert (held.tensor.shape, held.lo, held.extent) == ((8, 3), (2, 0), (2, 3))


@pytest.fixture
def in_place():
    made = Pair({"w": np.arange(500, dtype=np.float32)}, {"w": np.zeros(500, dtype=np.float32)}, mode="in_place")
    yield made
    made.close()


@pytest.mark.parametrize("through", [None, "cpu"])
def test_a_trainer_without_rows_takes_part(through):
    rows, engine = np.arange(32, dtype=np.float32).reshape(8, 4), np.zeros((8, 4), dtype=np.float32)
    parts = [{"w": Part(shape=(8, 4), lo=(lo, 0))} for lo in (0, 8)]
    trainers = [
        Weights.from_arrays({"w": array}, parts=part)
        for array, part in zip((rows, np.zeros((0, 4), "f4")), parts, strict=True)
    ]
    with Arena(trainers, [Weights.from_arrays({"w": engine})], through=through) as arena:
        arena.publish(1)
    assert np.array_equal(engine, rows)


def test_names_that_members_share_are_kept_by_members_only():
    weights = [Weights.from_arrays({"w": np.zeros(4, dtype=np.float32)}) for _ in range(2)]
    with Arena(weights[:1], weights[1:]) as arena:
        arena.publish(1)
        assert held._split_names.cache_info().currsize == 0


def test_in_place_nothing_is_written_before_the_engine_pauses(in_place):
    publication = in_place.sender.publish(version=1)
    update = in_place.receiver.wait(SOON_S)
    assert not publication.is_released
    assert not in_place.engine["w"].any()
    assert update.commit()
    assert np.array_equal(in_place.engine["w"], in_place.trainer["w"])
    publication.wait_committed(SOON_S)
    assert in_place.receiver.version == 1


def test_a_failed_update_in_place_poisons_the_receiver_until_the_next_commit(in_place):
    commit(in_place, 1)
    in_place.network.faults["engine 0"] = Faults(corrupt=True)
    in_place.trainer["w"] += 1
    publication = in_place.sender.publish(version=2)
    with pytest.raises(IntegrityError, match="trainer 0 sent digest"):
        in_place.receiver.wait(SOON_S).commit(SOON_S)
    with pytest.raises(VersionError, match="digest"):
        publication.wait_committed(SOON_S)
    assert in_place.receiver.is_poisoned
    with pytest.raises(IntegrityError, match="torn"):
        _ = in_place.receiver.version
    commit(in_place, 3)
    assert not in_place.receiver.is_poisoned
    assert in_place.receiver.version == 3
    assert np.array_equal(in_place.engine["w"], in_place.trainer["w"])


def test_in_place_an_engine_that_does_not_pause_is_named_and_stays_whole():
    made = Pair({"w": np.ones(8, np.float32)}, {"w": np.zeros(8, np.float32)}, mode="in_place", version_s=1.0)
    deadline = time.monotonic() + SOON_S
    while not made.controller.wait_planned(0.01):
        assert made.receiver.poll() is None
        assert time.monotonic() < deadline
    with pytest.raises(VersionError, match="waiting for engine 0 to pause"):
        made.sender.publish(version=1).wait_committed(SOON_S)
    while made.receiver.poll() is not None:  # the engine hears of it a moment after the trainer
        assert time.monotonic() < deadline
    assert made.receiver.version is None
    assert not made.engine["w"].any()
    made.close()


def test_with_the_digest_off_bytes_are_only_counted():
    made = Pair({"w": np.ones(8, np.float32)}, {"w": np.zeros(8, np.float32)}, digest="off")
    made.network.faults["engine 0"] = Faults(corrupt=True)
    commit(made, 1)
    assert not np.array_equal(made.engine["w"], made.trainer["w"]), "the fault was not injected"
    made.close()


def test_statistics_tell_what_happened(pair):
    commit(pair, 1)
    pair.network.faults["engine 0"] = Faults(corrupt=True)
    with pytest.raises(VersionError):
        pair.sender.publish(version=2).wait_committed(SOON_S)
    found = pair.controller.statistics()
    assert found.members == ("engine 0", "trainer 0")
    assert found.links == {"local (inside one process)": 1}
    assert (found.committed, found.num_committed, found.num_aborted) == (1, 1, 1)
    assert "digest" in found.last_abort
    assert found.bytes_per_version == 2000
    assert 0 < found.last_version_s < SOON_S


def test_a_member_that_cannot_open_its_transport_says_why_to_everybody():
    made = Pair({"w": np.ones((4, 4), np.float32)}, {"w": np.zeros((4, 8), np.float32)[:, ::2][:, :4]}, mode="in_place")
    with pytest.raises(WeftError, match="not contiguous"):
        made.receiver.wait(SOON_S)
    with pytest.raises(VersionError, match=r"engine 0 left: .* not contiguous"):
        made.sender.publish(version=1).wait_committed(SOON_S)
    made.close()


def test_only_members_with_keys_join(tmp_path):
    make_keys(tmp_path, ["controller", "trainer", "engine"])
    make_keys(tmp_path / "strange", ["engine"])
    weights, security = Weights.from_arrays({"w": np.zeros(4, np.float32)}), Security(keys=tmp_path)
    with Controller(num_trainers=1, num_engine_ranks=1, security=security) as controller:
        strange = Security(keys=tmp_path, key="strange/engine")
        with (
            Receiver(controller.address, rank=0, weights=weights, security=strange) as stranger,
            pytest.raises(AuthError, match="refused"),
        ):
            stranger.wait(SOON_S)
        assert controller.statistics().members == ()
        with (
            Sender(controller.address, rank=0, weights=weights, security=security) as sender,
            Receiver(controller.address, rank=0, weights=weights, security=security) as receiver,
        ):
            publication = sender.publish(version=1)
            receiver.wait(SOON_S).commit()
            publication.wait_committed(SOON_S)


def test_in_place_the_only_trainer_lost_while_writing_leaves_torn_weights(in_place):
    commit(in_place, 1)
    stalled = threading.Event()
    in_place.network.faults["engine 0"] = Faults(stalled=stalled)
    publication = in_place.sender.publish(version=2)
    update = in_place.receiver.wait(SOON_S)
    threading.Timer(0.5, lambda: in_place.sender._control.leave("its machine is on fire")).start()
    with pytest.raises(IntegrityError, match="on fire"):
        update.commit(SOON_S)
    assert in_place.receiver.is_poisoned
    stalled.set()
    publication.wait_released(SOON_S)


def test_a_version_that_was_given_up_before_its_turn_blocks_nobody(pair):
    """Its trainer stops waiting; when the turn comes, it says at once that nothing is being written."""
    pair.sender._timeout_s = 0.3
    pair.sender.publish(version=1).wait_released(SOON_S)
    second = pair.sender.publish(version=2)
    with pytest.raises(WeftError, match="not allowed to write version 2"):
        second.wait_committed(SOON_S)
    pair.receiver.wait(SOON_S).commit()
    pair.sender._timeout_s = SOON_S
    commit(pair, 3)


def test_an_engine_that_gives_up_waiting_in_place_blocks_nobody(in_place):
    stalled = threading.Event()
    in_place.network.faults["engine 0"] = Faults(stalled=stalled)
    publication = in_place.sender.publish(version=1)
    with pytest.raises(IntegrityError, match="not decided in"):
        in_place.receiver.wait(SOON_S).commit(0.3)
    stalled.set()
    with pytest.raises(VersionError, match="gave up"):
        publication.wait_committed(SOON_S)
    in_place.network.faults.clear()
    commit(in_place, 2)
