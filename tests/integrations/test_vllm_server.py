"""A vLLM server that answers requests while versions arrive, and while trainers die."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

import weft
from tests.integrations.engine_server import Answer
from tests.integrations.fsdp_trainer import WAIT_S, Trainer, patient
from tests.integrations.streams import Stream, check_spans, spans_by, wait_for_answers
from tests.integrations.tiny_models import PROMPTS, make_model, save_checkpoint
from tests.integrations.vllm_process import LOAD_S, Continue, Load, loaded
from tests.integrations.vllm_server import VllmServer, serving
from tests.support.processes import Process
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

KIND = "qwen3"
NUM_VERSIONS = 20
NUM_STREAMS = 3
NUM_TOKENS = 40
MEMORY = ("--gpu-memory-utilization", "0.15")
"""What a server is given; without a size of its own, its KV cache gets what is left of it."""


@pytest.fixture(scope="module")
def controller() -> Iterator[weft.Controller]:
    with weft.Controller(num_trainers=2, num_engine_ranks=1, settings=patient()) as controller:
        yield controller


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def server(controller, folder) -> Iterator[VllmServer]:
    checkpoint, ours = save_checkpoint(KIND, 1, folder), {"controller": controller.address, "cache": "recompute"}
    with serving(checkpoint, folder / "server.log", *MEMORY, kv_cache_gib="", **ours) as server:
        yield server


def seed_of(version: str) -> int:
    """Which weights a version has: the server's own checkpoint, then those of seeds 2 and 3 in turn."""
    return 1 if version == "default" else 2 + int(version) % 2


def number_of(version: str) -> int:
    return 0 if version == "default" else int(version)


def check_explained(answers: list[Answer], fresh: Process, folder) -> None:
    """Every span of tokens is what a fresh engine with that version's weights says after what was there before."""
    for seed, spans in spans_by(answers, seed_of).items():
        with loaded(fresh, Load(checkpoint=save_checkpoint(KIND, seed, folder))):
            fresh.ask(Continue([before for before, _ in spans], [len(said) for _, said in spans]))
            assert fresh.answer(LOAD_S) == [said for _, said in spans]


def test_versions_arrive_while_requests_stream(controller, server, trainer, fresh, folder):
    streams = [Stream(server.generate, PROMPTS[i:] + PROMPTS[:i], NUM_TOKENS) for i in range(NUM_STREAMS)]
    with trainer.training(KIND, controller.address):
        for stream in streams:
            stream.start()
        for version in range(1, NUM_VERSIONS + 1):
            trainer.publish(version, seed_of(str(version)))
        answers = [answer for stream in streams for answer in stream.stop()]
    assert server.version == str(NUM_VERSIONS)
    check_spans(answers, NUM_TOKENS)
    met = {version for answer in answers for version, _, _ in answer.spans}
    assert len(met) > 3, "the streams met hardly any version"
    changing = [answer for answer in answers if len(answer.spans) > 1]
    assert changing, "no answer saw the weights change"
    steady = [answer for answer in answers if len(answer.spans) == 1]
    check_explained(changing[:15] + steady[-5:], fresh, folder)
    (status,) = server.status()
    assert status["pause_s"] > 0


def test_a_trainer_that_dies_half_way_leaves_the_version_before(controller, server, trainer, fresh, folder):
    before = number_of(server.version)
    with ExitStack() as stack, ThreadPoolExecutor(1) as asking:
        mortal = Trainer(stack)
        with mortal.training(KIND, controller.address):
            said = server.generate(list(PROMPTS[3]), 16)
            mortal.publish(before + 2, seed_of(str(before + 2)))
            assert server.version == str(before + 2)
            during = asking.submit(server.generate, list(PROMPTS[3]), 16)
            mortal.die_writing(before + 3, seed_of(str(before + 3)))  # of other weights
            assert during.result(WAIT_S).tokens == said.tokens
    assert server.version == str(before + 2)
    assert server.generate(list(PROMPTS[3]), 16).tokens == said.tokens
    with trainer.training(KIND, controller.address):  # another trainer goes on
        trainer.publish(before + 7, seed_of(str(before + 7)))
    assert server.version == str(before + 7)
    answer = server.generate(list(PROMPTS[3]), 16)
    assert answer.tokens != said.tokens
    check_explained([answer], fresh, folder)


def test_a_paused_engine_takes_versions_and_goes_on(controller, server, trainer, fresh, folder):
    """vLLM's own pause keeps what runs; a version is committed meanwhile, and the answer goes on with it."""
    before = number_of(server.version)
    after = before + 1  # of other weights
    with ThreadPoolExecutor(1) as asking, trainer.training(KIND, controller.address):
        answering = asking.submit(server.generate, [3, 1, 4], 200)
        server.post("pause?mode=keep&clear_cache=false")
        trainer.publish(after, seed_of(str(after)))
        assert server.version == str(after)
        assert not answering.done()
        server.post("resume")
        answer = answering.result(WAIT_S)
    assert [version for version, _, _ in answer.spans][-1] == str(after)
    assert len(answer.tokens) == 200
    check_explained([answer], fresh, folder)


def test_a_sleeping_engine_is_not_written_to_and_joins_again(controller, server, trainer, fresh, folder):
    """Versions are refused by name until it is awake. One whose weights were discarded answers nothing before the
    next."""
    before = number_of(server.version)

    def sleep(level: int) -> None:
        server.post(f"sleep?level={level}")
        assert controller.statistics().lost["engine 0"] == "left: the engine is asleep"
        assert not server.status()[0]["error"]

    def wake_up() -> None:
        server.post("wake_up")
        wait_until(lambda: "engine 0" in controller.statistics().members, WAIT_S, "the engine has joined again")
        assert controller.wait_planned(WAIT_S)

    with ThreadPoolExecutor(1) as asking, trainer.training(KIND, controller.address):
        sleep(level=1)
        refusals = trainer.try_to_publish(before + 1, seed_of(str(before + 1)))
        assert len(refusals) == 2
        assert all("engine 0 left: the engine is asleep" in refusal.message for refusal in refusals)
        wake_up()
        trainer.publish(before + 2, seed_of(str(before + 2)))
        kept = server.generate(list(PROMPTS[3]), 16)
        sleep(level=2)
        wake_up()
        answering = asking.submit(server.generate, list(PROMPTS[3]), 16)
        with pytest.raises(TimeoutError):
            answering.result(3.0)
        trainer.publish(before + 3, seed_of(str(before + 3)))
        renewed = answering.result(WAIT_S)
    assert [kept.spans, renewed.spans] == [[(str(before + 2), 0, 16)], [(str(before + 3), 0, 16)]]
    check_explained([kept, renewed], fresh, folder)


def test_memory_for_versions_is_reserved_before_the_kv_cache_takes_the_rest(server, trainer, folder):
    """The KV cache gets less by what was reserved, and a version in mode shadow lands there."""
    checkpoint = save_checkpoint(KIND, 1, folder)
    with (
        weft.Controller(num_trainers=2, num_engine_ranks=1, settings=patient()) as controller,
        serving(
            checkpoint, folder / "reserve.log", *MEMORY, kv_cache_gib="", controller=controller.address, reserve="700MB"
        ) as reserving,
        trainer.training(KIND, controller.address),
    ):
        trainer.publish(1, 2)
        assert reserving.version == "1"
    assert kept_from_cache_gib(reserving) - kept_from_cache_gib(server) == pytest.approx(700e6 / 2**30, rel=0.25)


def kept_from_cache_gib(server: VllmServer) -> float:
    """How much of what a server was given its KV cache did not get, as its log says; of memory that comes and goes."""
    (found,) = set(re.findall(r"Auto set \(([\d.]+)/.* with ([\d.]+) GiB requested memory", server.log.read_text()))
    cache, given = (float(number) for number in found)
    return given - cache


def vllm_client(pipe: Any, url: str, seeds: tuple[int, ...]) -> None:
    """A trainer that speaks vLLM's own protocol."""
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory  # noqa: PLC0415
    from vllm.distributed.weight_transfer.base import ModuleSource  # noqa: PLC0415
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient  # noqa: PLC0415

    from tests.integrations.fsdp_trainer import fill, patient  # noqa: PLC0415
    from weft.integrations.vllm import register  # noqa: PLC0415
    from weft.integrations.vllm.trainer import WeftTrainerInit  # noqa: PLC0415

    register()
    model = make_model(KIND, 1)
    engine = WeightTransferTrainerFactory.trainer_init(
        WeftTrainerInit(rank=0, settings=patient()), client=HTTPVLLMWeightSyncClient(url), source=ModuleSource(model)
    )
    for seed in seeds:
        fill(model, make_model(KIND, seed))
        engine.send_weights()
        pipe.send(seed)
        assert pipe.recv() == "looked"
    engine.shutdown()


def test_vllms_own_protocol(server, fresh, folder):
    with ExitStack() as stack:
        trainer = Process.started(stack, vllm_client, server.url, (3, 2))
        for version, seed in ((1, 3), (2, 2)):
            assert trainer.answer(LOAD_S) == seed
            answer = server.generate(list(PROMPTS[3]), 16)
            assert answer.spans == [(str(version), 0, 16)]
            check_explained([answer], fresh, folder)
            trainer.ask("looked")


def test_torn_weights_are_not_served(server, trainer, fresh, folder):
    """In place: the writer of one half dies. The engine stands still, whatever it is told, until a whole version."""
    settings = patient(mode="in_place", silence_s=20.0)  # it is how the dead writer is noticed
    with (
        weft.Controller(num_trainers=2, num_engine_ranks=1, settings=settings) as controller,
        ThreadPoolExecutor(1) as asking,
    ):
        server.post("init_weight_transfer_engine", {"init_info": {"controller": controller.address}})
        with ExitStack() as stack:
            mortal = Trainer(stack)
            with mortal.training(KIND, controller.address):
                mortal.publish(1, 2)
                assert server.generate(list(PROMPTS[3]), 16).spans == [("1", 0, 16)]
                mortal.die_writing(2, 3)
        wait_until(lambda: server.status()[0]["is_poisoned"], WAIT_S, "the engine is torn")
        assert "version 2 failed on engine 0 after writing had begun" in server.status()[0]["error"]
        answering = asking.submit(server.generate, list(PROMPTS[3]), 16)
        server.post("resume")
        with pytest.raises(TimeoutError):
            answering.result(3.0)
        with trainer.training(KIND, controller.address):
            trainer.publish(3, 3)
            answer = answering.result(WAIT_S)
    assert answer.spans == [("3", 0, 16)]
    check_explained([answer], fresh, folder)
    assert not server.status()[0]["error"]


def test_nobody_finds_keys_and_values_of_older_weights(trainer, fresh, folder):
    """Running requests keep theirs (the default); those that wait or come later begin with the weights there are.

    In two engine cores that share the requests (data parallel).
    """
    cores = ("--data-parallel-size", "2", "--max-num-seqs", "1")  # so that requests wait, too
    with (
        weft.Controller(num_trainers=2, num_engine_ranks=2, settings=patient()) as controller,
        serving(save_checkpoint(KIND, 1, folder), folder / "keep.log", *cores, controller=controller.address) as server,
        trainer.training(KIND, controller.address),
    ):
        streams = [Stream(server.generate, [PROMPTS[3]], 8) for _ in range(NUM_STREAMS + 1)]
        for stream in streams:
            stream.start()
        for version in range(1, 7):
            trainer.publish(version, seed_of(str(version)))
            wait_for_answers(streams, 2, WAIT_S)
        answers = [answer for stream in streams for answer in stream.stop()]
    steady = [answer for answer in answers if len(answer.spans) == 1]
    assert len({answer.spans[0][0] for answer in steady}) > 3, "the streams met hardly any version"
    check_explained(steady, fresh, folder)
