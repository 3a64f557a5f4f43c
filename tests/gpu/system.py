"""A controller here, trainers and an engine in processes of their own, with weights on a GPU or in CPU memory.

Imported by tests that have checked that there is a GPU.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
from typing import Any

import torch

from tests.support.fp8_reference import quantized
from weft.config import TransferSettings
from weft.core.geometry.scaling import Scaling, scale_shape
from weft.errors import WeftError
from weft.integrations.torch import weights_of
from weft.runtime.controller.controller import Controller
from weft.runtime.receive.receiver import Receiver
from weft.runtime.send.sender import Sender
from weft.runtime.weights import Part

WAIT_S = 60.0
SHAPES = {"a": (520, 704), "b": (130, 257), "c": (1000,), "d": (256, 384)}
SCALINGS = {"a": Scaling.BLOCK, "b": Scaling.CHANNEL, "d": Scaling.TENSOR}
NUM_TRAINERS = 3


def module(tensors: dict[str, Any]) -> Any:
    made = torch.nn.Module()
    for name, tensor in tensors.items():
        made.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    return made


def whole(version: int) -> dict[str, Any]:
    """A version's weights; between versions one element in a hundred changes."""
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    for number in range(1, version + 1):
        generator = torch.Generator().manual_seed(number)
        for name, shape in SHAPES.items():
            hit = torch.rand(shape, generator=generator) < 0.01
            weights[name] = torch.where(hit, torch.randn(shape, generator=generator), weights[name])
    return {name: tensor.bfloat16() for name, tensor in weights.items()}


def rows_of(rank: int, num_rows: int) -> tuple[int, int]:
    step = -(-num_rows // NUM_TRAINERS)
    return min(rank * step, num_rows), min((rank + 1) * step, num_rows)


def trainer(pipe: Any, address: str, rank: int, device: str, through: str | None) -> None:
    tensors, parts = {}, {}
    for name, shape in SHAPES.items():
        a, b = rows_of(rank, shape[0])
        tensors[name] = torch.zeros((b - a, *shape[1:]), dtype=torch.bfloat16, device=device)
        parts[name] = Part(shape=shape, lo=(a, *(0,) * (len(shape) - 1)))
    weights = weights_of(module(tensors), parts=parts)
    with Sender(address, rank=rank, weights=weights, through=through, timeout_s=WAIT_S) as sender:
        pipe.send("there")
        while (request := pipe.recv()) is not None:
            version, spoil = request
            for name, tensor in whole(version).items():
                a, b = rows_of(rank, tensor.shape[0])
                tensors[name].copy_(tensor[a:b])
            if spoil and rank == 0:
                tensors["a"][3, 4] = math.nan
            try:
                publication = sender.publish(version=version)
                publication.wait_released(WAIT_S)
                for tensor in tensors.values():
                    tensor.fill_(math.nan)  # released: what is sent must not change any more
                publication.wait_committed(WAIT_S)
                pipe.send("committed")
            except WeftError as error:
                pipe.send(str(error))


def engine(pipe: Any, address: str, precision: str, device: str) -> None:
    tensors = {}
    for name, shape in SHAPES.items():
        if precision == "fp8" and name in SCALINGS:
            tensors[name] = torch.zeros(shape, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = torch.zeros(scale_shape(shape, SCALINGS[name]), device=device)
        else:
            dtype = torch.bfloat16 if precision == "fp8" or name != "d" else torch.float32
            tensors[name] = torch.zeros(shape, dtype=dtype, device=device)
    with Receiver(address, rank=0, weights=weights_of(module(tensors))) as receiver:
        pipe.send("there")
        while (request := pipe.recv()) is not None:
            if request == "take":
                receiver.wait(WAIT_S).commit(WAIT_S)
            found = {name: t.view(torch.uint8) if t.element_size() == 1 else t for name, t in tensors.items()}
            found = {name: t.cpu().clone() for name, t in found.items()}  # pickling moves what lies in CPU memory
            pipe.send((receiver.version, found))


class System:
    """A controller here, trainers and an engine in processes of their own."""

    def __init__(
        self,
        precision: str,
        device: str = "cuda",
        *,
        through: str | None = None,
        engine_device: str = "cuda",
        **settings: Any,
    ) -> None:
        """`device`: of the trainers' weights; `through`: the device offloaded ones are sent from."""
        defaults = {"version_s": WAIT_S, "silence_s": 30.0, "chunk_bytes": 65536, "staging_bytes": 1 << 20}
        self._controller = Controller(
            num_trainers=NUM_TRAINERS, num_engine_ranks=1, settings=TransferSettings(**(defaults | settings))
        )
        context = multiprocessing.get_context("spawn")
        self.pipes, self._processes = [], []
        trainers = [(trainer, (rank, device, through)) for rank in range(NUM_TRAINERS)]
        targets: list[Any] = [*trainers, (engine, (precision, engine_device))]
        for target, arguments in targets:
            ours, theirs = context.Pipe()
            process = context.Process(target=target, args=(theirs, self._controller.address, *arguments), daemon=True)
            process.start()
            self.pipes.append(ours)
            self._processes.append(process)
        for pipe in self.pipes:
            assert self._answer(pipe) == "there"

    @staticmethod
    def _answer(pipe: Any) -> Any:
        assert pipe.poll(WAIT_S), "no answer"
        return pipe.recv()

    def publish(self, version: int, *, spoil: bool = False) -> tuple[list[str], Any]:
        for pipe in self.pipes[:-1]:
            pipe.send((version, spoil))
        self.pipes[-1].send("look" if spoil else "take")
        held = None if spoil else self._answer(self.pipes[-1])
        answers = [self._answer(pipe) for pipe in self.pipes[:-1]]
        return answers, held if held is not None else self._answer(self.pipes[-1])

    def close(self) -> None:
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(20.0)
            process.kill()
        self._controller.close()


def check(held: Any, version: int, precision: str) -> None:
    visible, found = held
    assert visible == version
    for name, weight in whole(version).items():
        if precision == "fp8" and name in SCALINGS:
            codes, scale = quantized(weight, SCALINGS[name])
            assert torch.equal(found[name], codes.view(torch.uint8)), f"{name} in version {version}"
            assert torch.equal(found[f"{name}_scale_inv"], scale), f"scales of {name} in version {version}"
        else:
            assert torch.equal(found[name], weight.to(found[name].dtype)), f"{name} in version {version}"
