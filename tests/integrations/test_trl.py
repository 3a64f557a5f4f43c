"""A real TRL trainer feeds a real vLLM: after training it is what a fresh engine with the trained weights is."""

from __future__ import annotations

import importlib.util
from contextlib import ExitStack

import pytest

from tests.integrations.fsdp_trainer import free_port
from tests.integrations.trl_training import save_with_tokenizer, train
from tests.integrations.vllm_process import LOAD_S, Load, loaded, look
from tests.support.processes import Process

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(
        importlib.util.find_spec("trl") is None or importlib.util.find_spec("vllm") is None,
        reason="TRL or vLLM is not installed",
    ),
]

NUM_STEPS = 3


def test_training_steps_reach_the_engine(live, tmp_path):
    address = f"tcp://127.0.0.1:{free_port()}"
    model, trained = save_with_tokenizer(tmp_path / "model"), tmp_path / "trained"
    with loaded(live, Load(checkpoint=model, controller=address)), ExitStack() as stack:
        before = look(live)
        trainer = Process.started(stack, train, model, trained, address, NUM_STEPS, daemon=False)
        assert trainer.answer(LOAD_S) == NUM_STEPS + 1  # the weights it began with, and one version for every step
        after = look(live)
    with loaded(live, Load(checkpoint=trained)):
        fresh = look(live)
    assert after.checksums == fresh.checksums
    assert after.tokens == fresh.tokens
    assert before.checksums != fresh.checksums
    assert set(after.versions) == {str(NUM_STEPS + 1)}
