"""The processes of a GPU benchmark: one trainer with a whole model, and the ranks of one engine, all on one GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

from weft.bench import payload
from weft.bench.fleet import answer_requests
from weft.bench.gathering import reference_fp8
from weft.bench.on_gpu import contents
from weft.bench.worker import sleep_until
from weft.core.layouts.engine_boxes import EngineBox, EngineBoxes, held_rows
from weft.core.layouts.engine_layout import engine_recipe
from weft.core.models.catalog import build_model, load_model
from weft.core.models.model import Model
from weft.core.recipe import Op
from weft.errors import ConfigError
from weft.events import busy_seconds
from weft.integrations.torch import weights_of
from weft.runtime.receive.receiver import Receiver
from weft.runtime.send.sender import Sender
from weft.runtime.weights import Held, Weights

WAIT_S = 300.0
COPY_BYTES, NUM_COPIES = 4 << 30, 7
_TORCH = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp8_e4m3": torch.float8_e4m3fn}
_ENGINE = {"bf16": "bf16", "fp8": "fp8-block128"}
"""The names of precisions in engine layouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSetup:
    """The identity of a process."""

    side: str
    rank: int
    model: str
    num_layers: int | None
    device: str
    """Of its weights."""
    gpu: str
    num_parts: int
    """Tensor-parallel size of the engine."""
    precision: str
    handles: Connection | None
    """Pipe on which the trainer and the first rank exchange memory handles, in the run without weft."""


def load_layers(name: str, num_layers: int | None) -> Model:
    """A model, or its first layers."""
    model = load_model(name)
    if num_layers is not None and not 0 < num_layers <= model.num_layers:
        raise ConfigError(f"{num_layers} layers requested of `{name}`, which has {model.num_layers}")
    if num_layers is not None:
        model = build_model(name, {**model.config, "num_hidden_layers": num_layers})
    if any(tensor.dtype != "bf16" for tensor in model.policy_tensors):
        raise ConfigError(f"`{name}` is not a BF16 model", hint="use a BF16 model")
    return model


class _GpuMember:
    """What is measured on either side."""

    def __init__(self, setup: GpuSetup) -> None:
        self._setup, self._device, self._gpu = setup, torch.device(setup.device), torch.device(setup.gpu)

    def copy_bytes_per_s(self) -> float:
        """Bytes read and written per second by the device's own copy."""
        src = torch.ones(COPY_BYTES, dtype=torch.uint8, device=self._gpu)
        return 2 * _copy_rate(torch.empty_like(src), src)

    def bus_bytes_per_s(self, is_read: bool) -> float:
        """Bytes per second from pinned host memory to the device (`is_read`), or back."""
        host = torch.ones(COPY_BYTES // 4, dtype=torch.uint8, pin_memory=True)
        there = torch.ones_like(host, device=self._gpu)
        return _copy_rate(there, host) if is_read else _copy_rate(host, there)

    def free_bytes(self) -> int:
        """GPU memory that is free."""
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self._gpu)[0])


def _copy_rate(dst: torch.Tensor, src: torch.Tensor) -> float:
    """Bytes per second that are copied."""
    times = []
    for _ in range(NUM_COPIES):
        torch.cuda.synchronize()
        began = time.monotonic()
        for _ in range(4):
            dst.copy_(src, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.monotonic() - began)
    return 4 * len(src) / statistics.median(times)


class GpuTrainer(_GpuMember):
    """Holds all tensors of a model, each in its own memory."""

    def __init__(self, setup: GpuSetup) -> None:
        super().__init__(setup)
        model = load_layers(setup.model, setup.num_layers)
        self._module = payload.module_of(payload.whole_shapes(model), setup.device)
        self._tensors = {name: parameter.data for name, parameter in self._module.named_parameters()}
        self._sender: Sender | None = None

    def fill(self, version: int) -> None:
        """A version that differs everywhere from the one before."""
        for name, tensor in self._tensors.items():
            contents.fill(tensor, name, version, self._gpu)
        self._settle()

    def change_some(self, step: int) -> None:
        """A version that differs in one percent."""
        for tensor in self._tensors.values():
            contents.change_some(tensor, step)
        self._settle()

    def _settle(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def open(self, address: str) -> None:
        """Become a weft sender."""
        self._sender = Sender(address, rank=0, weights=weights_of(self._module), timeout_s=WAIT_S)

    def publish(self, version: int, start: float) -> tuple[float, float, dict[str, float]]:
        """Publish and wait until it is served: seconds in all, seconds of writing, busy seconds of each stage."""
        assert self._sender is not None
        sleep_until(start)
        began = time.monotonic()
        publication = self._sender.publish(version=version)
        publication.wait_committed(WAIT_S)
        ended = time.monotonic()
        return ended - began, publication.write_s or 0.0, busy_seconds(publication.events)

    def hand_over(self, start: float) -> float:
        """Without weft: a handle for every tensor, which the engine copies from; seconds until it has."""
        assert self._setup.handles is not None
        sleep_until(start)
        began = time.monotonic()
        share: Callable[[torch.Tensor], Any] = reduce_tensor
        self._setup.handles.send([(name, share(tensor)) for name, tensor in self._tensors.items()])
        if not self._setup.handles.poll(WAIT_S):
            raise TimeoutError("the engine did not copy in time")
        self._setup.handles.recv()
        return time.monotonic() - began

    def shut(self) -> None:
        """Stop being a sender."""
        if self._sender is not None:
            self._sender.close()
        self._sender = None
        torch.cuda.empty_cache()


@dataclass(slots=True)
class _EngineTensors:
    """The tensors of an engine rank, and where boxes of checkpoint tensors lie in them."""

    tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    views: list[tuple[EngineBox, torch.Tensor]] = field(default_factory=list)

    def weights(self, device: str) -> Weights:
        """As a member reports them."""
        held = tuple(
            Held(
                tensor=box.tensor,
                aliases=box.aliases,
                lo=box.lo,
                extent=box.extent,
                strides=tuple(view.stride()),
                address=view.data_ptr(),
            )
            for box, view in self.views
        )
        ranges = tuple((t.data_ptr(), t.numel() * t.element_size()) for t in self.tensors.values())
        return Weights.of(held, ranges, keep=self, device=device)


class GpuEngine(_GpuMember):
    """One tensor-parallel rank of an engine: fused projections, stacked experts."""

    def __init__(self, setup: GpuSetup) -> None:
        super().__init__(setup)
        model = load_layers(setup.model, setup.num_layers)
        self._shapes = payload.whole_shapes(model)
        recipe = engine_recipe(model, f"tp{setup.num_parts}", dtype=_ENGINE[setup.precision])
        self._memory = _EngineTensors()
        for number in held_rows(recipe.engine, setup.rank).nonzero()[0].tolist():
            tensor = recipe.engine.tensors[number]
            self._memory.tensors[number] = torch.zeros(tensor.shape, dtype=_TORCH[tensor.dtype], device=self._device)
        for box in EngineBoxes(recipe, self._shapes).of(setup.rank):
            whole = self._memory.tensors[box.inside]
            offset = sum(at * stride for at, stride in zip(box.at, whole.stride(), strict=True))
            view = torch.as_strided(whole, box.extent, box.strides_in(whole.stride()), offset)
            self._memory.views.append((box, view))
        self._receiver: Receiver | None = None

    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(view.numel() * view.element_size() for _, view in self._memory.views)

    def open(self, address: str) -> None:
        """Become a weft receiver."""
        weights = self._memory.weights(self._setup.device)
        self._receiver = Receiver(address, rank=self._setup.rank, weights=weights)

    def receive(self) -> float:
        """Wait for a version and commit it; returns the pause in seconds."""
        assert self._receiver is not None
        self._receiver.take(WAIT_S)
        return self._receiver.last_pause_s

    def spoil(self) -> None:
        """Forget the weights, so that a method that moves nothing cannot pass."""
        for tensor in self._memory.tensors.values():
            tensor.view(torch.uint8).fill_(0xBF)
        torch.cuda.synchronize()

    def copy_all(self) -> None:
        """Without weft: copy every tensor from the trainer's memory, as a loader does."""
        assert self._setup.handles is not None
        if not self._setup.handles.poll(WAIT_S):
            raise TimeoutError("the trainer sent no handles in time")
        shared = {name: rebuild(*arguments) for name, (rebuild, arguments) in self._setup.handles.recv()}
        for box, view in self._memory.views:
            view.copy_(shared[box.source][tuple(slice(a, a + n) for a, n in zip(box.lo, box.extent, strict=True))])
        torch.cuda.synchronize()
        self._setup.handles.send(None)

    def verify(self, version: int, steps: int) -> bool:
        """Whether every element is exactly that version's, after some small steps."""
        by_source: dict[str, list[tuple[EngineBox, torch.Tensor]]] = {}
        for box, view in self._memory.views:
            by_source.setdefault(box.source, []).append((box, view))
        is_right = all(self._is_right(name, views, version, steps) for name, views in by_source.items())
        torch.cuda.empty_cache()
        return is_right

    def _is_right(self, name: str, views: list[tuple[EngineBox, torch.Tensor]], version: int, steps: int) -> bool:
        whole = contents.whole(name, self._shapes[name], version, steps, self._gpu)
        made = {Op.COPY: whole}
        if any(box.op is Op.QUANTIZE for box, _ in views):
            made[Op.QUANTIZE], made[Op.SCALE] = reference_fp8(whole)
        for box, view in views:
            part = made[box.op][tuple(slice(a, a + n) for a, n in zip(box.lo, box.extent, strict=True))]
            if not torch.equal(_bits(view.to(self._gpu)), _bits(part)):
                return False
        return True

    def shut(self) -> None:
        """Stop being a receiver."""
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = None
        torch.cuda.empty_cache()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """As integers, which are equal only if all bits are."""
    kinds: dict[int, Any] = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return tensor.view(kinds[tensor.element_size()])


def serve(pipe: Connection, setup: GpuSetup) -> None:
    """The process."""
    try:
        torch.cuda.set_device(setup.gpu)
        member: GpuTrainer | GpuEngine = GpuTrainer(setup) if setup.side == "trainer" else GpuEngine(setup)
        answer_requests(pipe, member)
        member.shut()
    except Exception as error:
        pipe.send((False, f"{setup.side} {setup.rank}: {type(error).__name__}: {error}"))


def model_bytes(model: Model) -> int:
    """Bytes of all tensors of a trainer."""
    return sum(2 * prod(shape) for shape in payload.whole_shapes(model).values())
