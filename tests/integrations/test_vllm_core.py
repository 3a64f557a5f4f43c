"""When vLLM's engine core lets its workers commit, and what it makes of their answers; the core itself is a stand-in.

Real cores commit in the other tests. These are about what they hardly ever meet: workers that fail alone, users who
pause at the wrong moment, cores that compute together.
"""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft.errors import ConfigError

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.filterwarnings("ignore"),  # of vLLM
]


class Scheduler:
    def __init__(self) -> None:
        from vllm.v1.core.sched.interface import PauseState  # noqa: PLC0415

        self.states = PauseState
        self.pause_state = PauseState.UNPAUSED

    def set_pause_state(self, state: Any) -> None:
        self.pause_state = state


class Core:
    """What an attendant uses of an engine core with two workers."""

    def __init__(self) -> None:
        self.scheduler = Scheduler()
        self.model_executor = self
        self.batch_queue: list[str] = []
        self.request_block_hasher = None
        self.served: list[int | None] = [None, None]
        self.torn: set[int] = set()
        self.commits = 0
        self.calls: list[Any] = []
        self.label = "default"
        self.vllm_config = SimpleNamespace(
            additional_config={},
            parallel_config=SimpleNamespace(world_size=2, has_unfinished_dp=lambda group, mine: group(mine)),
            model_config=SimpleNamespace(is_multimodal_model=False),
        )

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[dict[str, Any]]:
        self.calls.append((method, *args))
        if method == "weft_attach":
            return []
        if method == "weft_serve":
            self.commits += 1
            self.served = [None if rank in self.torn else args[0] for rank in (0, 1)]
        return [
            {
                "rank": rank,
                "version": self.served[rank],
                "is_poisoned": rank in self.torn,
                "error": f"rank {rank} failed" if rank in self.torn else "",
                "num_commits": self.commits,
                "pause_s": 0.001,
            }
            for rank in (0, 1)
        ]

    def set_weight_version(self, version: str) -> None:
        self.label = version

    def is_scheduler_paused(self) -> bool:
        return self.scheduler.pause_state != self.scheduler.states.UNPAUSED

    def pause_scheduler(self, **_: Any) -> None:
        self.scheduler.set_pause_state(self.scheduler.states.PAUSED_ALL)

    def resume_scheduler(self) -> None:
        self.scheduler.set_pause_state(self.scheduler.states.UNPAUSED)


@pytest.fixture
def core():
    return Core()


@pytest.fixture
def attendant(core):
    from weft.integrations.vllm.core import CoreAttendant  # noqa: PLC0415

    attendant = CoreAttendant(core)
    yield attendant
    attendant.close()


def notice(attendant: Any, version: int | None, *ranks: int, controller: str = "tcp://one") -> None:
    from weft.integrations.vllm.worker import Notice  # noqa: PLC0415

    for rank in ranks:
        attendant._notices.put(Notice(rank=rank, version=version, controller=controller, num_joins=1))


def test_a_version_that_one_worker_does_not_have_is_not_committed(core, attendant):
    notice(attendant, 5, 0)
    attendant.between_steps()
    assert ("weft_serve", 5, 120.0) not in core.calls
    notice(attendant, 5, 1)
    attendant.between_steps()
    assert core.calls[-1] == ("weft_serve", 5, 120.0)
    assert core.label == "5"


def test_notices_of_another_controller_do_not_count(core, attendant):
    notice(attendant, 5, 0, controller="tcp://other")
    notice(attendant, 5, 1)
    attendant.between_steps()
    assert core.label == "default"
    notice(attendant, 5, 0)
    attendant.between_steps()
    assert core.label == "5"


def test_batches_under_way_are_finished_first_and_a_pause_meanwhile_is_kept(core, attendant):
    core.batch_queue.append("batch")
    notice(attendant, 5, 0, 1)
    attendant.between_steps()
    assert core.is_scheduler_paused()
    assert core.label == "default"
    core.scheduler.set_pause_state(core.scheduler.states.PAUSED_NEW)  # by a user
    core.batch_queue.clear()
    attendant.between_steps()
    assert core.label == "5"
    assert core.scheduler.pause_state == core.scheduler.states.PAUSED_NEW


def test_workers_that_differ_stop_the_engine_until_the_next_version(core, attendant):
    core.torn = {1}
    notice(attendant, 5, 0, 1)
    attendant.between_steps()
    assert core.label == "default"
    core.resume_scheduler()  # by a user
    attendant.between_steps()
    assert core.is_scheduler_paused()
    core.torn = set()
    notice(attendant, 6, 0, 1)
    attendant.between_steps()
    assert core.label == "6"
    assert not core.is_scheduler_paused()


def test_versions_served_through_vllms_own_routes_are_labelled(core, attendant):
    core.served, core.commits = [3, 3], 1
    attendant.after_update()
    assert core.label == "3"


def test_cores_that_compute_together_stop_and_go_on_together(core, attendant):
    others_are_torn = [True, False]
    core.dp_group = lambda mine: mine or others_are_torn.pop(0)
    core.batch_queue.append("batch")
    notice(attendant, 5, 0, 1)
    attendant.between_steps()
    core.batch_queue.clear()
    attendant.between_steps()
    assert core.is_scheduler_paused()  # this core has version 5, another one half of it
    notice(attendant, 6, 0, 1)
    attendant.between_steps()
    assert core.label == "6"
    assert not core.is_scheduler_paused()


def test_experts_that_move_are_refused():
    """vLLM's own load balancing needs GPUs; what it would say of itself is enough."""
    from weft.integrations.vllm.worker import WeftTransfer  # noqa: PLC0415

    parallel = SimpleNamespace(enable_eplb=True, data_parallel_index=0, world_size=1, rank=0)
    config = SimpleNamespace(
        additional_config={"weft": {"controller": "tcp://127.0.0.1:1"}}, parallel_config=parallel, model_config=None
    )
    with pytest.raises(ConfigError, match="load balancing moves experts"):
        WeftTransfer(None, config, torch.device("cpu"), torch.nn.Module())
