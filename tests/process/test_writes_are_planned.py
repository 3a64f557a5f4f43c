"""The plan is what runs: writes posted over real transports are those the plan counts, whatever the cuts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.arena import Arena
from weft.core.streams.stream import Path
from weft.runtime.weights import Part, Weights


def cut(arrays: dict[str, np.ndarray], dim: int, number: int, count: int) -> Weights:
    """One rank's share of every matrix, in memory of its own."""
    held, parts = {}, {}
    for name, whole in arrays.items():
        along = dim if whole.ndim > 1 else 0
        borders = [whole.shape[along] * i // count for i in range(count + 1)]
        lo = [0] * whole.ndim
        lo[along] = borders[number]
        take = [slice(None)] * whole.ndim
        take[along] = slice(borders[number], borders[number + 1])
        held[name] = np.ascontiguousarray(whole[tuple(take)])
        parts[name] = Part(shape=whole.shape, lo=tuple(lo))
    return Weights.from_arrays(held, parts=parts)


@pytest.mark.parametrize("transport", ["cma", "nixl"])
@pytest.mark.parametrize("mode", ["shadow", "in_place"])
@settings(deadline=None, max_examples=6)
@given(seed=st.integers(0, 2**32 - 1))
def test_posted_writes_are_those_of_the_plan(transport, mode, seed):
    chance = np.random.default_rng(seed)
    shapes = [tuple(chance.integers(4, 300, chance.integers(1, 3))) for _ in range(12)] + [(700, 900)]
    arrays = {f"t{i}": chance.standard_normal(shape).astype(np.float32) for i, shape in enumerate(shapes)}
    num_trainers, num_engines = int(chance.integers(1, 4)), int(chance.integers(1, 4))
    trainers = [cut(arrays, 0, rank, num_trainers) for rank in range(num_trainers)]
    zeros = {name: np.zeros_like(array) for name, array in arrays.items()}
    engines = [cut(zeros, int(chance.integers(0, 2)), rank, num_engines) for rank in range(num_engines)]
    engine_settings = {
        "chunk_bytes": int(chance.choice([65536, 1 << 20])),
        "min_write_bytes": int(chance.choice([0, 1, 4096, 1 << 30])),
        "window_bytes": 1 << 20,
    }
    with Arena(
        trainers, engines, transport=transport, mode=mode, ranks_per_engine=num_engines, **engine_settings
    ) as arena:
        for version in (1, 2):
            publications = arena.publish(version)
            plan, chunks = arena.controller._rounds.plan, arena.controller._rounds.plan.chunks
            posted = sum(publication.num_writes for publication in publications)
            assert posted == plan.num_writes > 0
            assert arena.controller.statistics().last_wire_bytes == chunks.num_bytes.sum()
            assert arena.controller.statistics().writes_per_version == posted
            if engine_settings["min_write_bytes"] == 1 << 30:
                assert (chunks.path == Path.PACKED).all()
    for number, engine in enumerate(engines):
        found = {held.tensor.name: (held.lo, held.extent) for held in engine.held}
        for name, (lo, extent) in found.items():
            box = tuple(slice(a, a + n) for a, n in zip(lo, extent, strict=True))
            assert np.array_equal(engine.keep[name], arrays[name][box]), (number, name)
