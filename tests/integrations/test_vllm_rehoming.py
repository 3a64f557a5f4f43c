"""Re-homing on a live vLLM: its parameters move into shared memory, a trainer process writes there, vLLM speaks anew.

    test process       the controller
    live engine        vLLM and the receiver in one process, serving checkpoint A at first
    trainer            the sender; publishes A or B under the names and in the shapes of vLLM's own parameters
    fresh engines      one vLLM process for each checkpoint, never written to: what the live one is compared with

Needs vLLM for CPU. Everything is float32: the aarch64 build's bfloat16 kernels stop with an illegal instruction on CPUs
without the bf16 extension. Linears keep their plain weights here (`_keep_plain_linears`): by default vLLM computes on
the CPU with packed copies that nobody can write to from outside.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weft
from tests.support.processes import Process

# Looked for, not imported: only the engine processes shall pay for it and get its side effects.
pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

START_S = 120.0
"""For a vLLM process to start and answer; a quiet machine needs a tenth."""
WAIT_S = 30.0
"""For anything weft does, inside a process."""
ANSWER_S = 3 * WAIT_S
"""For a process to answer: longer than it waits itself, so that it can say what it waited for."""
PROMPTS = ([1, 2, 3, 4], [5, 6, 7], [9] * 7, list(range(200)))
"""The last is longer than a block of vLLM's prefix cache (128 tokens on CPU): stale keys and values would show."""
NUM_TOKENS = 16
SHAPE = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.5,  # large, so that the tokens of random weights vary
}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine core and model live in the process that makes them
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; otherwise a fraction of all memory
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What an engine holds and says at one moment."""

    tokens: list[list[int]]
    values: dict[str, np.ndarray]
    addresses: dict[str, int]
    """By every name, tied ones too."""
    mappings: frozenset[tuple[Any, ...]]
    """Start and, where it has one, name of each piece of mapped memory the parameters lie in."""
    replaced: list[str]
    """Parameters that are not the objects they were when the engine had loaded."""


# In the engine processes: vLLM and torch are imported here only.


class Vllm:
    """A vLLM engine in this process."""

    def __init__(self, checkpoint: Path) -> None:
        os.environ.update(ENVIRONMENT)
        import vllm  # noqa: PLC0415

        _keep_plain_linears()
        self._llm = vllm.LLM(
            str(checkpoint), skip_tokenizer_init=True, enforce_eager=True, max_model_len=256, dtype="float32"
        )
        self._greedy = vllm.SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
        (self.model,) = self._llm.apply_model(lambda model: model)
        self._loaded = self._parameters()
        assert all(parameter.numel() for parameter in self._loaded.values()), "vLLM packed its linears after all"

    def _parameters(self) -> dict[str, Any]:
        return dict(self.model.named_parameters(remove_duplicate=False))

    def forget(self) -> None:
        """Drop keys and values that older weights have computed."""
        assert self._llm.reset_prefix_cache()

    def look(self) -> Look:
        parameters = self._parameters()
        addresses = {name: parameter.data_ptr() for name, parameter in parameters.items()}
        return Look(
            tokens=self._generate(),
            values={name: value.detach().numpy().copy() for name, value in self.model.named_parameters()},
            addresses=addresses,
            mappings=_mappings(set(addresses.values())),
            replaced=[name for name, parameter in self._loaded.items() if parameters.get(name) is not parameter],
        )

    def _generate(self) -> list[list[int]]:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        answers = self._llm.generate(prompts, self._greedy, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]


def _keep_plain_linears() -> None:
    """Let linears compute with their parameters; vLLM would pack them into copies and leave empty parameters behind."""
    from torch.nn.functional import linear  # noqa: PLC0415
    from vllm.model_executor.layers import utils  # noqa: PLC0415

    def dispatch(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = linear

    utils.dispatch_cpu_unquantized_gemm = dispatch


def _mappings(addresses: set[int]) -> frozenset[tuple[Any, ...]]:
    found = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        extent, _permissions, _offset, _device, _inode, *name = line.split(maxsplit=5)
        start, end = (int(border, 16) for border in extent.split("-"))
        if any(start <= address < end for address in addresses):
            found.add((start, *name))
    return frozenset(found)


def _make_checkpoint(path: Path, checkpoint: str, *, tied: bool) -> None:
    """Random weights that derive from the checkpoint's name, so that engine processes need not wait for each other."""
    import torch  # noqa: PLC0415
    from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: PLC0415

    torch.manual_seed(ord(checkpoint))
    Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=tied)).save_pretrained(path)


def _fresh_engine(pipe: Any, path: Path, checkpoint: str, tied: bool) -> None:
    """Loads a checkpoint and says what it got."""
    _make_checkpoint(path, checkpoint, tied=tied)
    pipe.send(Vllm(path).look())


def _live_engine(pipe: Any, path: Path, tied: bool, address: str) -> None:
    """Serves checkpoint A, and takes in whatever is published."""
    _make_checkpoint(path, "A", tied=tied)
    engine = Vllm(path)
    pipe.send(engine.look())
    with weft.Receiver(address, rank=0, weights=weft.weights_of(engine.model)) as receiver:
        while True:
            update = receiver.poll()
            if update is not None and update.commit(WAIT_S):
                engine.forget()
            if pipe.poll(0.001):
                if pipe.recv() is None:
                    return
                pipe.send((receiver.version, engine.look()))


def _trainer(pipe: Any, address: str, checkpoints: dict[str, dict[str, np.ndarray]]) -> None:
    arrays = {name: np.zeros_like(value) for name, value in checkpoints["A"].items()}
    weights = weft.Weights.from_arrays(arrays)
    with weft.Sender(address, rank=0, weights=weights, timeout_s=WAIT_S) as sender:
        while (request := _next_request(pipe)) is not None:
            version, checkpoint = request
            for name, value in checkpoints[checkpoint].items():
                arrays[name][...] = value
            publication = sender.publish(version=version)
            publication.wait_released(WAIT_S)
            publication.wait_committed(WAIT_S)
            pipe.send("committed")


def _next_request(pipe: Any) -> Any:
    assert pipe.poll(START_S), "nobody asks for anything"
    return pipe.recv()


# In the test process


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A live engine that serves A, a trainer that can publish A and B, and what fresh engines make of both."""

    controller: weft.Controller
    trainer: Process
    engine: Process
    loaded: Look
    """The live engine, before weft had anything to do with it."""
    fresh: dict[str, Look]

    def look(self) -> tuple[int | None, Look]:
        self.engine.ask("look")
        return self.engine.answer(ANSWER_S)

    def publish(self, version: int, checkpoint: str) -> None:
        self.trainer.ask((version, checkpoint))
        assert self.trainer.answer(ANSWER_S) == "committed"


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def scene(request, tmp_path) -> Iterator[Scene]:
    tied = request.param
    settings = weft.TransferSettings(mode="in_place", silence_s=20.0, version_s=WAIT_S)
    with ExitStack() as stack:
        controller = stack.enter_context(weft.Controller(num_trainers=1, num_engine_ranks=1, settings=settings))
        engine = Process.started(stack, _live_engine, tmp_path / "live", tied, controller.address)
        engines = {name: Process.started(stack, _fresh_engine, tmp_path / name, name, tied) for name in "AB"}
        fresh = {name: process.answer(START_S) for name, process in engines.items()}
        values = {name: look.values for name, look in fresh.items()}
        trainer = Process.started(stack, _trainer, controller.address, values)
        loaded = engine.answer(START_S)
        assert controller.wait_planned(WAIT_S)
        yield Scene(controller=controller, trainer=trainer, engine=engine, loaded=loaded, fresh=fresh)


def assert_same(look: Look, expected: Look) -> None:
    """The same tokens, and the same parameters bit for bit."""
    assert look.tokens == expected.tokens
    assert look.values.keys() == expected.values.keys()
    differing = [name for name, value in look.values.items() if value.tobytes() != expected.values[name].tobytes()]
    assert not differing


def assert_rehomed(look: Look, loaded: Look) -> None:
    """The same parameter objects, all of them elsewhere: in one piece of weft's shared memory."""
    assert not look.replaced
    assert look.addresses.keys() == loaded.addresses.keys()
    assert not set(look.addresses.values()) & set(loaded.addresses.values())
    ((_, memory),) = look.mappings
    assert memory.startswith("/memfd:weft")


def test_a_trainer_process_writes_new_weights_into_a_live_vllm(scene):
    fresh, loaded = scene.fresh, scene.loaded
    assert_same(loaded, fresh["A"])
    assert all(a != b for a, b in zip(fresh["A"].tokens, fresh["B"].tokens, strict=True))
    assert not any("weft" in str(mapping) for mapping in loaded.mappings)

    version, moved = scene.look()  # re-homed, and nothing was written yet
    assert version is None
    assert_same(moved, fresh["A"])
    assert_rehomed(moved, loaded)

    for version, checkpoint in enumerate("BABAB", start=1):
        scene.publish(version, checkpoint)
        visible, look = scene.look()
        assert visible == version
        assert_same(look, fresh[checkpoint])
        assert not look.replaced
        assert look.addresses == moved.addresses

    statistics = scene.controller.statistics()
    assert [link.split()[0] for link in statistics.links] == ["shm"]
    assert statistics.num_committed == 5
    assert statistics.bytes_per_version == sum(value.nbytes for value in loaded.values.values())
