"""Memory that writers may reach: what is created, what is offered, and what is never reused while a writer lives."""

from __future__ import annotations

import contextlib
import gc
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from weft.core.layout import Tensor
from weft.errors import LayoutError
from weft.runtime.control.messages import Offer, Opened, Writer, unpack
from weft.runtime.receive import reachable as module
from weft.runtime.receive.reachable import ReachableMemory
from weft.runtime.weights import Held, Weights
from weft.transport.base import Endpoint, Memory
from weft.transport.host import ProcessIdentity
from weft.transport.registry import Place

LIVE, MOVED, BESIDE = 1 << 20, 2 << 20, 3 << 20
HERE = Place(host="here", container="pid:1", user=0, device="cpu", installed=("shm",))


def weights(address: int = LIVE, *, device: str = "cpu", columns: int = 4) -> Weights:
    tensor = Tensor(name="w", dtype="fp32", shape=(2, 4))
    held = Held(tensor=tensor, lo=(0, 0), extent=(2, 4), strides=(columns, 1), address=address)
    return Weights.of([held], ranges=((address, held.span_bytes),), device=device)


def writer(rank: int) -> Writer:
    process = ProcessIdentity.of(os.getpid())
    return Writer(rank=rank, incarnation=1, process=process, place=HERE, transport="shm")


class Transports:
    """Stands in for open transports. Memory comes one piece after the other, 4096 bytes apart."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.is_freed = True
        """Whether memory can be given up."""
        self.on_allocate: Callable[[], None] = lambda: None
        self._next = BESIDE

    def allocate(self, num_bytes: int) -> Memory:
        self.events.append(f"allocate {num_bytes}")
        self.on_allocate()
        address, self._next = self._next, self._next + 4096
        return Memory(address=address, num_bytes=num_bytes, give_up=lambda: self._given_up(address))

    def _given_up(self, address: int) -> bool:
        self.events.append(f"give up {address - BESIDE}")
        return self.is_freed

    def offers(self, ranges: Any) -> dict[str, Offer]:
        """An offer that names the ranges."""
        data = repr(sorted(ranges)).encode()
        return {"shm": Offer(endpoint=Endpoint(transport="shm", member="engine 0", data=data), descriptors=[])}

    def close_all(self) -> list[str]:
        self.events.append("close all")
        return ["shm"]

    def pass_host(self, through_host: bool) -> None:
        self.events.append(f"pass host {through_host}")


class Reserve:
    """Stands in for a reservation."""

    num_bytes = 4096

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def take(self, num_bytes: int, allocate: Callable[[int], Memory]) -> Memory:
        self._events.append("take")
        return allocate(num_bytes)

    def hold(self) -> None:
        self._events.append("hold")

    def let_go(self) -> None:
        self._events.append("let go")

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        self._events.append("aside")
        yield
        self._events.append("back")


def reachable(held: Weights | None = None, *, has_reserve: bool = False) -> tuple[ReachableMemory, Transports]:
    transports = Transports()
    reserve: Any = Reserve(transports.events) if has_reserve else None
    given: Any = transports
    return ReachableMemory(held or weights(), given, reserve), transports


GROW = {
    "landing": ReachableMemory.stage,
    "patches": ReachableMemory.make_room_for_patches,
    "window": lambda memory, num_bytes: memory.land_in_live(window_bytes=num_bytes),
}


@pytest.mark.parametrize("name", GROW)
@pytest.mark.parametrize(
    ("sizes", "allocated"),
    [([64], [64]), ([64, 64], [64]), ([64, 32], [64]), ([64, 65], [64, 65]), ([64, 65, 64], [64, 65])],
)
def test_memory_is_kept_until_more_is_needed(name, sizes, allocated):
    memory, transports = reachable()
    held = []
    transports.on_allocate = lambda: held.append(getattr(memory, name))
    for size in sizes:
        GROW[name](memory, size)
    assert transports.events == [f"allocate {size}" for size in allocated]
    assert getattr(memory, name).num_bytes == max(sizes)
    assert held == [None] * len(allocated), "the old memory is freed first: both may not fit"


@pytest.mark.parametrize(
    ("name", "allocated"), [("landing", ["allocate 1"]), ("patches", ["allocate 1"]), ("window", [])]
)
def test_memory_for_nothing(name, allocated):
    """An engine rank to which no trainer sends anything has to offer an address all the same, except of a window."""
    memory, transports = reachable()
    GROW[name](memory, 0)
    assert transports.events == allocated


@pytest.mark.parametrize("name", GROW)
def test_memory_is_taken_from_what_was_reserved(name):
    memory, transports = reachable(has_reserve=True)
    GROW[name](memory, 64)
    assert transports.events == ["take", "allocate 64"]


@pytest.mark.parametrize("name", GROW)
def test_host_memory_is_pinned_and_not_taken_from_what_was_reserved_on_a_gpu(monkeypatch, name):
    monkeypatch.setattr(module, "pinned", lambda memory: replace(memory, keep="pinned"))
    memory, transports = reachable(weights(device="cuda:0"), has_reserve=True)
    memory.pass_host(True)
    assert "let go" in transports.events
    transports.events.clear()
    GROW[name](memory, 64)
    assert transports.events == ["allocate 64"]
    assert getattr(memory, name).keep == "pinned"


@pytest.mark.parametrize(
    ("made", "is_live", "is_open"),
    [
        ([], True, False),
        (["window"], True, True),
        (["landing"], False, False),
        (["patches"], False, False),
        (["patches", "window"], False, True),
    ],
)
def test_writers_reach_the_live_weights_unless_there_is_other_memory(made, is_live, is_open):
    memory, _ = reachable()
    for name in made:
        GROW[name](memory, 64)
    assert (memory.is_live, memory.is_open) == (is_live, is_open)


def opened(memory: ReachableMemory) -> tuple[Opened, str]:
    """What trainers are told, and which ranges they may write."""
    found = memory.offer(7)
    return found, found.offers["shm"].endpoint.data.decode()


@pytest.mark.parametrize(
    ("made", "is_live", "landing", "patches"),
    [
        ([], True, None, None),
        (["window"], True, 0, None),
        (["landing"], False, 0, None),
        (["patches"], False, None, 0),
        (["patches", "landing"], False, 4096, 0),
        (["patches", "window"], False, 4096, 0),
        (["window", "landing"], False, 4096, None),  # a window of an earlier mode is not used
    ],
)
def test_what_trainers_are_told(made, is_live, landing, patches):
    """Addresses of all memory they write, and only of that."""
    memory, _ = reachable()
    for name in made:
        GROW[name](memory, 64)
    found, ranges = opened(memory)
    live = [(LIVE, 32)] if is_live else []
    assert found.round == 7
    assert unpack(found.live).tolist() == [address for address, _ in live]
    assert found.landing == (0 if landing is None else BESIDE + landing)
    assert found.patches == (0 if patches is None else BESIDE + patches)
    own = [(BESIDE + at, 64) for at in (landing, patches) if at is not None]
    assert ranges == repr(sorted([*live, *own]))


# Live weights


@pytest.mark.parametrize(
    ("rehome", "can_move", "address"), [(False, True, LIVE), (True, False, LIVE), (True, True, MOVED)]
)
@pytest.mark.parametrize("has_reserve", [False, True])
def test_live_weights_are_moved_where_others_reach_them(rehome, can_move, address, has_reserve):
    """For a moment that takes as much memory again, which is not taken from what was reserved."""
    memory, transports = reachable(has_reserve=has_reserve)

    def move(allocate: Callable[[int], Memory]) -> Weights:
        assert allocate == transports.allocate
        transports.events.append("move")
        return weights(MOVED)

    memory.weights = replace(memory.weights, rehome=move if can_move else None)
    memory.land_in_live(rehome=rehome)
    assert unpack(memory.offer(1).live).tolist() == [address]
    is_moved = address == MOVED
    assert transports.events == (["aside", "move", "back"] if has_reserve else ["move"]) * is_moved
    assert memory.is_open


def test_strided_weights_are_not_offered():
    memory, transports = reachable(weights(columns=8))
    with pytest.raises(LayoutError, match="weights that are not contiguous cannot be written in place"):
        memory.land_in_live(window_bytes=64, rehome=True)
    assert not memory.is_open
    assert transports.events == []


# Through host memory


@pytest.mark.parametrize(
    ("device", "before", "now", "is_dropped"),
    [
        ("cpu", False, True, False),
        ("cpu", True, False, False),
        ("cuda:0", False, True, True),
        ("cuda:0", True, False, True),
        ("cuda:0", True, True, False),
        ("cuda:0", False, False, False),
    ],
)
def test_memory_is_dropped_when_versions_land_on_another_kind_of_device(monkeypatch, device, before, now, is_dropped):
    monkeypatch.setattr(module, "pinned", lambda memory: memory)
    memory, transports = reachable(weights(device=device))
    memory.pass_host(before)
    for grow in GROW.values():
        grow(memory, 64)
    transports.events.clear()
    memory.pass_host(now)
    assert transports.events == ["close all"] * is_dropped + [f"pass host {now}"]
    assert memory.is_behind_host == (now and device != "cpu")
    assert [getattr(memory, name) is None for name in GROW] == [is_dropped] * 3
    assert memory.is_open != is_dropped


def test_behind_the_host_nobody_reaches_the_live_weights():
    memory, _ = reachable(weights(device="cuda:0"))
    memory.pass_host(True)
    assert not memory.is_live
    found, ranges = opened(memory)
    assert (found.live, ranges) == (b"", "[]")


# Lost writers


@pytest.mark.parametrize(
    ("made", "is_freed", "writers", "kept", "is_lost"),
    [
        (["landing"], True, [], [], True),
        (["landing"], True, [3], [], True),
        (["landing"], False, [3], [], True),  # kept out of use until the writer has ended
        (["landing"], False, [], ["landing"], False),
        (["patches", "landing"], True, [3], [], True),
        (["patches", "landing"], False, [], ["landing", "patches"], False),
        (["patches", "window"], True, [3], [], False),
        (["patches", "window"], False, [3], [], False),
        (["patches", "window"], False, [], ["patches", "window"], False),
    ],
)
def test_memory_that_was_offered_is_given_up(made, is_freed, writers, kept, is_lost):
    memory, transports = reachable()
    for name in made:
        GROW[name](memory, 64)
    transports.is_freed = is_freed
    assert memory.give_up([writer(rank) for rank in writers]) is is_lost
    assert [name for name in GROW if getattr(memory, name) is not None] == kept
    assert memory.num_quarantined == len(made) - len(kept)
    assert sum(event.startswith("give up") for event in transports.events) == len(made)


def test_live_weights_are_offered_again_instead():
    memory, transports = reachable()
    memory.land_in_live(window_bytes=64)
    transports.events.clear()
    assert memory.give_up([]) is False
    assert not memory.is_open
    assert transports.events == [], "nothing is given up"


@pytest.mark.parametrize(
    ("writers", "ended", "is_kept"),
    [
        ([], [], False),
        ([3], [], True),
        ([3], [3], False),
        ([3, 4], [3], True),
        ([3, 4], [3, 4], False),
        ([3], [4], True),
    ],
)
def test_memory_is_kept_while_any_writer_may_still_write_there(writers, ended, is_kept):
    memory, _ = reachable()
    memory.stage(64)
    assert memory.landing is not None
    gone = weakref.ref(memory.landing)
    memory.give_up([writer(rank) for rank in writers])
    memory.release_quarantine(lambda lost: lost.rank in ended)
    gc.collect()
    assert (gone() is not None) == is_kept
    assert memory.num_quarantined == int(is_kept)


@pytest.mark.parametrize(("writers", "kept"), [([], []), ([3], [3])])
def test_what_a_lost_writer_reaches_outlives_the_rank(monkeypatch, writers, kept):
    """Transports and memory, for as long as the process lives."""
    reserved: list[Any] = []
    monkeypatch.setattr(module, "keep_reserved", reserved.extend)
    memory, transports = reachable()
    memory.stage(64)
    memory.make_room_for_patches(64)
    memory.close([writer(rank) for rank in writers])
    assert transports.events[2:] == ["close all", "give up 4096", "give up 0"]
    assert [name for name in GROW if getattr(memory, name) is not None] == []
    assert memory.num_quarantined == 0
    assert [[lost.rank for lost in each.writers] for each in reserved] == [kept] * (3 if kept else 0)


def test_writers_of_an_earlier_round_count_as_well(monkeypatch):
    reserved: list[Any] = []
    monkeypatch.setattr(module, "keep_reserved", reserved.extend)
    memory, _ = reachable()
    memory.close_transports([writer(3)])
    memory.close([])
    assert reserved[0].keep == ["shm"]
    assert reserved[0].writers == (writer(3),)
