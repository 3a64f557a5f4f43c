"""Versions that travel as patches: exact in every mode, anchors where needed, nothing lost when something fails."""

from __future__ import annotations

import pytest

from tests.process.runtime_members import LARGE, Fleet

COMMITTED = ["committed", "committed"]
BATCHES = {"batch_bytes": 1 << 18, "chunk_bytes": 1 << 16, "staging_bytes": 1 << 20}


@pytest.fixture
def fleet(request):
    made = Fleet(**({"delta": "on", "density": 0.01} | getattr(request, "param", {})))
    yield made
    made.close()


BATCHED = [
    {"mode": "patch", "shapes": LARGE, **BATCHES},
    {"mode": "shadow", "shapes": LARGE, "transport": "cma", "ranks_per_engine": 2, **BATCHES},
    {"mode": "patch", "shapes": LARGE, "compression": "zstd", **BATCHES},
]
"""Many Chunks to a link, and the patches of several made and sent together, as on a GPU."""
EVERY_MODE = [{"mode": mode} for mode in ("patch", "shadow", "in_place")]


@pytest.mark.parametrize(
    "fleet",
    [
        *EVERY_MODE,
        {"mode": "patch", "transport": "cma", "num_trainers": 2, "digest": "off"},
        {"mode": "patch", "transport": "nixl", "num_engines": 1},
        {"mode": "patch", "compression": "zstd"},
        *BATCHED,
    ],
    indirect=True,
    ids=lambda value: " ".join(str(v) for k, v in value.items() if k != "shapes"),
)
def test_patches_give_every_version_bit_for_bit(fleet):
    for version in range(1, 8):
        assert fleet.publish(version) == COMMITTED
        fleet.check(version)


@pytest.mark.parametrize("fleet", [{"mode": "patch", "shapes": LARGE, "anchor_every": 5}], indirect=True)
def test_only_changes_travel_between_anchors(fleet):
    sent = []
    for version in range(1, 9):
        assert fleet.publish(version) == COMMITTED
        sent.append(fleet.statistics().last_wire_bytes)
    fleet.check(8)
    whole = fleet.statistics().bytes_per_version
    anchors = [number for number, num_bytes in enumerate(sent) if num_bytes >= whole]
    assert anchors == [0, 5]
    assert max(num_bytes for number, num_bytes in enumerate(sent) if number not in anchors) < whole / 50


@pytest.mark.parametrize("fleet", EVERY_MODE, indirect=True)
def test_an_engine_that_comes_back_gets_an_anchor(fleet):
    for version in (1, 2):
        assert fleet.publish(version) == COMMITTED
    fleet.engines[1].kill()
    fleet.wait_lost("engine 1")
    fleet.engines[1] = fleet.new_engine(1)
    assert fleet.engines[1].answer() == "there"
    fleet.wait_planned()
    for version in (3, 4):
        assert fleet.publish(version) == COMMITTED
        fleet.check(version)


@pytest.mark.parametrize("fleet", EVERY_MODE, indirect=True)
def test_a_trainer_that_comes_back_sends_an_anchor(fleet):
    for version in (1, 2):
        assert fleet.publish(version) == COMMITTED
    fleet.trainers[0].kill()
    fleet.wait_lost("trainer 0")
    fleet.trainers[0] = fleet.new_trainer(0)
    assert fleet.trainers[0].answer() == "there"
    fleet.wait_planned()
    for version in (3, 4):
        assert fleet.publish(version) == COMMITTED
        fleet.check(version)


@pytest.mark.parametrize("fleet", EVERY_MODE, indirect=True)
def test_after_an_aborted_version_patches_go_on_from_what_is_served(fleet):
    """Only one trainer publishes version 3, so it is aborted; version 4 starts from version 2."""
    for version in (1, 2):
        assert fleet.publish(version) == COMMITTED
    fleet.trainers[0].ask(3)
    fleet.trainers[1].kill()
    assert fleet.trainers[0].answer() != "committed"
    fleet.trainers[1] = fleet.new_trainer(1)
    assert fleet.trainers[1].answer() == "there"
    fleet.wait_planned()
    for version in (4, 5):
        assert fleet.publish(version) == COMMITTED
        fleet.check(version)


LARGE_PATCHES = [{"mode": mode, "shapes": LARGE, "density": 0.2} for mode in ("patch", "shadow", "in_place")]
"""A fifth of all elements changes: far more than the twentieth there is room for."""


@pytest.mark.parametrize(
    "fleet",
    [
        *LARGE_PATCHES,
        {"mode": "patch", "shapes": LARGE, "density": 0.2, "transport": "cma", "window_bytes": 1 << 20},
        {"mode": "patch", "shapes": LARGE, "density": 0.2, "transport": "nixl", "digest": "off"},
        {"mode": "patch", "shapes": LARGE, "density": 0.2, "ranks_per_engine": 2},
        {"mode": "patch", "shapes": LARGE, "density": 0.2, **BATCHES},
    ],
    indirect=True,
    ids=lambda value: " ".join(str(v) for k, v in value.items() if k != "shapes"),
)
def test_patches_that_do_not_fit_make_the_version_a_whole_one(fleet):
    for version in (1, 2, 3):
        assert fleet.publish(version) == COMMITTED
        fleet.check(version)
        statistics = fleet.statistics()
        assert statistics.last_wire_bytes >= statistics.bytes_per_version


@pytest.mark.parametrize("fleet", [{"mode": mode, "shapes": LARGE} for mode in ("patch", "shadow")], indirect=True)
def test_an_engine_that_is_behind_alone_gets_a_whole_version(fleet):
    for version in (1, 2):
        assert fleet.publish(version) == COMMITTED
    fleet.engines[1].ask("fail")
    assert fleet.publish(3) == COMMITTED
    fleet.check(3, ranks=(0,))
    assert fleet.holdings()[1][0] is None, "engine 1 holds torn weights"
    assert fleet.publish(4) == COMMITTED
    fleet.check(4)
    statistics = fleet.statistics()
    half = statistics.bytes_per_version / 2
    assert half <= statistics.last_wire_bytes < half * 1.1, "one of two engines got patches"
    assert fleet.publish(5) == COMMITTED
    fleet.check(5)
    assert fleet.statistics().last_wire_bytes < half / 10


@pytest.mark.parametrize("fleet", LARGE_PATCHES[:1], indirect=True)
def test_a_whole_version_called_off_before_it_is_written_changes_nothing(fleet):
    """Version 2 does not fit as patches; engine 1 is stopped, so that it cannot stand still for a whole version."""
    assert fleet.publish(1) == COMMITTED
    fleet.engines[1].stall()
    assert all("has been silent" in answer for answer in fleet.publish(2))
    fleet.check(1, ranks=(0,))
    fleet.engines[1].resume()
    fleet.wait_planned()
    assert fleet.publish(3) == COMMITTED
    fleet.check(3)
