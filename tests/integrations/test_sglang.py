"""Versions into live SGLang servers: they say what fresh servers with the same checkpoints say.

Live servers load the checkpoint of seed 1; odd versions have the weights of seed 2, even ones those of seed 1.
"""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

import weft
from tests.integrations.engine_server import Answer
from tests.integrations.fsdp_trainer import WAIT_S, Trainer, patient
from tests.integrations.sglang_server import SglangServer, serving
from tests.integrations.streams import Stream, check_spans, spans_by, wait_for_answers
from tests.integrations.tiny_models import PROMPTS, save_checkpoint
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
]

NUM_STREAMS = 3
NUM_TOKENS = 60
NUM_VERSIONS = 12


def seed_of(version: str) -> int:
    return 1 if version == "default" else 1 + int(version) % 2


def test_versions_arrive_while_requests_stream(trainer, tmp_path):
    """Tied embeddings; running requests are computed again with new weights, so that every span can be checked."""
    checkpoints = {seed: save_checkpoint("tied", seed, tmp_path) for seed in (1, 2)}
    with (
        weft.Controller(num_trainers=2, num_engine_ranks=1, settings=patient()) as controller,
        serving(checkpoints[1], tmp_path / "live.log", controller=controller.address, cache="recompute") as server,
        trainer.training("tied", controller.address),
    ):
        streams = [Stream(server.generate, PROMPTS[i:] + PROMPTS[:i], NUM_TOKENS) for i in range(NUM_STREAMS)]
        for stream in streams:
            stream.start()
        for version in range(1, NUM_VERSIONS + 1):
            trainer.publish(version, seed_of(str(version)))
        answers = [answer for stream in streams for answer in stream.stop()]
        wait_for_version(server, NUM_VERSIONS)
        paused = said_across_a_pause(server, trainer)
        awake = said_after_sleep(server, trainer, controller)
    check_spans(answers, NUM_TOKENS)
    changing = [answer for answer in answers if len(answer.spans) > 1]
    assert changing, "no answer saw the weights change"
    steady = [answer for answer in answers if len(answer.spans) == 1]
    spans = spans_by([paused, awake, *changing[:12], *steady[-5:]], seed_of)

    def said_by_fresh(seed: int) -> list[list[int]]:
        with serving(checkpoints[seed], tmp_path / f"fresh-{seed}.log") as fresh:
            return [fresh.generate(before, len(said)).tokens for before, said in spans[seed]]

    with ThreadPoolExecutor() as starting:
        for seed, found in zip(spans, starting.map(said_by_fresh, spans), strict=True):
            assert found == [said for _, said in spans[seed]]


def said_across_a_pause(server: SglangServer, trainer: Trainer) -> Answer:
    """SGLang's own pause keeps what runs; a version is committed meanwhile, and the answer goes on with it."""
    with ThreadPoolExecutor(1) as asking:
        answering = asking.submit(server.generate, [3, 1, 4], 300)
        server.post("pause_generation", {"mode": "in_place"})
        trainer.publish(NUM_VERSIONS + 1, seed_of(str(NUM_VERSIONS + 1)))
        wait_for_version(server, NUM_VERSIONS + 1)
        assert not answering.done()
        server.post("continue_generation")
        answer = answering.result(WAIT_S)
    assert answer.spans[-1][0] == str(NUM_VERSIONS + 1)
    check_spans([answer], 300)
    return answer


def said_after_sleep(server: SglangServer, trainer: Trainer, controller: weft.Controller) -> Answer:
    """Users take the memory of the weights away and give it back: versions are refused meanwhile. On CPUs SGLang keeps
    the weights."""
    version = NUM_VERSIONS + 4
    before = server.generate([2, 7, 1], 20)
    server.post("flush_cache?timeout=60")  # when the last request has ended; SGLang ends if it is told to sleep earlier
    server.post("release_memory_occupation", {"tags": ["weights"]})
    assert controller.statistics().lost["engine 0"] == "left: the engine is asleep"
    refusals = trainer.try_to_publish(version - 1, seed_of(str(version - 1)))
    assert refusals
    assert all("engine 0 left: the engine is asleep" in refusal.message for refusal in refusals)
    server.post("resume_memory_occupation", {"tags": ["weights"]})
    wait_until(lambda: "engine 0" in controller.statistics().members, WAIT_S, "the engine has joined again")
    assert controller.wait_planned(WAIT_S)
    trainer.publish(version, seed_of(str(version)))
    wait_for_version(server, version)
    answer = server.generate([2, 7, 1], 20)
    assert answer.spans == [(str(version), 0, 20)]
    assert answer.tokens != before.tokens
    return answer


def test_experts_on_two_ranks(trainer, tmp_path):
    """Experts in parameters of three dimensions, cut over two ranks, written in place while requests run.

    Nobody finds keys and values of older weights; running requests keep theirs. Weights that are torn are not served.
    """
    checkpoints = {seed: save_checkpoint("moe", seed, tmp_path) for seed in (1, 2)}
    log = tmp_path / "live.log"

    def said_by_fresh() -> list[list[int]]:
        with serving(checkpoints[2], tmp_path / "fresh.log", num_ranks=2) as fresh:
            return said_by(fresh)

    beside = ThreadPoolExecutor(1)
    fresh = beside.submit(said_by_fresh)
    with (
        beside,
        weft.Controller(
            num_trainers=2, num_engine_ranks=2, ranks_per_engine=2, settings=patient(mode="in_place", silence_s=20.0)
        ) as controller,
        serving(checkpoints[1], log, num_ranks=2, controller=controller.address) as server,
    ):
        expected = {2: fresh.result(), 1: said_by(server)}
        assert all(a != b for a, b in zip(expected[1], expected[2], strict=True))
        streams = [Stream(server.generate, PROMPTS[i:] + PROMPTS[:i], 16) for i in range(NUM_STREAMS)]
        with ExitStack() as stack:
            mortal = Trainer(stack)
            with mortal.training("moe", controller.address):
                for stream in streams:
                    stream.start()
                for version in range(1, 7):
                    mortal.publish(version, seed_of(str(version)))
                    wait_for_answers(streams, 2, WAIT_S)
                answers = [answer for stream in streams for answer in stream.stop()]
                assert said_by(server) == expected[1]
                wait_for_version(server, 6)
                mortal.die_writing(7, 2)
        check_steady(answers, expected)
        wait_until(lambda: log.read_text().count("weights are torn") == 2, WAIT_S, "both ranks know that they are torn")
        with ThreadPoolExecutor(1) as asking, trainer.training("moe", controller.address):
            answering = asking.submit(server.generate, list(PROMPTS[0]), 16)
            server.post("continue_generation")
            with pytest.raises(TimeoutError):
                answering.result(3.0)
            server.post("pause_generation", {"mode": "in_place"})  # what users want takes effect when it is whole again
            trainer.publish(9, 2)
            wait_for_version(server, 9)
            with pytest.raises(TimeoutError):
                answering.result(1.0)
            server.post("continue_generation")
            answer = answering.result(WAIT_S)
            assert (answer.tokens, answer.spans) == (expected[2][0], [("9", 0, 16)])
            assert said_by(server) == expected[2]


def wait_for_version(server: SglangServer, version: int) -> None:
    """Trainers may know of a commit before SGLang's front end does."""
    wait_until(lambda: server.version == str(version), WAIT_S, f"the front end knows of version {version}")


def said_by(server: SglangServer) -> list[list[int]]:
    return [server.generate(list(prompt), 16).tokens for prompt in PROMPTS]


def check_steady(answers: list[Answer], expected: dict[int, list[list[int]]]) -> None:
    """Answers that began after a version, and ended before the next one, are those of a fresh engine."""
    check_spans(answers, 16)
    steady = [answer for answer in answers if len(answer.spans) == 1]
    assert len({answer.spans[0][0] for answer in steady}) > 2, "the streams met hardly any version"
    for answer in steady:
        assert answer.tokens == expected[seed_of(answer.spans[0][0])][PROMPTS.index(answer.prompt)]
