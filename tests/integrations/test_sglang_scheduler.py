"""What a scheduler process of SGLang refuses when it starts, and what it sets aside; the scheduler is a stand-in.

SGLang is imported in a process of its own, which may use stand-ins for the packages that SGLang does not need on CPUs.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.integrations.sglang_server import STUBS
from tests.support.processes import Process
from weft.config import EngineSettings
from weft.errors import ConfigError
from weft.runtime.weights import Weights

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
]

IMPORT_S = 240.0
NUM_BYTES = 4 * 1000 * 1000


def run_calls(pipe: Any) -> None:
    """Call functions of this module, as asked."""
    sys.path.insert(0, str(STUBS))
    while (call := pipe.recv()) is not None:
        function, facts = call
        pipe.send(function(**facts))


@pytest.fixture(scope="module")
def call() -> Iterator[Callable[..., Any]]:
    """Calls a function where SGLang is imported."""
    with ExitStack() as stack:
        process = Process.started(stack, run_calls)

        def called(function: Callable[..., Any], **facts: Any) -> Any:
            process.ask((function, facts))
            return process.answer(IMPORT_S)

        yield called


def attended(model: torch.nn.Module, *, enable_eplb: bool = False, **parallel: Any) -> dict[str, Any]:
    """What the receiver of a scheduler with these of SGLang's settings is made of."""
    from sglang.srt.arg_groups.arg_utils import namespace_of  # noqa: PLC0415
    from sglang.srt.runtime_context import get_parallel  # noqa: PLC0415
    from sglang.srt.server_args import ServerArgs  # noqa: PLC0415

    from weft.integrations.sglang import scheduler  # noqa: PLC0415

    found: dict[str, Any] = {}
    scheduler.Receiver = lambda *_, **facts: found.update(facts)
    scheduler.loaded_weights = lambda *_: Weights.from_arrays({})
    scheduler.TypeBasedDispatcher = list
    assert namespace_of(ServerArgs)["enable_eplb"] == "exec.moe", "SGLang keeps it elsewhere"
    scheduler.get_exec = lambda: SimpleNamespace(moe=SimpleNamespace(enable_eplb=enable_eplb))
    runner = SimpleNamespace(model=model, model_config=SimpleNamespace(model_path="nowhere"))
    worker = SimpleNamespace(model_runner=runner)
    stand_in = SimpleNamespace(enable_overlap=False, tp_worker=worker, _request_dispatcher=[])
    usual = {"pp_size": 1, "attn_dp_enabled": False, "tp_size": 1, "tp_rank": 0, "dp_rank": None}
    with get_parallel().override(**(usual | parallel)):
        scheduler.SchedulerAttendant(stand_in, EngineSettings(controller="tcp://127.0.0.1:1"))
    return found


def refused(**facts: Any) -> str:
    """Why a scheduler with these settings takes no versions; empty if it does."""
    try:
        return "" if attended(torch.nn.Linear(1, 1), **facts) else "it has no receiver"
    except ConfigError as error:
        return f"{error}; {error.hint}"


@pytest.mark.parametrize(
    ("facts", "what"),
    [
        ({}, ""),
        ({"enable_eplb": True}, "expert load balancing, which moves experts,"),
        ({"pp_size": 2}, "pipeline parallelism"),
        ({"attn_dp_enabled": True}, "dp attention"),
    ],
)
def test_weights_that_weft_would_not_find_are_refused(call, facts, what):
    """Before a scheduler joins: experts that move, for one, would be written where they no longer are."""
    refusal = f"weft does not support {what} in SGLang; use tensor parallelism and replicas"
    assert call(refused, **facts) == (refusal if what else "")


def set_aside(*, reserve: str, is_draft_worker: bool = False) -> int | str | None:
    """Bytes reserved when a model of a million parameters has been loaded, and given to its receiver."""
    from weft.integrations.sglang import scheduler  # noqa: PLC0415

    os.environ["WEFT_RESERVE"] = reserve
    model = torch.nn.Linear(1000, 1000, bias=False)
    try:
        scheduler.loaded(None, SimpleNamespace(is_draft_worker=is_draft_worker, model=model))
    except ConfigError as error:
        return f"{error}; {error.hint}"
    given = attended(model)["reservation"]
    assert model not in scheduler._RESERVED, "it is the receiver's now"
    return None if given is None else given.num_bytes


@pytest.mark.parametrize("reserve", ["shadow", "in_place", "patch", "3MB", "none"])
def test_memory_for_versions_is_set_aside_before_the_kv_cache_is_sized(call, reserve):
    expected = EngineSettings(reserve=reserve).reserved_bytes(NUM_BYTES, "cpu")
    assert call(set_aside, reserve=reserve) == (expected or None)


def test_nothing_is_set_aside_for_drafts(call):
    """Versions are written to the model they draft for."""
    assert call(set_aside, reserve="shadow", is_draft_worker=True) is None


def test_more_than_there_is_cannot_be_set_aside(call):
    refusal = call(set_aside, reserve="1000000GB")
    assert refusal.startswith("1000000.000 GB cannot be reserved for versions: ")
    assert refusal.endswith("; give the engine less memory, or set WEFT_RESERVE to in_place, patch, or none")
