"""A storm: sequences of faults drawn from a seed, each followed by a recovery, until enough versions were published."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Self

from tests.process.storm.fleet import Actor, Fleet, Publishing
from tests.process.storm.settings import StormSettings
from tests.process.storm.verdicts import Verdicts

PLANNED_S = 4.0
RECOVER_S = 90.0
CALM = (2, 12)
"""Versions between two faults."""
FLAT_S = 5.0
"""How soon an engine gives back what lost writers could reach, once they have ended."""
AGAIN_S = 0.5
MAX_ENDED = 3
"""Versions a trainer may fail in a recovery before its process is replaced."""


class Storm:
    """One fleet, one seed."""

    def __init__(self, settings: StormSettings, seed: int = 0) -> None:
        self.settings, self.rng = settings, random.Random(seed)
        self.verdicts = Verdicts(settings)
        self.faults: Counter[str] = Counter()
        self.fleet = Fleet(settings, on_event=self.verdicts.listen)
        try:
            self.fleet.wait_there(self.fleet.actors.values())
            assert self.recover(), "\n".join(["the fleet does not start", *map(str, self.fleet.journal)])
        except BaseException:
            self.fleet.close()
            raise

    def run(self, faults: list[Callable[[Storm], None]], *, num_versions: int, on_step: Callable[[], None]) -> None:
        """Fault after fault, each of them once before any comes again, with some calm between them."""
        deck: list[Callable[[Storm], None]] = []
        while self.fleet.version < num_versions:
            for _ in range(self.rng.randint(*CALM)):
                self.publish()
            deck = deck or self.rng.sample(faults, len(faults))
            fault = deck.pop()
            self.faults[fault.__name__] += 1
            self.fleet.note("storm", "begins", fault.__name__)
            fault(self)
            self.recover()
            on_step()

    def publish(self, **options: Any) -> Publishing:
        """A version from its beginning to its end."""
        publishing = self.fleet.publish(**options)
        self.collect(publishing)
        return publishing

    def collect(self, publishing: Publishing) -> bool:
        """Wait for the end of a version and look what came of it; returns whether it was committed."""
        fleet, verdicts = self.fleet, self.verdicts
        if not fleet.collect(publishing):
            silent = [a.name for a in publishing.asked if a.is_there and a.name not in publishing.outcomes()]
            verdicts.add("hung", fleet.now, f"version {publishing.version} has no end on {', '.join(silent)}")
        committed = any(how == "committed" for how, _ in publishing.outcomes().values())
        if committed:
            self._look_for_loss(publishing)
        self._look_for_lateness()
        return committed

    def _look_for_loss(self, publishing: Publishing) -> None:
        """Every engine that nothing happened to serves what was committed; with a quorum, it may be late."""
        if self.settings.quorum:
            return
        states, version = self.fleet.states(), publishing.version
        for actor in publishing.engines:
            served, reason = states.get(actor.name, (None, "it does not answer"))
            if actor.is_faulty_since is None and not reason and (served is None or served < version):
                what = f"{actor.name} serves version {served}, but version {version} is committed everywhere"
                self.verdicts.add("lost", self.fleet.now, what)

    def _look_for_lateness(self) -> None:
        known = self.fleet.answer(self.fleet.controller, "statistics")
        if known is not None:
            self.verdicts.look_for_lateness(known[3], self.fleet.now)

    def restart_controller(self) -> None:
        """Kill it, and start another at the same address."""
        if self.fleet.controller.is_alive:
            self.fleet.kill(self.fleet.controller)
        self.fleet.wait_there([self.fleet.start("controller")])

    def replace(self, name: str) -> Actor:
        """A new process for a role, whatever the old one does."""
        actor = self.fleet.start(name)
        self.fleet.wait_there([actor])
        return actor

    def recover(self) -> bool:
        """Everything that was stopped goes on, ghosts end, dead members are replaced: then the fleet serves again."""
        fleet = self.fleet
        for wire in fleet.wires.values():
            wire.release()
        fleet.end_ghosts()
        for name, actor in list(fleet.actors.items()):
            if actor.is_stopped:
                fleet.resume(actor)
            if not actor.is_alive:
                self.replace(name)
        deadline, failures = time.monotonic() + RECOVER_S, Counter[str]()
        while time.monotonic() < deadline:
            fleet.wait_planned(PLANNED_S)
            publishing = self.fleet.publish()
            if self.collect(publishing) and self._all_serve(publishing.version):
                self._all_is_well()
                return True
            for name, (how, _) in publishing.outcomes().items():
                failures[name] += MAX_ENDED if "refused" in how else how != "committed"
            self._replace_hopeless(failures)
        states = "; ".join(f"{name}: {version} {reason}" for name, (version, reason) in fleet.states().items())
        self.verdicts.add(
            "hung", fleet.now, f"the fleet does not serve {RECOVER_S:.0f} s after the last fault: {states}"
        )
        for name in [*fleet.actors]:
            self.fleet.kill(fleet.actors[name])
            self.replace(name)
        return False

    def _all_serve(self, version: int) -> bool:
        states = self.fleet.states()
        return len(states) == len(self.fleet.engines) and all(state == (version, "") for state in states.values())

    def _replace_hopeless(self, failures: Counter[str]) -> None:
        """A user starts a trainer anew that does not publish any more, and an engine that has failed for good."""
        fleet = self.fleet
        for name, actor in list(fleet.actors.items()):
            is_refused = any("refused" in error for _, error in actor.said.get("error", ()))
            if failures[actor.name] >= MAX_ENDED or is_refused or not actor.is_alive:
                fleet.kill(actor)
                self.replace(name)
                failures[actor.name] = 0

    def _all_is_well(self) -> None:
        """Nobody is excused any more; what is held is compared with what was held."""
        for actor in self.fleet.actors.values():
            actor.is_faulty_since = None
        deadline = time.monotonic() + FLAT_S
        while grown := self._grown():
            if time.monotonic() > deadline:
                for actor, what in grown:
                    self.verdicts.leaked(actor, what, self.fleet.now)
                return
            self.publish()
            self.fleet.listen(AGAIN_S)

    def _grown(self) -> list[tuple[Actor, str]]:
        held = self.fleet.footprints()
        grown = [(a, self.verdicts.growth_of(a, held[a.name])) for a in self.fleet.engines if a.name in held]
        return [(actor, what) for actor, what in grown if what]

    def close(self) -> None:
        self.fleet.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
