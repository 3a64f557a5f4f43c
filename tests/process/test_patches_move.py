"""Versions that travel as patches: exact in every mode, anchors where needed, nothing lost when something fails."""

from __future__ import annotations

import pytest

from tests.process.runtime_members import LARGE, Fleet

COMMITTED = ["committed", "committed"]


@pytest.fixture
def fleet(request):
    made = Fleet(**({"delta": "on", "density": 0.01} | getattr(request, "param", {})))
    yield made
    made.close()


EVERY_MODE = [{"mode": mode} for mode in ("patch", "shadow", "in_place")]


@pytest.mark.parametrize(
    "fleet",
    [
        *EVERY_MODE,
        {"mode": "patch", "transport": "cma", "num_trainers": 2, "digest": "off"},
        {"mode": "patch", "transport": "nixl", "num_engines": 1},
        {"mode": "patch", "compression": "zstd"},
    ],
    indirect=True,
    ids=lambda value: " ".join(str(v) for v in value.values()),
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
