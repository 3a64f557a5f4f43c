"""`weft trace`: what the controller recorded of real versions, as spans for Perfetto."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weft
from weft.observe.version_trace import version_spans

WAIT_S = 60.0
RECORD = {
    "version": 3,
    "at": 100.0,
    "outcome": "committed",
    "reason": "",
    "seconds": 2.5,
    "stages": {},
    "writes": [(0, 1, 1000, 1.5)],
    "moments": [
        (0.0, "Want", "trainer 0"),
        (0.1, "Expect", "engine 1"),
        (0.2, "Go", "trainer 0"),
        (2.0, "Written", "trainer 0"),
        (2.1, "Verify", "engine 1"),
        (2.2, "Ready", "engine 1"),
        (2.3, "Decide", "engine 1"),
        (2.4, "Committed", "engine 1"),
        (2.5, "Decide", "trainer 0"),
    ],
}


def test_members_do_something_between_two_messages():
    found = {(span.member, span.name): (span.start_s, span.start_s + span.duration_s) for span in version_spans(RECORD)}
    assert found["trainer 0", "send"] == pytest.approx((0.2, 2.0))
    assert found["trainer 0", "write"] == pytest.approx((0.5, 2.0))
    assert found["engine 1", "receive"] == pytest.approx((0.1, 2.1))
    assert found["engine 1", "verify"] == pytest.approx((2.1, 2.2))
    assert found["engine 1", "commit"] == pytest.approx((2.3, 2.4))
    assert ("engine 1", "pause") not in found
    assert found["controller", "version 3 committed"] == pytest.approx((0.0, 2.5))


def run_versions(path: Path, count: int) -> None:
    """Versions between two trainers and two engines."""
    size = 100_000
    with weft.Controller(num_trainers=2, num_engine_ranks=2, events=path) as controller:
        engines = [
            weft.Receiver(
                controller.address, rank=rank, weights=weft.Weights.from_arrays({"w": np.zeros(size, np.float32)})
            )
            for rank in range(2)
        ]
        trainers = []
        for rank in range(2):
            part = weft.Part(shape=(size,), lo=(rank * size // 2,))
            half = weft.Weights.from_arrays({"w": np.ones(size // 2, np.float32)}, parts={"w": part})
            trainers.append(weft.Sender(controller.address, rank=rank, weights=half))
        for version in range(1, count + 1):
            takers = [threading.Thread(target=engine.take, args=(WAIT_S,)) for engine in engines]
            for taker in takers:
                taker.start()
            for publication in [trainer.publish(version=version) for trainer in trainers]:
                publication.wait_committed(WAIT_S)
            for taker in takers:
                taker.join()
        for member in (*trainers, *engines):
            member.close()


def trace(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "weft", "trace", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)


def chains(trace_events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    lanes = {(event["pid"], event["tid"]) for event in trace_events if event["args"].get("name") == "chain"}
    return [event for event in trace_events if event["ph"] == "X" and (event["pid"], event["tid"]) in lanes]


def test_a_run_as_a_trace(tmp_path):
    events, out = tmp_path / "events.jsonl", tmp_path / "run.json"
    run_versions(events, 3)
    done = trace(str(events), "--out", str(out), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_versions"] == 3
    found = json.loads(out.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in found if event["name"] == "process_name"}
    assert names == {"controller", "trainer 0", "trainer 1", "engine 0", "engine 1"}
    writes = [event for event in found if event.get("cat") == "write"]
    assert sum(event["args"]["bytes"] for event in writes) == 3 * 2 * 400_000
    one = tmp_path / "one.json"
    assert trace(str(events), "2", "--out", str(one)).returncode == 0
    record = json.loads(events.read_text().splitlines()[1])
    lasted_us = sum(event["dur"] for event in chains(json.loads(one.read_text())["traceEvents"]))
    assert lasted_us == pytest.approx(record["seconds"] * 1e6, abs=100)


@pytest.mark.parametrize(
    ("content", "arguments", "what"),
    [
        ("", (), "has no version"),
        ("{not json}\n{}\n", (), "line 1 is not an event"),
        (json.dumps(RECORD) + "\n", ("7",), "has no version 7"),
    ],
)
def test_wrong_files_are_named(tmp_path, content, arguments, what):
    events = tmp_path / "events.jsonl"
    events.write_text(content)
    done = trace(str(events), *arguments, "--out", str(tmp_path / "trace.json"))
    assert done.returncode == 2
    assert what in " ".join(done.stderr.split())
    assert not (tmp_path / "trace.json").exists()
