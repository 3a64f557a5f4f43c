"""Trainers that do not fit a live vLLM: refused before a byte moves, every tensor named; the engine goes on serving."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import numpy as np
import pytest
from safetensors.numpy import load_file

import weft
from tests.integrations.fsdp_trainer import WAIT_S, patient
from tests.integrations.tiny_models import save_checkpoint
from tests.integrations.vllm_process import Load, loaded, look
from tests.support.processes import Process
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_checkpoint("moe", 1, tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def controller() -> Iterator[weft.Controller]:
    with weft.Controller(num_trainers=1, num_engine_ranks=1, settings=patient()) as controller:
        yield controller


@pytest.fixture(scope="module")
def engine(live, checkpoint, controller) -> Iterator[Process]:
    with loaded(live, Load(checkpoint=checkpoint, controller=controller.address)) as engine:
        yield engine


def renamed(tensors):
    tensors["model.layers.0.input_norm.weight"] = tensors.pop(NORM)
    return ["missing: " + NORM, "unexpected: model.layers.0.input_norm.weight"]


def without_an_expert(tensors):
    del tensors[EXPERT]
    return ["missing: " + EXPERT]


def of_another_width(tensors):
    """As if the trainer's config had a larger intermediate size for experts."""
    names = [name for name in tensors if ".experts." in name]
    for name in names:
        shape = [96 if size == 64 else size for size in tensors[name].shape]
        tensors[name] = np.zeros(shape, np.float32)
    return [f"{len(names)} tensors", f"shape: {names[0]} is", f"shape: {names[3]} is"]


def of_another_depth(tensors):
    """As if the trainer's config had a layer more."""
    more = {name.replace("layers.1.", "layers.2."): tensors[name] for name in tensors if ".layers.1." in name}
    tensors.update(more)
    return [f"{len(more)} tensors", *(f"unexpected: {name}" for name in sorted(more)[:20])]


@pytest.mark.parametrize("spoil", [renamed, without_an_expert, of_another_width, of_another_depth])
def test_the_wrong_tensors_are_named_and_the_engine_goes_on(engine, controller, checkpoint, spoil):
    before = look(engine)
    tensors = dict(load_file(next(checkpoint.glob("*.safetensors"))))
    expected = spoil(tensors)
    weights = weft.Weights.from_arrays(tensors)
    with (
        pytest.raises(weft.WeftError) as caught,
        weft.Sender(controller.address, rank=0, weights=weights, timeout_s=WAIT_S) as sender,
    ):
        sender.publish(version=1).wait_committed(WAIT_S)
    assert controller.statistics().num_committed == 0
    wait_until(lambda: expected[0] in look(engine).status[0]["error"], WAIT_S, "the engine hears of it")
    after = look(engine)
    for problem in expected:  # of many the first are named, and the others counted
        assert problem in str(caught.value)
        assert problem in after.status[0]["error"]
    assert after.tokens == before.tokens
    assert after.checksums == before.checksums


@pytest.mark.parametrize("dtype", [np.float64, np.int32])
def test_a_wrong_precision_is_refused_by_name(checkpoint, dtype):
    tensors = dict(load_file(next(checkpoint.glob("*.safetensors"))))
    tensors[NORM] = tensors[NORM].astype(dtype)
    with pytest.raises(weft.WeftError, match=NORM):
        weft.Weights.from_arrays(tensors)


def test_a_right_trainer_afterwards_is_served(engine, controller, checkpoint):
    tensors = {name: value * 0.5 for name, value in load_file(next(checkpoint.glob("*.safetensors"))).items()}
    before = look(engine)
    weights = weft.Weights.from_arrays(tensors)
    with weft.Sender(controller.address, rank=0, weights=weights, timeout_s=WAIT_S) as sender:
        sender.publish(version=1).wait_committed(WAIT_S)
    after = look(engine)
    assert after.checksums != before.checksums
    assert set(after.versions) == {"1"}
    assert not after.status[0]["error"]
