"""How often an engine rank looks at what lands: often only where a trainer cannot go on without it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from weft.config import DigestPolicy
from weft.core.geometry.planes import rows_as_planes
from weft.runtime.receive import following
from weft.runtime.receive.arrivals import NUM_BATCHES, Arrivals
from weft.runtime.receive.landing import ArrivingChunk, ArrivingLink

CHUNK = 10
NOTHING = rows_as_planes(**dict.fromkeys(("dst", "src", "length"), np.zeros(0, dtype=np.uint64)))


def link(num_straight: int, num_packed: int, num_slots: int) -> ArrivingLink:
    numbers = range(num_straight + num_packed)
    chunks = [ArrivingChunk(num_bytes=CHUNK, planes=NOTHING, is_drained=n >= num_straight) for n in numbers]
    return ArrivingLink(trainer=0, transport="counted", chunks=tuple(chunks), is_ordered=True, num_slots=num_slots)


class Counted:
    """A transport that counts looks and credits; `landed` is what has arrived."""

    def __init__(self) -> None:
        self.landed, self.num_looks, self.credited = 0, 0, 0

    def arrived(self, tag: int, *, writer: int) -> int:
        self.num_looks += 1
        return self.landed

    def credit(self, peer: str, tag: int, num_bytes: int) -> None:
        self.credited += num_bytes


@pytest.fixture
def follow(monkeypatch) -> Any:
    """Makes a Following of one link, without a digest, on a machine whose cores are all busy."""
    monkeypatch.setattr(following, "spare_core", lambda: False)

    def make(one: ArrivingLink) -> tuple[following.Following, Arrivals, Counted]:
        counted = Counted()
        work: Any = SimpleNamespace(copy_planes=lambda _: 0)
        transports: Any = {"counted": counted}
        made = following.Following("engine 0", "cpu", transports, work)
        return made, Arrivals(1, [one], transports, work, DigestPolicy.OFF, tag=1), counted

    return make


def test_links_on_a_gpu_are_digested_several_at_a_time():
    links = [
        ArrivingLink(
            trainer=trainer,
            transport="counted",
            chunks=(ArrivingChunk(num_bytes=CHUNK, planes=NOTHING, is_drained=False),),
            is_ordered=True,
        )
        for trainer in range(2 * NUM_BATCHES)
    ]
    landed, batches = dict.fromkeys(range(len(links)), 0), []

    def digest_each(tables: list[Any]) -> list[int]:
        batches.append(len(tables))
        return [1] * len(tables)

    transports: Any = {"counted": SimpleNamespace(arrived=lambda tag, *, writer: landed[writer])}
    work: Any = SimpleNamespace(digest_each=digest_each)
    arrivals = Arrivals(1, links, transports, work, DigestPolicy.ON, tag=1, is_on_gpu=True)
    moved = []
    for trainer in (0, 3, 1, 2, 4):
        landed[trainer] = CHUNK
        moved.append(arrivals.follow())
    assert moved == [False, True, False, True, False], "an eighth of the version is worth a launch"
    assert arrivals.num_bytes == 4 * CHUNK
    landed.update(dict.fromkeys(range(15), CHUNK))
    assert arrivals.follow()
    landed[15] = CHUNK
    assert arrivals.follow(), "the last one, however small"
    assert arrivals.is_whole
    assert batches == [2, 2, 11, 1]
    assert arrivals.digest == 16


@pytest.mark.parametrize(
    ("num_straight", "num_packed", "expected"),
    [(5, 0, []), (5, 4, []), (0, 6, [0, 1]), (3, 6, [3, 4])],
)
def test_chunks_whose_places_are_taken_again(num_straight, num_packed, expected):
    one = link(num_straight, num_packed, 4 if num_packed else 0)
    assert [n for n in range(len(one.chunks)) if one.frees_room(n)] == expected
    assert one.num_awaited == len(expected)


@pytest.mark.parametrize("one", [link(5, 0, 0), link(5, 4, 4)])
def test_nobody_looks_where_no_trainer_waits(follow, one):
    made, arrivals, counted = follow(one)
    made.settings = following.TransferSettings(digest=DigestPolicy.OFF)
    assert made._look_early(arrivals) is None
    assert counted.num_looks == 0


def test_looks_become_rare_until_a_chunk_lands(follow):
    made, arrivals, counted = follow(link(0, 6, 4))
    made.settings = following.TransferSettings(digest=DigestPolicy.OFF)
    waits = [made._look_early(arrivals) for _ in range(8)]
    assert waits == sorted(waits)
    assert waits[0] == 2 * following.ARRIVING_S
    assert waits[-1] == following.FOLLOW_S
    counted.landed = CHUNK
    assert made._look_early(arrivals) == 0.0
    assert counted.credited == CHUNK
    assert made._look_early(arrivals) == 2 * following.ARRIVING_S


def test_large_tensors_in_front_of_a_window_are_waited_for_patiently(follow):
    made, arrivals, counted = follow(link(3, 6, 4))
    made.settings = following.TransferSettings(digest=DigestPolicy.OFF)
    assert made._look_early(arrivals) == following.BUSY_S
    counted.landed = 3 * CHUNK
    assert made._look_early(arrivals) == 0.0  # although no core is idle: the window behind them must be drained
    assert made._look_early(arrivals) == 2 * following.ARRIVING_S
    counted.landed = 4 * CHUNK
    assert made._look_early(arrivals) == 0.0
    assert counted.credited == CHUNK


def test_one_look_takes_all_that_has_landed(follow):
    made, arrivals, counted = follow(link(0, 6, 4))
    made.settings = following.TransferSettings(digest=DigestPolicy.OFF)
    counted.landed = 5 * CHUNK
    assert made._look_early(arrivals) == 0.0
    assert counted.credited == 5 * CHUNK
