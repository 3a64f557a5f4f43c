"""Stages overlap, memory is bounded by bytes, the first error ends everything, and magnitudes are agreed on."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import ConfigError, ProtocolError, TransferTimeout, VersionError, WeftError
from weft.events import busy_seconds
from weft.runtime.send.pipeline import Flow, Room, Stage, run, run_in_turn
from weft.runtime.send.stages import divided

RUNNERS = [run, run_in_turn]


def soon() -> float:
    return time.monotonic() + 20.0


@given(sizes=st.lists(st.integers(0, 40), max_size=60), capacity=st.integers(40, 100))
def test_chunks_in_a_room_never_overlap(sizes, capacity):
    room = Room(sizes, capacity)
    inside: dict[int, tuple[int, int]] = {}
    next_out = 0
    for number, size in enumerate(sizes):
        while not room.is_free(number):
            room.leave(next_out)
            del inside[next_out]
            next_out += 1
        mine = (room.at[number], room.at[number] + size)
        assert mine[1] <= capacity
        assert all(end <= mine[0] or mine[1] <= begin for begin, end in inside.values() if begin < end)
        room.enter(number)
        inside[number] = mine
        assert room.occupied_bytes == sum(end - begin for begin, end in inside.values()) <= capacity
    assert room.peak_bytes <= capacity


def test_a_chunk_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="chunk of 41 bytes does not fit into 40 bytes of staging memory"):
        Room([1, 41], 40)


@pytest.mark.parametrize("runner", RUNNERS)
def test_every_item_passes_all_stages_in_order(runner):
    flow, seen = Flow(soon()), []
    lock = threading.Lock()

    def work(name: str):
        def note(number: int) -> int:
            with lock:
                seen.append((name, number))
            return 10

        return note

    runner(flow, [Stage("a", 5, work("a")), Stage("b", 5, work("b"), flow.after("a"))])
    assert [number for name, number in seen if name == "a"] == list(range(5))
    assert [number for name, number in seen if name == "b"] == list(range(5))
    assert all(seen.index(("a", n)) < seen.index(("b", n)) for n in range(5))
    assert sum(event.num_bytes for event in flow.recorder.events) == 100
    assert set(busy_seconds(flow.recorder.events)) == {"a", "b"}


@pytest.mark.parametrize("runner", RUNNERS)
def test_items_wait_for_room(runner):
    flow = Flow(soon())
    room = Room([40] * 10, 100)

    def fill(number: int) -> int:
        room.enter(number)
        return 40

    def send(number: int) -> int:
        room.leave(number)
        return 40

    runner(flow, [Stage("fill", 10, fill, room.is_free), Stage("send", 10, send, flow.after("fill"))])
    assert 40 <= room.peak_bytes <= 100
    assert room.occupied_bytes == 0


def test_the_first_error_ends_all_stages_and_is_the_one_that_is_raised():
    flow = Flow(soon())

    def fail(number: int) -> int:
        if number == 2:
            raise VersionError("the first")
        return 0

    def never(_: int) -> bool:
        return False

    stages = [Stage("a", 5, fail), Stage("b", 5, lambda _: 0, flow.after("a")), Stage("c", 1, lambda _: 0, never)]
    with pytest.raises(VersionError, match="the first"):
        run(flow, stages)
    assert not [thread for thread in threading.enumerate() if thread.name in ("weft-a", "weft-b", "weft-c")]


def test_a_defect_in_a_stage_is_reported_as_one():
    def break_down(_: int) -> int:
        raise KeyError("oops")

    with pytest.raises(ProtocolError, match="KeyError in stage a: 'oops'"):
        run(Flow(soon()), [Stage("a", 1, break_down)])


def test_a_defect_in_a_question_is_reported_by_the_stage_that_asks():
    flow, has_asked = Flow(soon()), threading.Event()

    def work(number: int) -> int:
        assert has_asked.wait(60.0)
        return number

    def may_go_on(_: int) -> bool:
        if not flow.after("a")(0):
            has_asked.set()
            return False
        raise KeyError("oops")

    with pytest.raises(ProtocolError, match="KeyError in stage b: 'oops'"):
        run(flow, [Stage("a", 1, work), Stage("b", 1, lambda _: 0, may_go_on)])


def test_only_stages_that_can_go_on_are_woken():
    flow, has_asked, asked = Flow(soon()), threading.Event(), []

    def work(_: int) -> int:
        assert has_asked.wait(60.0)
        return 0

    def ask(number: int) -> bool:
        if threading.current_thread() is threading.main_thread():  # the last stage runs there
            asked.append(number)
            has_asked.set()
        return flow.after("a")(99)

    run(flow, [Stage("a", 100, work), Stage("b", 1, lambda _: 0, ask)])
    assert len(asked) == 2  # before it waits, and once it is woken


def test_nobody_waits_beyond_the_deadline():
    with pytest.raises(TransferTimeout, match="trainer 3 is still waiting for a of chunk 0"):
        run(Flow(time.monotonic() + 0.05, member="trainer 3"), [Stage("a", 1, lambda _: 0, lambda _: False)])


def test_whoever_gives_a_version_up_ends_its_stages():
    flow = Flow(soon())
    timer = threading.Timer(0.05, flow.stop, [VersionError("given up")])
    timer.start()
    with pytest.raises(WeftError, match="given up"):
        run(flow, [Stage("a", 1, lambda _: 0, lambda _: False)])


def test_what_is_missing_at_the_deadline_may_be_found_out_with_locks_of_others():
    """Those hold their lock while they say that something has changed."""
    flow = Flow(time.monotonic() + 0.05)

    def obstacle() -> str:
        other = threading.Thread(target=flow.changed)
        other.start()
        other.join(5.0)
        return "the other waits for ever" if other.is_alive() else "nothing came"

    flow.obstacle = obstacle
    with pytest.raises(TransferTimeout, match="nothing came"):
        flow.wait(lambda: False, "something")


@pytest.mark.parametrize(
    ("sizes", "capacity", "batch_bytes", "expected"),
    [
        ([10] * 6, 1000, 0, [[0], [1], [2], [3], [4], [5]]),  # on a CPU, one after the other
        ([10] * 6, 1000, 20, [[0, 1], [2], [3, 4], [5]]),  # two streams of three
        ([10] * 6, 1000, 100, [[0, 1, 2], [3, 4, 5]]),
        ([10] * 6, 40, 100, [[0], [1], [2], [3], [4], [5]]),  # the ring has no room for two and the next ones
        ([10] * 6, 60, 100, [[0, 1], [2], [3, 4], [5]]),
    ],
)
def test_patches_are_made_in_batches_that_leave_room(sizes, capacity, batch_bytes, expected):
    streams = [SimpleNamespace(batch_bytes=batch_bytes, layouts=[SimpleNamespace(num_bytes=10)] * 3) for _ in range(2)]
    chunks = [SimpleNamespace(outgoing=streams[number // 3], number=number % 3) for number in range(len(sizes))]
    program = SimpleNamespace(room=Room(sizes, capacity), chunks=chunks)
    assert divided(program, range(len(sizes))) == expected
