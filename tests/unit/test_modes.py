"""How versions become visible in each mode: what is copied, applied and refused, and when."""

from __future__ import annotations

from typing import Any

import pytest

from weft.config import ReceiverMode
from weft.errors import IntegrityError
from weft.runtime.control.messages import Open
from weft.runtime.receive.modes import MODES, Mode

IN_ORDER = ["scatter", "bounce"]
BACK = ["bounce back", "scatter back"]


class Events(list[str]):
    """What happens to weights and memory, in order. Stands in for the device's work and for reachable memory."""

    def copy_planes(self, step: Step) -> None:
        self.append(step.name)

    def stage(self, num_bytes: int) -> None:
        self.append(f"stage {num_bytes}")

    def land_in_live(self, *, window_bytes: int) -> None:
        self.append(f"window {window_bytes}")

    def patches(self, version: int) -> Any:
        return Patches(version, self)

    def drain(self) -> list[str]:
        """What has happened since."""
        found = list(self)
        self.clear()
        return found


class Step:
    """Stands in for a table of planes."""

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def back(self) -> Step:
        return Step(f"{self.name} back")


class Patches:
    def __init__(self, version: int, events: Events) -> None:
        self.version, self._events = version, events

    def apply(self) -> None:
        self._events.append(f"apply {self.version}")


def made(name: str) -> tuple[Mode, Events]:
    """A mode with a plan of two steps."""
    events = Events()
    work: Any = events
    mode = MODES[ReceiverMode(name)](work)
    replan(mode)
    return mode, events


def replan(mode: Mode) -> None:
    steps: Any = [Step(name) for name in IN_ORDER]
    mode.plan(steps)


@pytest.mark.parametrize(
    ("name", "patch_bytes", "is_prepared", "events"),
    [
        ("shadow", 0, True, ["stage 100"]),
        ("shadow", 7, True, ["stage 100"]),
        ("patch", 7, True, ["window 100"]),
        ("in_place", 7, True, ["window 100"]),
        ("in_place", 0, False, []),  # live weights are moved and offered by the engine's own thread
    ],
)
def test_the_memory_that_trainers_write(name, patch_bytes, is_prepared, events):
    mode, memory = made(name)
    opening = Open(round=1, transports=["shm"], landing_bytes=100, patch_bytes=patch_bytes)
    assert mode.reserve(memory, opening) is is_prepared
    assert memory == events


@pytest.mark.parametrize(
    ("name", "whole", "is_in_place"),
    [
        ("shadow", False, False),
        ("shadow", True, False),
        ("in_place", False, True),
        ("in_place", True, True),
        ("patch", False, False),
        ("patch", True, True),
    ],
)
def test_whether_the_engine_stands_still_while_a_version_arrives(name, whole, is_in_place):
    assert made(name)[0].is_in_place(whole=whole) is is_in_place


# Shadow


@pytest.mark.parametrize("whole", [False, True])
def test_a_commit_copies_what_is_staged_step_by_step(whole):
    mode, events = made("shadow")
    mode.make_visible(7, whole=whole)
    assert events == IN_ORDER


def commit_whole(mode: Mode, events: Events) -> None:
    mode.make_visible(6, whole=True)


def take_and_commit(mode: Mode, events: Events) -> None:
    mode.take(events.patches(6), 5)
    mode.make_visible(6, whole=False)


def take_and_forget(mode: Mode, events: Events) -> None:
    mode.take(events.patches(6), 5)
    mode.forget()


def commit_and_plan(mode: Mode, events: Events) -> None:
    mode.make_visible(6, whole=True)
    replan(mode)


@pytest.mark.parametrize(
    ("before", "base", "is_copied_back"),
    [
        (lambda *_: None, 6, True),
        (lambda *_: None, None, True),
        (commit_whole, 6, False),
        (commit_whole, 5, True),
        (commit_whole, None, True),  # the weights are no version: what is staged is none, either
        (take_and_commit, 6, False),
        (take_and_commit, 5, True),
        (take_and_forget, 6, True),
        (commit_and_plan, 6, True),  # what is staged is laid out for another plan
    ],
)
def test_patches_are_applied_to_a_copy_of_their_base(before, base, is_copied_back):
    """It is made from the live weights, last step first, unless the base is what is staged."""
    mode, events = made("shadow")
    before(mode, events)
    events.drain()
    mode.take(events.patches(7), base)
    assert events.drain() == [*(BACK if is_copied_back else []), "apply 7"]
    mode.take(events.patches(8), 7)
    assert events == ["apply 8"], "what was patched is staged"


def test_a_commit_of_patches_does_not_change_what_is_staged():
    """Version 7 is staged already when version 6 becomes visible."""
    mode, events = made("shadow")
    mode.take(events.patches(7), 6)
    mode.make_visible(6, whole=False)
    events.drain()
    mode.take(events.patches(8), 7)
    assert events == ["apply 8"]


# In place


def test_patches_in_place_are_applied_at_once():
    mode, events = made("in_place")
    mode.take(events.patches(7), None)
    mode.forget()
    assert events == ["apply 7"]


@pytest.mark.parametrize("whole", [False, True])
def test_nothing_is_left_to_make_visible_in_place(whole):
    mode, events = made("in_place")
    with pytest.raises(IntegrityError, match="version 7 is visible before it is decided in this mode"):
        mode.make_visible(7, whole=whole)
    assert events == []


# Patch


def test_patches_wait_for_the_commit():
    mode, events = made("patch")
    mode.take(events.patches(7), 6)
    assert events == []
    mode.make_visible(7, whole=False)
    assert events == ["apply 7"]
    with pytest.raises(IntegrityError, match="no patch to version 7 is held"):
        mode.make_visible(7, whole=False)
    assert events == ["apply 7"], "only once"


@pytest.mark.parametrize(
    ("taken", "is_forgotten", "version"),
    [([], False, 7), ([6], False, 7), ([8], False, 7), ([7, 8], False, 7), ([7], True, 7)],
)
def test_only_the_patches_that_came_last_can_be_committed(taken, is_forgotten, version):
    mode, events = made("patch")
    for each in taken:
        mode.take(events.patches(each), each - 1)
    if is_forgotten:
        mode.forget()
    for _ in range(2):
        with pytest.raises(IntegrityError, match=f"no patch to version {version} is held"):
            mode.make_visible(version, whole=False)
    assert events == []
