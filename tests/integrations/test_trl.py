"""A real TRL trainer feeds a real vLLM: after training it is what a fresh engine with the trained weights is."""

from __future__ import annotations

import importlib.util
from contextlib import ExitStack

import pytest

from tests.integrations.fsdp_trainer import free_port
from tests.integrations.trl_training import save_with_tokenizer, train
from tests.integrations.vllm_process import Load, run_engines
from tests.support.processes import Process

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(
        importlib.util.find_spec("trl") is None or importlib.util.find_spec("vllm") is None,
        reason="TRL or vLLM is not installed",
    ),
]

LOAD_S = 240.0
NUM_STEPS = 3


def test_training_steps_reach_the_engine(tmp_path):
    address = f"tcp://127.0.0.1:{free_port()}"
    model, trained = save_with_tokenizer(tmp_path / "model"), tmp_path / "trained"
    with ExitStack() as stack:
        engine = Process.started(stack, run_engines, daemon=False)
        engine.ask(Load(checkpoint=model, controller=address))
        assert engine.answer(LOAD_S) == "loaded"
        engine.ask("look")
        before = engine.answer(LOAD_S)
        trainer = Process.started(stack, train, model, trained, address, NUM_STEPS, daemon=False)
        assert trainer.answer(LOAD_S) == NUM_STEPS + 1  # the weights it began with, and one version for every step
        engine.ask("look")
        after = engine.answer(LOAD_S)
        engine.ask("unload")
        engine.answer(LOAD_S)
        engine.ask(Load(checkpoint=trained))
        assert engine.answer(LOAD_S) == "loaded"
        engine.ask("look")
        fresh = engine.answer(LOAD_S)
    assert after.checksums == fresh.checksums
    assert after.tokens == fresh.tokens
    assert before.checksums != fresh.checksums
    assert set(after.versions) == {str(NUM_STEPS + 1)}
