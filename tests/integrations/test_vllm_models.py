"""Versions into a live vLLM: after each of them it is, and says, what a fresh engine with that checkpoint is and says.

    test process       the controller
    live engine        vLLM with weft's plug-in; loads the checkpoint of seed 1
    trainer            two FSDP2 ranks; publish the weights of seeds 2, 1, 2 …
    fresh engine       vLLM without weft; loads the checkpoint of seed 2, is never written to

vLLM's own reload of weights is silently wrong on CPUs for tied embeddings and experts, and fails for MLA: these models
are here on purpose.
"""

from __future__ import annotations

import importlib.util
from contextlib import contextmanager
from pathlib import Path

import pytest

import weft
from tests.integrations.fsdp_trainer import patient
from tests.integrations.tiny_models import save_checkpoint
from tests.integrations.vllm_process import Load, both_loaded, look
from tests.support.processes import Process

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


@contextmanager
def engines(live: Process, fresh: Process, folder: Path, kind: str, controller: weft.Controller, **options):
    """A live engine with the checkpoint of seed 1, and a fresh one with that of seed 2."""
    first, second = (save_checkpoint(kind, seed, folder) for seed in (1, 2))
    live_load = Load(checkpoint=first, controller=controller.address, **options)
    with both_loaded(live, live_load, fresh, Load(checkpoint=second, **options)):
        yield


def settings(mode: str, delta: str) -> weft.TransferSettings:
    return patient(mode=mode, delta=delta, anchor_every=3)


@pytest.mark.parametrize(
    ("kind", "num_ranks", "mode", "delta"),
    [
        ("qwen3", 1, "shadow", "off"),
        ("tied", 1, "in_place", "off"),
        ("padded", 1, "patch", "on"),
        ("moe", 1, "shadow", "on"),
        ("mla", 1, "in_place", "off"),
        ("llama", 1, "patch", "on"),
        ("padded", 2, "shadow", "off"),
        ("tied", 2, "shadow", "off"),
        ("moe", 2, "in_place", "off"),
        ("mla", 2, "patch", "on"),
    ],
)
def test_tokens_and_checksums_are_those_of_a_fresh_engine(live, fresh, trainer, tmp_path, kind, num_ranks, mode, delta):
    ranks = {"num_engine_ranks": num_ranks, "ranks_per_engine": num_ranks}
    with (
        weft.Controller(num_trainers=2, **ranks, settings=settings(mode, delta)) as controller,
        trainer.training(kind, controller.address),
        engines(live, fresh, tmp_path, kind, controller, num_ranks=num_ranks),
    ):
        expected = {1: look(live), 2: look(fresh)}
        assert all(a != b for a, b in zip(expected[1].tokens, expected[2].tokens, strict=True))
        for version, seed in enumerate((2, 1, 2, 1), start=1):
            trainer.publish(version, seed)
            found = look(live)
            assert found.tokens == expected[seed].tokens
            assert found.checksums == expected[seed].checksums
            assert set(found.versions) == {str(version)}
            assert [rank["version"] for rank in found.status] == [version] * num_ranks


@pytest.mark.parametrize("kind", ["qwen3", "tied"])
def test_live_parameters_are_written_where_they_are(live, fresh, trainer, tmp_path, kind):
    """Nothing is packed, so nothing is staged: the trainer's processes write into the memory vLLM computes with."""
    with (
        weft.Controller(num_trainers=2, num_engine_ranks=1, settings=settings("in_place", "off")) as controller,
        trainer.training(kind, controller.address),
        engines(live, fresh, tmp_path, kind, controller, plain_linears=True),
    ):
        expected = {1: look(live), 2: look(fresh)}
        for version, seed in enumerate((2, 1, 2), start=1):
            trainer.publish(version, seed)
            found = look(live)
            assert found.tokens == expected[seed].tokens
            assert found.checksums == expected[seed].checksums
            assert found.status[0]["staged_bytes"] == 0
        (link,) = controller.statistics().links
        assert link.startswith("shm")


def test_experts_on_two_ranks(live, fresh, trainer, tmp_path):
    """vLLM for CPU loads experts spread over ranks, but crashes when it generates: only what it holds is compared."""
    spread = {"num_ranks": 2, "expert_parallel": True, "can_generate": False}
    ranks = {"num_engine_ranks": 2, "ranks_per_engine": 2}
    with (
        weft.Controller(num_trainers=2, **ranks, settings=settings("shadow", "off")) as controller,
        trainer.training("moe", controller.address),
        engines(live, fresh, tmp_path, "moe", controller, **spread),
    ):
        before, expected = look(live), look(fresh)
        assert before.checksums != expected.checksums
        trainer.publish(1, 2)
        assert look(live).checksums == expected.checksums
        trainer.publish(2, 1)
        assert look(live).checksums == before.checksums
