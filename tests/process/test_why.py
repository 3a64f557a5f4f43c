"""`weft why` names what a version waited for: causes planted in real fleets, read from what the controller recorded."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weft
from weft import native
from weft.core.version import CommitPolicy
from weft.errors import ConfigError, VersionError
from weft.observe.events_file import read_versions
from weft.observe.why import Diagnosis, explain
from weft.runtime.send.outgoing import Outgoing
from weft.transport.shm import ShmTransport

NUM_ELEMENTS = 1_000_000
PLANTED_S = 0.5
"""Far more than a version of this size takes."""
WAIT_S = 60.0


class Fleet:
    """Trainers that hold a half each, and engines that hold all, in threads of this process."""

    def __init__(self, path: Path, stack: contextlib.ExitStack, **options: Any) -> None:
        self._path, self._stack = path, stack
        options_kinds = options.pop("engines", (weft.Receiver, weft.Receiver))
        options_dtype = options.pop("dtype", np.float32)
        settings = weft.TransferSettings(
            mode=options.pop("mode", "shadow"),
            delta=options.pop("delta", "off"),
            pause_s=options.pop("pause_s", WAIT_S),
            version_s=options.pop("version_s", WAIT_S),
            silence_s=20.0,
        )
        self.controller = stack.enter_context(
            weft.Controller(num_trainers=2, num_engine_ranks=2, settings=settings, events=path, **options)
        )
        self._kinds, self._dtype = options_kinds, options_dtype
        self.engines = [self._engine(rank) for rank in range(2)]
        self.trainers: list[weft.Sender] = []
        self._version = 0

    def _engine(self, rank: int) -> weft.Receiver:
        weights = weft.Weights.from_arrays({"w": np.zeros(NUM_ELEMENTS, self._dtype)})
        kind = self._kinds[rank]
        return self._stack.enter_context(kind(self.controller.address, rank=rank, weights=weights))

    def add_trainers(self, transport: Callable[[int], Any] = lambda _: None) -> None:
        half = NUM_ELEMENTS // 2
        for rank in range(2):
            part = weft.Part(shape=(NUM_ELEMENTS,), lo=(rank * half,))
            weights = weft.Weights.from_arrays({"w": np.ones(half, np.float32)}, parts={"w": part})
            sender = weft.Sender(self.controller.address, rank=rank, weights=weights, transport=transport(rank))
            self.trainers.append(self._stack.enter_context(sender))

    def version(self, *, late_trainer: int | None = None, late_engine: int | None = None) -> Diagnosis:
        """One version; one member may be late. Returns the explanation of its line."""
        self._version += 1
        takers = [
            threading.Thread(target=self._take, args=(rank, PLANTED_S if rank == late_engine else 0.0))
            for rank in range(2)
        ]
        for taker in takers:
            taker.start()
        publications = []
        for rank in sorted(range(2), key=lambda rank: rank == late_trainer):
            if rank == late_trainer:
                time.sleep(PLANTED_S)
            publications.append(self.trainers[rank].publish(version=self._version))
        for publication in publications:
            publication.wait_committed(WAIT_S)
        for taker in takers:
            taker.join()
        return explain(self.line(self._version))

    def _take(self, rank: int, late_s: float) -> None:
        time.sleep(late_s)
        self.engines[rank].wait(WAIT_S).commit(WAIT_S)

    def line(self, version: int) -> dict[str, Any]:
        """What was recorded of a version; it may be a moment after its end."""
        deadline = time.monotonic() + WAIT_S
        while (found := {line["version"]: line for line in read_versions(self._path)}.get(version)) is None:
            assert time.monotonic() < deadline, f"version {version} is not recorded"
            time.sleep(0.01)
        return found


@pytest.fixture
def fleet(request, tmp_path) -> Iterator[Fleet]:
    with contextlib.ExitStack() as stack:
        yield Fleet(tmp_path / "events.jsonl", stack, **getattr(request, "param", {}))


def longest(explanation: Diagnosis) -> str:
    assert sum(cause.seconds for cause in explanation.causes) == pytest.approx(explanation.seconds, abs=1e-4)
    return max(explanation.causes, key=lambda cause: cause.seconds).what


def test_an_engine_that_switches_late(fleet):
    fleet.add_trainers()
    fleet.version()
    assert longest(fleet.version(late_engine=1)) == "engine 1 had not switched to it"


@pytest.mark.parametrize("fleet", [{"mode": "in_place"}], indirect=True)
def test_an_engine_that_pauses_late(fleet):
    fleet.add_trainers()
    fleet.version()
    assert longest(fleet.version(late_engine=0)) == "engine 0 had not paused"


def test_a_trainer_that_publishes_late(fleet):
    fleet.add_trainers()
    fleet.version()
    assert longest(fleet.version(late_trainer=1)) == "trainer 1 had not published yet"


class SlowWork:
    """Takes its time to digest."""

    def __getattr__(self, name: str) -> Any:
        return getattr(native, name)

    def digest_planes(self, planes: Any) -> int:
        time.sleep(PLANTED_S)
        return native.digest_planes(planes)


class SlowVerifier(weft.Receiver):
    """An engine rank whose digests are slow."""

    def _device_work(self, device: str) -> Any:
        return SlowWork()


@pytest.mark.parametrize("fleet", [{"engines": (weft.Receiver, SlowVerifier)}], indirect=True)
def test_an_engine_that_verifies_slowly(fleet):
    fleet.add_trainers()
    fleet.version()
    assert longest(fleet.version()) == "engine 1 verified it"


@pytest.mark.parametrize(
    ("fleet", "method", "named"),
    [
        ({"dtype": np.float16}, "fill", "converted weights"),
        ({"delta": "on"}, "encode", "compared weights with the version before"),
    ],
    indirect=["fleet"],
)
def test_a_trainer_that_prepares_slowly(fleet, method, named, monkeypatch):
    swift = getattr(Outgoing, method)

    def slow(self: Outgoing, *arguments: Any) -> Any:
        time.sleep(PLANTED_S)
        return swift(self, *arguments)

    fleet.add_trainers()
    fleet.version()
    monkeypatch.setattr(Outgoing, method, slow)
    assert re.fullmatch(rf"trainer \d {named}", longest(fleet.version()))


class SlowShm(ShmTransport):
    """Takes its time before it writes."""

    def post_direct(self, batches: Any, tag: int) -> Any:
        time.sleep(PLANTED_S)
        return super().post_direct(batches, tag)


def test_a_trainer_that_writes_slowly(fleet):
    fleet.add_trainers(lambda rank: (SlowShm if rank == 1 else ShmTransport)(f"trainer {rank}", writer=rank))
    fleet.version()
    assert longest(fleet.version()).startswith("trainer 1 wrote to engine")


def test_a_slow_link_is_compared_with_the_others():
    moments = [(0.0, "Want", "trainer 0"), (0.1, "Go", "trainer 0"), (2.1, "Written", "trainer 0")]
    writes = [(0, 0, 10_000_000, 0.1), (0, 1, 10_000_000, 2.0), (0, 2, 10_000_000, 0.1)]
    record = {"version": 3, "outcome": "committed", "reason": "", "seconds": 2.2, "stages": {}}
    found = explain({**record, "moments": moments, "writes": writes})
    assert longest(found) == "trainer 0 wrote to engine 1 (5.0 MB/s, other links 100.0)"
    busy = {"trainer 0": {"convert": 1.8, "write": 0.2}}
    assert longest(explain({**record, "moments": moments, "writes": writes, "stages": busy})) == (
        "trainer 0 converted weights"
    )


def test_a_version_that_waits_for_the_one_before(fleet):
    fleet.add_trainers()
    fleet.version()
    first = [trainer.publish(version=10) for trainer in fleet.trainers]
    for publication in first:
        publication.wait_released(WAIT_S)
    second = [trainer.publish(version=11) for trainer in fleet.trainers]
    time.sleep(PLANTED_S)
    for rank in (0, 1, 0, 1):
        fleet._take(rank, 0.0)
    for publication in (*first, *second):
        publication.wait_committed(WAIT_S)
    assert longest(explain(fleet.line(11))) == "the previous version or a plan was not finished"


def aborted_version(fleet: Fleet) -> Diagnosis:
    """Publish a version that fails; returns the explanation of its line."""
    publications = [trainer.publish(version=20) for trainer in fleet.trainers]
    for publication in publications:
        with pytest.raises(VersionError):
            publication.wait_committed(WAIT_S)
    found = explain(fleet.line(20))
    assert found.outcome == "aborted"
    return found


@pytest.mark.parametrize(
    "fleet", [{"mode": "in_place", "pause_s": 1.0, "commit_policy": CommitPolicy.ALL}], indirect=True
)
def test_a_version_that_was_aborted_names_who_did_not_pause(fleet):
    fleet.add_trainers()
    fleet.version()
    found = aborted_version(fleet)
    assert longest(found) == "engine 0, engine 1 had not paused"
    assert "did not pause" in found.sentence


@pytest.mark.parametrize("fleet", [{"version_s": 1.0}], indirect=True)
def test_a_version_that_was_aborted_names_who_did_not_write(fleet):
    stops = {"now": False}

    class Stopping(ShmTransport):
        """Writes nothing for far too long, once it is told to stop."""

        def post_direct(self, batches: Any, tag: int) -> Any:
            time.sleep(3.0 if stops["now"] else 0.0)
            return super().post_direct(batches, tag)

    fleet.add_trainers(lambda rank: (Stopping if rank == 1 else ShmTransport)(f"trainer {rank}", writer=rank))
    fleet.version()
    stops["now"] = True
    found = aborted_version(fleet)
    assert longest(found) == "trainer 1 had not written"
    assert "trainer 1 to write" in found.sentence


def weft_why(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "weft", "why", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)


def test_the_command_explains_the_last_version_or_another(fleet, tmp_path):
    fleet.add_trainers()
    for _ in range(3):
        fleet.version()
    path = str(tmp_path / "events.jsonl")
    assert json.loads(weft_why(path, "--json").stdout)["version"] == 3
    said = weft_why(path, "2").stdout
    assert said.startswith("version 2 took ")
    wrong = weft_why(path, "9")
    assert wrong.returncode == 2
    assert "no version 9" in wrong.stderr
    assert "1, 2, 3" in wrong.stderr


def test_events_of_a_controller_begin_before_it_can_be_used(tmp_path):
    with weft.Controller(num_trainers=1, num_engine_ranks=1, events=tmp_path / "events.jsonl"):
        first, *_ = (tmp_path / "events.jsonl").read_text().splitlines()
    assert json.loads(first)["trainers"] == 1


def test_events_that_cannot_be_written_are_an_error_at_once(tmp_path):
    with pytest.raises(ConfigError, match="events"):
        weft.Controller(num_trainers=1, num_engine_ranks=1, events=tmp_path / "none" / "events.jsonl")
