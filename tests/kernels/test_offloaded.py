"""Weights that are offloaded and sent as FP8: every Chunk waits for all it reads, be it only for a scale."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tests.support.arena import Arena  # noqa: E402
from tests.support.fp8_reference import quantized  # noqa: E402
from tests.support.interpreted import InterpretedWork  # noqa: E402
from weft.codec.gpu.converter import GpuConverter  # noqa: E402
from weft.codec.memory import memory_view  # noqa: E402
from weft.core.geometry.scaling import Scaling, scale_shape  # noqa: E402
from weft.core.recipe import Op  # noqa: E402
from weft.integrations.torch import weights_of_tensors  # noqa: E402
from weft.runtime.send import mirror as mirrors  # noqa: E402
from weft.runtime.send import program as programs  # noqa: E402
from weft.runtime.weights import Part, Weights  # noqa: E402

if torch.cuda.is_available():
    pytest.skip("kernels would not run on the CPU's memory", allow_module_level=True)

SHAPES = {
    Scaling.CHANNEL: {"w.0": (8, 200), "w.1": (26, 200), "w.2": (40, 40), "w.3": (6, 200), "w.4": (8, 40)},
    Scaling.BLOCK: {"w.0": (40, 200), "w.1": (130, 200), "w.2": (200, 40), "w.3": (16, 200), "w.4": (40, 40)},
}
INTERPRETER = threading.Lock()


class OneAtATime(GpuConverter):
    """Triton's interpreter works for one thread at a time."""

    def find_amax(self, group: int) -> Any:
        with INTERPRETER:
            return super().find_amax(group)

    def agree(self, group: int, amax: Any) -> None:
        with INTERPRETER:
            super().agree(group, amax)

    def fill(self, chunks: Any, images: Any) -> Any:
        with INTERPRETER:
            return super().fill(chunks, images)


@pytest.fixture(autouse=True)
def a_gpu_in_memory_of_the_cpu(monkeypatch) -> None:
    def made(device: str, grids: Any, **options: Any) -> GpuConverter:
        return OneAtATime(InterpretedWork(), grids, **options)

    monkeypatch.setattr(programs, "converter_for", made)
    monkeypatch.setattr(mirrors, "PIECE_BYTES", 1024)


def trainer_weights(weights: dict[str, torch.Tensor], half: int) -> Weights:
    """Half of the rows of each matrix."""
    tensors, parts = {}, {}
    for name, whole in weights.items():
        border = len(whole) // 2
        tensors[name] = (whole[border:] if half else whole[:border]).clone()
        parts[name] = Part(shape=tuple(whole.shape), lo=(border * half, 0))
    return weights_of_tensors(tensors, parts=parts)


def engine_side(scaling: Scaling, half: int) -> tuple[dict[str, torch.Tensor], dict[str, Part]]:
    """Half of the columns of each matrix, which cuts rows, or blocks."""
    tensors, parts = {}, {}
    for name, (rows, columns) in SHAPES[scaling].items():
        border = min(columns // 2, 128)
        width = columns - border if half else border
        tensors[name] = torch.zeros(rows, width, dtype=torch.uint8).view(torch.float8_e4m3fn)
        parts[name] = Part(shape=(rows, columns), lo=(0, border * half))
        shape = scale_shape((rows, columns), scaling)
        tensors[f"{name}_scale_inv"] = torch.zeros(shape, dtype=torch.float32)
        parts[f"{name}_scale_inv"] = Part(shape=shape, lo=(0,) * len(shape))
    return tensors, parts


def image_of(program: Any, number: int) -> np.ndarray:
    """A Chunk, filled with what is on the device now."""
    chunk = program.chunks[number]
    image = np.zeros(chunk.outgoing.layouts[chunk.number].num_bytes, dtype=np.uint8)
    chunk.outgoing.fill([chunk.number], [image.ctypes.data])()
    return image


def has_scales_alone(fill: Any) -> bool:
    """Whether a Chunk has scales of matrices of which it has no codes."""
    scaled, coded = (set(fill.boxes.of(op).column("grid").tolist()) for op in (Op.SCALE, Op.QUANTIZE))
    return bool(scaled - coded)


@pytest.mark.parametrize("scaling", [Scaling.CHANNEL, Scaling.BLOCK])
def test_chunks_wait_for_what_they_search(scaling):
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES[scaling].items()}
    trainers = [trainer_weights(weights, half) for half in (0, 0, 1, 1)]
    engines = [engine_side(scaling, half) for half in (0, 1)]
    engine_weights = [weights_of_tensors(tensors, parts=parts) for tensors, parts in engines]
    options = {"through": "cpu", "chunk_bytes": 4096, "staging_bytes": 1 << 19}
    with Arena(trainers, engine_weights, ranks_per_engine=2, **options) as arena:
        arena.publish(1)
        for (tensors, parts), (name, whole) in itertools.product(engines, weights.items()):
            codes, scale = quantized(whole, scaling)
            left = parts[name].lo[1]
            part = codes[:, left : left + tensors[name].shape[1]]
            assert torch.equal(tensors[name].view(torch.uint8), part.view(torch.uint8))
            assert torch.equal(tensors[f"{name}_scale_inv"], scale.reshape(tensors[f"{name}_scale_inv"].shape))
        running = [sender._program for sender in arena.senders]
        assert all(each.groups for each in running), "cut blocks, or rows, are searched before"
        assert any(has_scales_alone(fill) for each in running for out in each._outgoing for fill in out.fills)
        for program in running:
            device = memory_view(program.mirror._memory.address, program.mirror._memory.num_bytes)
            wanted = [image_of(program, number) for number in range(len(program.chunks))]
            for number, num_pieces in enumerate(program.chunk_pieces):
                device[:] = 0x7E
                for piece in program.pieces[:num_pieces]:
                    program.mirror.copy(piece)
                assert np.array_equal(image_of(program, number), wanted[number]), "nothing else is read"
