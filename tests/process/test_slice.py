"""`weft bench slice`: one rank's work of a case, here on the CPU."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.support.tiny import tiny_model
from weft.bench.slice.engine import EngineSlice
from weft.bench.slice.measure import measure
from weft.bench.slice.trainer import TrainerSlice
from weft.config import DeltaPolicy, DigestPolicy, ReceiverMode, TransferSettings
from weft.core.case import Case, plan_case
from weft.core.plans.plan import Plan
from weft.errors import ConfigError

KEYS = {"stages", "non_wire_ms", "wire_ms", "paced_s", "predicted_s", "exact"}
FAMILIES = ["qwen3-moe", "deepseek"]


def plan_of(family: str) -> Plan:
    case = Case(
        model=family,
        trainer="fsdp3",
        engine="tp2",
        num_replicas=2,
        dtype="fp8-block128",
        topology="h200-efa3200",
    )
    return plan_case(case, model=tiny_model(family))


def settings(**changes: Any) -> TransferSettings:
    return TransferSettings(mode=ReceiverMode.SHADOW, anchor_every=1000, **changes)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("is_delta", [False, True])
@pytest.mark.parametrize("is_offloaded", [False, True])
def test_a_trainer_lands_what_another_device_makes(family, is_delta, is_offloaded):
    plan = plan_of(family)
    how = settings(digest=DigestPolicy.OFF, delta=DeltaPolicy.ON if is_delta else DeltaPolicy.OFF)
    mine = TrainerSlice(plan, 1, how, "cpu", is_offloaded=is_offloaded)
    mine.fill(torch.device("cpu"))
    first = mine.send()
    mine.change(1)
    second = mine.send()
    assert (second.num_bytes < first.num_bytes) == is_delta
    assert ("delta" in second.stages) == is_delta
    assert ("h2d" in second.stages) == is_offloaded
    reference = TrainerSlice(plan, 1, how, "cpu")
    reference.copy_from(mine)
    reference.send()
    mine.send(also_whole=True)
    assert mine.equals(reference)
    first_unit = next(iter(mine._landing.values())).address
    ctypes.c_uint8.from_address(first_unit).value ^= 1
    assert not mine.equals(reference)


def test_a_paced_link_takes_its_time():
    mine = TrainerSlice(plan_of("qwen3-moe"), 0, settings(digest=DigestPolicy.OFF), "cpu")
    mine.fill(torch.device("cpu"))
    mine.send()
    sent = mine.send(bytes_per_s=mine.landed_bytes / 0.5)
    assert sent.seconds >= sent.num_bytes / (mine.landed_bytes / 0.5)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_rank_commits_what_landed(family, monkeypatch):
    engine = EngineSlice(plan_of(family), 1, settings(digest=DigestPolicy.ON), "cpu")
    engine.fill()
    received = engine.receive()
    assert received.num_bytes > 0
    assert set(received.stages) == {"verify", "commit"}
    assert engine.is_exact
    monkeypatch.setattr(engine._mode, "make_visible", lambda *_, **__: None)  # nothing is committed
    engine.fill()
    engine.receive()
    assert not engine.is_exact


def weft(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "weft", "bench", "slice", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


LAYOUTS = ("--trainer", "fsdp16", "--engine", "tp2", "--replicas", "2", "--dtype", "fp8-block128")
CASE = ("qwen3-0.6b", *LAYOUTS, "--device", "cpu")


@pytest.mark.parametrize("side", ["trainer", "engine"])
def test_the_command_measures_one_rank(side):
    done = weft(*CASE, "--side", side, "--rank", "3", "--repeat", "1", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert set(report) >= KEYS
    assert report["exact"] is True
    assert report["rank"] == 3
    assert all(set(stage) == {"stage", "measured_ms", "predicted_ms"} for stage in report["stages"])
    assert {"wire", "convert" if side == "trainer" else "commit"} <= {stage["stage"] for stage in report["stages"]}


def test_wrong_input_is_named():
    done = weft(*CASE, "--rank", "most")
    assert done.returncode == 2
    assert "unknown rank `most`" in done.stderr
    plan = plan_of("qwen3-moe")
    how: dict[str, Any] = {"name": "", "device": "cpu", "offloaded": False, "repeat": 1, "say": print}
    with pytest.raises(ConfigError, match="trainer 16 does not exist"):
        measure(plan, side="trainer", rank=16, delta=False, **how)
    with pytest.raises(ConfigError, match="patches are measured on trainers only"):
        measure(plan, side="engine", rank=None, delta=True, **how)
