"""The loop, with real processes: every way to share a model, what engines hold compared bit for bit, and faults."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.leftovers import shared_files
from tests.support.waiting import wait_until
from weft.errors import ConfigError, PeerLost, TransportUnavailable
from weft.observe.events_file import read_versions
from weft.rl.run.launch import EVENTS, run_here
from weft.rl.settings import LoopSettings

START_S, END_S = 120.0, 60.0
SMALL = {"iterations": 3, "rollouts_per_rank": 8, "check_bits": True, "max_staleness": 1, "timeout_s": 60.0}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 64}
QWEN2 = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 64,
    "tie_word_embeddings": True,
}


def run(tmp_path: Path, **options):
    return run_here(LoopSettings.of(**(SMALL | options)), run_dir=tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {"num_trainers": 2, "trainer": "ddp", "num_engines": 2},
        {"num_trainers": 2, "trainer": "fsdp2", "ranks_per_engine": 2, "kl_coef": 0.01},
        {"num_trainers": 4, "trainer": "fsdp2", "num_engines": 2, "engine_dtype": "fp8"},
        {"num_trainers": 4, "trainer": "ddp", "num_engines": 1, "delta": True, "mode": "patch"},
        {"num_trainers": 2, "trainer": "fsdp2", "ranks_per_engine": 2, "delta": True, "engine_dtype": "fp8"},
        {"num_trainers": 1, "trainer": "ddp", "dtype": "fp32", "engine_dtype": "bf16", "mode": "in_place"},
        {"num_trainers": 2, "trainer": "fsdp2", "num_engines": 2, "method": "broadcast"},
        {"num_trainers": 2, "trainer": "fsdp2", "ranks_per_engine": 2, "method": "gather", "engine_dtype": "fp8"},
    ],
    ids=lambda options: " ".join(str(value) for value in options.values()),
)
def test_engines_hold_every_version_bit_for_bit(tmp_path, options):
    found = run(tmp_path, **options).summary()
    assert (found["iterations"], found["num_versions"], found["num_aborted"]) == (3, 4, 0)
    assert found["exact"] is True
    assert found["all_verified"]
    assert found["max_staleness"] <= 1
    versions = read_versions(tmp_path / EVENTS)
    assert [version["outcome"] for version in versions] == ["committed"] * (4 if found["method"] == "weft" else 0)
    for version in versions:
        sent, arrived = ({link[:2]: link[2] for link in map(tuple, version[end])} for end in ("writes", "arrivals"))
        assert sent == arrived, "both ends of every link"
    assert found["lost"] == {}


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (GPT2, {"ranks_per_engine": 2, "engine_dtype": "fp8", "trainer": "fsdp2", "num_trainers": 2}),
        (QWEN2, {"dtype": "fp32"}),
    ],
    ids=["gpt2", "qwen2"],
)
def test_hugging_face_modules_train_and_are_served(tmp_path, config, options):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(config))
    record = run(tmp_path / "run", model=str(tmp_path), modules="transformers", **options)
    assert record.summary()["exact"] is True
    assert record.iterations[0].metrics["importance_off"] < (0.1 if "engine_dtype" in options else 1e-3)


def test_in_turn_weft_and_a_broadcast_train_the_same_policy(tmp_path):
    options = {"sync": True, "num_engines": 2, "iterations": 6, "rollouts_per_rank": 16}
    runs = [run(tmp_path / method, method=method, **options) for method in ("weft", "broadcast")]
    rewards = [[iteration.reward for iteration in record.iterations] for record in runs]
    assert rewards[0] == rewards[1]
    assert {iteration.max_staleness for record in runs for iteration in record.iterations} == {0}


def test_updates_land_while_answers_are_being_made(tmp_path):
    """Generation is slow here: some answers are begun by one version and finished by a later one."""
    record = run(tmp_path, iterations=12, rollouts_per_rank=16, max_new_tokens=48, ppo_epochs=1, max_staleness=3)
    assert max(iteration.mixed for iteration in record.iterations) > 0
    assert max(iteration.max_staleness for iteration in record.iterations) <= 3


def test_a_resumed_run_goes_on_where_the_other_stopped(tmp_path):
    kept = {"checkpoint_dir": str(tmp_path / "kept"), "checkpoint_every": 2, "num_trainers": 2, "trainer": "fsdp2"}
    kept |= {"sync": True}
    whole = run(tmp_path / "whole", iterations=4, sync=True, num_trainers=2, trainer="fsdp2")
    run(tmp_path / "first", iterations=2, **kept)
    second = run(tmp_path / "second", iterations=4, resume=True, **kept)
    assert [iteration.number for iteration in second.iterations] == [2, 3]
    assert second.iterations[0].reward == whole.iterations[2].reward
    with pytest.raises(ConfigError, match="num_trainers is 2, not 1"):
        run(tmp_path / "third", resume=True, **(kept | {"num_trainers": 1}))


class Killer:
    """Kills a member once training is under way; called with the record, often."""

    def __init__(self, run_dir: Path, member: str) -> None:
        self._run_dir, self._member, self.killed_at = run_dir, member, None

    def __call__(self, record) -> None:
        if self.killed_at is None and len(record.iterations) >= 3:
            os.kill(json.loads((self._run_dir / "members.json").read_text())[self._member], signal.SIGKILL)
            self.killed_at = time.monotonic()


def test_training_goes_on_when_an_engine_is_killed(tmp_path):
    settings = LoopSettings.of(iterations=25, rollouts_per_rank=16, num_engines=2, timeout_s=60.0)
    killer = Killer(tmp_path, "engine 1")
    record = run_here(settings, run_dir=tmp_path, watch=killer)
    assert killer.killed_at is not None
    assert record.lost == {"engine 1": "was killed by SIGKILL"}
    assert len(record.iterations) == 25
    assert record.versions[-1].reason == ""
    assert record.commits[-1].version == 25


@pytest.mark.parametrize("member", ["trainer 0", "trainer 1"])
def test_a_killed_trainer_is_a_clear_error_in_seconds(tmp_path, member):
    settings = LoopSettings.of(iterations=100_000, rollouts_per_rank=8, num_trainers=2, timeout_s=60.0)
    killer = Killer(tmp_path, member)
    with pytest.raises(PeerLost, match=f"{member} was killed by SIGKILL|trainer . failed"):
        run_here(settings, run_dir=tmp_path, watch=killer)
    assert killer.killed_at is not None
    assert time.monotonic() - killer.killed_at < 30.0


class Staller:
    """Stops the only engine, each time longer than weft's controller waits for it, until a version was given up."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._until, self._next = run_dir, None, 2

    def __call__(self, record) -> None:
        if self._until is not None and time.monotonic() > self._until:
            self._tell(signal.SIGCONT)
            self._until, self._next = None, len(record.iterations) + 2
        given_up = any(version.reason for version in record.versions)
        if self._until is None and len(record.iterations) >= self._next and not given_up:
            self._tell(signal.SIGSTOP)
            self._until = time.monotonic() + 6.5

    def _tell(self, number: signal.Signals) -> None:
        os.kill(json.loads((self._run_dir / "members.json").read_text())["engine 0"], number)


def test_a_version_nobody_can_go_on_without_is_sent_again(tmp_path):
    """In turn: the only engine stalls until its version is given up, and comes back."""
    options = {"iterations": 16, "sync": True, "num_trainers": 2, "silence_s": 60.0}
    settings = LoopSettings.of(**{**SMALL, **options})
    record = run_here(settings, run_dir=tmp_path, watch=Staller(tmp_path))
    found = record.summary()
    assert found["num_aborted"] >= 1
    assert (found["iterations"], found["exact"]) == (16, True)
    assert {iteration.max_staleness for iteration in record.iterations} == {0}


def test_an_engine_lost_before_the_first_version_is_an_error_at_once(tmp_path):
    settings = LoopSettings.of(iterations=5, num_engines=2, timeout_s=100.0)
    killed_at: list[float] = []

    def kill(record) -> None:
        if not killed_at:
            os.kill(json.loads((tmp_path / "members.json").read_text())["engine 1"], signal.SIGKILL)
            killed_at.append(time.monotonic())

    with pytest.raises(PeerLost, match="engine 1 was killed by SIGKILL before the first commit"):
        run_here(settings, run_dir=tmp_path, watch=kill)
    assert time.monotonic() - killed_at[0] < 20.0


@contextmanager
def running(command: list[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A process that is gone at the end of the block, whatever happens in it."""
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def test_members_end_with_a_launcher_that_is_killed_at_any_moment(tmp_path):
    command = [sys.executable, "-m", "weft", "rl", "--iterations", "100000", "--out", str(tmp_path)]
    with running(command, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + START_S
        while not (tmp_path / "members.json").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.kill()
    pids = json.loads((tmp_path / "members.json").read_text()).values()
    deadline = time.monotonic() + END_S
    while any(Path(f"/proc/{pid}/exe").exists() for pid in pids):
        assert time.monotonic() < deadline, "a member was left behind"
        time.sleep(0.05)


def test_no_engine_left_is_an_error_that_says_so(tmp_path):
    settings = LoopSettings.of(iterations=100_000, rollouts_per_rank=8, timeout_s=60.0)
    with pytest.raises(PeerLost, match="no engine is left: engine 0 was killed by SIGKILL"):
        run_here(settings, run_dir=tmp_path, watch=Killer(tmp_path, "engine 0"))


def test_an_interrupt_leaves_nobody_and_nothing_behind(tmp_path):
    before = shared_files()
    command = [sys.executable, "-m", "weft", "rl", "--iterations", "100000", "--rollouts", "8", "--out", str(tmp_path)]
    with running(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "NO_COLOR": "1"}) as process:
        assert process.stderr is not None
        assert any("iteration" in line for line in process.stderr)
        pids = json.loads((tmp_path / "members.json").read_text()).values()
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        process.wait(END_S)
    assert process.returncode == 130
    assert time.monotonic() - began < END_S
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    wait_until(lambda: shared_files() <= before, END_S, "no shared memory is left")


def test_bad_options_are_errors_before_anything_starts(tmp_path):
    for options, message in (
        ({"rollouts_per_rank": 7, "minibatches": 2}, "do not divide"),
        ({"dtype": "fp8"}, "cannot train in fp8"),
        ({"mode": "patch"}, "without delta"),
        ({"method": "broadcast", "delta": True}, "has neither delta nor mode"),
        ({"resume": True}, "need a folder"),
        ({"device": "tpu"}, "unknown device"),
        ({"iterations": 0}, "invalid setting"),
        ({"method": "pigeon"}, "invalid setting"),
        ({"unheard": 1}, "invalid setting"),
    ):
        with pytest.raises(ConfigError, match=message):
            LoopSettings.of(**options)
    for options, message in (
        ({"task": "poetry"}, "unknown task"),
        ({"task": "json:nothing"}, "cannot be loaded"),
        ({"model": str(tmp_path)}, "cannot be read"),
        ({"model": "gpt2"}, "Hugging Face"),
        ({"ranks_per_engine": 3}, "do not divide"),
        ({"weights": str(tmp_path)}, "no safetensors"),
        ({"resume": True, "checkpoint_dir": str(tmp_path)}, "no complete checkpoint"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(tmp_path, **options)
    with pytest.raises(TransportUnavailable, match="uccl"):
        run(tmp_path, method="uccl", check_bits=False)
    assert not (tmp_path / "logs").exists()
