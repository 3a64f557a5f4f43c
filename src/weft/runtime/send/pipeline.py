"""Stages that overlap: each works through its items in order, on a thread of its own, as far as earlier stages allow.

    flow = Flow(deadline)
    room = Room(sizes, capacity)                                        # memory that items pass through in turn
    run(flow, [
        Stage("convert", count, convert, ready=room.is_free),
        Stage("write", count, write, ready=flow.after("convert")),
    ])

What stops one stage stops all, and the first error is the one that is raised. No wait lasts longer than the deadline.
Memory is bounded in bytes: an item enters a room when the previous items in its place have left.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from weft.errors import ConfigError, ProtocolError, TransferTimeout, WeftError
from weft.events import Recorder


class _Waiter:
    """A thread that waits until something is reached, once."""

    def __init__(self, reached: Callable[[], bool]) -> None:
        self._reached = reached
        self._asleep = threading.Lock()
        self._asleep.acquire()

    def is_due(self) -> bool:
        """Whether it can go on: also if asking fails, which its own thread then reports."""
        try:
            return self._reached()
        except Exception:  # not this thread's error to report
            return True

    def wait(self, timeout_s: float) -> None:
        """Until it is woken, or the time has passed."""
        self._asleep.acquire(timeout=timeout_s)

    def wake(self) -> None:
        """Called once."""
        self._asleep.release()


class Flow:
    """What the stages of one run share: how far each is, and whether something went wrong."""

    def __init__(self, deadline: float, *, member: str = "") -> None:
        """`deadline` is a time of `time.monotonic`."""
        self._deadline = deadline
        self._member = member
        self._lock = threading.Lock()
        self._waiters: list[_Waiter] = []
        self._done: dict[str, int] = {}
        self._error: WeftError | None = None
        self._began = time.monotonic()
        self.recorder = Recorder()
        self.obstacle: Callable[[], str] = lambda: ""
        """What other members have not done yet, for the error at the deadline."""

    def after(self, stage: str) -> Callable[[int], bool]:
        """Whether an item has passed another stage."""
        return lambda number: self._done.get(stage, 0) > number

    def passed(self, stage: str, number: int) -> None:
        """An item has passed a stage."""
        with self._lock:
            self._done[stage] = number + 1
            self._wake()

    def changed(self) -> None:
        """Something that stages may wait for has changed."""
        with self._lock:
            self._wake()

    def stop(self, error: WeftError) -> None:
        """End every wait; the first error counts."""
        with self._lock:
            self._error = self._error or error
            self._wake()

    def _wake(self) -> None:
        """Wake the threads that can go on, and no other: with many chunks, waking takes longer than working."""
        due = [waiter for waiter in self._waiters if self._error is not None or waiter.is_due()]
        for waiter in due:
            self._waiters.remove(waiter)
            waiter.wake()

    def check(self) -> None:
        """Raise the first error, if there was one."""
        if self._error is not None:
            raise self._error

    def wait(self, reached: Callable[[], bool], what: str) -> None:
        """Wait; raises the first error, or TransferTimeout at the deadline."""
        while True:
            with self._lock:
                self.check()
                if reached():
                    return
                left_s = self._deadline - time.monotonic()
                if left_s <= 0.0:
                    break
                waiter = _Waiter(reached)
                self._waiters.append(waiter)
            waiter.wait(left_s)
            with self._lock:
                if waiter in self._waiters:  # nothing woke it
                    self._waiters.remove(waiter)
        why = self.obstacle()  # it may take locks of its own
        because = f": {why}" if why else ""
        raise TransferTimeout(f"{self._member} is still waiting for {what} at the deadline{because}")

    def span(self, stage: str, start: float, end: float, num_bytes: int) -> None:
        """Record how long a stage was busy with an item."""
        begin, close = start - self._began, end - self._began
        with self._lock:
            self.recorder.span(stage, member=self._member, lane=stage, start_s=begin, end_s=close, num_bytes=num_bytes)


@dataclass(frozen=True, slots=True)
class Stage:
    """Work on items 0, 1, 2, …"""

    name: str
    count: int
    work: Callable[[int], int]
    """Returns the bytes it processed."""
    ready: Callable[[int], bool] = field(default=lambda _: True)
    """Whether an item can be worked on; checked when something has changed, on any thread."""
    is_recorded: bool = True
    """Whether its spans are the time its work takes; otherwise it records them itself."""

    def run(self, flow: Flow) -> None:
        """Work through all items."""
        try:
            for number in range(self.count):
                flow.wait(lambda number=number: self.ready(number), f"{self.name} of chunk {number}")  # type: ignore[misc]
                self.work_on(flow, number)
        except WeftError as error:
            flow.stop(error)
        except Exception as error:  # a bug in weft: nothing reads this thread's result
            flow.stop(ProtocolError(f"{type(error).__name__} in stage {self.name}: {error}"))

    def work_on(self, flow: Flow, number: int) -> None:
        """Work on one item that is ready."""
        began = time.monotonic()
        num_bytes = self.work(number)
        if self.is_recorded:
            flow.span(self.name, began, time.monotonic(), num_bytes)
        flow.passed(self.name, number)


def run(flow: Flow, stages: Sequence[Stage]) -> None:
    """Run all stages to their end; raises the first error when all have stopped."""
    threads = [
        threading.Thread(target=stage.run, args=(flow,), name=f"weft-{stage.name}", daemon=True)
        for stage in stages[:-1]
    ]
    for thread in threads:
        thread.start()
    stages[-1].run(flow)
    for thread in threads:
        thread.join()
    flow.check()


def run_in_turn(flow: Flow, stages: Sequence[Stage]) -> None:
    """The same work without overlap: always the item that is furthest along and can proceed. Used by benchmarks."""
    items = [0] * len(stages)

    def next_stage() -> int | None:
        for number in reversed(range(len(stages))):
            stage = stages[number]
            if items[number] < stage.count and stage.ready(items[number]):
                return number
        return None

    while any(item < stage.count for item, stage in zip(items, stages, strict=True)):
        flow.wait(lambda: next_stage() is not None, "any stage")
        number = next_stage()
        assert number is not None
        stages[number].work_on(flow, items[number])
        items[number] += 1


class Room:
    """A ring of memory that chunks of known sizes pass through in turn, repeatedly."""

    def __init__(self, sizes: Sequence[int], capacity: int) -> None:
        """Every chunk has its fixed place; `after[i]` is the last chunk that must have left before i may enter."""
        largest = max(sizes, default=0)
        if largest > capacity:
            raise ConfigError(
                f"chunk of {largest} bytes does not fit into {capacity} bytes of staging memory",
                hint="raise staging_bytes",
            )
        self.sizes, self.capacity = sizes, capacity
        self.at: list[int] = []
        self._after: list[int] = []
        inside: deque[tuple[int, int, int]] = deque()
        begin = 0
        for number, size in enumerate(sizes):
            if begin + size > capacity:
                begin = 0
            after = self._after[-1] if self._after else -1
            while any(first < begin + size and begin < last for _, first, last in inside):
                after = inside.popleft()[0]
            inside.append((number, begin, begin + size))
            self.at.append(begin)
            self._after.append(after)
            begin += size
        self.num_bytes = max((at + size for at, size in zip(self.at, sizes, strict=True)), default=0)
        self.empty()

    def empty(self) -> None:
        """A new round."""
        self._num_left = 0
        self.occupied_bytes = 0
        self.peak_bytes = 0

    def can_join(self, number: int, first: int) -> bool:
        """Whether a chunk may enter before an earlier one, `first`, has left."""
        return self._after[number] < first

    def is_free(self, number: int) -> bool:
        """Whether a chunk may enter."""
        return self._num_left > self._after[number]

    def enter(self, number: int) -> None:
        """A chunk takes its place."""
        self.occupied_bytes += self.sizes[number]
        self.peak_bytes = max(self.peak_bytes, self.occupied_bytes)

    def leave(self, number: int) -> None:
        """Chunks leave in order."""
        self.occupied_bytes -= self.sizes[number]
        self.skip_to(number + 1)

    def skip_to(self, number: int) -> None:
        """No chunk before this one is inside, or will be in this round."""
        self._num_left = number
