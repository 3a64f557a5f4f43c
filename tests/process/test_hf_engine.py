"""`transformers` as an engine: in this process, and behind `weft serve`, with a trainer process that publishes."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

import weft
from tests.integrations.engine_server import Answer, Server, running
from tests.integrations.fsdp_trainer import Trainer, free_port
from tests.integrations.streams import Stream, check_spans, spans_by
from tests.integrations.tiny_models import make_model, save_checkpoint
from tests.support.waiting import wait_until
from weft.integrations.hf_engine import HfEngine

PROMPTS = ([1, 2, 3, 4], [5, 6, 7], [9] * 20)
NUM_TOKENS = 24
KIND = "moe"


@pytest.fixture(scope="module")
def trainer() -> Iterator[Trainer]:
    with ExitStack() as stack:
        yield Trainer(stack)


def seed_of(version: str) -> int:
    return 1 if version == "None" else 1 + int(version) % 2


def tokens_of(seed: int, prompt: list[int], count: int) -> list[int]:
    """What a model says that nobody writes to."""
    model: Any = make_model(KIND, seed)
    tokens = torch.tensor([prompt])
    found = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, do_sample=False)
    return found[0, len(prompt) :].tolist()


def test_a_model_in_this_process(trainer):
    settings = weft.TransferSettings(silence_s=20.0)
    with (
        weft.Controller(num_trainers=2, num_engine_ranks=1, settings=settings) as controller,
        trainer.training(KIND, controller.address),
        HfEngine(make_model(KIND, 1), controller.address) as engine,
    ):
        assert engine.generate(PROMPTS[2], max_new_tokens=8, do_sample=False).spans[0].version is None
        for version in (1, 2, 3):
            trainer.ask_to_publish(version, seed_of(str(version)))
            wait_until(lambda: engine.attend() == version, 60.0, f"version {version} is served")  # noqa: B023
            assert not trainer.refusals()
            answer = engine.generate(PROMPTS[2], max_new_tokens=8, do_sample=False)
            assert answer.tokens == tokens_of(seed_of(str(version)), PROMPTS[2], 8)
            assert [(span.version, span.start, span.end) for span in answer.spans] == [(version, 0, 8)]
        with pytest.raises(weft.WeftError, match="exceed the model's limit"):
            engine.generate([1], max_new_tokens=100_000)


def test_an_engine_goes_on_after_a_trainer_that_does_not_fit(trainer):
    settings = weft.TransferSettings(silence_s=20.0)
    with (
        weft.Controller(num_trainers=2, num_engine_ranks=1, settings=settings) as controller,
        HfEngine(make_model(KIND, 1), controller.address) as engine,
    ):
        with trainer.training("qwen3", controller.address):
            assert all("do not agree" in refusal.message for refusal in trainer.try_to_publish(1, 2))
        answer = engine.generate(PROMPTS[2], max_new_tokens=8, do_sample=False)
        assert answer.tokens == tokens_of(1, PROMPTS[2], 8)
        assert "do not agree" in str(engine.error)
        with trainer.training(KIND, controller.address):
            trainer.ask_to_publish(2, 2)
            wait_until(lambda: engine.attend() == 2, 60.0, "version 2 is served")
            assert not trainer.refusals()
        assert engine.error is None


class HfServer(Server):
    def generate(self, prompt: list[int], num_tokens: int) -> Answer:
        said = self.post("generate", {"input_ids": prompt, "max_new_tokens": num_tokens})
        spans = [(str(span["version"]), span["start"], span["end"]) for span in said["weight_versions"]]
        return Answer(prompt, said["output_ids"], spans)


@pytest.fixture
def scene(tmp_path) -> Iterator[tuple[weft.Controller, HfServer]]:
    checkpoint = save_checkpoint(KIND, 1, tmp_path)
    server = HfServer(f"http://127.0.0.1:{free_port()}", tmp_path / "server.log")
    settings = weft.TransferSettings(silence_s=20.0)
    with weft.Controller(num_trainers=2, num_engine_ranks=1, settings=settings) as controller:
        command = [
            *(sys.executable, "-m", "weft", "serve", str(checkpoint), "--controller", controller.address),
            *("--port", server.url.rpartition(":")[2]),
        ]
        with running(command, {}, server):
            yield controller, server


def test_a_server_goes_on_while_versions_arrive(scene, trainer):
    controller, server = scene
    streams = [Stream(server.generate, [prompt], NUM_TOKENS) for prompt in PROMPTS[:2]]
    with trainer.training(KIND, controller.address):
        for stream in streams:
            stream.start()
        for version in range(1, 9):
            trainer.publish(version, seed_of(str(version)))
        answers = [answer for stream in streams for answer in stream.stop()]
    assert server.get("version") == {"version": 8, "error": None}
    check_spans(answers, NUM_TOKENS)
    assert len({version for answer in answers for version, _, _ in answer.spans}) > 2
    firsts = [Answer(answer.prompt, answer.tokens, answer.spans[:1]) for answer in answers]  # later ones keep old keys
    for seed, spans in spans_by(firsts[:6] + firsts[-2:], seed_of).items():
        for before, said in spans:
            assert tokens_of(seed, before, len(said)) == said


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"nonsense", "Expecting value"),
        (b"[]", "not a JSON object"),
        (b'{"input_ids": [1], "colour": 3}', "unknown fields: colour"),
        (b'{"input_ids": "abc"}', "input_ids must be"),
        (b'{"input_ids": [-1]}', "input_ids must be"),
        (b'{"input_ids": [1], "max_new_tokens": 0}', "max_new_tokens must be"),
        (b'{"input_ids": [1], "temperature": -1}', "temperature must be"),
    ],
)
def test_bad_requests_are_told_what_is_wrong(body, expected):
    from weft.integrations.hf_server import _parsed  # noqa: PLC0415

    with pytest.raises(ValueError, match=expected):
        _parsed(body)


def test_a_server_answers_bad_requests_and_goes_on(scene):
    _, server = scene
    with pytest.raises(urllib.error.HTTPError) as caught:
        server.post("generate", {"input_ids": [1], "max_new_tokens": 100_000})
    assert "exceed the model's limit" in json.loads(caught.value.read())["error"]
    assert len(server.generate([1, 2], 4).tokens) == 4


def test_serve_says_what_is_missing(tmp_path):
    command = [sys.executable, "-m", "weft", "serve", str(tmp_path), "--controller", "tcp://127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "has no config.json" in " ".join(done.stderr.split())
    assert "hint:" in done.stderr
