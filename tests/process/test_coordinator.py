"""The coordinator of a run, asked over real sockets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from weft.rl.run.coordinator import FINAL_TRIES, Coordinator
from weft.rl.run.links import Conversation, Links
from weft.rl.run.messages import Again, Done, Stop, VersionSent
from weft.rl.settings import LoopSettings

WAIT_S = 30.0


@contextmanager
def trainers(coordinator: Coordinator, count: int) -> Iterator[list[Conversation]]:
    links = Links(controller="", coordinator=coordinator.address, store_host="", store_port=0, run_dir="")
    with ExitStack() as stack:
        yield [stack.enter_context(Conversation(links, f"trainer {rank}", WAIT_S)) for rank in range(count)]


def all_done(talks: list[Conversation], reason: str) -> list[Again | Stop]:
    """Every trainer has nothing left to do, and the last version ended like this; the coordinator's answers."""
    talks[0].say(VersionSent(version=5, published_at=0.0, released_at=0.0, committed_at=0.0, reason=reason))
    for rank, talk in enumerate(talks):
        talk.say(Done(rank=rank))
    return [talk.listen() for talk in talks]


def test_the_final_policy_is_sent_again_until_engines_have_it():
    with (
        Coordinator(LoopSettings.of(num_trainers=2, num_engines=2)) as coordinator,
        trainers(coordinator, 2) as talks,
    ):
        assert all_done(talks, "engine 1 has been silent for 5.0 s") == [Again(), Again()]
        assert not coordinator.ended.is_set()
        assert all_done(talks, "") == [Stop(), Stop()]
        assert coordinator.ended.wait(WAIT_S)
        assert coordinator.failure == ""


def test_a_final_policy_no_engine_takes_does_not_hold_the_run_up():
    with Coordinator(LoopSettings.of(num_trainers=1)) as coordinator, trainers(coordinator, 1) as talks:
        answers = [all_done(talks, "no engine is ready")[0] for _ in range(FINAL_TRIES + 1)]
        assert answers == [Again()] * FINAL_TRIES + [Stop()]


def test_trainers_that_are_done_hear_of_a_failure():
    with (
        Coordinator(LoopSettings.of(num_trainers=2)) as coordinator,
        trainers(coordinator, 2) as talks,
    ):
        talks[0].say(Done(rank=0))
        while not coordinator._done:
            assert not coordinator.ended.wait(0.01)
        coordinator.fail("trainer 1 was killed by SIGKILL")
        assert talks[0].listen() == Stop(reason="trainer 1 was killed by SIGKILL")
        assert talks[1].ask(Done(rank=1)) == Stop(reason="trainer 1 was killed by SIGKILL")
