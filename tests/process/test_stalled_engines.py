"""Engines whose thread does not come: they are dropped by name, hold up nobody, and join again when it is back."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from tests.support.waiting import wait_until
from weft.config import TransferSettings
from weft.core.version import CommitPolicy
from weft.errors import WeftError
from weft.runtime.controller.controller import Controller
from weft.runtime.receive.receiver import Receiver
from weft.runtime.send.sender import Sender
from weft.runtime.weights import Part, Weights

SOON_S = 20.0
STALLED_S = 4.0
"""An engine that is not held commits, and stands still, within this, also on a busy machine."""


class Engine:
    """One engine of some ranks, whose thread can be held."""

    def __init__(self, address: str, ranks: range, num_ranks: int) -> None:
        self.ranks = ranks
        width = 600 // num_ranks
        self.arrays = [np.zeros((4, width), dtype=np.float32) for _ in ranks]
        parts = [{"w": Part(shape=(4, 600), lo=(0, width * number))} for number in range(num_ranks)]
        self.receivers = [
            Receiver(address, rank=rank, weights=Weights.from_arrays({"w": array}, parts=part))
            for rank, array, part in zip(ranks, self.arrays, parts, strict=True)
        ]
        self._runs, self._ends = threading.Event(), threading.Event()
        self._runs.set()
        self._threads = [threading.Thread(target=self._serve, args=(receiver,)) for receiver in self.receivers]
        for thread in self._threads:
            thread.start()

    def _serve(self, receiver: Receiver) -> None:
        while not self._ends.is_set():
            if self._runs.wait(0.01) and (update := receiver.poll()) is not None:
                update.commit()
            self._ends.wait(0.001)

    def hold(self) -> None:
        self._runs.clear()

    def go_on(self) -> None:
        self._runs.set()

    @property
    def serves(self) -> list[float]:
        return [float(value) for array in self.arrays for value in np.unique(array)]

    def close(self) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join(SOON_S)
        for receiver in self.receivers:
            receiver.close()


class Fleet:
    def __init__(self, *, quorum: int, ranks_per_engine: int = 1, **settings: object) -> None:
        self.controller = Controller(
            num_trainers=1,
            num_engine_ranks=2 * ranks_per_engine,
            ranks_per_engine=ranks_per_engine,
            commit_policy=CommitPolicy.QUORUM if quorum else CommitPolicy.ALL,
            quorum=quorum,
            settings=TransferSettings(**({"beat_s": 0.1, "silence_s": 5.0, "version_s": 30.0} | settings)),
        )
        self.weights = np.zeros((4, 600), dtype=np.float32)
        self.sender = Sender(self.controller.address, rank=0, weights=Weights.from_arrays({"w": self.weights}))
        numbers = [range(first, first + ranks_per_engine) for first in (0, ranks_per_engine)]
        self.engines = [Engine(self.controller.address, ranks, ranks_per_engine) for ranks in numbers]

    def publish(self, version: int) -> None:
        self.weights[...] = version
        self.sender.publish(version=version).wait_committed(SOON_S)

    def replace_trainer(self, timeout_s: float = SOON_S) -> None:
        """All members open again, for another plan."""
        self.sender.close()
        weights = Weights.from_arrays({"w": self.weights})
        self.sender = Sender(self.controller.address, rank=0, weights=weights, timeout_s=timeout_s)

    def wait_lost(self, member: str, why: str) -> None:
        wait_until(lambda: why in self.controller.statistics().lost.get(member, ""), SOON_S, f"{member} {why}")

    def wait_complete(self) -> None:
        members = 1 + sum(len(engine.ranks) for engine in self.engines)
        wait_until(lambda: len(self.controller.statistics().members) == members, SOON_S, "all are back")
        assert self.controller.wait_planned(SOON_S)

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        self.sender.close()
        self.controller.close()


@pytest.fixture
def fleet(request) -> Iterator[Fleet]:
    made = Fleet(**request.param)
    yield made
    made.close()


@pytest.mark.parametrize("fleet", [{"quorum": 0, "commit_s": STALLED_S}], indirect=True)
def test_an_engine_that_does_not_commit_is_dropped_by_name_and_comes_back(fleet):
    fleet.publish(1)
    fleet.engines[1].hold()
    fleet.publish(2)
    assert fleet.engines[0].serves == [2.0]
    fleet.wait_lost("engine 1", f"did not commit version 2 in {STALLED_S} s")
    with pytest.raises(WeftError, match="engine 1 did not commit version 2"):
        fleet.publish(3)
    fleet.engines[1].go_on()
    fleet.wait_complete()
    fleet.publish(4)
    assert fleet.engines[0].serves == fleet.engines[1].serves == [4.0]


@pytest.mark.parametrize("fleet", [{"quorum": 1, "commit_s": 60.0}], indirect=True)
def test_with_a_quorum_versions_go_on_without_an_engine_that_does_not_commit(fleet):
    """Version 2 lies in its landing area all the while, and it commits that when it is back."""
    fleet.publish(1)
    fleet.engines[1].hold()
    for version in (2, 3, 4):
        fleet.publish(version)
        assert fleet.engines[0].serves == [float(version)]
    assert fleet.engines[1].serves == [1.0]
    assert "engine 1" in fleet.controller.statistics().members
    fleet.engines[1].go_on()
    wait_until(lambda: fleet.controller.statistics().serves["engine 1"] == 2, SOON_S, "engine 1 commits 2")
    assert fleet.engines[1].serves == [2.0]
    fleet.publish(5)
    wait_until(lambda: fleet.engines[1].serves == [5.0], SOON_S, "engine 1 takes part again")


@pytest.mark.parametrize("fleet", [{"quorum": 1, "commit_s": STALLED_S, "ranks_per_engine": 2}], indirect=True)
def test_one_rank_that_stalls_costs_its_whole_engine_the_membership(fleet):
    fleet.publish(1)
    fleet.engines[1].hold()
    fleet.publish(2)
    fleet.wait_lost("engine 2", "did not commit version 2")
    fleet.wait_lost("engine 3", "did not commit version 2")
    fleet.publish(3)
    assert fleet.engines[0].serves == [3.0, 3.0]
    assert fleet.engines[1].serves == [1.0, 1.0]
    fleet.engines[1].go_on()
    fleet.wait_complete()
    fleet.publish(4)
    wait_until(lambda: fleet.engines[1].serves == [4.0, 4.0], SOON_S, "both ranks serve it")


@pytest.mark.parametrize(
    "fleet", [{"quorum": quorum, "mode": "in_place", "pause_s": STALLED_S} for quorum in (0, 1)], indirect=True
)
def test_an_engine_that_does_not_stand_still_is_left_out(fleet):
    fleet.publish(1)
    fleet.engines[1].hold()
    if fleet.controller._versions.needed_engines == 2:
        with pytest.raises(WeftError, match=f"did not pause for version 2 in {STALLED_S} s"):
            fleet.publish(2)
        assert fleet.engines[0].serves == [1.0], "the engine that stood still goes on"
        assert not fleet.engines[0].receivers[0].is_poisoned
    else:
        fleet.publish(2)
        assert fleet.engines[0].serves == [2.0]
    fleet.wait_lost("engine 1", "did not pause for version 2")
    assert fleet.engines[1].serves == [1.0], "nobody wrote into an engine that generates"
    fleet.engines[1].go_on()
    fleet.wait_complete()
    fleet.publish(3)
    wait_until(lambda: fleet.engines[1].serves == [3.0], SOON_S, "engine 1 takes part again")
    assert fleet.engines[0].serves == [3.0]


@pytest.mark.parametrize(
    "fleet",
    [{"quorum": 1, "mode": "in_place", "pause_s": STALLED_S, "ranks_per_engine": number} for number in (1, 2)],
    indirect=True,
)
def test_with_a_quorum_versions_go_on_without_an_engine_that_does_not_open_memory(fleet):
    fleet.publish(1)
    wait_until(lambda: {*fleet.engines[0].serves, *fleet.engines[1].serves} == {1.0}, SOON_S, "all serve it")
    fleet.engines[1].hold()
    fleet.replace_trainer()
    fleet.publish(2)
    assert set(fleet.engines[0].serves) == {2.0}
    for rank in fleet.engines[1].ranks:
        fleet.wait_lost(f"engine {rank}", f"waited {STALLED_S} s for its engine's thread to open memory")
    assert set(fleet.engines[1].serves) == {1.0}, "nobody wrote into it"
    fleet.engines[1].go_on()
    fleet.wait_complete()
    fleet.publish(3)
    wait_until(lambda: {*fleet.engines[0].serves, *fleet.engines[1].serves} == {3.0}, SOON_S, "all take part again")


@pytest.mark.parametrize("fleet", [{"quorum": 0, "mode": "in_place", "pause_s": 0.1}], indirect=True)
def test_an_engine_that_takes_long_to_start_is_named_and_waited_for(fleet):
    """Nobody could go on without it."""
    fleet.engines[1].hold()
    fleet.replace_trainer(timeout_s=STALLED_S)
    told = "engine 1 is waiting for its engine's thread to open memory"
    wait_until(lambda: told in fleet.controller._rounds.status, SOON_S, "the controller knows why")
    with pytest.raises(WeftError, match=told):
        fleet.publish(1)
    with pytest.raises(WeftError, match=told):
        fleet.engines[0].receivers[0].wait(0.1)
    assert not fleet.controller.statistics().lost
    fleet.engines[1].go_on()
    fleet.wait_complete()
