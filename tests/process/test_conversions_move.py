"""FP8 on the way between real processes: exact over every transport, in many chunks; what fails, fails clearly."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.process.runtime_members import Fleet
from tests.property.test_conversions import module
from tests.support.arena import Arena
from tests.support.fp8_reference import quantized
from weft.codec import fp8
from weft.core.geometry.scaling import Scaling
from weft.errors import ConfigError, LayoutError, ProtocolError, VersionError
from weft.integrations.torch import weights_of
from weft.runtime.send import mirror
from weft.runtime.weights import Part, Weights

SHAPES = {"a": (520, 700), "b": (130, 257), "c": (1000,), "d": (300, 128)}
"""Four trainers cut rows inside blocks."""
CHUNKS = {"chunk_bytes": 8192, "staging_bytes": 1 << 16}


@pytest.fixture
def fleet(request):
    made = Fleet(**({"shapes": SHAPES, "precision": "fp8", "num_trainers": 4} | CHUNKS | request.param))
    yield made
    made.close()


@pytest.mark.parametrize(
    "fleet",
    [
        {"mode": "shadow", "transport": "shm"},
        {"mode": "in_place", "transport": "cma"},
        {"mode": "shadow", "transport": "nixl", "num_trainers": 2},
        {"mode": "patch", "delta": "on", "density": 0.01},
        {"mode": "patch", "delta": "on", "density": 0.01, "transport": "nixl", "num_trainers": 2},
        {"mode": "shadow", "delta": "on", "density": 0.01, "compression": "zstd", "num_trainers": 2},
        {"mode": "shadow", "staging": "cpu", "num_trainers": 2, "digest": "off"},
        {"mode": "shadow", "num_trainers": 2, "digest": "off"},
        {"mode": "in_place", "num_trainers": 2, "digest": "off"},
    ],
    indirect=True,
    ids=lambda value: " ".join(str(v) for v in value.values()),
)
def test_engines_get_fp8_from_shards_that_cut_its_blocks(fleet):
    for version in range(1, 5):
        assert set(fleet.publish(version)) == {"committed"}
        fleet.check(version)
    cut_blocks = fleet.statistics().last_magnitude_bytes / 4
    assert 0 < cut_blocks < sum(math.prod(shape) for shape in SHAPES.values() if len(shape) == 2) / 1000


@pytest.mark.parametrize("fleet", [{"mode": "shadow"}], indirect=True)
def test_a_trainer_that_dies_while_others_wait_for_its_magnitudes_costs_the_version_only(fleet):
    assert set(fleet.publish(1)) == {"committed"}
    for trainer in fleet.trainers[:3]:
        trainer.ask(2)
    fleet.trainers[3].kill()
    assert all(answer != "committed" for answer in (trainer.answer() for trainer in fleet.trainers[:3]))
    fleet.check(1)
    fleet.trainers[3] = fleet.new_trainer(3)
    assert fleet.trainers[3].answer() == "there"
    fleet.wait_planned()
    assert set(fleet.publish(3)) == {"committed"}
    fleet.check(3)


def fp8_engine(shape: tuple[int, int], **others: torch.Tensor) -> Weights:
    codes = torch.zeros(shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
    blocks = torch.zeros(-(-shape[0] // 128), -(-shape[1] // 128))
    return weights_of(module({"w": codes, "w_scale_inv": blocks, **others}))


def test_numbers_that_are_not_finite_are_refused_by_name_and_the_next_version_is_fine():
    weight = torch.randn(256, 256)
    with Arena([weights_of(module({"w": weight}))], [fp8_engine((256, 256))]) as arena:
        arena.publish(1)
        weight[3, 4] = math.nan
        publication = arena.senders[0].publish(version=2)
        with pytest.raises(Exception, match="`w` has 1 elements that are not finite"):
            publication.wait_committed(20.0)
        assert arena.receivers[0].version == 1
        weight[3, 4] = 0.5
        arena.publish(3)
        assert arena.receivers[0].version == 3


def test_numbers_that_are_not_finite_can_be_allowed():
    weight = torch.randn(256, 256)
    weight[0, 0], weight[1, 1] = math.inf, math.nan
    with Arena([weights_of(module({"w": weight}))], [fp8_engine((256, 256))], allow_nonfinite=True) as arena:
        arena.publish(1)
        assert arena.receivers[0].version == 1


@pytest.mark.parametrize(
    ("engine", "what"),
    [
        ({"w": torch.zeros(64, 64, dtype=torch.uint8).view(torch.float8_e4m3fn)}, "w: has no scales"),
        (
            {
                "w": torch.zeros(64, 64, dtype=torch.uint8).view(torch.float8_e4m3fn),
                "w_scale_inv": torch.zeros(3, 3),
            },
            r"`w_scale_inv` has the shape \[3, 3\]",
        ),
    ],
    ids=["no scales", "scales of another shape"],
)
def test_engines_whose_fp8_cannot_be_made_are_refused(engine, what):
    with (
        Arena([weights_of(module({"w": torch.randn(64, 64)}))], [weights_of(module(engine))]) as arena,
        pytest.raises((ProtocolError, LayoutError, VersionError), match=what),
    ):
        arena.receivers[0].wait(20.0)


def test_engines_that_share_scales_differently_are_refused():
    codes = [torch.zeros(256, 128, dtype=torch.uint8).view(torch.float8_e4m3fn) for _ in range(2)]
    engines = [
        weights_of(module({"w": codes[0], "w_scale_inv": torch.zeros(2, 1)})),
        weights_of(module({"w": codes[1], "w_scale_inv": torch.zeros(256, 1)})),
    ]
    with (
        Arena([weights_of(module({"w": torch.randn(256, 128)}))], engines) as arena,
        pytest.raises(ProtocolError, match=r"`w` is wanted with scales of \[2, 1\] .* and of \[256, 1\]"),
    ):
        arena.receivers[1].wait(20.0)


def test_what_is_missing_is_said_to_everybody():
    with Arena([weights_of(module({"other": torch.randn(8, 8)}))], [fp8_engine((64, 64))]) as arena:
        with pytest.raises(ProtocolError, match="missing: w"):
            arena.receivers[0].wait(20.0)
        with pytest.raises(ProtocolError, match="missing: w"):  # at once, or when it hears of it
            arena.senders[0].publish(version=1).wait_released(20.0)


def test_trainers_that_hold_blocks_and_send_none_tell_their_magnitudes_before_they_are_released(monkeypatch):
    """Two shards, three replicas of each: some trainers send a vector of their own, and tell magnitudes only."""
    find = fp8.amax_boxes

    def find_late(table):
        time.sleep(0.1)
        return find(table)

    monkeypatch.setattr(fp8, "amax_boxes", find_late)
    weight = torch.randn(200, 256)
    shards = [{"w": weight[100 * (rank % 2) :][:100].clone(), f"c{rank}": torch.randn(8)} for rank in range(6)]
    trainers = [
        weights_of(module(tensors), parts={"w": Part(shape=(200, 256), lo=(100 * (rank % 2), 0))})
        for rank, tensors in enumerate(shards)
    ]
    vectors = {f"c{rank}": torch.zeros(8) for rank in range(6)}
    codes = torch.zeros(200, 256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    tensors = {"w": codes, "w_scale_inv": torch.zeros(2, 2)}
    with Arena(trainers, [weights_of(module(tensors | vectors))], staging="cpu") as arena:
        arena.publish(1, on_released=lambda rank: shards[rank]["w"].fill_(1e6))
    expected, scale = quantized(weight, Scaling.BLOCK)
    assert torch.equal(tensors["w_scale_inv"], scale)
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))


def test_weights_may_change_once_released_although_nothing_was_sent():
    """With staging the copy is what is sent, however late the engine takes it."""
    weight = torch.randn(512, 512)
    engine = torch.zeros(512, 512)
    with Arena(
        [weights_of(module({"w": weight}))], [weights_of(module({"w": engine}))], staging="cpu", mode="shadow"
    ) as arena:
        expected = weight.clone()
        publication = arena.senders[0].publish(version=1)
        publication.wait_released(20.0)
        weight.fill_(math.nan)
        assert arena.receivers[0].wait(20.0).commit()
        publication.wait_committed(20.0)
        assert np.array_equal(engine.numpy(), expected.numpy())
        assert {event.name for event in publication.events} == {"convert", "write"}


@pytest.mark.parametrize("engine_dtype", [torch.float32, torch.bfloat16], ids=["as it is", "cast"])
def test_offloaded_weights_are_sent_from_the_device_and_released_once_they_are_there(engine_dtype, monkeypatch):
    """Several pieces; the device is the CPU here."""
    monkeypatch.setattr(mirror, "PIECE_BYTES", 100_000)
    weight = torch.randn(512, 512)
    engine = torch.zeros(512, 512, dtype=engine_dtype)
    trainers, engines = [weights_of(module({"w": weight}))], [weights_of(module({"w": engine}))]
    with Arena(trainers, engines, through="cpu", chunk_bytes=65536) as arena:
        for version in (1, 2):
            weight.normal_()
            expected = weight.clone().to(engine_dtype)
            (publication,) = arena.publish(version, on_released=lambda _: weight.fill_(math.nan))
            assert torch.equal(engine, expected)
            assert sum(event.num_bytes for event in publication.events if event.name == "h2d") == 512 * 512 * 4


def test_weights_that_are_on_a_device_already_do_not_go_through_one():
    weights = replace(weights_of(module({"w": torch.zeros(2, 2)})), device="cuda:0")
    with pytest.raises(ConfigError, match="weights on cuda:0 are not offloaded"):
        mirror.Mirror(weights, "cuda:0")
