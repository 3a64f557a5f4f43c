"""Random layouts, precisions and updates through the whole system: engines hold exactly what a reference says."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.support.arena import Arena
from tests.support.fp8_reference import quantized
from weft.core.geometry.scaling import Scaling, block_sides, scale_shape
from weft.core.streams import exchange
from weft.integrations.torch import weights_of
from weft.runtime.weights import Part

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
Box = tuple[tuple[int, int], tuple[int, int]]


@st.composite
def cuts(draw, shape: tuple[int, int], num_parts: int) -> list[Box]:
    """The boxes of some ranks: rows, columns, two shards with replicas, or the whole on all of them."""
    how = draw(st.sampled_from(["rows", "columns", "whole", "hybrid"]))
    if how == "whole":
        return [((0, 0), shape)] * num_parts
    if how == "hybrid" and num_parts > 1:
        border = draw(st.integers(1, shape[0]))
        return [((0, 0), (border, shape[1])) if n % 2 else ((border, 0), shape) for n in range(num_parts)]
    size = shape[0] if how == "rows" else shape[1]
    inner = draw(st.lists(st.integers(0, size), min_size=num_parts - 1, max_size=num_parts - 1))
    borders = [0, *sorted(inner), size]
    spans = list(itertools.pairwise(borders))
    if how == "rows":
        return [((a, 0), (b, shape[1])) for a, b in spans]
    return [((0, a), (shape[0], b)) for a, b in spans]


@st.composite
def cases(draw):
    """A few matrices with their precisions and layouts on both sides, and how they travel."""
    num_trainers, num_engines = draw(st.integers(1, 5)), draw(st.integers(1, 2))
    matrices = {}
    for number in range(draw(st.integers(1, 3))):
        shape = draw(st.tuples(st.integers(1, 300), st.integers(1, 300)))
        kinds = st.sampled_from(["fp8", "fp8", "fp32", "bf16", "fp16"])
        wanted = draw(st.lists(kinds, min_size=num_engines, max_size=num_engines))
        given_as = draw(st.sampled_from(["bf16", "fp32"] if "fp8" in wanted else ["bf16", "fp32", "fp16"]))
        matrices[f"w{number}"] = {
            "shape": shape,
            "from": given_as,
            "to": wanted,
            "scaling": draw(st.sampled_from(list(Scaling))),
            "trainers": draw(cuts(shape, num_trainers)),
            "engines": draw(cuts(shape, num_engines)),
        }
    delta = draw(st.sampled_from(["off", "on"]))
    modes = ["shadow", "in_place"] + (["patch"] if delta == "on" else [])
    options = {
        "delta": delta,
        "mode": draw(st.sampled_from(modes)),
        "staging": draw(st.sampled_from(["none", "cpu"])),
        "chunk_bytes": draw(st.sampled_from([4096, 65536])),
        "staging_bytes": 1 << 19,
        "through": draw(st.sampled_from([None, "cpu"])),
        "anchor_every": draw(st.sampled_from([2, 20])),
    }
    return num_trainers, num_engines, matrices, options


def module(tensors: dict[str, torch.Tensor]) -> torch.nn.Module:
    made = torch.nn.Module()
    for name, tensor in tensors.items():
        made.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    return made


def local(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    (top, left), (bottom, right) = box
    return tensor[top:bottom, left:right]


def blocks_of(box: Box, shape: tuple[int, int], scaling: Scaling) -> Box:
    (top, left), (bottom, right) = box
    height, width = block_sides(shape, scaling)
    return (top // height, left // width), (-(-bottom // height), -(-right // width))


def held(box: Box) -> bool:
    return box[0][0] < box[1][0] and box[0][1] < box[1][1]


def engine_side(matrices, rank):
    """An engine rank's tensors, what they are parts of, and the box each one is."""
    tensors, parts, boxes = {}, {}, {}
    for name, matrix in matrices.items():
        box = matrix["engines"][rank]
        if not held(box):
            continue
        found = {name: (box, matrix["shape"], DTYPES[matrix["to"][rank]])}
        if matrix["to"][rank] == "fp8":
            scale_box = blocks_of(box, matrix["shape"], matrix["scaling"])
            found[f"{name}_scale_inv"] = (scale_box, scale_shape(matrix["shape"], matrix["scaling"]), torch.float32)
        for key, (where, shape, dtype) in found.items():
            extent = (where[1][0] - where[0][0], where[1][1] - where[0][1])
            tensors[key] = torch.zeros(extent, dtype=torch.uint8 if dtype.itemsize == 1 else dtype).view(dtype)
            parts[key] = Part(shape=tuple(shape), lo=where[0])
            boxes[key] = where
    return tensors, parts, boxes


def expected(matrices, weights, rank) -> dict[str, torch.Tensor]:
    """Whole tensors of a version, as an engine rank wants them."""
    found = {}
    for name, matrix in matrices.items():
        if matrix["to"][rank] == "fp8":
            found[name], found[f"{name}_scale_inv"] = quantized(weights[name], matrix["scaling"])
        else:
            found[name] = weights[name].to(DTYPES[matrix["to"][rank]])
    return found


def spoil(tensors: dict[str, torch.Tensor]) -> None:
    """Weights that were released may change at once."""
    for tensor in tensors.values():
        tensor.fill_(3e4)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return tensor.contiguous().view(kinds[tensor.element_size()])


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    """Magnitudes are exchanged in several groups."""
    monkeypatch.setattr(exchange, "GROUP_BYTES", 20_000)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking a whole system takes minutes
)
@given(case=cases(), seed=st.integers(0, 2**32 - 1))
def test_engines_hold_what_the_reference_says(case, seed):
    num_trainers, num_engines, matrices, options = case
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.randn(matrix["shape"], generator=generator).to(DTYPES[matrix["from"]])
        for name, matrix in matrices.items()
    }
    trainers = [
        {
            name: local(weights[name], m["trainers"][rank]).clone()
            for name, m in matrices.items()
            if held(m["trainers"][rank])
        }
        for rank in range(num_trainers)
    ]
    engines = [engine_side(matrices, rank) for rank in range(num_engines)]
    if not all(trainers) or not all(tensors for tensors, _, _ in engines):
        return  # a member without weights does not join
    trainer_weights = [
        weights_of(
            module(tensors),
            parts={
                name: Part(shape=matrices[name]["shape"], lo=matrices[name]["trainers"][rank][0]) for name in tensors
            },
        )
        for rank, tensors in enumerate(trainers)
    ]
    engine_weights = [weights_of(module(tensors), parts=parts) for tensors, parts, _ in engines]
    with Arena(trainer_weights, engine_weights, **options) as arena:
        for version in range(1, 5):
            for name, whole in weights.items():
                hit = torch.rand(whole.shape, generator=generator) < (1.0 if version == 1 else 0.02)
                fresh = torch.randn(whole.shape, generator=generator).to(whole.dtype)
                whole.copy_(torch.where(hit, fresh, whole))
                for rank, tensors in enumerate(trainers):
                    if name in tensors:
                        tensors[name].copy_(local(whole, matrices[name]["trainers"][rank]))
            for publication in arena.publish(version, on_released=lambda rank: spoil(trainers[rank])):
                assert publication.peak_staging_bytes <= options["staging_bytes"]
            for rank, (tensors, _, boxes) in enumerate(engines):
                whole_engine = expected(matrices, weights, rank)
                for name, tensor in tensors.items():
                    assert torch.equal(bits(tensor), bits(local(whole_engine[name], boxes[name]))), (version, name)


@pytest.mark.parametrize("scaling", [(2,), (1,)], ids=["a scale for each row", "one scale"])
def test_scales_without_a_second_dimension(scaling):
    weight = torch.randn(2, 40)
    tensors = {"w": torch.zeros(2, 40, dtype=torch.uint8).view(torch.float8_e4m3fn), "w_scale": torch.zeros(scaling)}
    with Arena([weights_of(module({"w": weight}))], [weights_of(module(tensors))]) as arena:
        arena.publish(1)
    codes, scale = quantized(weight, Scaling.CHANNEL if scaling == (2,) else Scaling.TENSOR)
    assert torch.equal(bits(tensors["w"]), bits(codes))
    assert torch.equal(tensors["w_scale"], scale.reshape(scaling))
