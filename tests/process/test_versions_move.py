"""Versions from trainer processes to engine processes, through a controller process: bytes, order, repetition."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.process.runtime_members import Fleet
from tests.support.leftovers import shared_files
from tests.support.waiting import wait_until


@pytest.fixture
def fleet(request):
    made = Fleet(**getattr(request, "param", {}))
    yield made
    made.close()


@pytest.mark.parametrize(
    "fleet",
    [
        {"transport": "shm"},
        {"transport": "cma", "num_trainers": 3},
        {"transport": "cma", "mode": "in_place"},
        {"transport": "nixl", "num_engines": 1},
        {"transport": "nixl", "mode": "in_place", "digest": "off", "num_engines": 1},
    ],
    indirect=True,
    ids=lambda value: " ".join(str(v) for v in value.values()),
)
def test_several_versions_arrive_bit_for_bit(fleet):
    for version in (1, 2, 3, 7):
        assert fleet.publish(version) == ["committed"] * len(fleet.trainers)
        fleet.check(version)
    found = fleet.statistics()
    assert (found.committed, found.num_committed, found.num_aborted) == (7, 4, 0)
    assert found.bytes_per_version > 0


def test_the_choice_of_transport_is_reported_with_its_reason(fleet):
    fleet.wait_planned()
    assert fleet.statistics().links == {"shm (one host, CPU memory)": 4}


@pytest.mark.parametrize("fleet", [{"mode": "in_place"}], indirect=True)
def test_memory_that_cannot_be_shared_is_reached_by_the_kernel(fleet):
    fleet.wait_planned()
    assert fleet.statistics().links == {"cma (one host, CPU memory that cannot be moved into shared memory)": 4}


def test_versions_must_grow(fleet):
    assert fleet.publish(5) == ["committed", "committed"]
    answers = fleet.publish(5)
    assert all("version 5 after version 5" in answer for answer in answers)


def usage(pid: int) -> dict[str, int]:
    """Open files, threads, mapped shared memory and resident memory of a process."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    maps = Path(f"/proc/{pid}/maps").read_text()
    return {
        "files": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(status["Threads"]),
        "shared maps": maps.count("memfd:weft"),
        "memory": int(status["VmRSS"].split()[0]) << 10,
    }


def test_two_hundred_versions_leave_nothing_behind(fleet):
    """After the first versions nothing grows any more: files, threads, shared memory, resident memory."""
    shared = shared_files()
    for version in range(1, 21):
        assert fleet.publish(version) == ["committed", "committed"]
    processes = [*fleet.trainers, *fleet.engines, fleet.controller]
    before = [usage(process.pid) for process in processes]
    for version in range(21, 201):
        assert fleet.publish(version) == ["committed", "committed"]
    fleet.check(200)
    for old, new in zip(before, [usage(process.pid) for process in processes], strict=True):
        assert {k: new[k] for k in ("files", "threads", "shared maps")} == {
            k: old[k] for k in ("files", "threads", "shared maps")
        }
        assert new["memory"] - old["memory"] < 4 << 20
    assert fleet.statistics().num_committed == 200
    wait_until(lambda: shared_files() <= shared, 60.0, "no shared memory is left")
