"""Processes that take long to start, and serve many tests one after the other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.integrations.fsdp_trainer import Trainer
from tests.integrations.vllm_process import run_engines
from tests.support.processes import Process

# otherwise every process of an engine compiles small functions for seconds
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def vllm_process() -> Iterator[Process]:
    """Imports vLLM once and loads what it is asked to."""
    with ExitStack() as stack:
        yield Process.started(stack, run_engines, daemon=False)


live = pytest.fixture(scope="session", name="live")(vllm_process)
fresh = pytest.fixture(scope="session", name="fresh")(vllm_process)


@pytest.fixture(scope="session")
def trainer() -> Iterator[Trainer]:
    """Two ranks that train any model for any controller. Tests that kill a rank take a trainer of their own."""
    with ExitStack() as stack:
        yield Trainer(stack)
