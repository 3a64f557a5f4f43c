"""Links between CPU and GPU memory in one process, where Triton's interpreter stands in for the GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

from tests.support.arena import Arena
from weft.runtime.weights import Part, Weights
from weft.transport.base import ordinary_memory

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("tests/gpu has the same with a GPU", allow_module_level=True)

import weft.gpu  # noqa: E402
import weft.runtime.memory  # noqa: E402
from tests.support.interpreted import InterpretedWork  # noqa: E402

SHAPE, NUM_TRAINERS = (96, 40), 2
WAYS = [
    {"mode": "shadow"},
    {"mode": "shadow", "digest": "off"},
    {"mode": "in_place"},
    {"mode": "patch", "delta": "on"},
    {"mode": "shadow", "delta": "on"},
    {"mode": "in_place", "delta": "on"},
]
GPU = "cuda:0"


class RecordedPin:
    """Memory that would be pinned."""

    pinned: ClassVar[dict[int, int]] = {}

    def __init__(self, address: int, num_bytes: int, *, keep: object = None) -> None:
        self._address, self._num_bytes, self._keep = address, num_bytes, keep
        self.begin()

    def begin(self) -> None:
        self.pinned[self._address] = self._num_bytes

    def end(self) -> None:
        self.pinned.pop(self._address, None)

    def __del__(self) -> None:
        self.end()


class Interpreted(InterpretedWork):
    """One thread at a time: the interpreter changes Triton's own module while a kernel runs."""

    _turn = threading.RLock()

    def __init__(self, index: int) -> None:
        assert index == 0
        super().__init__()

    @contextlib.contextmanager
    def queue(self) -> Iterator[None]:
        with self._turn:
            yield

    stream = queue


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch):
    monkeypatch.setattr(weft.gpu, "GpuWork", Interpreted)
    monkeypatch.setattr(weft.gpu, "Pin", RecordedPin)
    monkeypatch.setattr(weft.runtime.memory, "device_memory", lambda index, num_bytes: ordinary_memory(num_bytes))
    weft.runtime.memory._bringing.cache_clear()
    monkeypatch.setattr(weft.gpu, "pinned_memory", lambda num_bytes: torch.zeros(num_bytes, dtype=torch.uint8))
    RecordedPin.pinned.clear()


def numbers(version: int) -> Any:
    """One element in eleven changes from version to version."""
    found = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)
    for step in range(1, version + 1):
        found.reshape(-1)[step::11] += 1000.0
    return found


def on(device: str, weights: Weights) -> Weights:
    return dataclasses.replace(weights, device=device)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: " ".join(way.values()))
@pytest.mark.parametrize(
    ("trainers", "engines"),
    [(["cpu", "cpu"], [GPU]), ([GPU, GPU], ["cpu"]), (["cpu", GPU], [GPU, "cpu"])],
    ids=["to GPU", "from GPU", "mixed"],
)
def test_engines_hold_every_version(trainers, engines, way):
    rows = SHAPE[0] // NUM_TRAINERS
    sent = [np.zeros((rows, SHAPE[1]), np.float32) for _ in trainers]
    parts = [{"w": Part(shape=SHAPE, lo=(rank * rows, 0))} for rank in range(NUM_TRAINERS)]
    served = [np.zeros(SHAPE, np.float32) for _ in engines]
    with Arena(
        [on(d, Weights.from_arrays({"w": a}, parts=p)) for d, a, p in zip(trainers, sent, parts, strict=True)],
        [on(device, Weights.from_arrays({"w": array})) for device, array in zip(engines, served, strict=True)],
        chunk_bytes=65536,
        **way,
    ) as arena:
        for version in range(1, 4):
            whole = numbers(version)
            for rank, array in enumerate(sent):
                array[:] = whole[rank * rows : (rank + 1) * rows]
            arena.publish(version)
            for array in served:
                assert np.array_equal(array, whole)
        assert bool(RecordedPin.pinned) == (GPU in engines), "engines on GPUs receive in pinned memory"
    assert not RecordedPin.pinned, "what was pinned is unpinned"
