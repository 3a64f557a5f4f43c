"""`weft controller --metrics`: what Prometheus gets, and the dashboard that shows it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from weft import Receiver, Sender, Weights
from weft.cli.top import TopView
from weft.errors import ConfigError
from weft.observe.metrics import NAMES, serve_metrics
from weft.observe.scrape import scrape

WAIT_S = 60.0
DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"


@pytest.fixture
def controller() -> Iterator[tuple[str, str, subprocess.Popen[str]]]:
    """A controller's address and that of its metrics."""
    command = [sys.executable, "-m", "weft", "controller", "--trainers", "1", "--engine-ranks", "1"]
    command += ["--bind", "tcp://127.0.0.1:*", "--metrics", "127.0.0.1:0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = ""
        while "/metrics" not in said:
            line = process.stderr.readline()
            assert line, said
            said += line.strip() + " "
        yield re.findall(r"tcp://[\d.:]+", said)[0], re.findall(r"http://\S+", said)[0], process
        process.kill()


def samples(address: str) -> dict[tuple[str, tuple[str, ...]], float]:
    with urllib.request.urlopen(address, timeout=WAIT_S) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {(s.name, tuple(s.labels.values())): s.value for family in families for s in family.samples}


def test_a_controller_counts_its_versions(controller):
    address, metrics, process = controller
    before = samples(metrics)
    assert before["weft_versions_committed_total", ()] == 0
    assert before["weft_members", ("trainer",)] == 0
    trained, served = np.ones(1000, np.float32), np.zeros(1000, np.float32)
    with (
        Sender(address, rank=0, weights=Weights.from_arrays({"w": trained})) as sender,
        Receiver(address, rank=0, weights=Weights.from_arrays({"w": served})) as receiver,
    ):
        for version in (3, 4):
            publication = sender.publish(version=version)
            receiver.take(WAIT_S)
            publication.wait_committed(WAIT_S)
        found = samples(metrics)
        seen = top(metrics, "--once")
    assert seen.returncode == 0, seen.stderr
    assert re.search(r"version +4 *\n", seen.stdout)
    assert re.search(r"trainers +1 *\n", seen.stdout)
    assert {name for name, _ in found} <= set(NAMES)
    assert found["weft_versions_committed_total", ()] == 2
    assert found["weft_version", ()] == 4
    assert found["weft_version_wire_bytes", ()] == trained.nbytes == found["weft_plan_bytes", ()]
    assert found["weft_version_seconds", ()] > 0
    assert found["weft_members", ("trainer",)] == found["weft_members", ("engine",)] == 1
    assert sum(value for (name, _), value in found.items() if name == "weft_links") == 1
    process.send_signal(signal.SIGINT)
    assert process.wait(WAIT_S) == 0


def top(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "weft", "top", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)


def test_top_names_what_is_lost_and_slow():
    now = {
        "members": ("trainer 0", "engine 0", "engine 1"),
        "lost": {"engine 2": "killed"},
        "links": {"nixl": 2},
        "slow_hosts": {"trainer 0": 0.25},
        "committed": None,
    }
    numbers = dict.fromkeys(("num_committed", "num_aborted", "num_plans", "num_beats", "last_version_s"), 0)
    numbers |= dict.fromkeys(("last_wire_bytes", "last_magnitude_bytes", "bytes_per_version", "writes_per_version"), 0)
    with serve_metrics("127.0.0.1:0", lambda: {**now, **numbers, "plan_s": 0.5}) as address:
        shown = TopView().show(scrape(address))
        console = Console(record=True, width=100)
        console.print(shown)
    text = console.export_text()
    assert "lost: engine 2" in text
    assert "slow: trainer 0 at 25%" in text
    assert re.search(r"engine ranks +2", text)


@pytest.mark.parametrize(
    ("address", "what"),
    [("127.0.0.1:9", "is not an address of metrics"), ("http://127.0.0.1:9/metrics", "has no metrics")],
)
def test_top_names_wrong_addresses(address, what):
    with pytest.raises(ConfigError, match=what):
        scrape(address)


def test_the_dashboard_shows_only_what_is_exported():
    panels: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    shown = {
        name for panel in panels for target in panel["targets"] for name in re.findall(r"weft_\w+", target["expr"])
    }
    assert shown <= set(NAMES)
    assert shown >= {"weft_version", "weft_version_seconds", "weft_members_lost"}


@pytest.mark.parametrize("bind", ["9464", "127.0.0.1:", "127.0.0.1:99999", "127.0.0.1:http"])
def test_wrong_addresses_are_named(bind):
    with pytest.raises(ConfigError, match=f"metrics cannot be served on `{bind}`"), serve_metrics(bind, dict):
        pass


def test_a_port_that_is_taken_is_named():
    with serve_metrics("127.0.0.1:0", dict) as address:
        port = re.findall(r":(\d+)/", address)[0]
        with (
            pytest.raises(ConfigError, match="Address already in use"),
            serve_metrics(f"127.0.0.1:{port}", dict),
        ):
            pass
