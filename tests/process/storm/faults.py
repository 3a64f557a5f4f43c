"""What can happen, as sequences. Each leaves processes stopped, dead or cut off; the storm's recovery comes after it.

Moments are those of the processes themselves (a trainer is about to write, an engine was offered a version), and
random ones between.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.process.storm.fleet import Actor, Publishing
from tests.process.storm.gate import END, STOP
from tests.process.storm.storm import Storm
from tests.process.storm.wires import TO_CONTROLLER, TO_MEMBER

MOMENT_S = 0.12
"""A version takes about half of this."""
LATE_WRITE_S = 2.0
"""For a writer that goes on to write what it was about to."""


def _moment(storm: Storm, publishing: Publishing) -> None:
    """A random moment of a version: between its beginning and a little after its end, or as writing begins."""
    if storm.rng.random() < 0.5:
        storm.fleet.listen(storm.rng.random() * MOMENT_S)
        return
    writer = storm.rng.choice(publishing.asked)
    before = writer.num_said("writing")
    storm.fleet.happens(lambda: writer.num_said("writing") > before or publishing.is_over, 2.0)
    storm.fleet.listen(storm.rng.random() * 0.004)


def _any_of(storm: Storm, actors: list[Actor]) -> Actor:
    return storm.rng.choice(actors)


def killed(storm: Storm) -> None:
    """kill -9 of any process, at any moment."""
    publishing = storm.fleet.publish()
    _moment(storm, publishing)
    storm.fleet.kill(_any_of(storm, list(storm.fleet.actors.values())))
    storm.collect(publishing)


def two_killed(storm: Storm) -> None:
    """Two of them at once."""
    publishing = storm.fleet.publish()
    _moment(storm, publishing)
    for actor in storm.rng.sample(list(storm.fleet.actors.values()), 2):
        storm.fleet.kill(actor)
    storm.collect(publishing)


def writer_killed(storm: Storm) -> None:
    """A trainer that is about to write its first bytes."""
    rank = storm.rng.randrange(storm.settings.num_trainers)
    lose_writer(storm, f"trainer {rank}")


def lose_writer(storm: Storm, name: str) -> None:
    """A trainer ends as it writes."""
    victim = storm.fleet.actors[name]
    publishing = storm.fleet.publish(actions={name: END})
    storm.fleet.happens(lambda: not victim.is_alive, storm.settings.end_s)
    storm.fleet.note(name, "ended at its first bytes")
    storm.collect(publishing)


def controller_restarted(storm: Storm) -> None:
    """The controller dies inside a version, and is back at once, or later."""
    publishing = storm.fleet.publish()
    _moment(storm, publishing)
    storm.fleet.kill(storm.fleet.controller)
    storm.fleet.listen(storm.rng.choice([0.0, 0.0, 2 * storm.settings.silence_s]))
    storm.restart_controller()
    storm.collect(publishing)


def stopped(storm: Storm) -> None:
    """Any process stands still inside a version, for a moment or until it is given up."""
    victim = _any_of(storm, list(storm.fleet.actors.values()))
    publishing = storm.fleet.publish()
    _moment(storm, publishing)
    storm.fleet.stop(victim)
    storm.fleet.listen(storm.rng.choice([0.2, 0.9, 1.1, 1.5, 2.5]) * storm.settings.silence_s)
    storm.fleet.resume(victim)
    storm.collect(publishing)


def engine_replaced(storm: Storm) -> None:
    """An engine rank is stopped, replaced, and goes on."""
    name = f"engine {storm.rng.randrange(storm.settings.num_engine_ranks)}"
    publishing = storm.fleet.publish()
    _moment(storm, publishing)
    ghost = storm.fleet.actors[name]
    storm.fleet.stop(ghost)
    storm.replace(name)
    storm.collect(publishing)
    storm.fleet.wait_planned(5.0)
    publishing = storm.fleet.publish()
    _moment(storm, publishing)
    storm.fleet.resume(ghost)
    storm.collect(publishing)


def engine_stands_still(storm: Storm) -> None:
    """An engine rank is stopped just before a version is written to it, and replaced."""
    write_to_stopped(storm, f"engine {storm.rng.randrange(storm.settings.num_engine_ranks)}")
    storm.publish()


def write_to_stopped(storm: Storm, engine: str) -> Publishing:
    """Returns what became of the version; another process has the engine's role then."""
    storm.fleet.stop(storm.fleet.actors[engine])
    publishing = storm.fleet.publish()
    storm.collect(publishing)
    storm.replace(engine)
    storm.fleet.wait_planned(5.0)
    return publishing


def stop_draining(storm: Storm, engine: str) -> Publishing:
    """An engine stops in the middle of a version in place: what lies in its window is not drained, and no credits come
    back. It goes on when the version is over."""
    victim = storm.fleet.actors[engine]
    before = victim.num_said("offered")
    publishing = storm.fleet.publish()
    storm.fleet.happens(lambda: victim.num_said("offered") > before or publishing.is_over, storm.settings.end_s)
    storm.fleet.listen(storm.rng.random() * 0.01)
    storm.fleet.stop(victim)
    storm.collect(publishing)
    storm.fleet.resume(victim)
    return publishing


def credits_stop(storm: Storm) -> None:
    """The same, as one of many faults; sometimes the controller is restarted while nothing is drained."""
    name = f"engine {storm.rng.randrange(storm.settings.num_engine_ranks)}"
    stop_draining(storm, name)
    if storm.rng.random() < 0.3:
        storm.restart_controller()


def network_stalls(storm: Storm) -> None:
    """What one or two members say, or hear, arrives late."""
    names = storm.rng.sample(list(storm.fleet.wires), storm.rng.randint(1, 2))
    for name in names:
        storm.fleet.hold(name, storm.rng.choice([TO_MEMBER, TO_CONTROLLER]))
    publishing = storm.fleet.publish()
    storm.fleet.listen(storm.rng.choice([0.3, 1.5, 2.5]) * storm.settings.silence_s)
    for name in names:
        storm.fleet.release(name)
    storm.collect(publishing)


def late_go(storm: Storm) -> None:
    """Trainers give a version up because they do not hear the controller; then they hear that they may write it."""
    names = [f"trainer {rank}" for rank in range(storm.settings.num_trainers)]
    if storm.rng.random() < 0.3:
        names = [storm.rng.choice(names)]
    hear_late(storm, names)
    storm.publish()


def hear_late(storm: Storm, names: list[str]) -> Publishing:
    """These trainers hear nothing until they have given a version up."""
    for name in names:
        storm.fleet.hold(name)
    publishing = storm.fleet.publish()
    deaf = [storm.fleet.actors[name] for name in names]
    storm.fleet.happens(lambda: all(a.name in publishing.outcomes() for a in deaf), storm.settings.end_s)
    for name in names:
        storm.fleet.release(name)
    storm.collect(publishing)
    return publishing


def half_refused(storm: Storm) -> None:
    """A version is refused to one trainer while an engine is gone; the engine is back before the next one asks."""
    rank = storm.rng.randrange(storm.settings.num_engine_ranks)
    refuse_one(storm, f"engine {rank}")


def refuse_one(storm: Storm, engine: str) -> Publishing:
    """Returns what became of the version for the trainer that came later."""
    fleet = storm.fleet
    fleet.kill(fleet.actors[engine])
    fleet.wait_lost(engine)
    first, *others = fleet.trainers
    refused = fleet.publish(only=[first])
    storm.collect(refused)
    storm.replace(engine)
    fleet.wait_planned(10.0)
    later = fleet.publish_again(refused.version, only=others)
    storm.collect(later)
    return later


def stopped_writer(storm: Storm) -> None:
    """A trainer stands still as it writes; others are replaced around it; it goes on at the worst moment."""
    name = f"trainer {storm.rng.randrange(storm.settings.num_trainers)}"
    ghost = stop_while_writing(storm, name, exactly=storm.rng.random() < 0.6)
    if storm.rng.random() < 0.4:
        storm.fleet.wait_lost(name)
    around: list[tuple[float, Callable[[], None]]] = [
        (0.6, storm.restart_controller),
        (0.3, lambda: storm.fleet.kill(_any_of(storm, storm.fleet.engines))),
        (0.2, lambda: storm.fleet.kill(_any_of(storm, [a for a in storm.fleet.trainers if a is not ghost]))),
    ]
    for share, happen in storm.rng.sample(around, len(around)):
        if storm.rng.random() < share:
            happen()
    storm.replace(name)
    for role, actor in list(storm.fleet.actors.items()):
        if not actor.is_alive:
            storm.replace(role)
    go_on_when(storm, ghost, storm.rng.choice(["offered", "offered", "committed", "planned"]))
    storm.publish()


def stop_while_writing(storm: Storm, name: str, *, exactly: bool = True) -> Actor:
    """A trainer that was stopped before its first bytes (exactly), or within milliseconds after that."""
    fleet = storm.fleet
    victim = fleet.actors[name]
    publishing = fleet.publish(actions={name: STOP} if exactly else {})
    if exactly:
        fleet.happens(lambda: not victim.is_alive or victim.is_frozen, storm.settings.end_s)
    else:
        before = victim.num_said("writing")
        fleet.happens(lambda: victim.num_said("writing") > before or publishing.is_over, storm.settings.end_s)
        fleet.listen(storm.rng.random() * 0.006)
    fleet.stop(victim)
    fleet.happens(lambda: victim.is_frozen, 5.0)
    return victim


def go_on_when(storm: Storm, ghost: Actor, when: str) -> None:
    """A stopped writer goes on when the fleet is planned anew, or when the next version was verified and handed to
    the engines, or when they serve it; then it has time to write."""
    fleet = storm.fleet
    fleet.wait_planned(5.0)
    if when == "planned":
        _let_write(storm, ghost)
        return
    if when == "offered":
        for engine in fleet.engines:
            engine.ask("hold")
    before = {engine.name: engine.num_said("offered") for engine in fleet.engines}
    publishing = fleet.publish()
    if when == "offered":
        fleet.happens(
            lambda: publishing.is_over or all(e.num_said("offered") > before[e.name] for e in fleet.engines),
            storm.settings.version_s / 2,
        )
    else:
        storm.collect(publishing)
    _let_write(storm, ghost)
    for engine in fleet.engines:
        engine.ask("go_on")
    storm.collect(publishing)


def _let_write(storm: Storm, ghost: Actor) -> None:
    """It goes on, and writes what it was about to, or learns that it must not."""
    before = ghost.num_said("wrote_late"), ghost.num_said("published")
    storm.fleet.resume(ghost)
    storm.fleet.happens(
        lambda: (ghost.num_said("wrote_late"), ghost.num_said("published")) != before or not ghost.is_alive,
        LATE_WRITE_S,
    )


def engine_away(storm: Storm) -> None:
    """An engine rank is dead, or stands still, while another member is replaced. With a quorum the others do not wait
    for it."""
    fleet, engines = storm.fleet, [f"engine {rank}" for rank in range(storm.settings.num_engine_ranks)]
    away, another = storm.rng.sample(engines, 2)
    leave = storm.rng.choice([fleet.kill, fleet.stop])
    leave(fleet.actors[away])
    fleet.wait_lost(away)
    name = storm.rng.choice(["trainer 0", "trainer 1", another])
    fleet.kill(fleet.actors[name])
    fleet.wait_lost(name)
    storm.replace(name)
    fleet.wait_joined(name)
    if not storm.collect(fleet.publish()):
        storm.verdicts.add("hung", fleet.now, f"nothing was served without {away} after {name} was replaced")


ALL = [
    killed,
    two_killed,
    writer_killed,
    controller_restarted,
    stopped,
    engine_replaced,
    engine_stands_still,
    credits_stop,
    network_stalls,
    late_go,
    half_refused,
    stopped_writer,
    stopped_writer,
    stopped_writer,
]
"""What a storm draws from; the stopped writer, which has most to combine, more often."""
WITH_QUORUM = [*(fault for fault in ALL if fault is not half_refused), engine_away, engine_away, engine_away]
"""The same where versions go on without some engines: they are not refused."""
