"""Real verl workers: actors and rollouts keep the methods of their verl classes; only model and engine are ours.

Values derive from name and step, so both sides know what should arrive.
"""

from __future__ import annotations

import hashlib
import os
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from verl.checkpoint_engine import CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.import_utils import import_external_libs
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout import BaseRollout, RolloutReplica
from verl.workers.rollout.utils import ensure_async_iterator

torch.set_num_threads(1)
SHAPES = {
    "embed.weight": (515, 64),
    "layer.q.weight": (64, 64),
    "layer.up.weight": (192, 64),
    "layer.norm.weight": (64,),
    "layer.odd.weight": (3, 7),
    "head.weight": (8200, 64),  # large enough that several senders share it
}


def value_of(name: str, step: int) -> torch.Tensor:
    seed = int(hashlib.sha256(f"{name}/{step}".encode()).hexdigest()[:8], 16)
    return torch.empty(SHAPES[name]).uniform_(-1, 1, generator=torch.Generator().manual_seed(seed))


def others_of(step: int) -> dict[str, torch.Tensor]:
    """What a state dict may hold beside parameters."""
    return {
        "count": torch.tensor([step, 2, 3]),
        "flags": torch.tensor([True, False, step % 2 == 0]),
        "scale": torch.tensor(float(step)),
        "empty": torch.empty(0, 4),
        "turned": (torch.arange(12.0).reshape(3, 4) + step).t(),
    }


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            *path, last = name.split(".")
            module: torch.nn.Module = self
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, torch.nn.Module())
                module = getattr(module, part)
            module.register_parameter(last, torch.nn.Parameter(torch.zeros(shape)))


class Engine:
    """A training engine: hands out whole tensors, as verl's own do."""

    is_param_offload_enabled = False

    def __init__(self) -> None:
        self.module, self.step, self.breaks = Net(), 0, False
        if dist.get_world_size() > 1:
            fully_shard(self.module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))

    def train(self, step: int) -> None:
        self.step = step
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                value = value_of(name, step)
                if isinstance(parameter, DTensor):
                    value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
                parameter.copy_(value)

    def move(self) -> None:
        """As offloading and loading again does."""
        with torch.no_grad():
            for parameter in self.module.parameters():
                held = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
                held.data = held.data.clone()

    def get_per_tensor_param(self, **_: Any) -> Any:
        def named():
            for name, parameter in self.module.named_parameters():
                if self.breaks and name.startswith("layer."):
                    self.breaks = False
                    raise ValueError("the training engine broke")
                yield name, parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            yield from others_of(self.step).items()

        return named(), None


class _Config(SimpleNamespace):
    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


class Actor(ActorRolloutRefWorker):
    """With verl's own `update_weights` and `execute_checkpoint_engine`."""

    def __init__(self, config: Any) -> None:
        Worker.__init__(self)
        dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
        self.config = SimpleNamespace(rollout=_Config(checkpoint_engine=config, free_cache_engine=False, name="vllm"))
        self.actor = SimpleNamespace(engine=Engine())
        import_external_libs(config.custom_backend_module)
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            config.backend,
            is_master=dist.get_rank() == 0,
            bucket_size=config.update_weights_bucket_megabytes << 20,
            **config.engine_kwargs.get(config.backend, {}),
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train(self, step: int) -> None:
        self.actor.engine.train(step)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def break_next(self) -> None:
        self.actor.engine.breaks = True

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def move(self) -> None:
        self.actor.engine.move()


class Adapter(BaseRollout):
    """The engine's end: keeps what it is given."""

    def __init__(self, config: Any, model_config: Any) -> None:
        super().__init__(config, model_config, device_mesh=None)
        self.received: dict[str, torch.Tensor] = {}
        self.step: int | None = None

    async def resume(self, tags: Any) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(self, weights: Any, global_steps: int | None = None, **_: Any) -> None:
        self.step = global_steps
        async for name, tensor in ensure_async_iterator(weights):
            self.received[name] = tensor.clone()


class Rollout(CheckpointEngineWorker):
    def __init__(self, rollout_config: Any, model_config: Any) -> None:
        super().__init__(rollout_config, model_config, Adapter(rollout_config, model_config))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def differing(self, step: int, with_others: bool) -> list[str]:
        """Names of what did not arrive as it was sent in a step."""
        got, self.server_adapter.received = self.server_adapter.received, {}
        expected = {name: value_of(name, step) for name in SHAPES} | (others_of(step) if with_others else {})
        wrong = [name for name in expected.keys() | got.keys() if not _same(expected.get(name), got.get(name))]
        return wrong + ([] if self.server_adapter.step == step else ["global_steps"])


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None or one.dtype != other.dtype or one.shape != other.shape:
        return False
    return bool(one.reshape(-1).contiguous().view(torch.uint8).equal(other.reshape(-1).contiguous().view(torch.uint8)))


class Replica(RolloutReplica):
    """An engine of one worker, without servers: verl's pauses and resumes go nowhere."""

    async def init_hybrid(self, worker_group: Any) -> None:
        first = self.world_size * self.replica_rank
        self.workers = worker_group.workers[first : first + self.world_size]

    def get_ray_class_with_init_args(self) -> Any:
        raise NotImplementedError

    async def launch_servers(self) -> None:
        raise NotImplementedError
