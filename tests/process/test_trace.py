"""`weft trace`: what the controller recorded of real versions, as spans for Perfetto."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weft
from weft.observe.events_file import find_version, read_versions
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
    arrivals = [event for event in found if event.get("cat") == "arrive"]
    assert sum(event["args"]["bytes"] for event in arrivals) == 3 * 2 * 400_000
    one = tmp_path / "one.json"
    assert trace(str(events), "2", "--out", str(one)).returncode == 0
    record = find_version(events, 2)
    lasted_us = sum(event["dur"] for event in chains(json.loads(one.read_text())["traceEvents"]))
    assert lasted_us == pytest.approx(record["seconds"] * 1e6, abs=100)


def slices(path: Path) -> list[tuple[str, str, float, float]]:
    """Track, name, begin and end of every slice of a trace, as Perfetto's own protos read it."""
    trace_pb2 = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    found = trace_pb2.Trace()
    found.ParseFromString(path.read_bytes())
    tracks = {packet.track_descriptor.uuid: packet.track_descriptor.name for packet in found.packet}
    open_slices: dict[int, list[tuple[str, float]]] = {}
    made = []
    for packet in found.packet:
        event, at = packet.track_event, packet.timestamp / 1e9
        if event.type == event.TYPE_SLICE_BEGIN:
            open_slices.setdefault(event.track_uuid, []).append((event.name, at))
        elif event.type == event.TYPE_SLICE_END:
            name, begun = open_slices[event.track_uuid].pop()
            made.append((tracks[event.track_uuid], name, begun, at))
    assert not any(open_slices.values())
    return made


def test_a_trace_in_perfettos_own_format(tmp_path):
    events, out = tmp_path / "events.jsonl", tmp_path / "one.pftrace"
    run_versions(events, 2)
    assert trace(str(events), "2", "--out", str(out)).returncode == 0
    found, seconds = slices(out), find_version(events, 2)["seconds"]
    chain = sorted((begin, end) for track, _, begin, end in found if track == "chain")
    assert sum(end - begin for begin, end in chain) == pytest.approx(seconds, abs=1e-4)
    assert all(earlier[1] == pytest.approx(later[0]) for earlier, later in itertools.pairwise(chain))
    assert len([1 for _, name, _, _ in found if name == "write"]) == 4
    assert len([1 for _, name, _, _ in found if name == "arrive"]) == 4
    assert max(end for _, _, _, end in found) == pytest.approx(seconds, abs=1e-4)


def test_versions_are_exported_as_spans(tmp_path):
    service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    events = tmp_path / "events.jsonl"
    run_versions(events, 2)
    bodies: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            bodies.append(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        where = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}
        command = [sys.executable, "-m", "weft", "trace", str(events), "--otel", "--json"]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=WAIT_S, check=False, env={**os.environ, **where}
        )
        server.shutdown()
    assert done.returncode == 0, done.stderr
    requests = [service.ExportTraceServiceRequest.FromString(body) for body in bodies]
    spans = [
        span
        for request in requests
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    assert json.loads(done.stdout)["num_spans"] == len(spans)
    roots = {span.name: span for span in spans if not span.parent_span_id}
    assert set(roots) == {"version 1", "version 2"}
    for record in read_versions(events):
        root = roots[f"version {record['version']}"]
        assert (root.end_time_unix_nano - root.start_time_unix_nano) / 1e9 == pytest.approx(record["seconds"], abs=1e-5)
        inside = [span for span in spans if span.parent_span_id == root.span_id]
        assert {span.trace_id for span in inside} == {root.trace_id}
        assert len([span for span in inside if span.name.endswith(": write")]) == 4


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
