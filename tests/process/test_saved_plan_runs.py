"""A plan that `weft plan --save` wrote, run by `weft controller --plan` between real processes; and a refused one.

Trainers are replicas. For version 1 each fills its weights with a number of its own, so that every byte an engine holds
says who sent it; version 2 is a checkpoint.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.process.test_cli import weft
from tests.support.executor import execute, random_checkpoint, same_bits
from tests.support.planned_members import engine_arrays, trainer_arrays
from tests.support.processes import Process
from tests.support.tiny import CONFIGS
from weft.core.plans import plan_file
from weft.errors import WeftError
from weft.runtime.receive.receiver import Receiver
from weft.runtime.send.sender import Sender
from weft.runtime.weights import Weights

ANSWER_S = 60.0
NORM = "model.norm.weight"


def trainer(pipe: Any, address: str, path: str, rank: int, missing: str = "") -> None:
    """Publishes version 1, marked with its rank, and version 2; answers what became of each."""
    plan = plan_file.load(Path(path))
    arrays, parts = trainer_arrays(plan, rank)
    arrays.pop(missing, None)
    try:
        with Sender(address, rank=rank, weights=Weights.from_arrays(arrays, parts=parts), timeout_s=ANSWER_S) as sender:
            for version in (1, 2):
                whole = random_checkpoint(plan, version)
                for name, array in arrays.items():
                    array[...] = rank + 1 if version == 1 else whole[name]
                publication = sender.publish(version=version)
                publication.wait_committed(ANSWER_S)
                pipe.send(("committed", publication.num_writes))
                pipe.recv()
    except WeftError as error:
        pipe.send(f"{error}\nhint: {error.hint}")


def engine(pipe: Any, address: str, path: str, rank: int) -> None:
    """Serves; answers with its weights."""
    arrays = engine_arrays(plan_file.load(Path(path)), rank)
    with Receiver(address, rank=rank, weights=Weights.from_arrays(arrays)) as receiver:
        while not pipe.poll(0.005):
            try:
                update = receiver.poll()
            except WeftError as error:
                pipe.send(str(error))
                return
            if update is not None:
                update.commit()
                pipe.send({name: array.copy() for name, array in arrays.items()})


@contextmanager
def controller(path: Path, *options: str) -> Iterator[tuple[str, Any]]:
    """`weft controller --plan`: its address, and a function that ends it and gives what it printed."""
    command = [sys.executable, "-m", "weft", "controller", "--trainers", "2", "--engine-ranks", "2"]
    command += ["--ranks-per-engine", "2", "--bind", "tcp://127.0.0.1:*", "--plan", str(path), "--json", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def ended() -> tuple[dict[str, Any], str]:
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=ANSWER_S)
        return json.loads(stdout), stderr

    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith("listening on "), line
        yield line.split()[2].rstrip(","), ended
    finally:
        process.kill()
        process.communicate()


def made(folder: Path, placement: str) -> Path:
    """As a user makes it: a tiny model, two replicas of the trainer, a policy that is not the default."""
    (folder / "config.json").write_text(json.dumps(CONFIGS["qwen3"]))
    case = (
        str(folder / "config.json"),
        "--trainer",
        "ddp2",
        "--engine",
        "tp2",
        "--policy",
        "round_robin",
        "--memory",
        "cpu",
    )
    done = weft("plan", *case, "--placement", placement, "--save", str(folder / "a.plan"))
    assert done.returncode == 0, done.stderr
    return folder / "a.plan"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A plan for members on one host."""
    return made(tmp_path_factory.mktemp("plan"), "packed")


def started(stack: ExitStack, address: str, path: Path, **of_first: Any) -> tuple[list[Process], list[Process]]:
    trainers = [
        Process.started(stack, trainer, address, str(path), rank, *(of_first.values() if rank == 0 else ()))
        for rank in range(2)
    ]
    return trainers, [Process.started(stack, engine, address, str(path), rank) for rank in range(2)]


def sent_by(arrays: dict[str, np.ndarray], rank: int) -> int:
    return sum(int((array == rank + 1).sum()) * array.itemsize for array in arrays.values())


def test_bytes_take_the_ways_of_the_plan(saved):
    plan = plan_file.load(saved)
    with ExitStack() as stack:
        address, ended = stack.enter_context(controller(saved))
        trainers, engines = started(stack, address, saved)
        assert [t.answer(ANSWER_S)[0] for t in trainers] == ["committed"] * 2
        marked = [e.answer(ANSWER_S) for e in engines]
        found = [[sent_by(arrays, rank) for arrays in marked] for rank in range(2)]
        assert found == plan.pair_bytes.tolist()
        assert found[0][1] == found[1][0] == 0  # round_robin: few sessions per source
        for process in trainers:
            process.ask("next")
        assert [t.answer(ANSWER_S)[0] for t in trainers] == ["committed"] * 2
        expected = execute(plan, random_checkpoint(plan, 2)).tensors
        for rank, arrays in enumerate(e.answer(ANSWER_S) for e in engines):
            assert all(same_bits(array, expected[rank][name]) for name, array in arrays.items())
        statistics, _ = ended()
    assert statistics["plan_digest"] == plan_file.digest(plan)
    assert (statistics["num_committed"], statistics["bytes_per_version"]) == (2, plan.total_bytes)


@pytest.mark.parametrize("mode", ["shadow", "in_place"])
def test_the_writes_that_are_printed_are_the_writes_that_run(tmp_path, mode):
    """The case asks for packing as well: rows of a column cut are shorter than 4 KB."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen3"]))
    (tmp_path / "weft.toml").write_text("[weft]\nmin_write_bytes = 4096\nwindow_bytes = 1048576\n")
    path = tmp_path / "a.plan"
    case = (str(tmp_path / "config.json"), "--trainer", "fsdp2", "--engine", "tp2", "--memory", "cpu")
    how = ("--placement", "packed", "--mode", mode, "--transport", "cma", "--config", str(tmp_path / "weft.toml"))
    done = weft("plan", *case, *how, "--save", str(path), "--json")
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["packed_bytes"] > 0 < printed["zero_copy_bytes"]
    with ExitStack() as stack:
        address, ended = stack.enter_context(controller(path))
        trainers, _ = started(stack, address, path)
        answers = [trainer.answer(ANSWER_S) for trainer in trainers]
        assert [answer[0] for answer in answers] == ["committed"] * 2, answers
        assert sum(num_writes for _, num_writes in answers) == printed["num_writes"]
        statistics, _ = ended()
    assert statistics["writes_per_version"] == printed["num_writes"]
    assert statistics["plan_digest"] == printed["digest"]


def test_members_that_differ_are_refused_with_every_difference(saved):
    with ExitStack() as stack:
        address, ended = stack.enter_context(controller(saved))
        began = time.monotonic()
        trainers, engines = started(stack, address, saved, missing=NORM)
        told = [member.answer(ANSWER_S) for member in (*trainers, *engines)]
        assert time.monotonic() - began < ANSWER_S
        _, log = ended()
    for text in (*told, log):
        assert "members differ from the plan in 1 point" in text
        assert f"{NORM}: the plan has [0:256] on trainer 0, which does not hold it" in text
    assert "make the plan again" in told[0]


def test_a_plan_for_two_hosts_runs_on_one_only_if_that_is_asked_for(tmp_path):
    path = made(tmp_path, "separate")
    with ExitStack() as stack:
        address, _ = stack.enter_context(controller(path))
        trainers, engines = started(stack, address, path)
        for told in [member.answer(ANSWER_S) for member in (*trainers, *engines)]:
            assert "engine rank 0: on the host of trainer 0, the plan has it on another" in told
    with ExitStack() as stack:
        address, ended = stack.enter_context(controller(path, "--any-place"))
        trainers, engines = started(stack, address, path)
        assert [t.answer(ANSWER_S)[0] for t in trainers] == ["committed"] * 2
        sent = [sent_by(e.answer(ANSWER_S), 0) for e in engines]
        assert sent == plan_file.load(path).pair_bytes[0].tolist()
        for process in trainers:
            process.ask("next")
        assert [t.answer(ANSWER_S)[0] for t in trainers] == ["committed"] * 2
        statistics, _ = ended()
    assert statistics["num_committed"] == 2


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--plan", "none.plan"), "`none.plan` cannot be read"),
        (("--policy", "fair"), "unknown policy `fair`"),
        (("--topology", "h200"), "unknown topology `h200`"),
    ],
)
def test_wrong_options_end_the_controller_at_once(options, told):
    done = weft("controller", "--trainers", "2", "--engine-ranks", "2", *options)
    assert done.returncode == 2
    assert f"error: {told}" in done.stderr


def test_a_plan_for_other_members_ends_the_controller_at_once(saved):
    done = weft("controller", "--trainers", "4", "--engine-ranks", "2", "--plan", str(saved))
    assert done.returncode == 2
    assert "the plan is for 2 trainers and 2 engine ranks in engines of 2" in done.stderr
    assert "hint: --trainers 2 --engine-ranks 2 --ranks-per-engine 2" in done.stderr
