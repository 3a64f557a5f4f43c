"""All processes of a storm. One thread drives them and keeps the journal; no process outlives the fleet."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import wait as wait_for_pipes
from pathlib import Path
from typing import Any, Self

from tests.process.storm import members
from tests.process.storm.settings import StormSettings
from tests.process.storm.wires import TO_MEMBER, Wire
from tests.support.processes import quick_context

START_S = 30.0
END_S = 20.0
QUIET = frozenset({"checked", "state", "statistics", "footprint", "planned"})
"""What is not worth a line in the journal."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something a process said, or something that was done to it."""

    time_s: float
    """Since the storm began."""
    who: str
    what: str
    facts: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.time_s:9.3f}  {self.who:<14} {self.what} {' '.join(str(fact) for fact in self.facts)}"


@dataclass(slots=True)
class Footprint:
    """What a process holds."""

    num_bytes: int
    num_fds: int
    num_threads: int


class Actor:
    """One process and what it has said."""

    def __init__(self, name: str, body: Callable[..., None], *args: Any) -> None:
        context = quick_context()
        self.name = name
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=members.run, args=(theirs, body, *args), daemon=True)
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        self.said: dict[str, list[tuple[Any, ...]]] = {}
        self.is_stopped = False
        self.is_replaced = False
        self.is_faulty_since: float | None = None
        """When something was first done to this process that excuses it."""

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    @property
    def is_there(self) -> bool:
        """Whether it can answer."""
        return self.is_alive and not self.is_stopped

    @property
    def is_frozen(self) -> bool:
        """Whether the kernel has stopped it."""
        stat = Path(f"/proc/{self.pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] == "T"

    def ask(self, *request: Any) -> None:
        try:
            self.pipe.send(request)
        except OSError:  # it has ended
            return

    def num_said(self, what: str) -> int:
        return len(self.said.get(what, ()))

    def last(self, what: str) -> tuple[Any, ...]:
        return self.said[what][-1]

    def signal(self, number: int) -> None:
        if self.is_alive:
            os.kill(self.pid, number)
        self.is_stopped = (self.is_stopped or number == signal.SIGSTOP) and number != signal.SIGCONT

    def join(self, timeout_s: float) -> None:
        self._process.join(timeout_s)


@dataclass(slots=True)
class Publishing:
    """A version that trainers were asked to publish."""

    version: int
    asked: list[Actor]
    engines: list[Actor]
    """Engine ranks that nothing had happened to when it began."""

    def outcomes(self) -> dict[str, tuple[str, float]]:
        """Trainer → how it ended there, and after how many seconds."""
        found = {}
        for actor in self.asked:
            for _, version, how, seconds in actor.said.get("published", ()):
                if version == self.version:
                    found[actor.name] = how, seconds
        return found

    @property
    def is_over(self) -> bool:
        """Whether every trainer that can has answered."""
        known = self.outcomes()
        return all(actor.name in known or not actor.is_there for actor in self.asked)


class Fleet:
    """A controller, trainers and engine ranks; those that were replaced and may still run are `ghosts`."""

    def __init__(
        self, settings: StormSettings, *, on_event: Callable[[Actor | None, Event], None] | None = None
    ) -> None:
        self.settings = settings
        self._on_event = on_event or (lambda _actor, _event: None)
        self.journal: list[Event] = []
        self._began = time.monotonic()
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self._port = probe.getsockname()[1]
        self._names = [
            *(f"trainer {rank}" for rank in range(settings.num_trainers)),
            *(f"engine {rank}" for rank in range(settings.num_engine_ranks)),
        ]
        self.wires = {name: Wire(self._port) for name in self._names}
        self._seeds = iter(range(1 << 30))
        self._incarnations: dict[str, int] = {}
        self.ghosts: list[Actor] = []
        self.actors: dict[str, Actor] = {}
        self.start("controller")
        for name in self._names:
            self.start(name)
        self.version = 0

    # Members

    @property
    def controller(self) -> Actor:
        return self.actors["controller"]

    @property
    def trainers(self) -> list[Actor]:
        return [actor for name, actor in self.actors.items() if name.startswith("trainer")]

    @property
    def engines(self) -> list[Actor]:
        return [actor for name, actor in self.actors.items() if name.startswith("engine")]

    def start(self, name: str) -> Actor:
        """A process for a role; the one that had it, if it still runs, is a ghost from now on."""
        old = self.actors.get(name)
        if old is not None:
            old.is_replaced = True
            if old.is_alive:
                self.ghosts.append(old)
        number = self._incarnations[name] = self._incarnations.get(name, -1) + 1
        side, _, rank = name.partition(" ")
        title = f"{name}{'′' * min(number, 3)}"
        match side:
            case "controller":
                actor = Actor(title, members.controller, self._port, self.settings)
            case "trainer":
                actor = Actor(title, members.trainer, self.wires[name].address, self.settings, int(rank))
            case _:
                address, seed = self.wires[name].address, next(self._seeds)
                actor = Actor(title, members.engine, address, self.settings, int(rank), seed)
        self.actors[name] = actor
        self.note(title, "starts", f"process {actor.pid}")
        return actor

    def wait_there(self, actors: Iterable[Actor]) -> None:
        for actor in actors:
            self.until(lambda a=actor: a.num_said("there") > 0 or not a.is_alive, START_S, f"{actor.name} starts")

    def kill(self, actor: Actor) -> None:
        self._excuse(actor)
        self.note(actor.name, "is killed")
        actor.signal(signal.SIGKILL)
        actor.join(END_S)
        self.pump(0.0)

    def stop(self, actor: Actor) -> None:
        self._excuse(actor)
        self.note(actor.name, "is stopped")
        actor.signal(signal.SIGSTOP)

    def resume(self, actor: Actor) -> None:
        self._excuse(actor)
        self.note(actor.name, "goes on")
        actor.signal(signal.SIGCONT)

    def hold(self, name: str, direction: str = TO_MEMBER) -> None:
        self._excuse(self.actors[name])
        self.note(name, "is held", direction)
        self.wires[name].hold(direction)

    def release(self, name: str) -> None:
        self.note(name, "is released")
        self.wires[name].release()

    def _excuse(self, actor: Actor) -> None:
        if actor.is_faulty_since is None:
            actor.is_faulty_since = self.now

    def end_ghosts(self) -> None:
        """Processes that were replaced go on for a moment, and are killed."""
        for ghost in self.ghosts:
            self.kill(ghost)
        self.ghosts.clear()

    # The journal

    @property
    def now(self) -> float:
        return time.monotonic() - self._began

    def note(self, who: str, what: str, *facts: Any) -> None:
        self._record(None, Event(self.now, who, what, facts))

    def _record(self, actor: Actor | None, event: Event) -> None:
        if event.what not in QUIET:
            self.journal.append(event)
        self._on_event(actor, event)

    def pump(self, timeout_s: float) -> None:
        """Hear what processes have to say."""
        everybody = {actor.pipe: actor for actor in (*self.actors.values(), *self.ghosts) if not actor.pipe.closed}
        for pipe in wait_for_pipes(list(everybody), timeout_s):
            actor = everybody[pipe]
            try:
                while actor.pipe.poll(0.0):
                    what, at, *facts = actor.pipe.recv()
                    actor.said.setdefault(what, []).append((at, *facts))
                    self._record(actor, Event(at - self._began, actor.name, what, tuple(facts)))
            except (EOFError, OSError):
                actor.pipe.close()

    def until(self, happened: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Listen until something has happened; raises AssertionError if it does not in time."""
        assert self.happens(happened, timeout_s), f"not in {timeout_s:.1f} s: {what}"

    def happens(self, happened: Callable[[], bool], timeout_s: float) -> bool:
        """Listen until something has happened; False if it does not in time."""
        deadline = time.monotonic() + timeout_s
        self.pump(0.0)
        while not happened():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            self.pump(min(left_s, 0.02))
        return True

    def listen(self, seconds: float) -> None:
        """Let time pass."""
        self.happens(lambda: False, seconds)

    def answer(self, actor: Actor, what: str, *request: Any, timeout_s: float = END_S) -> tuple[Any, ...] | None:
        """What a process answers; None if it is gone, stopped, or does not in time."""
        before = actor.num_said(what)
        actor.ask(what, *request)
        self.happens(lambda: actor.num_said(what) > before or not actor.is_there, timeout_s)
        return actor.last(what)[1:] if actor.num_said(what) > before else None

    # Versions

    def publish(self, actions: dict[str, str] | None = None, only: Iterable[Actor] | None = None) -> Publishing:
        """Ask trainers for the next version. `actions`: what happens to a trainer at its first bytes."""
        self.version += 1
        return self.publish_again(self.version, actions, only)

    def publish_again(
        self, version: int, actions: dict[str, str] | None = None, only: Iterable[Actor] | None = None
    ) -> Publishing:
        """Ask (other) trainers for the same version."""
        asked = [actor for actor in (self.trainers if only is None else only) if actor.is_there]
        self.note("everybody" if only is None else ", ".join(a.name for a in asked), "publishes", version)
        for actor in asked:
            actor.ask("publish", version, (actions or {}).get(actor.name.rstrip("′"), ""))
        return Publishing(version, asked, [actor for actor in self.engines if actor.is_faulty_since is None])

    def collect(self, publishing: Publishing) -> bool:
        """Wait for the end of a version; False if it has not ended in its time."""
        return self.happens(lambda: publishing.is_over, self.settings.end_s + START_S)

    def wait_planned(self, timeout_s: float) -> bool:
        answer = self.answer(self.controller, "planned", timeout_s, timeout_s=timeout_s + 5.0)
        return bool(answer and answer[0])

    def wait_lost(self, name: str) -> None:
        """Until the controller has noticed that a member is gone."""
        deadline = time.monotonic() + END_S
        while name not in ((self.answer(self.controller, "statistics") or ((), {}))[1]):
            assert time.monotonic() < deadline, f"{name} is not missed"
            self.listen(0.02)

    def wait_joined(self, name: str) -> None:
        """Until a process is the controller's member."""
        deadline = time.monotonic() + END_S
        while name not in ((self.answer(self.controller, "statistics") or ((), {}))[0]):
            assert time.monotonic() < deadline, f"{name} does not join"
            self.listen(0.02)

    def states(self) -> dict[str, tuple[int | None, str]]:
        """Engine → the version it serves, or why it serves none; those that can answer."""
        found = {actor.name: self.answer(actor, "state") for actor in self.engines if actor.is_there}
        return {name: (state[0], state[1]) for name, state in found.items() if state is not None}

    def footprints(self) -> dict[str, Footprint]:
        found = {actor.name: self.answer(actor, "footprint") for actor in self.engines if actor.is_there}
        return {name: Footprint(*state) for name, state in found.items() if state is not None}

    def close(self) -> None:
        """End every process."""
        everybody = (*self.actors.values(), *self.ghosts)
        for actor in everybody:
            actor.signal(signal.SIGKILL)
        for actor in everybody:
            actor.join(END_S)
            actor.pipe.close()
        for wire in self.wires.values():
            wire.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
