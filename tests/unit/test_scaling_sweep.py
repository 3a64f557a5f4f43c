"""What `weft bench scaling` measures, with which hosts; fleets and labs are replaced by ones that only take notes."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

import pytest

from weft import cli
from weft.bench.scaling import measure as module
from weft.bench.scaling.rows import FleetShape, ScalingCase, ScalingRow
from weft.cli import bench
from weft.lab import LabSpec

Hosts = tuple[int, int]


class NotedLab:
    """A lab with no hosts."""

    def __init__(self, spec: LabSpec, notes: list[Any]) -> None:
        self._notes = notes
        notes.append(("lab", len(spec.hosts)))

    def __enter__(self) -> NotedLab:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def slow(self, host: int, rate: str) -> None:
        self._notes.append(("slow", host, rate))

    def heal(self, host: int) -> None:
        self._notes.append(("heal", host))


class NotedRun:
    """A run of which every row takes a second."""

    def __init__(self, fleet: FleetShape) -> None:
        self._fleet = fleet
        self.rows: list[ScalingRow] = []

    def _add(self, method: str) -> None:
        senders, receivers = self._fleet.num_senders, self._fleet.num_receivers
        row = ScalingRow(
            method=method,
            num_senders=senders,
            num_receivers=receivers,
            nic_gb_per_s=1.0,
            num_nics=1,
            seconds=1.0,
            gb_per_s=1.0,
            fraction_of_nics=1.0,
        )
        self.rows.append(row)

    def sockets(self) -> float:
        self._add("sockets")
        return 100.0 * self._fleet.num_senders + self._fleet.num_receivers

    def dense(self, rate: float, *, method: str = "weft", rebalance: bool = False) -> None:
        self._add(f"{method}{' rebalanced' * rebalance} at {rate:.0f}")

    def patches(self, rate: float) -> None:
        self._add(f"patches at {rate:.0f}")

    def collectives(self, rate: float) -> None:
        self._add(f"collectives at {rate:.0f}")


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What happens to the lab."""
    noted: list[Any] = []
    monkeypatch.setattr(module, "Lab", lambda spec: NotedLab(spec, noted))
    monkeypatch.setattr(module, "start_fleet", lambda lab, case, fleet: contextlib.nullcontext())
    monkeypatch.setattr(module, "Run", lambda case, fleet, *_: NotedRun(fleet))
    return noted


def measured(**case: Any) -> list[tuple[str, Hosts]]:
    found = module.measure(ScalingCase(model="smallest", **case), repeat=1, baselines=True, say=lambda _: None)
    return [(row.method, (row.num_senders, row.num_receivers)) for row in found.rows]


def test_every_number_of_senders_meets_every_number_of_receivers(notes):
    rows = measured(num_senders=(1, 2, 3), num_receivers=(1, 2), slow_host=False)
    grid = [(senders, receivers) for receivers in (1, 2) for senders in (1, 2, 3)]
    assert [hosts for method, hosts in rows if method == "sockets"] == grid
    for hosts in grid:
        rate = f"{100 * hosts[0] + hosts[1]}"
        methods = [method for method, at in rows if at == hosts][: 3 if hosts[0] == 2 else 4]
        broadcasts = [] if hosts[0] == 2 else [f"collectives at {rate}"]
        assert methods == ["sockets", f"weft at {rate}", f"patches at {rate}", *broadcasts]
    assert rows[-4:] == [
        ("weft, BF16 replicas at 302", (3, 2)),
        ("weft, expert-parallel ranks of a MoE at 302", (3, 2)),
        ("weft, FP8 engines at 302", (3, 2)),
        ("patches at 302", (3, 2)),
    ]
    assert notes == [("lab", 6)]


def test_the_last_sender_of_the_largest_fleet_is_the_slow_one(notes):
    rows = measured(num_senders=(1, 2), num_receivers=(2, 1))
    assert rows[-3:] == [
        ("weft, FSDP, one sender at a tenth rebalanced at 202", (2, 2)),
        ("weft, DDP, one sender at a tenth rebalanced at 202", (2, 2)),
        ("weft, DDP, without the slow sender at 202", (1, 2)),
    ]
    assert notes == [("lab", 5), *[("slow", 4, "10000kbit"), ("heal", 4)] * 2]


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch, notes: list[Any]) -> list[ScalingCase]:
    """What the command asks for; it needs no root here, and keeps the signals of this process."""
    asked: list[ScalingCase] = []
    original = module.measure

    def noted(case: ScalingCase, **options: Any) -> Any:
        asked.append(case)
        return original(case, **options)

    monkeypatch.setattr(module, "measure", noted)
    monkeypatch.setattr(bench, "check_possible", lambda: None)
    monkeypatch.setattr(bench, "clean_up_when_told_to_end", lambda: None)
    monkeypatch.setattr(bench.logging, "disable", lambda _: None)
    return asked


@pytest.mark.parametrize(
    ("options", "receivers"),
    [([], (8,)), (["--receivers", "2"], (2,)), (["--receivers", "1", "--receivers", "4"], (1, 4))],
)
def test_the_command_takes_several_numbers_of_receivers(cases, options, receivers, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["weft", "bench", "scaling", "--model", "smallest", *options, "--json"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    (case,) = cases
    assert (case.num_senders, case.num_receivers) == ((1, 2, 4, 8), receivers)
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["num_receivers"] for row in rows} == set(receivers)
